"""Bits per byte against float64 formulas, on any batch size and number of ranks."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from eval.bpb import READ_EVERY, evaluate_bpb, packed_rows, packed_val_batches, stream_batch, val_bpb

VOCAB, BOS = 37, 36


class Bigram(nn.Module):
    """Scores the next token by the present one alone, with weights drawn at random."""

    def __init__(self, seed=0):
        super().__init__()
        g = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(VOCAB, VOCAB, generator=g) * 2)
        self.shapes = []

    def forward(self, idx, targets=None, reduction="mean"):
        self.shapes.append(tuple(idx.shape))
        logits = self.table[idx]
        if targets is None:
            return logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction="none")
        return loss.view_as(targets) if reduction == "none" else loss.sum() / (targets >= 0).sum()


def text(n, seed):
    """A stream with BOS here and there, and the bytes of each token."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, n).astype(np.uint16)
    lengths = rng.integers(1, 9, VOCAB).astype(np.int32)
    lengths[BOS] = 0
    return tokens, lengths


def expected(model, tokens, lengths):
    """Bits per byte of every target of the stream, in float64 with numpy."""
    table = model.table.detach().double().numpy()
    logp = table - np.log(np.exp(table).sum(1, keepdims=True))
    x, y = tokens[:-1].astype(int), tokens[1:].astype(int)
    counted = lengths[y] > 0
    return -logp[x, y][counted].sum() / math.log(2) / lengths[y].sum(), int(lengths[y].sum())


@pytest.mark.parametrize("n,T", [(1000, 16), (1001, 10), (77, 16), (17, 16), (18, 16), (5, 16), (2, 3)])
@pytest.mark.parametrize("batch_rows", [1, 3, 8])
def test_stream_counts_every_byte_once(n, T, batch_rows):
    tokens, lengths = text(n, seed=n * T)
    model = Bigram(n)
    got = val_bpb(model, tokens, T, lengths, batch_rows)
    want, size = expected(model, tokens, lengths)
    assert got["bytes"] == size
    assert got["bpb"] == pytest.approx(want, rel=1e-6)
    assert got["tokens"] == n - 1 and got["complete"] and got["rows"] == got["rows_total"] == math.ceil((n - 1) / T)
    assert set(model.shapes) == {(batch_rows, T)}, "a second shape would be compiled"


def test_rows_are_those_of_the_stream():
    tokens = np.arange(23, dtype=np.uint16)
    x, y = stream_batch(tokens, 5, 3, 3)
    assert x.tolist() == [[15, 16, 17, 18, 19], [20, 21, 0, 0, 0], [0] * 5]
    assert y.tolist() == [[16, 17, 18, 19, 20], [21, 22, -1, -1, -1], [-1] * 5]


def test_uniform_model_has_the_known_score():
    tokens, lengths = text(500, 3)
    model = Bigram()
    nn.init.zeros_(model.table)
    counted = (lengths[tokens[1:]] > 0).sum()
    assert val_bpb(model, tokens, 32, lengths, 4)["bpb"] == pytest.approx(
        counted * math.log2(VOCAB) / lengths[tokens[1:]].sum(), rel=1e-6
    )


def test_part_of_the_stream():
    tokens, lengths = text(1000, 5)
    model = Bigram()
    got = val_bpb(model, tokens, 16, lengths, 4, max_tokens=100)  # 7 rows
    assert got["tokens"] == 112 and got["rows"] == got["rows_total"] == 7
    assert got["bpb"] == pytest.approx(expected(model, tokens[:113], lengths)[0], rel=1e-6)


def test_time_cap_scores_what_was_done():
    tokens, lengths = text(10_000, 6)
    model = Bigram()
    ticks = iter(range(0, 10_000, 7))
    got = val_bpb(model, tokens, 16, lengths, 2, max_seconds=10, clock=lambda: next(ticks))
    assert not got["complete"] and 0 < got["rows"] < got["rows_total"]
    assert got["bpb"] == pytest.approx(expected(model, tokens[: got["tokens"] + 1], lengths)[0], rel=1e-6)


def test_a_stop_that_was_asked_for_before_ends_it_at_the_first_look():
    batches = READ_EVERY * 3
    tokens, lengths = np.arange(batches * 2 * 16 + 1) % 7, np.ones(7, dtype=np.int64)
    seen = []

    class Counting(torch.nn.Module):
        def forward(self, x, y, reduction):
            seen.append(x)
            return torch.ones(y.shape)

    score = val_bpb(Counting(), tokens, 16, lengths, 2, stop=lambda: True)
    assert len(seen) == READ_EVERY and not score["complete"]
    pairs = [(x, x) for x in seen] * 3
    evaluate_bpb(Counting(), pairs, len(pairs), torch.from_numpy(lengths), stop=lambda: True)
    assert len(seen) == 2 * READ_EVERY


def test_no_bytes_is_infinite():
    lengths = np.zeros(VOCAB, dtype=np.int32)
    assert val_bpb(Bigram(), text(100, 1)[0], 8, lengths, 2)["bpb"] == math.inf
    assert val_bpb(Bigram(), text(1, 1)[0], 8, lengths, 2)["bpb"] == math.inf


def test_training_mode_comes_back():
    model = Bigram().train()
    val_bpb(model, *[text(100, 1)[0], 8, text(100, 1)[1], 2])
    assert model.training
    assert not any(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("ignored", [0.0, 0.3])
def test_evaluate_bpb_is_nanochats_formula(ignored):
    """sum of losses where the target has bytes / (ln 2 * their bytes), targets < 0 left out, in float64."""
    rng = np.random.default_rng(1)
    lengths = text(1, 2)[1]
    model = Bigram()
    table = model.table.detach().double().numpy()
    logp = table - np.log(np.exp(table).sum(1, keepdims=True))
    batches, nats, size = [], 0.0, 0
    for _ in range(5):
        x, y = rng.integers(0, VOCAB, (3, 11)), rng.integers(0, VOCAB, (3, 11))
        y[rng.random(y.shape) < ignored] = -1
        batches.append((torch.from_numpy(x), torch.from_numpy(y)))
        keep = (y >= 0) & (lengths[y] > 0)
        nats -= logp[x, y][keep].sum()
        size += lengths[y][keep].sum()
    got = evaluate_bpb(model, batches, len(batches), torch.from_numpy(lengths))
    assert got == pytest.approx(nats / (math.log(2) * size), abs=1e-6)


def split_of(lengths, seed=0):
    rng = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    return SimpleNamespace(tokens=rng.integers(0, BOS, offsets[-1]).astype(np.uint16), offsets=offsets)


def packed_by_hand(documents, T, rows, buffer_size, refill):
    """The packing of nanochat, told step by step with lists and a scan of the whole buffer."""
    out, buffer, at = [], [], 0
    for _ in range(rows):
        row = []
        while len(row) < T + 1:
            while len(buffer) < buffer_size:
                buffer.extend(documents[at : at + refill])
                at = 0 if at + refill >= len(documents) else at + refill
            room, best, best_size = T + 1 - len(row), -1, 0
            for i, d in enumerate(buffer):
                if best_size < len(d) <= room:
                    best, best_size = i, len(d)
            if best < 0:
                best = min(range(len(buffer)), key=lambda i: len(buffer[i]))
            row += buffer.pop(best)[:room]
        out.append(row)
    return out


@pytest.mark.parametrize("T,buffer_size,refill", [(20, 30, 7), (33, 5, 128), (7, 50, 64)])
def test_packed_rows_are_nanochats(T, buffer_size, refill):
    split = split_of(np.random.default_rng(T).integers(0, 60, 40))
    documents = [[BOS, *split.tokens[a:b]] for a, b in zip(split.offsets[:-1], split.offsets[1:], strict=True)]
    got = packed_rows(split, T, BOS, 25, buffer_size, refill)
    assert got.tolist() == packed_by_hand(documents, T, 25, buffer_size, refill)
    assert (got[:, 0] == BOS).all()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_packed_batches_share_the_same_rows(world):
    split = split_of(np.random.default_rng(3).integers(1, 60, 40))
    have = len(split.tokens) + 40
    everything = packed_rows(split, 16, BOS, have // 16)
    parts = [packed_val_batches(split, 16, 2, BOS, rank, world) for rank in range(world)]
    assert len({len(p) for p in parts}) == 1, "ranks make the same number of forward passes"
    rows = [y for step in zip(*parts, strict=True) for _, y in step]
    rows = torch.cat(rows)
    assert rows[: len(everything)].tolist() == everything[:, 1:].tolist()
    assert (rows[len(everything) :] == -1).all()


def on_rank(rank, world, port, out):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    tokens, lengths = text(3001, 9)
    out[rank] = val_bpb(Bigram(), tokens, 16, lengths, 4, rank, world)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("world", [2, 3])
def test_same_number_on_any_number_of_ranks(world, free_port):
    tokens, lengths = text(3001, 9)
    alone = val_bpb(Bigram(), tokens, 16, lengths, 4)
    with mp.Manager() as manager:
        out = manager.dict()
        mp.spawn(on_rank, (world, free_port, out), nprocs=world)
        results = dict(out)
    assert len(results) == world
    for result in results.values():
        assert result["bytes"] == alone["bytes"] and result["tokens"] == alone["tokens"]
        assert result["bpb"] == pytest.approx(alone["bpb"], rel=1e-7)
