"""In-context-learning scores: models whose score is known, and the same number on any batch size and ranks."""

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from torch import nn

from eval.icl import icl_scores, repeat_rows

VOCAB, BOS = 61, 60
TOKENS = np.random.default_rng(0).integers(0, VOCAB, 40 * 64 + 5).astype(np.uint16)


class Oracle(nn.Module):
    """Copies: predicts what followed the last earlier place of the present token. Its loss falls along a row by
    `slope` nats a position."""

    def __init__(self, slope=0.0):
        super().__init__()
        self.slope, self.shapes = slope, set()

    def forward(self, idx, targets=None, reduction="mean"):
        self.shapes.add(tuple(idx.shape))
        B, T = idx.shape
        if targets is not None:
            return (5.0 - self.slope * torch.arange(T)).expand(B, T) * (targets >= 0)
        logits = torch.zeros(B, T, VOCAB)
        for b in range(B):
            last = {}
            for t in range(T - 1):
                token = int(idx[b, t])
                if token in last:
                    logits[b, t, int(idx[b, last[token] + 1])] = 1.0
                last[token] = t
        return logits


class Constant(nn.Module):
    def forward(self, idx, targets=None, reduction="mean"):
        if targets is not None:
            return torch.ones(idx.shape)
        return torch.nn.functional.one_hot(torch.full_like(idx, 7), VOCAB).float()


def test_a_copying_model_repeats_everything():
    score = icl_scores(Oracle(), TOKENS, 64, VOCAB, BOS, 4)
    assert score["icl_repeat_accuracy"] == 1 and score["icl_repeat_accuracy_se"] == 0
    assert icl_scores(Constant(), TOKENS, 64, VOCAB, BOS, 4)["icl_repeat_accuracy"] < 0.1


def test_gain_is_the_slope_of_the_loss():
    T, slope = 64, 0.01
    score = icl_scores(Oracle(slope), TOKENS, T, VOCAB, BOS, 4)
    early, late = np.arange(T // 16, T // 8).mean(), np.arange(T - T // 4, T).mean()
    assert score["icl_gain"] == pytest.approx(slope * (late - early) / np.log(2), rel=1e-5)
    assert score["icl_gain_se"] == pytest.approx(0, abs=1e-6)
    assert icl_scores(Constant(), TOKENS, T, VOCAB, BOS, 4)["icl_gain"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("T", [16, 17, 65, 200])
def test_repeat_rows(T):
    x, y = repeat_rows(T, VOCAB, BOS)
    assert x.shape == y.shape == (64, T)
    asked = y >= 0
    assert (asked.sum(1) == asked[0].sum()).all() and asked[0].sum() >= 5
    assert (x[:, 0] == BOS).all() and not (y == BOS).any()
    for row, target, where in zip(x, y, asked, strict=True):
        assert torch.equal(target[where][:-1], row[1:][where[:-1]][:-1]), "a target is the next token"
        length = int(where.sum()) + 1
        assert torch.equal(row[1 : 1 + length], row[1 + length : 1 + 2 * length])
    assert torch.equal(x, repeat_rows(T, VOCAB, BOS)[0]), "the items are fixed"


@pytest.mark.parametrize("batch_rows", [1, 3, 8])
def test_batch_size_does_not_matter_and_one_shape_is_met(batch_rows):
    model = Oracle(0.02)
    score = icl_scores(model, TOKENS, 64, VOCAB, BOS, batch_rows)
    assert model.shapes == {(batch_rows, 64)}
    assert score == pytest.approx(icl_scores(Oracle(0.02), TOKENS, 64, VOCAB, BOS, 4))


def on_rank(rank, world, port, out):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    out[rank] = icl_scores(Oracle(0.02), TOKENS, 64, VOCAB, BOS, 4, rank, world)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("world", [2, 3])
def test_same_number_on_any_number_of_ranks(world, free_port):
    with mp.Manager() as manager:
        out = manager.dict()
        mp.spawn(on_rank, (world, free_port, out), nprocs=world)
        results = dict(out)
    alone = icl_scores(Oracle(0.02), TOKENS, 64, VOCAB, BOS, 4)
    assert len(results) == world
    for result in results.values():
        assert result == pytest.approx(alone)
