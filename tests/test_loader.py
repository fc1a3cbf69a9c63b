"""data/loader.py: every token once an epoch, the same rows on any number of ranks, exact positions, safe caches."""

import errno
import json
import os
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data import loader as ld
from data.corpus import EMBEDDED, Corpus, DataError, open_corpus
from data.loader import Loader, TokenSplit, tokenize_split, val_stream
from data.tokenizer import load_tokenizer, make_tokenizer

LAYOUTS = ["stream", "packed"]
BYTES = make_tokenizer([bytes([b]) for b in range(256)])  # for tests that need no merges


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """{"sotu" | "moby": its split} with a small vocabulary, and "tokenizer"."""
    cache = tmp_path_factory.mktemp("cache")
    sotu = open_corpus("embedded", cache)
    tokenizer = load_tokenizer(sotu, 1024, cache)
    moby = Corpus("moby", sorted(EMBEDDED.glob("moby*")), sotu.val_files, "moby")
    splits = {name: tokenize_split(c, "train", tokenizer, cache) for name, c in (("sotu", sotu), ("moby", moby))}
    return splits | {"tokenizer": tokenizer}


def numbered(offsets) -> TokenSplit:
    """A split whose tokens are their own places, so that each can be told from all others; BOS is `bos_of` it."""
    offsets = np.asarray(offsets, dtype=np.int64)
    return TokenSplit("train", np.arange(offsets[-1], dtype=np.uint32), offsets, 0, {}, "numbered")


def bos_of(split: TokenSplit) -> int:
    return int(split.offsets[-1])


def of_lengths(lengths) -> TokenSplit:
    return numbered(np.cumsum([0, *lengths]))


def all_rows(split, T, layout, rows, seed=0, pool=1, micro=None, **ranks) -> np.ndarray:
    """The first `rows` rows of the global order, (rows, T+1), read in steps of `micro`."""
    micro = micro or min(rows, 500)
    loader = Loader(split, T, micro, layout, bos_of(split), seed, pool, **ranks)
    found = [row for _ in range(-(-rows // micro)) for row in joined(loader.next())]
    loader.close()
    return np.array(found)[:rows]


def natural_rows(split, T, layout, epochs, seed=0) -> np.ndarray:
    """The rows of `epochs` epochs, (rows, T+1), in the order in which they are made, as with pool_rows = 1 but fast."""
    loader = Loader(split, T, 1, layout, bos_of(split), seed, 1000)
    at, rows, size = loader.state()["start"], [], bos_of(split) + len(split.offsets) - 1
    while at["row"] * T < epochs * size if layout == "stream" else at["epoch"] < epochs:
        block = loader._make_block(at)
        assert sorted(block.order) == list(range(len(block.order)))
        rows.append(block.rows(np.arange(len(block.order))))
        at = block.following
    return np.concatenate(rows)


def joined(batches) -> np.ndarray:
    """Rows (n, T+1) from (x, y) pairs, after a look at the pairs."""
    rows = []
    for x, y in batches:
        assert x.dtype == y.dtype == torch.int64 and x.shape == y.shape and x.is_contiguous() and y.is_contiguous()
        assert torch.equal(x[:, 1:], y[:, :-1])
        rows.append(torch.cat([x, y[:, -1:]], dim=1).numpy())
    return np.concatenate(rows)


def sorted_rows(rows: np.ndarray) -> np.ndarray:
    return rows[np.lexsort(rows.T[::-1])]


def check_stream(split: TokenSplit, T: int, rows: np.ndarray, epochs: int) -> list[np.ndarray]:
    """`rows` in natural order hold at least `epochs` epochs, each with every token once as input, once as target.

    Returns the documents of each epoch in their order, by first token.
    """
    bos, n, documents = bos_of(split), int(split.offsets[-1]), len(split.offsets) - 1
    inputs, targets = rows[:, :-1].reshape(-1), rows[:, 1:].reshape(-1)
    assert (inputs[1:] == targets[:-1]).all()  # one endless stream: what is a target here is the input after it
    size = n + documents
    assert len(inputs) >= epochs * size and inputs[0] == bos
    orders = []
    for e in range(epochs):
        stream = inputs[e * size : (e + 1) * size]
        assert (np.bincount(stream, minlength=bos + 1)[:-1] == 1).all() and (stream == bos).sum() == documents
        starts = np.append(np.flatnonzero(stream == bos), size)
        firsts = stream[starts[:-1] + 1]
        assert sorted(firsts) == split.offsets[:-1].tolist()
        lengths = dict(zip(split.offsets[:-1].tolist(), np.diff(split.offsets).tolist(), strict=True))
        assert [lengths[f] for f in firsts.tolist()] == (np.diff(starts) - 1).tolist()
        inside = np.flatnonzero((stream[1:] != bos) & (stream[:-1] != bos))
        assert (stream[inside + 1] == stream[inside] + 1).all()
        orders.append(firsts)
    return orders


def check_packed(split: TokenSplit, T: int, rows: np.ndarray, epochs: int) -> list[np.ndarray]:
    """`rows` in natural order: BOS first, pieces unbroken, every document token once in each of `epochs` epochs."""
    bos, n = bos_of(split), int(split.offsets[-1])
    assert rows.shape[1] == T + 1 and (rows[:, 0] == bos).all()
    after, before = rows[:, 1:], rows[:, :-1]
    inside = (after != bos) & (before != bos)
    assert (after[inside] == before[inside] + 1).all()
    document = np.searchsorted(split.offsets, rows, side="right")
    assert (document[:, 1:][inside] == document[:, :-1][inside]).all()
    tokens = rows[rows != bos]
    assert len(tokens) >= epochs * n
    parts = [tokens[e * n : (e + 1) * n] for e in range(epochs)]
    for part in parts:
        assert (np.bincount(part, minlength=n) == 1).all()
    return parts


CHECKS = {"stream": check_stream, "packed": check_packed}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["sotu", "moby"])
@pytest.mark.parametrize("T", [1, 37, 256, 1023])
def test_every_token_once_an_epoch(real, name, layout, T):
    whole = real[name].offsets
    split = numbered(whole if T > 37 else whole[: np.searchsorted(whole, 1_000_000 if T > 1 else 200_000)])
    natural = natural_rows(split, T, layout, 2)
    orders = CHECKS[layout](split, T, natural, 2)
    assert not (orders[0] == orders[1]).all()
    assert (all_rows(split, T, layout, 40) == natural[:40]).all()
    assert (all_rows(split, T, layout, 40, seed=1) != natural[:40]).any()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["sotu", "moby"])
@pytest.mark.parametrize("pool", [7, 1000, 10**8])
def test_a_pool_only_changes_the_order_within_an_epoch(real, name, layout, pool):
    split, T = numbered(real[name].offsets), 511
    size = bos_of(split) + len(split.offsets) - 1
    rows = size // T * 3 // 2
    natural, drawn = natural_rows(split, T, layout, 2)[:rows], all_rows(split, T, layout, rows, pool=pool)
    if layout == "stream":  # row i begins in epoch i * T // size
        ends = [-(-e * size // T) for e in (0, 1)] + [rows]
    else:  # an epoch ends with the row that has its last token
        done = np.cumsum((natural != bos_of(split)).sum(axis=1))
        ends = [0, int(np.searchsorted(done, bos_of(split))) + 1, rows]
    first = slice(*ends[:2])
    assert (sorted_rows(natural[first]) == sorted_rows(drawn[first])).all()
    for start in range(ends[0], ends[1] - pool, pool):  # a pool at a time
        block = slice(start, start + pool)
        assert (sorted_rows(natural[block]) == sorted_rows(drawn[block])).all()
        assert (natural[block] != drawn[block]).any()
    place = {row.tobytes(): i for i, row in enumerate(natural[first])}
    places = np.array([place[row.tobytes()] for row in drawn[first]])
    assert abs(places - np.arange(len(places))).max() < pool
    assert abs(places - np.arange(len(places))).mean() > 0.25 * min(pool, len(places))  # a third, if all is well


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("world", [1, 2, 3, 5])
@pytest.mark.parametrize("name", ["sotu", "moby"])
def test_rows_on_real_text_are_the_same_on_any_number_of_ranks(real, layout, world, name):
    """Rows of the real tokens are those of the numbered ones looked up; ranks share them out."""
    split, T, bos = real[name], 129, real["tokenizer"].bos_id
    places = all_rows(numbered(split.offsets), T, layout, 30 * 8, pool=64, seed=5)
    wanted = np.append(split.tokens, bos)[places]
    loaders = [Loader(split, T, 2, layout, bos, 5, 64, rank, world) for rank in range(world)]
    at = 0
    for n in (1, 1, 3, 2, 1, 1):
        for loader in loaders:
            batches = loader.next(n)
            assert len(batches) == n and all(x.shape == (2, T) for x, _ in batches)
            assert (joined(batches) == wanted[at : at + 2 * n]).all()
            at += 2 * n
    assert at == 18 * world
    for loader in loaders:
        loader.close()


def brute_force_packing(lengths, T, rows, orders):
    """Best fit by its description: lists of (first token, tokens, is_first_bos) searched from end to end."""
    firsts = np.cumsum([0, *lengths])
    buffer, epoch, waiting, out = [], -1, [], []
    for _ in range(rows):
        row = []
        while len(row) < T + 1:
            if not buffer and not waiting:
                epoch += 1
                waiting = [(int(firsts[d]), lengths[d]) for d in orders(epoch)]
            while waiting and len(buffer) < max(1, min(ld.BUFFER, len(lengths) // 8)):
                buffer.append(waiting.pop(0))
            space = T + 1 - len(row)
            fitting = [piece for piece in buffer if piece[1] + 1 <= space]
            chosen = max(fitting or buffer, key=lambda piece: (piece[1], piece[0]))  # equal lengths: the later text
            buffer.remove(chosen)
            first, count = chosen
            taken = min(count, space - 1)
            row += [int(firsts[-1]), *range(first, first + taken)]
            if taken < count:
                buffer.append((first + taken, count - taken))
        out.append(row)
    return np.array(out)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 40), min_size=30, max_size=80), st.integers(1, 30), st.integers(0, 99), st.integers(1, 9)
)
def test_packing_equals_a_plain_search(lengths, T, seed, buffer):
    """With the document order read off the stream layout, which a test above checks."""
    split, before = of_lengths(lengths), ld.BUFFER
    size = sum(lengths) + len(lengths)
    many = 2 * size // (T + 1) + 1
    rows = all_rows(split, size, "stream", many * (T + 1) // size + 1, seed=seed)  # one epoch a row
    starts = split.offsets[:-1].tolist()
    orders = [[starts.index(token) for token in row[np.flatnonzero(row[:-1] == bos_of(split)) + 1]] for row in rows]
    ld.BUFFER = buffer
    try:
        found = all_rows(split, T, "packed", many, seed=seed)
        assert (found == brute_force_packing(lengths, T, many, orders.__getitem__)).all()
    finally:
        ld.BUFFER = before


shapes = st.tuples(st.integers(1, 5), st.integers(1, 3))  # ranks, rows of a micro-batch
steps = st.lists(st.integers(1, 4), min_size=1, max_size=5)  # micro-batches


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=12),
    st.integers(1, 50),
    st.integers(1, 20),
    st.sampled_from(LAYOUTS),
    st.lists(st.tuples(shapes, steps), min_size=1, max_size=4),
)
def test_positions_survive_json_and_another_number_of_ranks(lengths, T, pool, layout, parts):
    """A run in parts, each on other ranks, more of them than documents now and then, sees the rows of one run."""
    split = of_lengths(lengths)
    total = sum(world * micro * sum(counts) for (world, micro), counts in parts)
    wanted, at, state = all_rows(split, T, layout, total, pool=pool), 0, None
    for (world, micro), counts in parts:
        loaders = [Loader(split, T, micro, layout, bos_of(split), 0, pool, rank, world) for rank in range(world)]
        for loader in loaders:
            if state is not None:
                loader.restore(json.loads(state))
                assert json.dumps(loader.state()) == state
        for n in counts:
            found = np.concatenate([joined(loader.next(n)) for loader in loaders])
            assert (found == wanted[at : at + len(found)]).all()
            at += len(found)
        states = {json.dumps(loader.state()) for loader in loaders}
        assert len(states) == 1
        (state,) = states
        epochs = {loader.epoch for loader in loaders}
        assert len(epochs) == 1
        for loader in loaders:
            loader.close()
    assert at == total


@pytest.mark.parametrize("layout", LAYOUTS)
def test_going_back(real, layout):
    """The position is of what was handed out, not of what was made ahead; going back twice works, in any loader."""
    split = numbered(real["moby"].offsets)
    make = lambda: Loader(split, 100, 3, layout, bos_of(split), pool_rows=50)  # noqa: E731
    loader, start = make(), make().state()
    first = [joined(loader.next()) for _ in range(20)]
    state, epoch = loader.state(), loader.epoch
    time.sleep(0.1)  # the thread fills its queue
    assert loader.state() == state and loader.epoch == epoch
    then = [joined(loader.next(2)) for _ in range(20)]
    for _ in range(2):
        loader.restore(state)
        assert loader.epoch == epoch
        assert all((joined(loader.next(2)) == rows).all() for rows in then)
    loader.restore(start)
    assert all((joined(loader.next()) == rows).all() for rows in first)
    state["start"]["row"] = 10**6  # ours now; the loader's own is another
    assert (joined(loader.next(2)) == then[0]).all()
    loader.close()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_epoch_and_size_of_state(real, layout):
    split, T = numbered(real["sotu"].offsets), 1024
    tokens, documents = bos_of(split), len(split.offsets) - 1
    loader = Loader(split, T, 64, layout, bos_of(split))
    assert loader.epoch == 0
    last, seen = 0.0, 0
    while loader.epoch < 2.2:
        seen += int((joined(loader.next())[:, :-1] != bos_of(split)).sum())
        assert loader.epoch > last
        last = loader.epoch
        assert loader.epoch == pytest.approx(seen / tokens, abs=0.02 + 64 * T / tokens)
    if layout == "stream":
        assert loader.epoch == pytest.approx(seen / tokens, rel=documents / tokens)
    assert len(json.dumps(loader.state())) < 30_000
    loader.close()


def test_packing_wastes_little(real):
    """Positions that are BOS: hardly more than one a document and one a row that had to be cut."""
    for name in ("sotu", "moby"):
        split, T = numbered(real[name].offsets), 512
        rows = all_rows(split, T, "packed", bos_of(split) // T)
        pieces = (rows == bos_of(split)).sum()
        assert pieces <= 1.05 * (len(rows) + (len(split.offsets) - 1))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_state_of_another_kind_is_refused(layout):
    split = of_lengths([30, 40, 50])
    arguments = {"seq_len": 8, "micro_rows": 1, "rows": layout, "bos_id": 120, "seed": 3, "pool_rows": 4}
    state = Loader(split, **arguments).state()
    others = {"seq_len": 9, "seed": 4, "pool_rows": 5, "rows": LAYOUTS[1 - LAYOUTS.index(layout)]}
    for key, value in others.items():
        with pytest.raises(DataError, match=f"saved data position is for {key} ="):
            Loader(split, **(arguments | {key: value})).restore(state)
    loader = Loader(split, **arguments)
    for key, value in {"split": "other", "start": None, "drawn": 10**6, "epoch": "x"}.items():
        with pytest.raises(DataError, match="saved data position"):
            loader.restore(state | {key: value})
    with pytest.raises(DataError, match="saved data position"):
        loader.restore({})
    loader.restore(state)
    assert len(joined(loader.next(3))) == 3
    loader.close()


def test_impossible_arguments():
    split = of_lengths([3])
    good = {"seq_len": 4, "micro_rows": 1, "rows": "stream", "bos_id": 3}
    for bad in ({"rows": "Stream"}, {"seq_len": 0}, {"micro_rows": 0}, {"pool_rows": 0}, {"rank": 2, "world": 2}):
        with pytest.raises(DataError):
            Loader(split, **(good | bad))
    loader = Loader(split, **good)
    with pytest.raises(ValueError, match="micro_batches = 0"):
        loader.next(0)
    loader.close()
    loader.close()
    with pytest.raises(RuntimeError, match="closed"):
        loader.next()


class Broken:
    """Tokens on a disk that fails when `on`."""

    on = True

    def __getitem__(self, places):
        if self.on:
            raise OSError(errno.EIO, "Input/output error")
        return np.zeros(np.shape(places), dtype=np.uint16)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_errors_of_the_thread_come_out_of_next(layout):
    tokens = Broken()
    split = TokenSplit("train", tokens, np.array([0, 50, 90]), 0, {}, "broken")
    loader = Loader(split, 8, 2, layout, 1)
    for _ in range(3):  # each call says so, none waits for ever
        with pytest.raises(OSError, match="Input/output error"):
            loader.next()
    tokens.on = False
    x, _ = loader.next()[0]
    assert x.shape == (2, 8) and loader.epoch > 0
    loader.close()


def test_close_stops_the_thread():
    def loading():
        return [t for t in threading.enumerate() if t.name == "loader"]

    before = len(loading())
    loader = Loader(of_lengths([30, 40]), 8, 2, "packed", 70)
    loader.next()
    loader.next(2)
    assert len(loading()) == before + 1 and all(t.daemon for t in loading())
    time.sleep(0.05)  # now it waits for room in the queue
    start = time.monotonic()
    loader.close()
    assert len(loading()) == before and time.monotonic() - start < 5


def test_batches_are_made_ahead():
    made = threading.Event()

    class Counting(np.ndarray):
        reads = 0

        def __getitem__(self, places):
            Counting.reads += 1
            if Counting.reads == 3:
                made.set()
            return super().__getitem__(places)

    split = of_lengths([1000])
    split.tokens = split.tokens.view(Counting)
    loader = Loader(split, 8, 1, "packed", 1000)
    loader.next()
    assert made.wait(20)  # the third batch is made though only one was asked for
    loader.close()


# ---- tokenising ----


def write(folder: Path, **texts) -> Corpus:
    """A corpus of parquet files name -> documents."""
    folder.mkdir(exist_ok=True)
    for name, values in texts.items():
        pq.write_table(pa.table({"text": pa.array(values, pa.string())}), folder / f"{name}.parquet")
    return open_corpus(str(folder), folder / "cache")


def test_tokens_are_those_of_the_documents(real, tmp_path):
    corpus, tokenizer = open_corpus("embedded", tmp_path), real["tokenizer"]
    split = tokenize_split(corpus, "val", tokenizer, tmp_path)
    texts = pq.read_table(corpus.val_files[0])["text"].to_pylist()
    assert len(split.offsets) == len(texts) + 1 and split.offsets.dtype == np.int64
    assert split.tokens.dtype == np.uint16 and split.offsets[-1] == len(split.tokens)
    for i, text in enumerate(texts):
        ids = split.tokens[split.offsets[i] : split.offsets[i + 1]]
        assert ids.tolist() == tokenizer.encoding.encode_ordinary(text)
    assert split.text_bytes == sum(len(t.encode()) for t in texts) == tokenizer.token_bytes[split.tokens].sum()
    with pytest.raises((ValueError, OSError)):  # the cache is not for writing
        split.tokens[0] = 1


def test_val_stream(real, tmp_path):
    split = tokenize_split(open_corpus("embedded", tmp_path), "val", real["tokenizer"], tmp_path)
    bos = real["tokenizer"].bos_id
    expected = []
    for a, b in zip(split.offsets, split.offsets[1:], strict=False):
        expected += [bos, *split.tokens[a:b].tolist()]
    stream = val_stream(split, bos)
    assert type(stream) is np.ndarray and stream.dtype == split.tokens.dtype and stream.tolist() == expected
    assert len(val_stream(split, bos, seq_len=len(expected) - 1)) == len(expected)
    with pytest.raises(DataError, match=f"less than a row of model.seq_len = {len(expected)} "):
        val_stream(split, bos, seq_len=len(expected))


def test_large_vocabulary_needs_four_bytes(tmp_path):
    """All pairs of bytes as tokens: 65,793 of them, and text that uses the last."""
    tokens = [bytes([b]) for b in range(256)] + [bytes([a, b]) for a in range(256) for b in range(256)]
    tokenizer = make_tokenizer(tokens)
    corpus = write(tmp_path / "c", a=["zz~~", "\U00103fff" * 3], val=["v"])
    split = tokenize_split(corpus, "train", tokenizer, tmp_path)
    assert split.tokens.dtype == np.uint32 and split.tokens.max() > 2**15
    texts = [tokenizer.decode(split.tokens[a:b]) for a, b in zip(split.offsets, split.offsets[1:], strict=False)]
    assert texts == ["zz~~", "\U00103fff" * 3]
    edge = make_tokenizer(tokens[: 2**16 - 1])  # 65,536 ids: two bytes are just enough
    assert tokenize_split(corpus, "train", edge, tmp_path).tokens.dtype == np.uint16


def test_long_and_odd_documents_are_not_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(ld, "BATCH_CHARS", 1000)
    texts = ["", "x", None, "a" * 10_000_000, "é", "", "\0", "end"] + ["filler"] * 500
    corpus, notes = write(tmp_path / "c", a=texts, val=["v"]), []
    split = tokenize_split(corpus, "train", BYTES, tmp_path / "cache", log=notes.append)
    kept = [t for t in texts if t]
    assert [split.offsets[i + 1] - split.offsets[i] for i in range(len(kept))] == [len(t.encode()) for t in kept]
    assert bytes(split.tokens.astype(np.uint8)) == "".join(kept).encode() and split.skipped == {"empty": 2, "null": 1}
    assert "notice: train: skipped 2 empty documents, 1 null document" in notes
    notes.clear()  # a later run hears of it, too
    assert tokenize_split(corpus, "train", BYTES, tmp_path / "cache", log=notes.append).skipped == split.skipped
    assert notes == ["notice: train: skipped 2 empty documents, 1 null document"]


@pytest.mark.parametrize("texts", [[], [""], [None, None], ["", None]])
def test_no_text(tmp_path, texts):
    corpus = write(tmp_path / "c", a=["x"], val=texts)
    with pytest.raises(DataError, match=r"val.parquet: no validation text in it(.*skipped)?") as info:
        tokenize_split(corpus, "val", BYTES, tmp_path / "cache")
    assert "\n" not in str(info.value) and not list((tmp_path / "cache").iterdir())
    corpus = write(tmp_path / "d", a=texts, b=texts, val=["x"])
    with pytest.raises(DataError, match="no training text"):
        tokenize_split(corpus, "train", BYTES, tmp_path / "cache")


def test_cache_is_used_and_keyed_by_all_that_matters(tmp_path, monkeypatch):
    corpus = write(tmp_path / "c", a=["one two", "three"], val=["v"])
    other = make_tokenizer([bytes([b]) for b in range(256)] + [b"on"])
    first = tokenize_split(corpus, "train", BYTES, tmp_path)
    variants = [
        first,
        tokenize_split(corpus, "val", BYTES, tmp_path),
        tokenize_split(corpus, "train", other, tmp_path),
        tokenize_split(write(tmp_path / "d", a=["one two", "threes"], val=["v"]), "train", BYTES, tmp_path),
    ]
    assert len({split.checksum for split in variants}) == 4
    assert [len(split.tokens) for split in variants] == [12, 1, 11, 13]
    monkeypatch.setattr(ld, "_encoded", lambda *_: pytest.fail("tokenised again"))
    again = tokenize_split(corpus, "train", BYTES, tmp_path, log=pytest.fail)
    assert (again.tokens == first.tokens).all() and (again.offsets == first.offsets).all()
    assert (again.text_bytes, again.skipped, again.checksum) == (12, {}, first.checksum)


def test_damaged_caches_are_made_again(tmp_path):
    corpus = write(tmp_path / "c", a=[f"document {i}" for i in range(50)], val=["v"])
    cache = tmp_path / "cache2"
    good = tokenize_split(corpus, "train", BYTES, cache)
    whole = {file: file.read_bytes() for file in cache.iterdir()}
    assert sorted(file.suffix for file in whole) == [".json", ".offsets", ".tokens"]
    expected = (good.tokens.tolist(), good.offsets.tolist())

    def flip(content):
        place = np.random.default_rng().integers(len(content))
        return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]

    damages = [lambda c: b"", lambda c: c[:-1], lambda c: c + b"x", flip, None]
    for file, content in whole.items():
        for damage in damages:
            for f, c in whole.items():
                f.write_bytes(c)
            file.unlink() if damage is None else file.write_bytes(damage(content))
            notes = []
            split = tokenize_split(corpus, "train", BYTES, cache, log=notes.append)
            assert (split.tokens.tolist(), split.offsets.tolist()) == expected
            assert {f: f.read_bytes() for f in cache.iterdir()} == whole
            if not (damage is None and file.suffix == ".json"):
                assert notes[0].startswith("notice: ") and notes[0].endswith("; tokenising train again"), notes
    about = next(file for file in whole if file.suffix == ".json")
    for changes in ({"sha256": []}, {"tokens": 0}, {"documents": 10**9}, {"key": "0"}, {"skipped": 3}, {"tokens": "x"}):
        about.write_bytes(json.dumps(json.loads(whole[about]) | changes).encode())
        assert tokenize_split(corpus, "train", BYTES, cache, log=lambda _: None).tokens.tolist() == expected[0]
        assert about.read_bytes() == whole[about]


@pytest.mark.parametrize("broken", ["tokens", "offsets", "json", "interrupt"])
def test_a_write_that_fails_leaves_no_half_cache(tmp_path, monkeypatch, broken):
    corpus, cache = write(tmp_path / "c", a=["some text"] * 9, val=["v"]), tmp_path / "cache"
    real, calls = os.fsync, []

    def failing(descriptor):
        calls.append(descriptor)
        if len(calls) == {"tokens": 1, "offsets": 2, "json": 3, "interrupt": 1}[broken]:
            raise KeyboardInterrupt if broken == "interrupt" else OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(descriptor)

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(KeyboardInterrupt if broken == "interrupt" else DataError) as info:
        tokenize_split(corpus, "train", BYTES, cache)
    assert broken == "interrupt" or "No space left on device); free some space" in str(info.value)
    assert not [f for f in cache.iterdir() if f.suffix in (".tmp", ".json")]
    monkeypatch.setattr(os, "fsync", real)
    assert bytes(tokenize_split(corpus, "train", BYTES, cache).tokens.astype(np.uint8)) == b"some text" * 9


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch):
    corpus = write(tmp_path / "c", a=["x"], val=["v"])
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", Path("/proc/nanotrn")):
        with pytest.raises(DataError, match=r"cannot write it .*; choose a data.cache_dir that can be written"):
            tokenize_split(corpus, "train", BYTES, folder)
    done = tokenize_split(corpus, "train", BYTES, tmp_path / "cache")
    monkeypatch.setattr(ld, "atomic_file", lambda _: pytest.fail("written to"))
    assert (tokenize_split(corpus, "train", BYTES, tmp_path / "cache").tokens == done.tokens).all()


def test_a_tokenizer_that_does_not_fit_is_noticed(tmp_path):
    """A split pattern that leaves text out would lose it silently."""
    lossy = make_tokenizer([bytes([b]) for b in range(256)], pattern=r"\p{L}+")
    corpus = write(tmp_path / "c", a=["two words"], val=["v"])
    with pytest.raises(DataError, match="do not add up to the text"):
        tokenize_split(corpus, "train", lossy, tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
