"""kernels/ops.py against float64 formulas written down a second time, explicit masks, and finite differences."""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import ops

SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True)
def fresh_seed():
    """New inputs every run; the seed is printed with a failure."""
    torch.set_num_threads(1)
    seed = random.SystemRandom().randrange(2**32)
    print(f"torch.manual_seed({seed})")
    torch.manual_seed(seed)


def largest_tensor(f):
    """Elements of the largest tensor that any operator inside f() returns."""

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(t, torch.Tensor):
                    self.largest = max(self.largest, t.numel())
            return out

    with Watch() as watch:
        f()
    return watch.largest


def gradients(f, inputs, weight):
    """d sum(weight * f(*inputs)) / d inputs by autograd, in the dtype of the inputs."""
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    (f(*inputs) * weight.to(inputs[0].dtype)).sum().backward()
    return [x.grad for x in inputs]


def assert_close(found, expected, rtol=2e-5, atol=2e-6):
    torch.testing.assert_close(found.double(), expected.double(), rtol=rtol, atol=atol)


def central_difference(f, x, direction, h):
    """Derivative of the scalar f at x along `direction`, from values of f alone."""
    with torch.no_grad():
        return (f(x + h * direction).double() - f(x - h * direction).double()) / (2 * h)


# ---------------------------------------------------------------------------------------------------- norms, rotary


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 33), (4, 1, 2, 640)])
@pytest.mark.parametrize("size", [1e-6, 1e-3, 1.0, 1e4])
def test_rms_norm(shape, size):
    x = size * torch.randn(shape)

    def reference(x):
        return x / (x.pow(2).sum(-1, keepdim=True) / x.size(-1) + 1e-6).sqrt()

    assert_close(ops.rms_norm(x), reference(x.double()))
    weight = torch.randn(shape)
    (found,), (expected,) = gradients(ops.rms_norm, [x], weight), gradients(reference, [x.double()], weight)
    assert_close(found, expected, rtol=1e-4, atol=1e-5 * float(expected.abs().max() + weight.abs().max() / size))


def test_rms_norm_keeps_dtype_and_computes_in_float32():
    x = torch.randn(5, 4096).bfloat16()
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_close(ops.rms_norm(x), expected, rtol=2**-8, atol=0)  # one rounding, at the end


@pytest.mark.parametrize("T, D, base", [(1, 2, 10.0), (7, 2, 1e5), (33, 6, 1e4), (130, 64, 1e5)])
def test_rotary_tables(T, D, base):
    cos, sin = ops.rotary_tables(T, D, base)
    assert cos.shape == sin.shape == (1, T, 1, D // 2) and cos.dtype == sin.dtype == torch.float32
    for t in {0, T // 2, T - 1}:
        for i in range(D // 2):
            angle = t / base ** (2 * i / D)
            assert math.isclose(cos[0, t, 0, i], math.cos(angle), abs_tol=2e-7 * (1 + t))
            assert math.isclose(sin[0, t, 0, i], math.sin(angle), abs_tol=2e-7 * (1 + t))


@pytest.mark.parametrize("B, T, H, D, gain", [(1, 1, 1, 2, 1.0), (2, 5, 3, 6, 1.2), (1, 17, 1, 64, 0.3)])
def test_qk_norm_rotary_is_a_rotation_of_complex_numbers(B, T, H, D, gain):
    x = torch.randn(B, T, H, D)
    cos, sin = ops.rotary_tables(T, D, 1e4)
    turn = torch.complex(cos.double(), sin.double())

    def reference(x):
        x = gain * x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
        z = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * turn
        return torch.cat((z.real, z.imag), dim=-1)

    def ours(x):
        return ops.qk_norm_rotary(x, cos, sin, gain)

    assert_close(ours(x), reference(x.double()))
    weight = torch.randn_like(x)
    assert_close(gradients(ours, [x], weight)[0], gradients(reference, [x.double()], weight)[0], rtol=1e-4, atol=1e-5)
    lengths = ours(x).norm(dim=-1)  # neither normalising nor turning leaves a head longer or shorter than its place
    assert_close(lengths, torch.full_like(lengths, gain * D**0.5), rtol=1e-3)
    assert ours(x.bfloat16()).dtype == torch.bfloat16
    assert_close(ours(x.bfloat16()), reference(x.bfloat16().double()), rtol=2**-8, atol=1e-3)


def test_rotary_scores_depend_on_distance_only():
    D, T = 16, 40
    cos, sin = ops.rotary_tables(T, D, 1e4)
    q = ops.qk_norm_rotary(torch.randn(1, 1, 1, D).expand(1, T, 1, D), cos, sin, 1.0)[0, :, 0]
    k = ops.qk_norm_rotary(torch.randn(1, 1, 1, D).expand(1, T, 1, D), cos, sin, 1.0)[0, :, 0]
    scores = q @ k.T
    for distance in (0, 1, 7, 25):
        diagonal = scores.diagonal(-distance)
        assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(scores[0, 0], scores[1, 0], atol=1e-3)


# ---------------------------------------------------------------------------------------------------- attention


def attention_by_hand(q, k, v, window):
    """One query after the other, one head after the other; float64 in, float64 out."""
    B, T, H, D = q.shape
    rows = []
    for t in range(T):
        first = max(0, t - window + 1) if window > 0 else 0
        heads = []
        for h in range(H):
            g = h // (H // k.size(2))
            scores = (q[:, t, h, None] * k[:, first : t + 1, g]).sum(-1) / math.sqrt(D)
            heads.append((torch.softmax(scores, -1)[..., None] * v[:, first : t + 1, g]).sum(1))
        rows.append(torch.stack(heads, 1))
    return torch.stack(rows, 1)


class Elsewhere(torch.Tensor):
    """A tensor that says it is on an accelerator, to take the path of those on a CPU."""

    class device:
        type = "accelerator"


class Torch:
    """The torch module, but arange does not ask where."""

    arange = staticmethod(lambda *args, device: torch.arange(*args))

    def __getattr__(self, name):
        return getattr(torch, name)


def accelerator_attention(q, k, v, window):
    """ops.attention as an accelerator runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "torch", Torch())
        q, k, v = (x.as_subclass(Elsewhere) for x in (q, k, v))
        return ops.attention(q, k, v, window).as_subclass(torch.Tensor)


@settings(max_examples=60, deadline=None)
@given(
    B=st.integers(1, 2),
    T=st.integers(1, 23),
    kv=st.integers(1, 3),
    groups=st.integers(1, 3),
    D=st.sampled_from([1, 2, 6, 16]),
    window=st.sampled_from([0, 1, 2, 3, 7, 22, 23, 24, 1000]),
    block=st.sampled_from([1, 2, 5, 8, 256]),
    seed=SEEDS,
)
def test_attention(B, T, kv, groups, D, window, block, seed):
    torch.manual_seed(seed)
    q, k, v = (torch.randn(B, T, n, D) for n in (kv * groups, kv, kv))
    double, weight = [x.double() for x in (q, k, v)], torch.randn_like(q)
    expected = attention_by_hand(*double, window)
    expected_gradients = gradients(lambda *x: attention_by_hand(*x, window), double, weight)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "QUERY_BLOCK", block)
        for attention in (ops.attention, accelerator_attention):
            assert_close(attention(q, k, v, window), expected)
            found = gradients(lambda *x, f=attention: f(*x, window), [q, k, v], weight)
            for a, b in zip(found, expected_gradients, strict=True):
                assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [0, 1, 100, 256, 300])
def test_attention_at_the_real_block_size(window):
    T = 2 * ops.QUERY_BLOCK + 13
    q, k, v = (torch.randn(1, T, n, 8) for n in (4, 2, 2))
    q *= 5  # sharp softmax
    distance = torch.arange(T)[:, None] - torch.arange(T)[None]
    mask = (distance >= 0) & (distance < window if window else True)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k.double().repeat_interleave(2, 2)) / math.sqrt(8)
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    expected = torch.einsum("bhqk,bkhd->bqhd", weights, v.double().repeat_interleave(2, 2))
    assert_close(ops.attention(q, k, v, window), expected, atol=1e-5)
    if window == 1:
        assert_close(ops.attention(q, k, v, window), v.repeat_interleave(2, 2), atol=0, rtol=1e-6)
    half = ops.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), window)
    assert half.dtype == torch.bfloat16 and half.shape == q.shape
    assert (half.double() - expected).abs().mean() < 0.02


def test_attention_skips_the_keys_no_query_of_a_block_sees(monkeypatch):
    monkeypatch.setattr(ops, "QUERY_BLOCK", 16)
    q = torch.randn(1, 256, 1, 2)
    assert largest_tensor(lambda: ops.attention(q, q, q, 8)) <= max(16 * (16 + 8 - 1), q.numel())
    assert largest_tensor(lambda: ops.attention(q, q, q, 0)) <= 16 * 256


def test_attention_of_huge_scores_is_finite():
    q = 1e4 * torch.randn(1, 9, 2, 4)
    x = [t.clone().requires_grad_() for t in (q, q, q)]
    ops.attention(*x, 3).sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in x)


# ---------------------------------------------------------------------------------------------------- MLP, softcap


@pytest.mark.parametrize("shape, hidden", [((1, 1), 1), ((2, 3, 5), 7), ((11, 24), 96)])
def test_relu2_mlp(shape, hidden):
    x, up, down = torch.randn(shape), torch.randn(hidden, shape[-1]), torch.randn(shape[-1], hidden)

    def reference(x, up, down):
        inner = torch.einsum("...c,fc->...f", x, up)
        return torch.einsum("...f,cf->...c", torch.where(inner > 0, inner * inner, 0 * inner), down)

    double = [t.double() for t in (x, up, down)]
    expected = reference(*double)  # sums of large terms that may cancel: errors go with the largest
    assert_close(ops.relu2_mlp(x, up, down), expected, rtol=1e-4, atol=3e-6 * float(expected.abs().max()) + 1e-6)
    weight = torch.randn(shape)
    found, expected = gradients(ops.relu2_mlp, [x, up, down], weight), gradients(reference, double, weight)
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, rtol=1e-4, atol=3e-6 * float(b.abs().max()) + 1e-6)


def test_softcap():
    x = torch.cat([torch.randn(50), torch.tensor([0.0, 1e4, -1e4, 1e30])])
    assert_close(ops.softcap(x, 15.0), 15 * torch.tanh(x.double() / 15))
    assert ops.softcap(x, 0) is x and ops.softcap(x, 0.0) is x
    assert ops.softcap(x.bfloat16(), 15.0).dtype == ops.softcap(x.bfloat16(), 0).dtype == torch.float32
    assert ops.softcap(x, 15.0).abs().max() <= 15


# ---------------------------------------------------------------------------------------------------- head and loss


def losses_by_hand(x, weight, targets, cap):
    """Loss of each position from the whole logits, 0 where ignored: float64 in, float64 out."""
    logits = x @ weight.T
    logits = cap * torch.tanh(logits / cap) if cap else logits
    safe = targets.clamp(min=0)
    return torch.where(targets >= 0, F.cross_entropy(logits, safe, reduction="none"), 0.0)


def mean_by_hand(x, weight, targets, cap):
    return losses_by_hand(x, weight, targets, cap).sum() / max(1, int((targets >= 0).sum()))


@settings(max_examples=60, deadline=None)
@given(
    N=st.integers(1, 40),
    V=st.integers(2, 50),
    C=st.integers(1, 20),
    cap=st.sampled_from([0, 0.5, 15.0]),
    chunk=st.sampled_from([1, 3, 8, 39, 512]),
    ignored=st.sampled_from([0.0, 0.3, 0.95, 1.0]),
    scale=st.sampled_from([1.0, 0.37, -2.0]),
    seed=SEEDS,
)
def test_head_loss_value_and_both_gradients(N, V, C, cap, chunk, ignored, scale, seed):
    torch.manual_seed(seed)
    x, weight, targets = torch.randn(N, C), torch.randn(V, C), torch.randint(V, (N,))
    targets[torch.rand(N) < ignored] = -1
    double = [x.double(), weight.double()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "HEAD_CHUNK", chunk)
        loss = ops.head_loss(x, weight, targets, cap)
        found = gradients(lambda a, b: ops.head_loss(a, b, targets, cap), [x, weight], torch.tensor(scale))
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert_close(loss, mean_by_hand(*double, targets, cap))
    expected = gradients(lambda a, b: mean_by_hand(a, b, targets, cap), double, torch.tensor(scale))
    for a, b in zip(found, expected, strict=True):
        assert_close(a, b, rtol=1e-4, atol=1e-5)
    if not (targets >= 0).any():
        assert loss == 0 and all((g == 0).all() for g in found)
    assert_close(ops.head_losses(x, weight, targets, cap), losses_by_hand(*double, targets, cap), atol=1e-5)
    total = ops.head_losses(x, weight, targets, cap).double().sum()
    assert_close(total / max(1, int((targets >= 0).sum())), loss, atol=1e-5)


@pytest.mark.parametrize("negative", [-1, -2, -100, -(2**40)])
def test_any_negative_target_is_ignored(negative):
    x, weight, targets = torch.randn(9, 5), torch.randn(7, 5), torch.randint(7, (9,))
    targets[2:5] = negative
    expected = losses_by_hand(x.double(), weight.double(), targets, 15.0)
    assert_close(ops.head_loss(x, weight, targets, 15.0), expected.sum() / 6)
    assert_close(ops.head_losses(x, weight, targets, 15.0), expected)


def test_head_loss_against_finite_differences():
    x, weight, targets = torch.randn(11, 6), torch.randn(13, 6), torch.randint(13, (11,))
    targets[4] = -1
    found = gradients(lambda a, b: ops.head_loss(a, b, targets, 3.0), [x, weight], torch.tensor(1.0))
    along_x, along_w = torch.randn_like(x), torch.randn_like(weight)
    expected = central_difference(lambda a: ops.head_loss(a, weight, targets, 3.0), x, along_x, 3e-3)
    assert_close((found[0] * along_x).sum(), expected, rtol=5e-3, atol=2e-3)
    expected = central_difference(lambda b: ops.head_loss(x, b, targets, 3.0), weight, along_w, 3e-3)
    assert_close((found[1] * along_w).sum(), expected, rtol=5e-3, atol=2e-3)


@pytest.mark.parametrize("scale", [1.0, 1 / 3, 1 / 12])
def test_head_loss_in_bfloat16_is_close_to_float32(scale):
    N, V, C = 600, 97, 32
    x, weight, targets = torch.randn(N, C).bfloat16(), (0.3 * torch.randn(V, C)).bfloat16(), torch.randint(V, (N,))
    targets[::7] = -1
    double = [x.double(), weight.double()]
    loss = ops.head_loss(x, weight, targets, 15.0)
    assert loss.dtype == torch.float32
    assert_close(loss, mean_by_hand(*double, targets, 15.0), rtol=2e-3)
    found = gradients(lambda a, b: ops.head_loss(a, b, targets, 15.0), [x, weight], torch.tensor(scale))
    expected = gradients(lambda a, b: mean_by_hand(a, b, targets, 15.0), double, torch.tensor(scale))
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.bfloat16
        assert (a.double() - b).norm() < 0.01 * b.norm()
    losses = ops.head_losses(x, weight, targets, 15.0)
    assert losses.dtype == torch.float32
    assert_close(losses, losses_by_hand(*double, targets, 15.0), rtol=2e-2, atol=2e-2)


def test_head_loss_never_holds_all_logits(monkeypatch):
    monkeypatch.setattr(ops, "HEAD_CHUNK", 8)
    N, V, C = 200, 50, 4
    x, weight = torch.randn(N, C, requires_grad=True), torch.randn(V, C, requires_grad=True)
    targets = torch.randint(V, (N,))
    assert largest_tensor(lambda: ops.head_loss(x, weight, targets, 15.0).backward()) <= max(8 * V, N * C, V * C)


def test_head_loss_of_extreme_logits_is_finite():
    x, weight, targets = 1e4 * torch.randn(6, 4), torch.randn(9, 4), torch.randint(9, (6,))
    for cap in (0, 15.0):
        found = gradients(lambda a, b, cap=cap: ops.head_loss(a, b, targets, cap), [x, weight], torch.tensor(1.0))
        assert all(torch.isfinite(g).all() for g in found)


def test_a_part_without_gradient_is_left_alone():
    x, weight, targets = torch.randn(6, 4, requires_grad=True), torch.randn(9, 4), torch.randint(9, (6,))
    ops.head_loss(x, weight, targets, 15.0).backward()
    assert weight.grad is None
    expected = gradients(lambda a: mean_by_hand(a, weight.double(), targets, 15.0), [x.double()], torch.tensor(1.0))
    assert_close(x.grad, expected[0], atol=1e-5)
