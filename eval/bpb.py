"""Bits per byte of the validation text: cross-entropy in bits over the UTF-8 bytes of the target tokens.

It does not depend on the tokenizer, so models with different vocabularies compare. Special tokens count
neither in the loss nor in the bytes. Two layouts of the text:
    val_bpb             the documents as one stream, BOS before each, cut every T tokens
    packed_val_batches  rows that begin with BOS and are packed best-fit, cropped, as nanochat scores them
"""

import math
import time

import numpy as np
import torch
import torch.distributed as dist

from runtime import agree, control_group, cut_graph

READ_EVERY = 16  # batches between two looks at the clock, which wait for the device


def stream_row_count(tokens, seq_len):
    """Rows of T inputs that cover every target of a stream of this many tokens."""
    return max(0, -(-(len(tokens) - 1) // seq_len))


def stream_batch(tokens, seq_len, first, count):
    """Rows first .. first + count of the stream as x, y of shape (count, T) int64.

    Row i has inputs tokens[i*T : i*T + T] and the token after each as target. Beyond the end inputs are 0 and
    targets -1, so that every batch has the same shape.
    """
    piece = tokens[first * seq_len : (first + count) * seq_len + 1].astype(np.int64)
    x = np.zeros(count * seq_len, dtype=np.int64)
    y = np.full(count * seq_len, -1, dtype=np.int64)
    n = max(0, len(piece) - 1)
    x[:n], y[:n] = piece[:n], piece[1 : n + 1]
    return torch.from_numpy(x).view(count, seq_len), torch.from_numpy(y).view(count, seq_len)


def nats_and_bytes(model, x, y, token_bytes):
    """Summed loss (0-dim float32) and bytes (0-dim int64) of the targets that count: >= 0 and not special.

    x, y: (B, T) int64; token_bytes: (V,) integer tensor, 0 for special tokens; all on the model's device.
    """
    lengths = torch.where(y >= 0, token_bytes[y.clamp(min=0)], 0)
    losses = model(x, y, reduction="none")
    return torch.where(lengths > 0, losses.view_as(y), 0.0).sum(), lengths.sum(dtype=torch.int64)


def add(nats, size, pairs):
    """nats and size, Python numbers, plus a list of what `nats_and_bytes` returns: waits for the device."""
    if not pairs:
        return nats, size
    more, sizes = (torch.stack(values).cpu() for values in zip(*pairs, strict=True))
    return nats + more.double().sum().item(), size + sizes.sum().item()


def over_ranks(nats, size, world):
    """Sums over all ranks, on the hosts; float64 holds both exactly enough (bytes up to 2^53)."""
    if world > 1:
        both = torch.tensor([nats, size], dtype=torch.float64)
        dist.all_reduce(both, group=control_group())
        nats, size = both.tolist()
    return nats, int(size)


def bits_per_byte(nats, size):
    """nats / (ln 2 * bytes); infinite where there is no byte."""
    return nats / (math.log(2) * size) if size else math.inf


@torch.no_grad()
def val_bpb(
    model,
    tokens,
    seq_len,
    token_bytes,
    batch_rows,
    rank=0,
    world=1,
    device="cpu",
    max_tokens=0,
    max_seconds=math.inf,
    clock=time.monotonic,
    stop=lambda: False,
):
    """Bits per byte of a stream of tokens, every byte once; the same on any number of ranks.

    tokens: (N,) integers, documents joined with BOS; token_bytes: (V,) bytes of each token, 0 for specials;
    max_tokens > 0: only the rows that cover so many targets; max_seconds: end then, or when stop() is true on some
    rank (both checked every few batches).
    Every forward pass has the shape (batch_rows, seq_len), on every rank the same number of them.
    Returns a dict: bpb, nats, bytes, tokens (targets seen), rows, rows_total, complete, seconds.
    """
    token_bytes = torch.as_tensor(np.asarray(token_bytes)).to(device)
    rows_total = stream_row_count(tokens, seq_len)
    if max_tokens > 0:
        rows_total = min(rows_total, -(-max_tokens // seq_len))
    visible = tokens[: rows_total * seq_len + 1]
    began, was_training = clock(), model.training
    model.eval()
    nats, size, pending, rows = 0.0, 0, [], 0
    while rows < rows_total:
        if len(pending) == READ_EVERY:
            nats, size, pending = *add(nats, size, pending), []
            if agree((stop() or clock() - began > max_seconds,), world)[0]:
                break
        x, y = stream_batch(visible, seq_len, rows + rank * batch_rows, batch_rows)
        pending.append(nats_and_bytes(model, x.to(device), y.to(device), token_bytes))
        cut_graph(device)
        rows += batch_rows * world
    model.train(was_training)
    rows = min(rows, rows_total)
    nats, size = over_ranks(*add(nats, size, pending), world)
    return {
        "bpb": bits_per_byte(nats, size),
        "nats": nats,
        "bytes": size,
        "tokens": max(0, min(rows * seq_len, len(visible) - 1)),
        "rows": rows,
        "rows_total": rows_total,
        "complete": rows == rows_total,
        "seconds": clock() - began,
    }


@torch.no_grad()
def evaluate_bpb(model, batches, steps, token_bytes, world=1, max_seconds=math.inf, stop=lambda: False):
    """Bits per byte of the first `steps` of `batches`, pairs (x, y) on the model's device, summed over the ranks;
    of fewer where max_seconds are over or stop() says so (checked every few batches).

    The definition of nanochat's function of this name: the same number on the same batches.
    """
    began, was_training = time.monotonic(), model.training
    model.eval()
    batches = iter(batches)
    nats, size, pending = 0.0, 0, []
    for _ in range(steps):
        if len(pending) == READ_EVERY:
            nats, size, pending = *add(nats, size, pending), []
            if agree((stop() or time.monotonic() - began > max_seconds,), world)[0]:
                break
        x, y = next(batches)
        pending.append(nats_and_bytes(model, x, y, token_bytes))
        cut_graph(x.device)
    model.train(was_training)
    return bits_per_byte(*over_ranks(*add(nats, size, pending), world))


def packed_rows(split, seq_len, bos_id, rows, buffer_size=1000, refill=128):
    """Validation rows as nanochat lays them out, (rows, T + 1) int64.

    From a buffer of at least `buffer_size` documents (BOS in front; the split is read again and again) a row
    takes the longest one that fits, until none does; then the shortest is cropped to fill it, its rest dropped.
    """
    out = np.empty((rows, seq_len + 1), dtype=np.int64)
    count = len(split.offsets) - 1
    buffer, next_document = [], 0
    for row in out:
        at = 0
        while at < len(row):
            while len(buffer) < buffer_size:
                some = range(next_document, min(next_document + refill, count))
                buffer += [(int(split.offsets[i + 1] - split.offsets[i]) + 1, i) for i in some]
                next_document = some.stop % count
            room = len(row) - at
            fitting = [length for length, _ in buffer if length <= room]
            length = max(fitting) if fitting else min(length for length, _ in buffer)
            place = next(k for k, (n, _) in enumerate(buffer) if n == length)
            start = int(split.offsets[buffer.pop(place)[1]])
            length = min(length, room)
            row[at] = bos_id
            row[at + 1 : at + length] = split.tokens[start : start + length - 1]
            at += length
    return out


def packed_val_batches(split, seq_len, batch_rows, bos_id, rank=0, world=1, device="cpu", max_tokens=0):
    """This rank's batches (x, y), (batch_rows, T) each, of as many packed rows as the split has tokens for.

    All ranks together see the same rows whatever their number; the last batch is filled up with targets -1.
    """
    have = len(split.tokens) + len(split.offsets) - 1
    rows = max(1, (min(have, max_tokens) if max_tokens > 0 else have) // seq_len)
    packed = packed_rows(split, seq_len, bos_id, rows)
    per_round = batch_rows * world
    packed = np.concatenate((packed, np.full((-rows % per_round, seq_len + 1), -1)))
    batches = []
    for first in range(rank * batch_rows, len(packed), per_round):
        piece = torch.from_numpy(packed[first : first + batch_rows])
        batches.append((piece[:, :-1].clamp(min=0).to(device), piece[:, 1:].contiguous().to(device)))
    return batches
