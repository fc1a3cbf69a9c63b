"""In-context learning of small models: does the loss fall along a row, and can it repeat what it has just read?

The items are fixed by ICL_VERSION: scores of different versions do not compare.
"""

import math

import numpy as np
import torch
import torch.distributed as dist

from eval.bpb import stream_batch
from runtime import control_group, cut_graph

ICL_VERSION = 1
GAIN_ROWS = 256  # validation rows for the loss by position, or all there are
REPEAT_ROWS = 64  # random sequences to repeat
REPEAT_LENGTH = 32  # tokens of each, less where a row is too short for two copies


def repeat_rows(seq_len, vocab_size, bos_id):
    """Rows BOS s s BOS BOS ..., s random, no token twice, no special: inputs and targets (REPEAT_ROWS, T) int64.

    Targets are -1 except where the second copy's tokens but the first are predicted: there the row tells which.
    """
    ordinary = np.array([t for t in range(vocab_size) if t != bos_id])
    length = min(REPEAT_LENGTH, (seq_len - 1) // 2, len(ordinary))
    random = np.random.default_rng(ICL_VERSION)
    s = np.stack([random.choice(ordinary, length, replace=False) for _ in range(REPEAT_ROWS)])
    x = np.full((REPEAT_ROWS, seq_len), bos_id)
    x[:, 1 : 1 + length], x[:, 1 + length : 1 + 2 * length] = s, s
    y = np.full((REPEAT_ROWS, seq_len), -1)
    y[:, 1 + length : 2 * length] = s[:, 1:]
    return torch.from_numpy(x), torch.from_numpy(y)


def share_rows(f, rows, batch_rows, rank, world):
    """f(first) for batches of batch_rows rows, shared out over the ranks; it returns one number for each row.

    Returns float64 (rows,), the same on every rank, which all make the same number of calls.
    """
    per_round = batch_rows * world
    out = torch.zeros(-(-rows // per_round) * per_round, dtype=torch.float64)
    done = []
    for first in range(rank * batch_rows, len(out), per_round):
        done.append((first, f(first)))
        cut_graph(done[-1][1].device)
    for first, values in done:  # only now is the device waited for
        out[first : first + batch_rows] = values.cpu().double()
    if world > 1:
        dist.all_reduce(out, group=control_group())
    return out[:rows]


def mean_and_error(values, name):
    """{name: mean, with "_se" its standard error}; nothing where there is no such number."""
    found = {name: values.mean().item(), f"{name}_se": (values.std() / math.sqrt(len(values))).item()}
    return {key: x for key, x in found.items() if math.isfinite(x)}


@torch.no_grad()
def icl_scores(model, tokens, seq_len, vocab_size, bos_id, batch_rows, rank=0, world=1, device="cpu"):
    """In-context-learning scores with their standard errors (`_se`), the same on any number of ranks.

    icl_gain: mean loss at positions [T/16, T/8) minus mean loss over the last quarter of a row, in bits per token,
        on whole rows of the validation stream `tokens` (N,): what the longer context is worth.
    icl_repeat_accuracy: how often the most likely token is right when a random sequence comes a second time;
        icl_repeat_chance: that of a uniform guess.
    Every forward pass has the shape (batch_rows, seq_len).
    """
    was_training = model.training
    model.eval()
    T = seq_len

    def gain(first):
        x, y = stream_batch(tokens, T, first, batch_rows)
        losses = model(x.to(device), y.to(device), reduction="none") / math.log(2)
        return losses[:, T // 16 : max(T // 8, T // 16 + 1)].mean(1) - losses[:, T - T // 4 :].mean(1)

    xs, ys = repeat_rows(T, vocab_size, bos_id)
    padding = batch_rows * world  # rows beyond the end, so that every batch is whole
    xs = torch.cat((xs, torch.full((padding, T), bos_id)))
    ys = torch.cat((ys, torch.full((padding, T), -1)))

    def repeat(first):
        x, y = xs[first : first + batch_rows].to(device), ys[first : first + batch_rows].to(device)
        right = (model(x).argmax(-1) == y) & (y >= 0)
        return right.sum(1) / (y >= 0).sum(1).clamp(min=1)

    rows = min(GAIN_ROWS, (len(tokens) - 1) // T)
    scores = {}
    if rows:
        scores |= mean_and_error(share_rows(gain, rows, batch_rows, rank, world), "icl_gain")
    scores |= mean_and_error(share_rows(repeat, REPEAT_ROWS, batch_rows, rank, world), "icl_repeat_accuracy")
    scores["icl_repeat_chance"] = 1 / (vocab_size - 1)
    scores["icl_version"] = ICL_VERSION
    model.train(was_training)
    return scores
