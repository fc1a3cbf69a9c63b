"""optim.py: the updates against torch.optim, an SVD and float64 formulas; 1, 2 and 3 ranks give the same parameters."""

import random
import traceback
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import optim
from config import ModelConfig, OptimConfig
from model import GPT
from optim import MuonAdamW, adamw_update, muon_update, ngram_update, orthogonalize, pack, unpack

SEEDS = st.integers(0, 2**32 - 1)


@pytest.fixture(autouse=True)
def fresh_seed():
    """New inputs every run; the seed is printed with a failure."""
    torch.set_num_threads(1)
    seed = random.SystemRandom().randrange(2**32)
    print(f"torch.manual_seed({seed})")
    torch.manual_seed(seed)


def scalar(x):
    return torch.tensor(x, dtype=torch.float32)


def numpy64(*tensors):
    return [t.detach().double().numpy().copy() for t in tensors]


# ---------------------------------------------------------------------------------------------------- AdamW


@pytest.mark.parametrize("n", [1, 7, 1000])
@pytest.mark.parametrize("beta1, beta2, decay", [(0.8, 0.995, 0.0), (0.8, 0.95, 0.3), (0.0, 0.5, 0.01)])
def test_adamw_is_torchs_adamw(n, beta1, beta2, decay):
    p = torch.randn(n)
    reference = nn.Parameter(p.double().clone())
    torchs = torch.optim.AdamW([reference], lr=1.0, betas=(beta1, beta2), eps=optim.EPS, weight_decay=decay)
    first, second = torch.zeros(n), torch.zeros(n)
    for t in range(1, 31):
        grad = torch.randn(n) * 10.0 ** random.uniform(-4, 2)
        lr = random.uniform(0, 0.1)
        torchs.param_groups[0]["lr"], reference.grad = lr, grad.double()
        torchs.step()
        hyper = [scalar(x) for x in (lr, decay, beta1, beta2, t)]
        adamw_update(p, grad, first, second, *hyper)
        torch.testing.assert_close(p.double(), reference.detach(), rtol=1e-4, atol=2e-5)


def test_adamw_takes_an_own_rate_for_each_element():
    n, lr, decay = 6, torch.rand(6), torch.rand(6)
    beta1, beta2 = torch.rand(6) * 0.9, torch.rand(6) * 0.9
    p, grads = torch.randn(n), torch.randn(5, n)
    together = [p.clone(), torch.zeros(n), torch.zeros(n)]
    for t, grad in enumerate(grads, 1):
        adamw_update(together[0], grad, *together[1:], lr, decay, beta1, beta2, scalar(t))
    for i in range(n):
        alone = [p[i : i + 1].clone(), torch.zeros(1), torch.zeros(1)]
        for t, grad in enumerate(grads, 1):
            hyper = lr[i], decay[i], beta1[i], beta2[i], scalar(t)
            adamw_update(alone[0], grad[i : i + 1], *alone[1:], *hyper)
        torch.testing.assert_close(alone[0][0], together[0][i], rtol=1e-6, atol=1e-7)


def test_adamw_of_a_zero_gradient_moves_nothing():
    p = torch.randn(9)
    before = p.clone()
    adamw_update(p, torch.zeros(9), torch.zeros(9), torch.zeros(9), *map(scalar, (0.1, 0.0, 0.8, 0.95, 1)))
    assert torch.equal(p, before)


# ---------------------------------------------------------------------------------------------------- Muon


def polar(s):
    """The scalar polynomial that `orthogonalize` applies to each singular value, float64."""
    for a, b, c in optim.POLAR_EXPRESS:
        s = a * s + b * s**3 + c * s**5
    return s


def test_polar_express_takes_every_singular_value_close_to_1():
    s = np.geomspace(1e-3, 1, 100_001)
    assert 0.85 < polar(s).min() and polar(s).max() < 1.15
    assert polar(np.array(0.0)) == 0 and (polar(np.geomspace(1e-9, 1e-3, 1000)) < 1.15).all()


@pytest.mark.parametrize("K, m, n", [(1, 1, 1), (3, 5, 5), (2, 3, 17), (2, 17, 3), (1, 40, 1), (1, 1, 40), (4, 24, 60)])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_orthogonalize_against_an_svd(K, m, n, size):
    x = torch.randn(K, m, n)
    x = size * x / x.norm(dim=(-2, -1), keepdim=True)
    (original,) = numpy64(x)
    found = orthogonalize(x, torch.float32)
    assert found.shape == x.shape and found.dtype == torch.float32
    assert np.array_equal(original, x.double().numpy())  # the input is left as it was
    for k in range(K):
        u, s, vt = np.linalg.svd(original[k], full_matrices=False)
        moved = polar(s / (np.sqrt((s**2).sum()) * 1.02 + 1e-6))
        np.testing.assert_allclose(found[k].double().numpy(), u * moved @ vt, atol=2e-3)  # same singular vectors
        large = s > 2e-3 * np.sqrt((s**2).sum())
        assert (abs(np.linalg.svd(found[k].double().numpy(), compute_uv=False)[: large.sum()] - 1) < 0.15).all()


def test_orthogonalize_keeps_signs_transposes_and_leaves_zero_alone():
    x = torch.randn(2, 6, 11)
    y = orthogonalize(x, torch.float32)
    torch.testing.assert_close(orthogonalize(-x, torch.float32), -y)
    torch.testing.assert_close(orthogonalize(x.mT.contiguous(), torch.float32), y.mT)
    torch.testing.assert_close(orthogonalize(1000 * x, torch.float32), y, rtol=1e-3, atol=1e-4)
    x[1] = 0
    y = orthogonalize(x, torch.float32)
    assert (y[1] == 0).all() and torch.isfinite(y[0]).all()


def test_orthogonalize_in_bfloat16():
    x = torch.randn(3, 32, 48)
    y = orthogonalize(x, torch.bfloat16)
    assert y.dtype == torch.bfloat16
    s = torch.linalg.svdvals(y.float())
    assert (s > 0.6).all() and (s < 1.3).all()
    exact = orthogonalize(x, torch.float32)
    assert (y.float() - exact).norm() < 0.06 * exact.norm()


def muon_by_hand(p, grad, buffer, second, lr, momentum, decay, beta):
    """NorMuon with cautious decay on one matrix, float64, from the papers; returns the new (p, buffer, second)."""
    m, n = p.shape
    buffer = momentum * buffer + (1 - momentum) * grad
    looked_ahead = (1 - momentum) * grad + momentum * buffer
    u, s, vt = np.linalg.svd(looked_ahead, full_matrices=False)
    step = u * polar(s / (np.linalg.norm(looked_ahead) * 1.02 + 1e-6)) @ vt
    neurons = step if m >= n else step.T  # a row each
    second = beta * second + (1 - beta) * (neurons**2).mean(1)
    scaled = neurons / np.sqrt(second)[:, None]
    scaled *= np.linalg.norm(neurons) / np.linalg.norm(scaled)
    step = scaled if m >= n else scaled.T
    agree = step * p > 0
    return p - lr * np.sqrt(max(1, m / n)) * (step + decay * p * agree), buffer, second


def but_for_decay(found, expected, rtol, atol):
    """`expected`, with what was found in one element, or in 0.2% of them, that is not close but differs by 5% at most.

    Cautious decay is on or off by the sign of the update: where that is 0 but for rounding, both are right.
    """
    off = ~np.isclose(found, expected, rtol=rtol, atol=atol)
    jumped = off & (abs(found - expected) <= 0.05 * abs(expected))
    return np.where(jumped, found, expected) if jumped.sum() <= max(1, 0.002 * jumped.size) else expected


@pytest.mark.parametrize("K, m, n", [(2, 6, 6), (1, 9, 4), (3, 4, 9), (1, 24, 60), (2, 60, 24)])
def test_muon_against_float64(K, m, n):
    p, buffer, second = torch.randn(K, m, n), torch.zeros(K, m, n), torch.zeros(K, *((m, 1) if m >= n else (1, n)))
    hand = [(a, b, c.ravel()) for a, b, c in zip(*numpy64(p, buffer, second), strict=True)]
    for step in range(6):
        grad = torch.randn(K, m, n) * 10.0 ** random.uniform(-2, 1)
        lr, momentum, decay, beta = 0.05 / (step + 1), 0.85 + 0.02 * step, 0.3, 0.9
        hyper = [scalar(x) for x in (lr, momentum, decay, beta)]
        muon_update(p, grad, buffer, second, *hyper, torch.float32)
        (g,) = numpy64(grad)
        hand = [muon_by_hand(a, g[k], b, c, lr, momentum, decay, beta) for k, (a, b, c) in enumerate(hand)]
        for found, i in ((p, 0), (buffer, 1), (second, 2)):
            expected, found = np.stack([h[i] for h in hand]).reshape(found.shape), found.double().numpy()
            if i == 0:
                expected = but_for_decay(found, expected, rtol=2e-3, atol=5e-4)
            np.testing.assert_allclose(found, expected, rtol=2e-3, atol=5e-4)


@settings(max_examples=30, deadline=None)
@given(K=st.integers(1, 3), m=st.integers(1, 12), n=st.integers(1, 12), seed=SEEDS)
def test_decay_acts_only_where_it_has_the_sign_of_the_update(K, m, n, seed):
    torch.manual_seed(seed)
    p, grad = torch.randn(K, m, n), torch.randn(K, m, n)
    shape = (K, m, 1) if m >= n else (K, 1, n)
    after = {}
    for decay in (0.0, 0.5):
        q = p.clone()
        state = torch.zeros(K, m, n), torch.zeros(shape)
        muon_update(q, grad, *state, *map(scalar, (0.02, 0.9, decay, 0.9)), torch.float32)
        after[decay] = q
    lr = 0.02 * max(1, m / n) ** 0.5
    towards_zero = (p - after[0.0]) * p > 0
    assert torch.equal(after[0.5][~towards_zero], after[0.0][~towards_zero])
    expected = after[0.0] - lr * 0.5 * p
    torch.testing.assert_close(after[0.5][towards_zero], expected[towards_zero], rtol=1e-4, atol=1e-6)


def test_matrices_of_a_stack_do_not_mix_and_zero_padding_stays_zero():
    p, grad = torch.randn(4, 6, 10), torch.randn(4, 6, 10)
    p[3] = grad[3] = 0
    q, state = p.clone(), (torch.zeros(4, 6, 10), torch.zeros(4, 1, 10))
    hyper = [scalar(x) for x in (0.02, 0.9, 0.1, 0.9)]
    for _ in range(3):
        muon_update(q, grad, *state, *hyper, torch.float32)
    assert (q[3] == 0).all() and all((s[3] == 0).all() for s in state)
    alone, own = p[1:2].clone(), (torch.zeros(1, 6, 10), torch.zeros(1, 1, 10))
    for _ in range(3):
        muon_update(alone, grad[1:2], *own, *hyper, torch.float32)
    torch.testing.assert_close(alone[0], q[1], rtol=1e-5, atol=1e-6)


# ---------------------------------------------------------------------------------------------------- n-gram rows


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 30),
    C=st.integers(1, 9),
    N=st.integers(1, 60),
    decay=st.sampled_from([0.0, 0.5]),
    beta2=st.sampled_from([0.0, 0.95]),
    seed=SEEDS,
)
def test_ngram_update_against_a_dense_loop(rows, C, N, decay, beta2, seed):
    torch.manual_seed(seed)
    table, scratch, second = torch.randn(rows, C), torch.zeros(rows, C), torch.zeros(rows)
    hand_table, hand_second = numpy64(table, second)
    for step in range(4):
        ids, grad, lr = torch.randint(rows, (N,)), torch.randn(N, C), 0.1 / (step + 1)
        before, before_second = table.clone(), second.clone()
        ngram_update(table, ids, grad, scratch, second, *map(scalar, (lr, decay, beta2)))
        (g,) = numpy64(grad)
        for row in set(ids.tolist()):
            total = sum(g[i] for i in range(N) if ids[i] == row)
            power = (total**2).mean()
            new = beta2 * hand_second[row] + (1 - beta2) * power if hand_second[row] > 0 else power
            hand_second[row] = new
            hand_table[row] = hand_table[row] * (1 - lr * decay) - lr * total / np.sqrt(new)
        np.testing.assert_allclose(table.numpy(), hand_table, rtol=1e-4, atol=1e-4)
        np.testing.assert_allclose(second.numpy(), hand_second, rtol=1e-4, atol=1e-5)
        untouched = torch.ones(rows, dtype=torch.bool)
        untouched[ids] = False
        assert torch.equal(table[untouched], before[untouched])
        assert torch.equal(second[untouched], before_second[untouched])
        assert (scratch == 0).all()


def test_ngram_row_with_a_zero_gradient_stays():
    table, scratch, second = torch.randn(4, 3), torch.zeros(4, 3), torch.zeros(4)
    before = table.clone()
    ids, grad = torch.tensor([1, 1, 2]), torch.tensor([[1.0] * 3, [-1.0] * 3, [0.0] * 3])
    ngram_update(table, ids, grad, scratch, second, *map(scalar, (0.1, 0.0, 0.95)))
    assert torch.equal(table, before)


# ---------------------------------------------------------------------------------------------------- one rank

EVERYTHING = {  # five layers of width 28: no bank's matrices and no table divides by both 2 and 3 ranks
    "depth": 5, "width": 28, "head_dim": 14, "kv_heads": 1, "seq_len": 12, "mlp_ratio": 1.5, "window_pattern": "SL",
    "window": 5, "smear": True, "backout": True, "ngram_orders": [2, 3], "ngram_rows": 101,
}  # fmt: skip
VOCAB = 149  # of width 28: above optim.SMALL elements
ROWS = 6  # of the union batch: for 1, 2 and 3 ranks


def make(rank=0, world=1, backend="", seed=0, **more):
    """A model on its way, no weight at 0, and its optimizer: at the start most gradients are 0 but for rounding."""
    model = GPT(ModelConfig(**(EVERYTHING | more)), VOCAB, seed=seed)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=g))
    # little decay: rounding may flip the sign of an update close to 0, and then all of an element's decay comes or goes
    return model, MuonAdamW(model, OptimConfig(matrix_decay=0.01), rank, world, backend=backend)


# Where sums in another order are compared: AdamW's first step is a sign, and with the real value rounding decides
# that of a gradient close to 0, that of some element in most runs.
LARGE_EPS = 1e-3


@pytest.fixture
def large_eps(monkeypatch):
    monkeypatch.setattr(optim, "EPS", LARGE_EPS)


def union_batch(step, seed=0):
    g = torch.Generator().manual_seed(1000 * seed + step)
    return torch.randint(VOCAB, (2, ROWS, 12), generator=g)


def train(model, optimizer, steps, rank=0, world=1, seed=0, micro_batches=1, lr_scale=0.02):
    """Steps of a schedule that changes everything each time, on this rank's rows."""
    for step in steps:
        x, y = union_batch(step, seed)[:, rank::world]
        reads = []
        for xs, ys in zip(x.chunk(micro_batches), y.chunk(micro_batches), strict=True):
            if model.cfg.ngram_orders:
                ids = model.ngram_ids(xs)
                rows = nn.functional.embedding(ids, model.ngram).detach().requires_grad_()
                (model(xs, ys, ngram_rows=rows) / micro_batches).backward()
                reads.append((ids.flatten(), rows.grad.flatten(0, -2)))
            else:
                (model(xs, ys) / micro_batches).backward()
        optimizer.set_hyper(lr_scale * (1 - step / 40), 0.85 + 0.005 * step, 1 - step / 20)
        optimizer.step(reads)
        model.zero_grad(set_to_none=True)


def weights(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_same_weights(found, expected, atol=1e-5):
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        if name in optim.MUON:
            want = torch.from_numpy(but_for_decay(found[name].numpy(), want.numpy(), rtol=1e-5, atol=atol))
        torch.testing.assert_close(found[name], want, rtol=1e-5, atol=atol, msg=lambda m, n=name: f"{n}: {m}")


def test_every_group_has_its_place():
    model, optimizer = make()
    kinds = {name: group.kind for group in optimizer.groups for name in group.names}
    assert kinds.keys() | {"ngram"} == dict(model.named_parameters()).keys()
    assert {name for name, kind in kinds.items() if kind == "muon"} == {"query", "key", "value", "out", "up", "down"}
    assert {name for name, kind in kinds.items() if kind == "adamw"} == {"embed", "head", "value_embed"}


def test_every_parameter_moves_and_the_loss_falls():
    model, optimizer = make()
    before = weights(model)
    x, y = union_batch(0)
    with torch.no_grad():
        start = float(model(x, y))
    train(model, optimizer, [0] * 12, lr_scale=0.3)
    for name, p in weights(model).items():
        assert torch.isfinite(p).all() and not torch.equal(p, before[name]), name
    with torch.no_grad():
        assert float(model(x, y)) < start - 0.5


def test_same_bits_again_and_micro_batches_add_up(large_eps):
    first, second, halves = make(), make(), make()
    train(*first, range(5))
    train(*second, range(5))
    train(*halves, range(5), micro_batches=2)
    assert all(torch.equal(a, b) for a, b in zip(first[0].parameters(), second[0].parameters(), strict=True))
    assert_same_weights(weights(halves[0]), weights(first[0]))


@pytest.mark.parametrize("depth", [1, 3, 5])
def test_at_the_start_rounding_moves_no_scalar(depth):
    """Output projections start at 0, so the stream is a multiple of x0 and the last norm makes the gradient of its
    scales 0 but for rounding, which differs between machines, micro-batches and ranks. AdamW must not blow it up."""
    found = []
    for micro_batches in (1, 2, 3):
        model = GPT(ModelConfig(**(EVERYTHING | {"depth": depth})), VOCAB)
        train(model, MuonAdamW(model, OptimConfig()), [0], micro_batches=micro_batches, lr_scale=1.0)
        found.append(weights(model))
    for other in found[1:]:
        assert_same_weights(other, found[0])


def test_a_step_follows_the_formulas():
    """Learning rates, decays and betas reach the right parameters."""
    cfg = OptimConfig(embed_decay=0.3, head_decay=0.2, value_decay=0.1, matrix_decay=0.4)
    model = GPT(ModelConfig(**(EVERYTHING | {"ngram_orders": []})), VOCAB)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))
    optimizer = MuonAdamW(model, cfg)
    scale = (28 / 768) ** -0.5
    adamw = {  # rate, decay, betas
        "embed": (0.3 * scale, 0.3, 0.8, 0.995),
        "head": (0.008 * scale, 0.2, 0.8, 0.96),
        "value_embed": (0.15 * scale, 0.1, 0.8, 0.995),
    }
    parameters, reference = dict(model.named_parameters()), []
    copies = {name: nn.Parameter(p.detach().double().clone()) for name, p in parameters.items()}
    hand = {}
    for name, p in copies.items():
        if p.ndim == 3 and name not in ("value_embed", "value_gate"):
            hand[name] = [(m.numpy(), np.zeros(m.shape), np.zeros(max(m.shape))) for m in p.detach()]
        else:
            lr, decay, beta1, beta2 = adamw.get(name, (0.02, 0.0, 0.8, 0.95))
            reference.append({"params": [p], "lr": lr, "base": lr, "betas": (beta1, beta2), "weight_decay": decay})
    torchs = torch.optim.AdamW(reference, eps=optim.EPS)
    for step in range(3):
        lr_scale, momentum, decay_scale = 0.5 / (step + 1), 0.9 + 0.01 * step, 1 - 0.3 * step
        for name, p in parameters.items():
            p.grad = torch.randn_like(p)
            copies[name].grad = p.grad.double()
        for group in torchs.param_groups:
            group["lr"] = group["base"] * lr_scale
        torchs.step()
        for name, bank in hand.items():
            grads = copies[name].grad.numpy()
            hyper = 0.02 * lr_scale, momentum, 0.4 * decay_scale, 0.9
            hand[name] = [muon_by_hand(a, g, b, c, *hyper) for (a, b, c), g in zip(bank, grads, strict=True)]
        optimizer.set_hyper(lr_scale, momentum, decay_scale)
        optimizer.step()
        for name, p in parameters.items():
            expected = np.stack([a for a, _, _ in hand[name]]) if name in hand else copies[name].detach().numpy()
            found = p.detach().numpy()
            if name in hand:
                expected = but_for_decay(found, expected, rtol=1e-3, atol=2e-4)
            np.testing.assert_allclose(found, expected, rtol=1e-3, atol=2e-4, err_msg=name)


@pytest.mark.parametrize("name", [name for name, _ in make()[0].named_parameters() if name != "ngram"])
def test_a_missing_gradient_is_named(name):
    model, optimizer = make()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    dict(model.named_parameters())[name].grad = None
    optimizer.set_hyper(1.0, 0.9, 1.0)
    with pytest.raises(RuntimeError, match=rf"\b{name}\b.*no gradient") as error:
        optimizer.step([(torch.tensor([0]), torch.zeros(1, 28))])
    assert "\n" not in str(error.value)


def test_missing_reads_of_the_table_are_named():
    model, optimizer = make()
    model(*union_batch(0)).backward()  # a dense gradient of the table, which the optimizer does not use
    optimizer.set_hyper(1.0, 0.9, 1.0)
    with pytest.raises(RuntimeError, match="ngram"):
        optimizer.step()


def test_state_goes_through_a_dict_and_the_rest_of_the_run_is_the_same():
    straight, stopped = make(), make()
    train(*straight, range(12))
    train(*stopped, range(6))
    state = stopped[1].state_dict()
    again = make(seed=5)
    again[0].load_state_dict(stopped[0].state_dict())
    again[1].load_state_dict(state)
    train(*stopped, range(6, 9))  # what was saved is a copy
    train(*again, range(6, 12))
    for name, p in again[0].named_parameters():
        assert torch.equal(p, dict(straight[0].named_parameters())[name]), name
    a, b = again[1].state_dict(), straight[1].state_dict()
    assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def test_own_state_is_all_that_training_changes():
    model, optimizer = make()
    train(model, optimizer, range(3))
    kept = {k: t.clone() for k, t in (model.state_dict() | optimizer.own_state()).items()}
    t = optimizer.t
    train(model, optimizer, range(3, 6))
    expected = weights(model)
    with torch.no_grad():
        for k, now in (model.state_dict() | optimizer.own_state()).items():
            now.copy_(kept[k])
    optimizer.t = t
    train(model, optimizer, range(3, 6))
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("more", [{"depth": 3}, {"ngram_orders": []}, {"value_embeds": False}, {"width": 56}])
def test_state_of_another_model_is_refused(more):
    _, other = make(**more)
    _, optimizer = make()
    with pytest.raises((RuntimeError, ValueError, KeyError)):
        optimizer.load_state_dict(other.state_dict())


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    unit=st.sampled_from([(), (2, 3), (1, 1)]),
    extra=st.integers(0, 4),
)
def test_pack_and_unpack(sizes, unit, extra):
    tensors = [torch.randn(n, *unit) for n in sizes]
    before = [t.clone() for t in tensors]
    stack = pack(tensors, unit, sum(sizes) + extra)
    assert stack.shape == (sum(sizes) + extra, *unit) and (stack[sum(sizes) :] == 0).all()
    assert torch.equal(stack[: sum(sizes)], torch.cat(before))
    stack = stack + 1
    unpack(stack, tensors)
    assert all(torch.equal(t, b + 1) for t, b in zip(tensors, before, strict=True))


def test_changing_hyper_parameters_compiles_nothing_again():
    torch._dynamo.reset()
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model, optimizer = make(backend=counting)
    eager, eager_optimizer = make()
    compiled_after = []
    for step in range(8):
        train(model, optimizer, [step])
        train(eager, eager_optimizer, [step])
        compiled_after.append(len(graphs))
    assert_same_weights(weights(model), weights(eager))
    for lr_scale in (0.0, 1.0, 1e-8, 1e-10):  # values that a compiler may treat as constants
        model(*union_batch(0)).backward()
        optimizer.set_hyper(lr_scale, lr_scale, 1.0 - lr_scale)
        optimizer.step([(torch.arange(ROWS * 24), torch.zeros(ROWS * 24, 28))])
        compiled_after.append(len(graphs))
    assert compiled_after[0] > 0 and set(compiled_after) == {compiled_after[0]}, compiled_after
    assert len(graphs) <= len(optimizer.groups)


# ---------------------------------------------------------------------------------------------------- several ranks


class Odd(nn.Module):
    """Parameters under the names that the optimizer knows, of shapes that divide by nothing."""

    def __init__(self):
        super().__init__()
        self.cfg = ModelConfig(width=96)
        g = torch.Generator().manual_seed(7)
        shapes = {
            "embed": (17, 241), "head": (4096,), "value_embed": (1, 5003, 1),  # 4,097, 4,096 and 5,003 elements
            "query": (5, 7, 3), "out": (2, 7, 3), "key": (1, 3, 8), "up": (1, 8, 3), "down": (4, 6, 6),
            "gate": (5,), "scale": (1,), "other": (3, 1),
        }  # fmt: skip
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=g)))


def train_odd(model, optimizer, steps, ranks):
    """Steps with random gradients, a different one for each of so many ranks; this rank has `optimizer.rank`'s,
    a single rank has their mean."""
    for step in range(steps):
        g = torch.Generator().manual_seed(step)
        for p in model.parameters():
            grads = torch.randn(ranks, *p.shape, generator=g)
            p.grad = grads.mean(0) if optimizer.world == 1 else grads[optimizer.rank].clone()
        optimizer.set_hyper(1 - step / 20, 0.9, 1 - step / 20)
        optimizer.step()


def ranks_at_work(rank, folder, seed):
    """One of three processes: a run on 3 ranks, then one on 2 (without the last process)."""
    torch.set_num_threads(1)
    optim.EPS = LARGE_EPS
    try:
        for world in (3, 2):
            if rank >= world:
                continue
            where = f"file://{folder}/meet-{world}"
            dist.init_process_group(
                "gloo", init_method=where, rank=rank, world_size=world, timeout=timedelta(seconds=60)
            )
            model, optimizer = make(rank, world)
            train(model, optimizer, range(10), rank, world, seed)
            half = {"weights": weights(model), "state": optimizer.state_dict()}
            train(model, optimizer, range(10, 20), rank, world, seed)
            out = {"half": half, "weights": weights(model), "state": optimizer.state_dict()}
            out["own"] = {k: t.numel() for k, t in optimizer.own_state().items()}
            if rank == 0:
                torch.save(half, f"{folder}/half-{world}.pt")
            odd = Odd()
            optimizer = MuonAdamW(odd, OptimConfig(), rank, world)
            train_odd(odd, optimizer, 20, world)
            out["odd"], out["odd_state"] = weights(odd), optimizer.state_dict()
            for source in (1, 3):  # go on where another number of ranks stopped
                if source != world:
                    half = torch.load(f"{folder}/half-{source}.pt", weights_only=True)
                    model, optimizer = make(rank, world, seed=9)
                    model.load_state_dict(half["weights"])
                    optimizer.load_state_dict(half["state"])
                    train(model, optimizer, range(10, 20), rank, world, seed)
                    out[f"from {source}"] = weights(model)
            torch.save(out, f"{folder}/rank-{world}-{rank}.pt")
            dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        raise


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """{(world, rank): what it ended with} for 1, 2 and 3 ranks, and "seed"."""
    torch.set_num_threads(1)
    folder, seed = tmp_path_factory.mktemp("ranks"), random.SystemRandom().randrange(2**20)
    patch = pytest.MonkeyPatch()
    patch.setattr(optim, "EPS", LARGE_EPS)
    model, optimizer = make()
    train(model, optimizer, range(10), seed=seed)
    half = {"weights": weights(model), "state": optimizer.state_dict()}
    torch.save(half, folder / "half-1.pt")
    train(model, optimizer, range(10, 20), seed=seed)
    out = {(1, 0): {"half": half, "weights": weights(model), "state": optimizer.state_dict()}, "seed": seed}
    out[1, 0]["own"] = {k: t.numel() for k, t in optimizer.own_state().items()}
    patch.undo()
    mp.spawn(ranks_at_work, args=(str(folder), seed), nprocs=3)
    for world in (2, 3):
        for rank in range(world):
            out[world, rank] = torch.load(folder / f"rank-{world}-{rank}.pt", weights_only=True)
    return out


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_give_the_parameters_of_one_rank_on_the_union_batch(runs, world):
    print("seed of the batches", runs["seed"])
    start = weights(make()[0])
    moved = {name: float((runs[1, 0]["weights"][name] - p).abs().max()) for name, p in start.items()}
    assert all(moved[name] > 1e-3 for name, p in start.items() if p.numel() > 100), moved
    assert_same_weights(runs[world, 0]["weights"], runs[1, 0]["weights"])
    for rank in range(1, world):  # and every rank has the same bits
        for key in ("weights", "state", "odd", "odd_state"):
            a, b = runs[world, rank][key], runs[world, 0][key]
            assert a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("world", [2, 3])
def test_odd_shapes_on_ranks(runs, large_eps, world):
    model = Odd()
    optimizer = MuonAdamW(model, OptimConfig())
    train_odd(model, optimizer, 20, world)
    assert_same_weights(runs[world, 0]["odd"], weights(model))
    expected = optimizer.state_dict()
    assert expected.keys() == runs[world, 0]["odd_state"].keys()
    for key, t in expected.items():
        assert runs[world, 0]["odd_state"][key].shape == t.shape
        torch.testing.assert_close(runs[world, 0]["odd_state"][key], t, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world", [2, 3])
def test_state_is_sharded(runs, world):
    """The large state of a rank is its share, padded by less than a unit a rank."""
    for key, whole in runs[1, 0]["own"].items():
        part = runs[world, 0]["own"][key]
        if key.startswith(("embed", "head", "value_embed")):
            assert part == -(-whole // world)
        if key.endswith(".buffer"):
            assert whole / world <= part < whole / world + 28 * 42


@pytest.mark.parametrize("source", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_state_saved_on_some_ranks_goes_on_with_others(runs, large_eps, source, world):
    if world == 1:
        model, optimizer = make(seed=9)
        half = runs[source, 0]["half"]
        model.load_state_dict(half["weights"])
        optimizer.load_state_dict(half["state"])
        train(model, optimizer, range(10, 20), seed=runs["seed"])
        found = weights(model)
    elif f"from {source}" in runs[world, 0]:
        found = runs[world, 0][f"from {source}"]
    else:  # the same number, or 2 going on as 3: the state is that of one rank
        expected, found = runs[1, 0]["half"]["state"], runs[source, 0]["half"]["state"]
        assert expected.keys() == found.keys() and all(expected[k].shape == found[k].shape for k in expected)
        found = runs[source, 0]["weights"]
    assert_same_weights(found, runs[1, 0]["weights"])
