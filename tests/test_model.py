"""model.py: a second GPT in float64, written plainly, must give the same logits and gradients; nothing sees the future;
parameters and FLOPs are counted by hand."""

import math
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from config import ModelConfig
from kernels import ops
from model import GPT, ngram_hash, value_layers, windows

PLAIN = {"depth": 2, "width": 24, "head_dim": 6, "seq_len": 19, "mlp_ratio": 2.5, "value_embeds": False}
EVERYTHING = {
    "depth": 3, "width": 32, "head_dim": 8, "kv_heads": 2, "seq_len": 21, "mlp_ratio": 1.5, "window_pattern": "SL",
    "window": 4, "value_embeds": True, "smear": True, "key_offset": True, "backout": True,
    "ngram_orders": [2, 3], "ngram_rows": 37,
    "softcap": 4.0, "qk_gain": 1.4, "rope_base": 1000.0,
}  # fmt: skip
OPTIONS = {
    "plain": {},
    "gqa": {"kv_heads": 2},
    "mqa": {"kv_heads": 1},
    "window": {"window_pattern": "SSL", "window": 3, "depth": 3},
    "window_1": {"window_pattern": "S", "window": 1, "depth": 3},
    "value_embeds": {"value_embeds": True},
    "smear": {"smear": True},
    "backout": {"backout": True, "depth": 3},
    "key_offset": {"key_offset": True},
    "no_softcap": {"softcap": 0.0},
    "ngram": {"ngram_orders": [2, 4], "ngram_rows": 11},
    "one_layer": {"depth": 1, "value_embeds": True},
    "everything": EVERYTHING,
    "five_layers": EVERYTHING | {"depth": 5, "kv_heads": 1, "window_pattern": "SSLS"},
}
VOCAB = 29


@pytest.fixture(autouse=True)
def fresh_seed():
    """New inputs every run; the seed is printed with a failure."""
    torch.set_num_threads(1)
    seed = random.SystemRandom().randrange(2**32)
    print(f"torch.manual_seed({seed})")
    torch.manual_seed(seed)


def make(option, **more):
    """A model of an entry of OPTIONS with random weights in all places: at the start many are 0 and hide faults."""
    model = GPT(ModelConfig(**(PLAIN | OPTIONS[option] | more)), VOCAB, seed=random.randrange(2**31))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def tokens(B, T):
    return torch.randint(VOCAB, (B, T))


# ---------------------------------------------------------------------------------------------------- a second GPT


def norm(x):
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()


def reference_logits(weights, cfg, idx, ngram_ids):
    """Logits (T, V) of one row idx (T,), float64, head by head and position by position.

    weights: {name: float64 tensor}; ngram_ids: (orders, T).
    """
    T, D, H = len(idx), cfg.head_dim, cfg.width // cfg.head_dim
    kv = cfg.kv_heads or H
    w = weights
    x = norm(w["embed"][idx])
    for rows in ngram_ids:
        x = x + w["ngram"][rows]
    if cfg.smear:
        smeared = [x[0]]
        for t in range(1, T):
            gate = 1 / (1 + torch.exp(-(w["smear_gate"][0] * x[t, :24]).sum()))
            smeared.append(x[t] + w["smear_scale"] * gate * x[t - 1])
        x = torch.stack(smeared)
    frequency = torch.tensor([cfg.rope_base ** (-2 * i / D) for i in range(D // 2)], dtype=torch.float64)
    angle = torch.arange(T, dtype=torch.float64)[:, None] * frequency
    turn = torch.complex(angle.cos(), angle.sin())

    def rotate(x):
        x = norm(x) * cfg.qk_gain
        z = torch.complex(x[:, : D // 2], x[:, D // 2 :]) * turn
        return torch.cat((z.real, z.imag), -1)

    with_values = list(range(cfg.depth - 1, -1, -2))[::-1] if cfg.value_embeds else []
    start, middle = x, None
    for i in range(cfg.depth):
        x = w["resid_scale"][i] * x + w["x0_scale"][i] * start
        h = norm(x)
        q, k, v = (h @ w[name][i].T for name in ("query", "key", "value"))
        if cfg.key_offset:
            slow = [c for c in range(k.size(1)) if D // 4 <= c % (D // 2)]
            k = torch.stack([k[t].index_copy(0, torch.tensor(slow), k[max(t - 1, 0), slow]) for t in range(T)])
        short = cfg.window_pattern[i % len(cfg.window_pattern)] == "S" and i != cfg.depth - 1
        reach = cfg.window if short else T
        heads = []
        for head in range(H):
            g = head // (H // kv)
            value = v[:, g * D : (g + 1) * D]
            if i in with_values:
                slot = with_values.index(i)
                gate = 3 * torch.sigmoid(h[:, :12] @ w["value_gate"][slot, g])
                value = value + gate[:, None] * w["value_embed"][slot][idx][:, g * D : (g + 1) * D]
            query, key = rotate(q[:, head * D : (head + 1) * D]), rotate(k[:, g * D : (g + 1) * D])
            out = []
            for t in range(T):
                first = max(0, t + 1 - reach)
                share = torch.softmax(key[first : t + 1] @ query[t] / math.sqrt(D), 0)
                out.append(share @ value[first : t + 1])
            heads.append(torch.stack(out))
        x = x + torch.cat(heads, -1) @ w["out"][i].T
        x = x + torch.relu(norm(x) @ w["up"][i].T).pow(2) @ w["down"][i].T
        if i == cfg.depth // 2:
            middle = x
    if cfg.backout:
        x = x - w["backout_scale"] * middle
    logits = norm(x) @ w["head"].T
    return cfg.softcap * torch.tanh(logits / cfg.softcap) if cfg.softcap else logits


def doubles(model):
    return {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("block", [4, 256])
def test_same_logits_and_gradients_as_a_second_gpt(option, block, monkeypatch):
    monkeypatch.setattr(ops, "QUERY_BLOCK", block)
    monkeypatch.setattr(ops, "HEAD_CHUNK", 5)
    model = make(option)
    B, T = 2, model.cfg.seq_len - 4
    idx, targets = tokens(B, T), tokens(B, T)
    targets[0, 3:7] = -1
    ids = model.ngram_ids(idx) if model.cfg.ngram_orders else torch.zeros(0, B, T, dtype=torch.int64)
    w = doubles(model)
    expected = torch.stack([reference_logits(w, model.cfg, idx[b], ids[:, b]) for b in range(B)])
    found = model(idx)
    assert found.dtype == torch.float32 and found.shape == (B, T, VOCAB)
    torch.testing.assert_close(found.double(), expected, rtol=1e-3, atol=2e-4)

    loss = model(idx, targets)
    expected_loss = F.cross_entropy(expected.flatten(0, 1), targets.flatten(), ignore_index=-1)
    torch.testing.assert_close(loss.double(), expected_loss, rtol=1e-4, atol=1e-5)
    each = model(idx, targets, reduction="none")
    assert each.shape == (B, T) and each.dtype == torch.float32 and (each[0, 3:7] == 0).all()
    assert math.isclose(float(each.detach().double().sum()) / (B * T - 4), float(loss.detach()), rel_tol=1e-5)

    loss.backward()
    expected_loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None, name
        reference = w[name].grad
        error = (p.grad.double() - reference).norm()
        # where only the scale of the stream changes before a norm, the gradient is 0 but for rounding
        assert error <= 2e-3 * reference.norm() + 2e-6, f"{name}: error {error}, gradient {reference.norm()}"


@pytest.mark.parametrize("option", OPTIONS)
def test_no_logit_sees_a_later_token(option, monkeypatch):
    monkeypatch.setattr(ops, "QUERY_BLOCK", 6)
    model = make(option)
    T = model.cfg.seq_len
    idx = tokens(1, T)
    with torch.no_grad():
        before = model(idx)
        for t in range(T):
            changed = idx.clone()
            changed[0, t] = (changed[0, t] + 1 + random.randrange(VOCAB - 1)) % VOCAB
            after = model(changed)
            assert torch.equal(after[:, :t], before[:, :t]), f"changing token {t} changes a logit before it"
            assert not torch.equal(after[:, t], before[:, t])
        changed = idx.clone()
        changed[0, 0] = (changed[0, 0] + 1) % VOCAB
        assert not torch.equal(model(changed)[:, -1], before[:, -1])  # the last layer sees the whole row


@pytest.mark.parametrize("option", OPTIONS)
def test_rows_are_independent_and_a_prefix_gives_the_same(option):
    model = make(option)
    idx = tokens(4, model.cfg.seq_len)
    with torch.no_grad():
        together = model(idx)
        for b in range(4):
            torch.testing.assert_close(model(idx[b : b + 1])[0], together[b], rtol=1e-4, atol=2e-5)
        for T in (1, 2, 7):
            torch.testing.assert_close(model(idx[:, :T]), together[:, :T], rtol=1e-4, atol=2e-5)
        shuffled = model(idx[[2, 0, 3, 1]])
        torch.testing.assert_close(shuffled, together[[2, 0, 3, 1]], rtol=1e-4, atol=2e-5)


def test_windows_reach_exactly_so_far():
    """With one windowed layer below the last, of which the attention is cut off, only the window is seen."""
    model = make("plain", depth=2, window_pattern="S", window=4)
    with torch.no_grad():
        model.out[1].zero_()  # the last layer, which sees the whole row, does nothing
        idx = tokens(1, 19)
        before = model(idx)[0]
        for t in (0, 5, 11):
            changed = idx.clone()
            changed[0, t] = (changed[0, t] + 1) % VOCAB
            moved = (model(changed)[0] != before).any(-1).nonzero().flatten().tolist()
            assert moved == list(range(t, t + 4))


@pytest.mark.parametrize(
    "pattern, depth, expected",
    [("L", 3, [0, 0, 0]), ("S", 1, [0]), ("S", 3, [9, 9, 0]), ("SSL", 5, [9, 9, 0, 9, 0]), ("LS", 4, [0, 9, 0, 0])],
)
def test_window_of_each_layer(pattern, depth, expected):
    assert windows(ModelConfig(depth=depth, window_pattern=pattern, window=9)) == expected


@pytest.mark.parametrize("depth, expected", [(1, [0]), (2, [1]), (3, [0, 2]), (4, [1, 3]), (7, [0, 2, 4, 6])])
def test_value_layers(depth, expected):
    assert value_layers(depth) == expected


# ---------------------------------------------------------------------------------------------------- n-gram tables


@settings(max_examples=50, deadline=None)
@given(
    B=st.integers(1, 3),
    T=st.integers(1, 12),
    order=st.integers(2, 8),
    rows=st.sampled_from([2, 3, 1000, 65536, 2**28]),
    seed=st.integers(0, 2**32 - 1),
)
def test_ngram_hash_depends_on_exactly_the_last_tokens_of_the_row(B, T, order, rows, seed):
    g = torch.Generator().manual_seed(seed)
    idx = torch.randint(2**20, (B, T), generator=g)
    found = ngram_hash(idx, order, rows)
    assert found.shape == idx.shape and found.dtype == torch.int64
    assert (found >= 0).all() and (found < rows).all()
    longer = torch.cat(
        (torch.randint(2**20, (B, 5), generator=g), torch.zeros(B, order - 1, dtype=torch.int64), idx), 1
    )
    assert torch.equal(ngram_hash(longer, order, rows)[:, -T:], found)  # before the row's start is token 0
    if rows == 2**28:  # where chance collisions are rare, each of the `order` tokens counts, and so does their order
        for back in range(min(order, T)):
            other = idx.clone()
            other[:, T - 1 - back] ^= 1
            assert (ngram_hash(other, order, rows)[:, -1] != found[:, -1]).all()


@pytest.mark.parametrize("order, rows", [(2, 1000), (2, 4096), (3, 4096), (3, 65536)])
def test_ngram_hash_spreads_over_all_rows(order, rows):
    """Distinct n-grams fill the table as balls thrown at random: neither piled up nor in a part of it."""
    pairs = torch.cartesian_prod(torch.arange(64), torch.arange(4 * rows // 64))  # neighbours, the hard case
    idx = torch.cat((torch.full((len(pairs), order - 2), 7), pairs), 1)
    count = torch.bincount(ngram_hash(idx, order, rows)[:, -1], minlength=rows).double()
    chi2 = ((count - count.mean()) ** 2 / count.mean()).sum()
    assert chi2 < rows + 8 * math.sqrt(2 * rows)
    assert (count == 0).sum() < 2 * rows * math.exp(-4) + 10


def test_ngram_ids_of_different_orders_read_different_parts():
    model = make("everything")
    ids = model.ngram_ids(tokens(3, 20))
    assert ids.shape == (2, 3, 20)
    assert (ids[0] < 37).all() and (ids[1] >= 37).all() and (ids[1] < 74).all()


@pytest.mark.parametrize("option", ["ngram", "everything", "five_layers"])
def test_gradient_of_the_rows_is_the_gradient_of_the_table(option):
    model = make(option)
    idx, targets = tokens(3, 17), tokens(3, 17)
    dense = model(idx, targets)
    dense.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    ids = model.ngram_ids(idx)
    rows = F.embedding(ids, model.ngram).detach().requires_grad_()
    loss = model(idx, targets, ngram_rows=rows)
    loss.backward()
    assert torch.equal(loss, dense) and model.ngram.grad is None
    table = np.zeros(model.ngram.shape)
    np.add.at(table, ids.flatten().numpy(), rows.grad.flatten(0, -2).double().numpy())
    torch.testing.assert_close(expected.pop("ngram").double(), torch.from_numpy(table), rtol=1e-4, atol=1e-7)
    for name, grad in expected.items():
        torch.testing.assert_close(dict(model.named_parameters())[name].grad, grad, rtol=1e-5, atol=1e-7)


# ---------------------------------------------------------------------------------------------------- start


@pytest.mark.parametrize("option", OPTIONS)
def test_init_follows_from_the_seed_alone(option):
    cfg = ModelConfig(**(PLAIN | OPTIONS[option]))
    first = GPT(cfg, VOCAB, seed=5).state_dict()
    torch.manual_seed(99)
    torch.rand(3)
    again, other = GPT(cfg, VOCAB, seed=5).state_dict(), GPT(cfg, VOCAB, seed=6).state_dict()
    assert first.keys() == {name for name, _ in GPT(cfg, VOCAB).named_parameters()}
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in ("embed", "head", "query", "key", "value", "up"))
    assert all(torch.isfinite(p).all() and p.dtype == torch.float32 for p in first.values())


def test_init_fills_every_place_again():
    model = GPT(ModelConfig(**EVERYTHING), VOCAB, seed=3)
    expected = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(math.nan)
    model.init_weights(3)
    assert all(torch.equal(p, expected[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize("option", ["value_embeds", "smear", "ngram"])
def test_an_added_part_leaves_the_other_weights_as_they_are(option):
    plain = GPT(ModelConfig(**PLAIN), VOCAB, seed=1).state_dict()
    more = GPT(ModelConfig(**(PLAIN | OPTIONS[option])), VOCAB, seed=1).state_dict()
    assert more.keys() > plain.keys() and all(torch.equal(more[name], plain[name]) for name in plain)


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_at_the_start_the_loss_is_that_of_guessing_and_every_parameter_has_a_gradient(depth):
    model = GPT(ModelConfig(**(EVERYTHING | {"depth": depth})), 64, seed=depth)
    idx, targets = torch.randint(64, (4, 21)), torch.randint(64, (4, 21))
    loss = model(idx, targets)
    assert abs(float(loss.detach()) - math.log(64)) < 0.02
    loss.backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and torch.isfinite(p.grad).all(), name


@pytest.mark.parametrize("depth", [2, 3, 4, 5])
def test_every_parameter_moves_the_loss(depth):
    """No parameter is a passenger whose gradient is rounding noise, which AdamW would blow up to full steps."""
    model = make("everything", depth=depth)
    model(tokens(4, 21), tokens(4, 21)).backward()
    for name, p in model.named_parameters():
        assert p.grad.norm() > 1e-5, f"{name} hardly moves the loss at depth {depth}: gradient {p.grad.norm():.1e}"


@pytest.mark.parametrize(
    "more",
    [
        {"width": 8, "head_dim": 4, "value_embeds": True},
        {"width": 16, "head_dim": 8, "smear": True},
        {"width": 2, "head_dim": 2, "value_embeds": True, "smear": True, "backout": True},
    ],
)
def test_narrow_models_work(more):
    model = GPT(ModelConfig(**(PLAIN | more)), VOCAB)
    model(tokens(2, 5), tokens(2, 5)).backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("option", ["plain", "everything", "five_layers"])
def test_bfloat16_is_close_to_float32(option):
    model = GPT(ModelConfig(**(PLAIN | OPTIONS[option])), VOCAB, seed=random.randrange(2**31))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name in ("out", "down", "head"):
                p.add_(torch.randn_like(p) / p.size(-1) ** 0.5)
    idx, targets = tokens(3, 17), tokens(3, 17)
    loss = model(idx, targets)
    loss.backward()
    exact = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.dtype = torch.bfloat16
    assert model(idx).dtype == torch.float32
    half = model(idx, targets)
    assert half.dtype == torch.float32 and abs(float((half - loss).detach())) < 0.03
    half.backward()
    for name, p in model.named_parameters():
        assert p.grad.dtype == torch.float32
        if p.ndim > 1 and exact[name].norm() > 1e-4:
            alike = F.cosine_similarity(p.grad.flatten(), exact[name].flatten(), dim=0)
            assert alike > 0.98, f"{name}: {alike}"


# ---------------------------------------------------------------------------------------------------- counts

# Worked out on paper. C width, K = kv_heads * head_dim, M = mlp_ratio * C, V vocabulary, L depth, T row.
COUNTS = [
    (  # the defaults: C = K = 640, M = 2560, V = 8192, L = 10, T = 1024, 5 heads of 128, values in 5 layers
        ModelConfig(), 8192,
        {
            "embed": 5_242_880, "head": 5_242_880,
            "matrices": 49_152_000,  # 10 * (4 * 640 * 640 + 2 * 640 * 2560)
            "value_embed": 26_214_400,  # 5 * 8192 * 640
            "ngram": 0,
            "scalars": 320,  # 10 + 10, and 5 gates of 5 heads x 12 channels
            "total": 85_852_480,
        },
        # 6 * (5,242,880 + 49,152,000 + 300) + 12 * 5 * 128 * 10 * 1024
        405_014_280,
    ),
    (  # C = 32, 4 heads of 8, K = 16, M = 48, V = 50, L = 3, T = 21, windows 4, 21, 21, values in layers 0 and 2
        ModelConfig(**EVERYTHING), 50,
        {
            "embed": 1600, "head": 1600,
            "matrices": 18_432,  # 3 * (2 * 32 * 32 + 2 * 16 * 32 + 2 * 48 * 32)
            "value_embed": 1600,  # 2 * 50 * 16
            "ngram": 2368,  # 2 * 37 * 32
            "scalars": 80,  # 3 + 3, value gates 2 * 2 * 12, smear gate 24 and scale 1, backout 1
            "total": 25_680,
        },
        # 6 * (1600 + 18,432 + 48 + 24) + 12 * 4 * 8 * (4 + 21 + 21)
        138_288,
    ),
    (  # one layer, one key/value head, no options, a window longer than the row: C = 24, K = 6, M = 60, V = 29
        ModelConfig(**(PLAIN | {"depth": 1, "kv_heads": 1, "window_pattern": "S", "window": 100})), 29,
        {
            "embed": 696, "head": 696, "matrices": 4320,  # 2 * 24 * 24 + 2 * 6 * 24 + 2 * 60 * 24
            "value_embed": 0, "ngram": 0, "scalars": 2, "total": 5714,
        },
        # 6 * (696 + 4320) + 12 * 4 * 6 * 19
        35_568,
    ),
]  # fmt: skip


@pytest.mark.parametrize("cfg, vocab, counts, flops", COUNTS, ids=["default", "everything", "one_layer"])
def test_counts_by_hand(cfg, vocab, counts, flops):
    model = GPT(cfg, vocab)
    assert model.parameter_counts() == counts
    assert model.flops_per_token() == flops


@pytest.mark.parametrize("option", OPTIONS)
def test_counts_add_up(option):
    model = make(option)
    counts = model.parameter_counts()
    assert counts.pop("total") == sum(counts.values()) == sum(p.numel() for p in model.parameters())
