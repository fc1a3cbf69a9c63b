"""Tokenise a split once into a memory-mapped file, and make batches of its rows.

Rows have T+1 tokens, of which the first T are inputs and the last T targets. Two layouts, both with
every position filled and no token lost:

- "stream": the documents of an epoch in random order, each behind a BOS, one epoch behind the other in
  an endless stream s; row i is s[i*T : i*T + T + 1], so every token is an input once and a target once.
- "packed": every row starts with BOS and takes, again and again, the longest piece of a buffer of
  documents that fits; when none fits, the longest is cut to fill the row and its rest goes back to the
  buffer behind a BOS of its own. Every document token is in one row of an epoch; the last row of an
  epoch is filled up with the next one.

Rows form blocks of `pool_rows` (the last of an epoch is shorter), drawn in random order within. That
global order depends on nothing but the split, T, the layout, `pool_rows` and the seed: ranks share out
consecutive rows of it, so a step takes the same rows on any number of ranks, and a position in it, in
rows, is all there is to save.
"""

import bisect
import hashlib
import json
import os
import queue
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from data.corpus import Corpus, DataError, atomic_file, count_documents, file_sha256, io_error, progress, show
from data.tokenizer import Tokenizer, cores

SPLIT_FORMAT = "nanotrn tokens 1"
BATCH_CHARS = 4_000_000  # characters tokenised at a time
BUFFER = 1024  # documents and rests that a packed row is chosen from, or an eighth of the documents if that is less
PREFETCH = 3  # steps made ahead


# ---- the tokens of a split ----


@dataclass
class TokenSplit:
    """The documents of a split as ids, without BOS: document i is tokens[offsets[i] : offsets[i + 1]]."""

    name: str  # "train" or "val"
    tokens: np.ndarray  # uint16, or uint32 for a vocabulary above 65,536: (tokens,), memory-mapped
    offsets: np.ndarray  # int64 (documents + 1,)
    text_bytes: int  # UTF-8 bytes of the documents
    skipped: dict[str, int]  # documents that were left out, by reason
    checksum: str  # hex, of corpus, split and tokenizer


def tokenize_split(
    corpus: Corpus, split: str, tokenizer: Tokenizer, cache_dir: str | Path, log: Callable[[str], None] = print
) -> TokenSplit:
    """The tokens of "train" or "val", from `cache_dir` or else made and kept there. Raises DataError.

    A damaged cache is replaced with a notice. Three files: tokens and offsets as plain little-endian
    numbers, and a .json, written last, with their sizes and checksums.
    """
    key = hashlib.sha256(f"{SPLIT_FORMAT} {corpus.checksum} {split} {tokenizer.checksum}".encode()).hexdigest()
    base = Path(cache_dir) / f"{split}-{key[:16]}"
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    if os.path.exists(base.with_suffix(".json")):
        try:
            return _load_split(base, split, key, dtype, log)
        except DataError as e:
            log(f"notice: {e}; tokenising {split} again")
    start = time.monotonic()
    files = corpus.files(split)
    tokens_file, offsets_file = base.with_suffix(".tokens"), base.with_suffix(".offsets")
    ends, text_bytes = array("q", [0]), 0  # ends: where each document ends
    digests = [hashlib.sha256(), hashlib.sha256()]
    with atomic_file(tokens_file) as out:
        for ids, size in _encoded(corpus, split, tokenizer, log):
            if tokenizer.token_bytes[ids].sum() != size:
                raise DataError(f"the tokenizer does not fit {show(corpus.name)}: its tokens do not add up to the text")
            data = ids.astype(dtype).tobytes()
            out.write(data)
            digests[0].update(data)
            ends.append(ends[-1] + len(ids))
            text_bytes += size
        skipped = corpus.skips(files)
        if len(ends) == 1:
            left_out = f" (skipped: {_counts(skipped)})" if skipped else ""
            what = "training" if split == "train" else "validation"
            where = files[0] if len(files) == 1 else files[0].parent
            raise DataError(f"{show(where)}: no {what} text in it{left_out}; add documents")
    with atomic_file(offsets_file) as out:
        data = np.frombuffer(ends, dtype=np.int64).astype("<i8").tobytes()
        out.write(data)
        digests[1].update(data)
    about = {
        "format": SPLIT_FORMAT,
        "key": key,
        "tokens": ends[-1],
        "documents": len(ends) - 1,
        "text_bytes": text_bytes,
        "skipped": skipped,
        "sha256": [digest.hexdigest() for digest in digests],
    }
    with atomic_file(base.with_suffix(".json")) as out:
        out.write(json.dumps(about, indent=0).encode())
    log(f"{split}: tokenised {show(corpus.name)} in {time.monotonic() - start:.1f} s")
    return _load_split(base, split, key, dtype, log)


def _encoded(
    corpus: Corpus, split: str, tokenizer: Tokenizer, log: Callable[[str], None]
) -> Iterator[tuple[np.ndarray, int]]:
    """(ids, UTF-8 bytes) of each document, encoded in batches on all cores."""
    files = corpus.files(split)
    batches = _text_batches(corpus.documents(files))
    total = count_documents(files)
    for batch in progress(((b, len(b)) for b in batches), total, f"tokenise {split}", "documents", log):
        for text, ids in zip(batch, tokenizer.encode_batch(batch, threads=cores()), strict=True):
            yield ids, len(text.encode())


def _text_batches(documents: Iterator[str]) -> Iterator[list[str]]:
    batch, size = [], 0
    for text in documents:
        batch.append(text)
        size += len(text)
        if size >= BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _load_split(base: Path, split: str, key: str, dtype: np.dtype, log: Callable[[str], None]) -> TokenSplit:
    """The split in the files of `base`, checked. Raises DataError if they are damaged."""
    about_file = base.with_suffix(".json")
    try:
        about = json.loads(about_file.read_bytes())
        found, (tokens_digest, offsets_digest) = (about["format"], about["key"]), about["sha256"]
        tokens, documents = int(about["tokens"]), int(about["documents"])
        text_bytes, skipped = int(about["text_bytes"]), dict(about["skipped"])
    except OSError as e:
        raise io_error(e, about_file, "read") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f"{show(about_file)}: is damaged") from None
    if found != (SPLIT_FORMAT, key):
        raise DataError(f"{show(about_file)}: is for another corpus, tokenizer or version")
    arrays = []
    for suffix, kind, count, digest in (
        (".tokens", dtype, tokens, tokens_digest),
        (".offsets", np.dtype("<i8"), documents + 1, offsets_digest),
    ):
        file = base.with_suffix(suffix)
        if file_sha256(file, base.parent) != digest or file.stat().st_size != count * kind.itemsize or not count:
            raise DataError(f"{show(file)}: does not match its checksum")
        arrays.append(np.memmap(file, dtype=kind, mode="r", shape=(count,)))
    if skipped:
        log(f"notice: {split}: skipped {_counts(skipped)}")
    return TokenSplit(split, arrays[0], np.asarray(arrays[1]), text_bytes, skipped, key)


def _counts(skipped: dict[str, int]) -> str:
    return ", ".join(f"{n:,} {reason} document{'s' if n > 1 else ''}" for reason, n in sorted(skipped.items()))


def val_stream(split: TokenSplit, bos_id: int, seq_len: int = 0) -> np.ndarray:
    """BOS document BOS document ... in the order of the files: (tokens + documents,), dtype of the split.

    Raises DataError if that is less than one row of `seq_len` inputs and their targets.
    """
    stream = np.insert(np.asarray(split.tokens), split.offsets[:-1], bos_id)
    if len(stream) <= seq_len:
        raise DataError(
            f"the {split.name} split has {len(stream):,} tokens, less than a row of model.seq_len = {seq_len} "
            f"and one more; add text, or set model.seq_len to at most {len(stream) - 1}"
        )
    return stream


# ---- rows in order ----


def _random(seed: int, *what: int) -> np.random.Generator:
    return np.random.default_rng([seed, *what])


@dataclass
class _Block:
    """Consecutive rows of one layout."""

    start: dict  # where it begins, as plain numbers: all that is needed to make it again
    following: dict  # where the next block begins
    order: np.ndarray  # int64 (rows,): the order in which its rows are drawn
    epochs: tuple[float, float]  # epochs done before and after it
    rows: Callable[[np.ndarray], np.ndarray]  # (n,) places in the block -> int64 (n, T+1) tokens


def _stream_blocks(split: TokenSplit, T: int, bos_id: int, seed: int, pool_rows: int) -> Callable[[dict], _Block]:
    """A function that makes the block at a start {"row": first row}."""
    documents = len(split.offsets) - 1
    lengths = np.diff(split.offsets) + 1  # BOS included
    size = int(lengths.sum())  # of the stream of one epoch

    @lru_cache(maxsize=4)
    def epoch_order(epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Of the documents in the order of the epoch: where they start in its stream, and in the split."""
        order = _random(seed, 0, epoch).permutation(documents)
        starts = np.cumsum(lengths[order]) - lengths[order]
        return starts, split.offsets[order]

    def rows(numbers: np.ndarray) -> np.ndarray:
        places = numbers[:, None] * T + np.arange(T + 1)  # (n, T+1) in the endless stream
        out = np.empty(places.shape, dtype=np.int64)
        epochs = places // size
        for epoch in range(int(epochs.min()), int(epochs.max()) + 1):
            here = epochs == epoch
            starts, sources = epoch_order(epoch)
            place = places[here] - epoch * size
            document = np.searchsorted(starts, place, side="right") - 1
            within = place - starts[document]  # 0 is the BOS
            ids = split.tokens[np.maximum(sources[document] + within - 1, 0)]
            out[here] = np.where(within == 0, bos_id, ids)
        return out

    def block(start: dict) -> _Block:
        first = start["row"]
        epoch = first * T // size
        last = -(-(epoch + 1) * size // T)  # the first row that begins in the next epoch
        end = min(first + pool_rows, last)
        order = _random(seed, 1, first).permutation(end - first)
        epochs = (first * T / size, end * T / size)
        return _Block(start, {"row": end}, order, epochs, lambda picked: rows(first + picked))

    return block


def _packed_blocks(split: TokenSplit, T: int, bos_id: int, seed: int, pool_rows: int) -> Callable[[dict], _Block]:
    """A function that makes the block at a start {"row", "epoch", "next": documents taken from the epoch so far,
    "used": tokens of it in rows before, "buffer": [[length with BOS, first token in the split], ...] sorted}.
    """
    documents, total = len(split.offsets) - 1, int(split.offsets[-1])
    room = max(1, min(BUFFER, documents // 8))  # with all documents in it, every epoch would have the same rows

    @lru_cache(maxsize=2)
    def epoch_order(epoch: int) -> np.ndarray:
        return _random(seed, 0, epoch).permutation(documents)

    def block(start: dict) -> _Block:
        epoch, following, used = start["epoch"], start["next"], start["used"]
        buffer = [(length, first) for length, first in start["buffer"]]
        order = epoch_order(epoch)
        sizes, firsts, row_ends = array("q"), array("q"), array("q", [0])  # of pieces; row_ends counts pieces
        before = epoch + used / total
        while len(row_ends) - 1 < pool_rows and epoch == start["epoch"]:
            space = T + 1
            while space:
                if not buffer and following == documents:
                    epoch, following, used, order = epoch + 1, 0, 0, epoch_order(epoch + 1)
                while len(buffer) < room and following < documents:
                    first, end = split.offsets[order[following]], split.offsets[order[following] + 1]
                    bisect.insort(buffer, (int(end - first) + 1, int(first)))
                    following += 1
                fits = bisect.bisect_left(buffer, (space + 1, -1))
                length, first = buffer.pop(fits - 1)  # the longest that fits; if none, -1: the longest
                size = min(length, space)
                if size < length:
                    bisect.insort(buffer, (length - size + 1, first + size - 1))
                sizes.append(size)
                firsts.append(first)
                used += size - 1
                space -= size
            row_ends.append(len(sizes))
            if not buffer and following == documents:  # the epoch ends where the row does
                epoch, following, used = epoch + 1, 0, 0
        n = len(row_ends) - 1
        after = {"row": start["row"] + n, "epoch": epoch, "next": following, "used": used}
        after["buffer"] = [list(piece) for piece in buffer]
        row_order = _random(seed, 1, start["row"]).permutation(n)
        ends_ = np.frombuffer(row_ends, dtype=np.int64)
        pieces = (np.frombuffer(sizes, dtype=np.int64), np.frombuffer(firsts, dtype=np.int64))

        def rows(picked: np.ndarray) -> np.ndarray:
            counts = ends_[picked + 1] - ends_[picked]
            which = np.arange(counts.sum()) + np.repeat(ends_[picked] - (np.cumsum(counts) - counts), counts)
            size, first = pieces[0][which], pieces[1][which]
            begins = np.cumsum(size) - size  # where each piece begins in the output
            source = np.arange(size.sum()) + np.repeat(first - 1 - begins, size)
            source[begins] = 0
            out = split.tokens[source].astype(np.int64)
            out[begins] = bos_id
            return out.reshape(len(picked), T + 1)

        return _Block(start, after, row_order, (before, epoch + used / total), rows)

    return block


_LAYOUTS = {
    "stream": (_stream_blocks, {"row": 0}),
    "packed": (_packed_blocks, {"row": 0, "epoch": 0, "next": 0, "used": 0, "buffer": []}),
}


# ---- batches ----


class Loader:
    """Batches of a rank, made ahead in a background thread. All errors come out of `next`.

    Step by step the ranks share n * world * micro_rows rows of the global order: rank r gets those
    from r * n * micro_rows on.
    """

    def __init__(
        self,
        split: TokenSplit,
        seq_len: int,
        micro_rows: int,
        rows: str,
        bos_id: int,
        seed: int = 0,
        pool_rows: int = 4096,
        rank: int = 0,
        world: int = 1,
    ):
        if rows not in _LAYOUTS:
            raise DataError(f'data.rows = {rows}: must be "stream" or "packed"')
        if min(seq_len, micro_rows, pool_rows) < 1 or not 0 <= rank < world or seed < 0:
            raise DataError(
                f"impossible loader: seq_len {seq_len}, micro_rows {micro_rows}, pool_rows {pool_rows}, seed {seed}, "
                f"rank {rank} of {world}; sizes are at least 1, the seed at least 0, ranks count from 0"
            )
        make, start = _LAYOUTS[rows]
        self._make_block = make(split, seq_len, bos_id, seed, pool_rows)
        # what a saved position is only good for
        self._kind = {"rows": rows, "seq_len": seq_len, "seed": seed, "pool_rows": pool_rows, "split": split.checksum}
        self._micro_rows, self._rank, self._world = micro_rows, rank, world
        self._at = (start, 0, 0.0)  # after the last batch handed out: block's start, rows drawn of it, epochs
        self._thread = None
        self._closed = False

    @property
    def epoch(self) -> float:
        """Epochs consumed by all ranks together, up to the last batch handed out."""
        return self._at[2]

    def next(self, micro_batches: int = 1) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The next `micro_batches` pairs (x, y) of this rank: int64 (micro_rows, seq_len), contiguous, on the CPU.

        y is x one place further. A number other than that of the last call throws away what was made ahead.
        """
        if self._closed:
            raise RuntimeError("the loader is closed")
        if micro_batches < 1:
            raise ValueError(f"micro_batches = {micro_batches}: must be at least 1")
        if self._thread is None or self._count != micro_batches:
            self._stop_thread()
            self._start_thread(micro_batches)
        item = self._queue.get()
        if isinstance(item, BaseException):
            self._stop_thread()  # a next call tries again from here
            raise item
        x, y, self._at = item
        return [(torch.from_numpy(x[i]), torch.from_numpy(y[i])) for i in range(micro_batches)]

    def state(self) -> dict:
        """The position after the last batch handed out, as JSON-able numbers and strings."""
        start, drawn, epoch = self._at
        return self._kind | {"start": json.loads(json.dumps(start)), "drawn": drawn, "epoch": epoch}

    def restore(self, state: dict) -> None:
        """Go to a position from `state`, taken with any number of ranks and rows.

        Raises DataError if it is one of another split, layout, seq_len, pool_rows or seed, or damaged.
        """
        for key, mine in self._kind.items():
            if state.get(key) != mine:
                raise DataError(f"the saved data position is for {key} = {state.get(key)}, not {mine}; use the same")
        try:
            start = json.loads(json.dumps(state["start"]))
            drawn, epoch = int(state["drawn"]), float(state["epoch"])
            block = self._make_block(start)
        except (KeyError, TypeError, ValueError, IndexError):
            raise DataError("the saved data position is damaged; resume from another checkpoint") from None
        if not 0 <= drawn < len(block.order):
            raise DataError(f"the saved data position is damaged (row {drawn} of {len(block.order)})")
        self._stop_thread()
        self._at = (start, drawn, epoch)

    def close(self) -> None:
        """Stop the thread; may be called twice."""
        self._stop_thread()
        self._closed = True

    def _start_thread(self, count: int) -> None:
        self._count, self._queue, self._stopping = count, queue.Queue(PREFETCH), threading.Event()
        arguments = (count, self._at[:2], self._queue, self._stopping)
        self._thread = threading.Thread(target=self._produce, args=arguments, name="loader", daemon=True)
        self._thread.start()

    def _stop_thread(self) -> None:
        if self._thread is not None:
            self._stopping.set()
            with suppress(queue.Empty):
                while True:  # make room, so that the thread need not wait before it looks
                    self._queue.get_nowait()
            self._thread.join()
            self._thread = None

    def _produce(self, count: int, at: tuple[dict, int], out: queue.Queue, stopping: threading.Event) -> None:
        """In the thread: put (x, y, position after them) into the queue until told to stop."""
        try:
            block, drawn = self._make_block(at[0]), at[1]
            while True:
                item, block, drawn = self._step(count, block, drawn)
                if not _put(out, item, stopping):
                    return
        except BaseException as e:  # whatever it is, the training loop must hear of it
            _put(out, e, stopping)

    def _step(self, count: int, block: _Block, drawn: int) -> tuple[tuple, _Block, int]:
        """(x, y, position after them) of one step, x and y int64 (count, micro_rows, T); where the next begins."""
        share = count * self._micro_rows
        low, high = self._rank * share, (self._rank + 1) * share  # ours among the rows of the step
        parts, seen = [], 0
        while seen < share * self._world:
            n = min(len(block.order) - drawn, share * self._world - seen)
            a, b = max(low - seen, 0), min(high - seen, n)
            if a < b:
                parts.append(block.rows(block.order[drawn + a : drawn + b]))
            drawn, seen = drawn + n, seen + n
            if drawn == len(block.order):
                block, drawn = self._make_block(block.following), 0
        rows = np.concatenate(parts).reshape(count, self._micro_rows, -1)
        x, y = np.ascontiguousarray(rows[..., :-1]), np.ascontiguousarray(rows[..., 1:])
        before, after = block.epochs
        epoch = before + (after - before) * drawn / len(block.order)
        return (x, y, (block.start, drawn, epoch)), block, drawn


def _put(out: queue.Queue, item: object, stopping: threading.Event) -> bool:
    """Put `item` when there is room; False if told to stop first."""
    while not stopping.is_set():
        try:
            out.put(item, timeout=0.05)
            return True
        except queue.Full:
            pass
    return False
