"""data/tokenizer.py: lossless, equal to the library that trained it, kept safely."""

import base64
import builtins
import json
import os
import subprocess
import sys
import time
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from data import tokenizer as tk
from data.corpus import EMBEDDED, Corpus, DataError, open_corpus
from data.tokenizer import BOS, load_tokenizer, make_tokenizer, read_tokenizer, save_tokenizer, train_bpe

ROOT = Path(__file__).parent.parent
SMALL = 600  # vocabulary of the tokenizer most tests use


def documents(pattern: str) -> list[str]:
    return [t for f in sorted(EMBEDDED.glob(pattern)) for t in pq.read_table(f)["text"].to_pylist()]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """(tokenizer, corpus, cache folder): trained on the shortest file there is."""
    corpus = Corpus("val", sorted(EMBEDDED.glob("sotu_val*")), [], "ab" * 32)
    cache = tmp_path_factory.mktemp("cache")
    return load_tokenizer(corpus, SMALL, cache), corpus, cache


@pytest.fixture(scope="module")
def library():
    """The trainer's own tokenizer, with the same settings, and its merges as the tokenizer under test gets them."""
    bpe = tk._untrained()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=1499, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    texts = documents("sotu_val*") + documents("moby*")[:20]
    texts += ["naïve café — “Zürich” " * 50, "数学と物理 " * 50, "a" * 999]
    bpe.train_from_iterator(texts, trainer)
    return bpe, make_tokenizer(train_bpe(texts, 1499))


def check(tokenizer: tk.Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """Decoding gives the text back and the bytes of the tokens add up, for each text."""
    ids = tokenizer.encode_batch(texts, threads=2)
    assert len(ids) == len(texts)
    for text, row in zip(texts, ids, strict=True):
        assert row.dtype == np.uint32 and row.ndim == 1
        assert tokenizer.decode(row) == text
        assert tokenizer.token_bytes[row].sum() == len(text.encode())
        assert not len(row) or row.max() < tokenizer.bos_id
    return ids


def test_properties_of_the_vocabulary(small):
    tokenizer = small[0]
    assert tokenizer.vocab_size == SMALL == tokenizer.encoding.n_vocab and tokenizer.bos_id == SMALL - 1
    assert tokenizer.token_bytes.shape == (SMALL,) and tokenizer.token_bytes.dtype == np.int32
    assert tokenizer.token_bytes[tokenizer.bos_id] == 0
    for i in range(SMALL - 1):
        assert tokenizer.token_bytes[i] == len(tokenizer.encoding.decode_single_token_bytes(i)) > 0
    assert tokenizer.decode([tokenizer.bos_id]) == BOS
    assert all(len(row) == 1 for row in tokenizer.encode_batch([chr(i) for i in range(128)]))
    for bad in (-1, SMALL, 2**40):
        with pytest.raises(DataError, match="token id"):
            tokenizer.decode([0, bad])


def test_corpora_survive_and_compress(small):
    for pattern, ratio in (("sotu_val*", 2.4), ("moby*", 2.0)):
        texts = documents(pattern)
        ids = check(small[0], texts)
        assert sum(len(t.encode()) for t in texts) > ratio * sum(map(len, ids))


@settings(max_examples=400, deadline=None)
@given(st.text())
def test_any_text_survives(small, text):
    check(small[0], [text])


blocks = ["'s", "’LL", "'Re", " ", "  ", "\n", "\r\n", "\t", "\u00a0", "\u2028", "\x00", "a", "the ", "Ünder"]
blocks += [
    "1",
    "234",
    "٣",
    "½",
    "…",
    "!!!",
    " (",
    "---",
    "<|bos|>",
    "漢字",
    "🙂",
    "\u200d",
    "e\u0301",
    "\ufeff",
    "\ufffd",
]


@settings(max_examples=400, deadline=None)
@given(st.lists(st.sampled_from(blocks) | st.text(max_size=3), max_size=40).map("".join))
def test_mixed_text_survives_and_equals_the_library(library, text):
    bpe, tokenizer = library
    (ids,) = check(tokenizer, [text])
    assert ids.tolist() == bpe.encode(text).ids


def test_ids_equal_the_library_on_the_corpora_and_every_character(library):
    bpe, tokenizer = library
    assert [bpe.token_to_id(t) for t in ("a", "Ġ")] == [tokenizer.encode_batch([t])[0][0] for t in ("a", " ")]
    characters = [chr(i) for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    known = [c for c in characters if unicodedata.category(c) not in ("Cn", "Co")]
    texts = documents("sotu_val*") + documents("moby*")[::3]
    # each character among letters, digits and spaces, a few hundred characters a text
    texts += ["".join(f"x{c} {c}{c}7{c}" for c in known[i : i + 200]) for i in range(0, len(known), 200)]
    assert len(known) > 130_000
    ours = check(tokenizer, texts)
    for text, ids, theirs in zip(texts, ours, bpe.encode_batch(texts), strict=True):
        assert ids.tolist() == theirs.ids, text[:80]


@pytest.mark.parametrize("unit", ["a", " ", "-", "7", "\r\n", "中", "!\n", " x", BOS])
def test_ten_megabytes_of_one_character(small, unit):
    text = unit * (10_000_000 // len(unit.encode()))
    start = time.process_time()
    check(small[0], [text + "a"])
    assert time.process_time() - start < 60  # some seconds; it would be hours or a crash if time were quadratic


def test_pieces_are_bounded_and_digits_pair_up(small):
    encoding, rng = small[0].encoding, np.random.default_rng()
    # longest piece: a sign and 32 letters, so no token may be longer, whatever the vocabulary
    assert max(len(encoding.decode_single_token_bytes(i)) for i in range(SMALL - 1)) <= 33 * 4
    for unit in ("a", " ", "-"):  # tokens of 2, 4, ... 64 of it: the last is longer than a piece
        doubled = make_tokenizer([bytes([b]) for b in range(256)] + [unit.encode() * 2**k for k in range(1, 7)])
        (ids,) = doubled.encode_batch([unit * 128])
        assert doubled.token_bytes[ids].max() == 32 and doubled.token_bytes[ids].sum() == 128
    digits = "".join(rng.choice(list("0123456789"), 20))
    pieces = [encoding.decode_single_token_bytes(i) for i in small[0].encode_batch([digits])[0]]
    cuts = np.cumsum([len(p) for p in pieces])
    assert max(map(len, pieces)) <= 2 and set(range(2, 21, 2)) <= set(cuts.tolist())


def test_special_tokens_in_text_are_text(small):
    (ids,) = check(small[0], [f"before {BOS} after"])
    assert small[0].bos_id not in ids and len(ids) > 5


def test_half_a_surrogate_pair_is_refused(small):
    with pytest.raises(DataError, match="half a surrogate pair at character 2"):
        small[0].encode_batch(["fine", "ab\ud800"])


@pytest.mark.parametrize("threads", [0, 1, 3])
def test_threads_change_nothing(small, threads):
    texts = documents("sotu_val*")
    expected = [small[0].encoding.encode_ordinary(t) for t in texts]
    assert [ids.tolist() for ids in small[0].encode_batch(texts, threads=threads)] == expected
    assert small[0].encode_batch([], threads=threads) == []


def test_training_is_repeatable_in_another_process(small):
    """Other hash seeds, other thread counts: the same tokens."""
    code = (
        "import sys; from pathlib import Path; from data.corpus import Corpus, EMBEDDED\n"
        "from data.tokenizer import load_tokenizer\n"
        "corpus = Corpus('val', sorted(EMBEDDED.glob('sotu_val*')), [], 'ab' * 32)\n"
        f"print(load_tokenizer(corpus, {SMALL}, Path(sys.argv[1]), log=lambda _: None).checksum)\n"
    )
    for threads in ("1", "2"):
        variables = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        arguments = [sys.executable, "-c", code, small[2] / threads]
        run = subprocess.run(arguments, cwd=ROOT, env=variables, capture_output=True, text=True)
        assert run.stdout.strip() == small[0].checksum, run.stderr


def test_cache_is_used_without_training(small, monkeypatch):
    tokenizer, corpus, cache = small
    monkeypatch.setattr(tk, "train_bpe", lambda *_: pytest.fail("trained again"))
    again = load_tokenizer(corpus, SMALL, cache, log=lambda line: pytest.fail(line))
    assert again.checksum == tokenizer.checksum and again.vocab_size == SMALL
    assert (again.token_bytes == tokenizer.token_bytes).all()
    text = documents("sotu_val*")[0]
    assert again.encode_batch([text])[0].tolist() == tokenizer.encode_batch([text])[0].tolist()


def test_only_training_documents_up_to_a_limit_count(tmp_path, monkeypatch):
    files = []
    for name, texts in (("a", ["xyxy " * 500, "rest " * 500]), ("b", ["uvuv " * 500])):
        files.append(tmp_path / f"{name}.parquet")
        pq.write_table(pa.table({"text": texts}), files[-1])
    val = tmp_path / "val.parquet"
    pq.write_table(pa.table({"text": ["qzqz " * 500]}), val)
    corpus = Corpus("c", files, [val], "")
    assert list(tk._some_documents(corpus)) == ["xyxy " * 500, "rest " * 500, "uvuv " * 500]
    monkeypatch.setattr(tk, "TRAIN_CHARS", 2000)
    assert list(tk._some_documents(corpus)) == ["xyxy " * 200, "uvuv " * 200]


def test_too_large_a_vocabulary_names_the_largest(tmp_path):
    (tmp_path / "a.txt").write_text("abc abc abd " * 10 + "caféxyz")
    (tmp_path / "val.txt").write_text("other")
    corpus, cache = open_corpus(str(tmp_path), tmp_path), tmp_path / "cache"
    with pytest.raises(DataError, match="data.vocab_size = 5000.*the largest possible is ") as info:
        load_tokenizer(corpus, 5000, cache)
    largest = int(str(info.value).split()[-1])
    assert not list(cache.iterdir())
    assert load_tokenizer(corpus, largest, cache).vocab_size == largest
    with pytest.raises(DataError, match=f"the largest possible is {largest}$"):
        load_tokenizer(corpus, largest + 1, cache)
    assert load_tokenizer(corpus, 257, cache).vocab_size == 257  # bytes only
    with pytest.raises(DataError, match="must be at least 257"):
        load_tokenizer(corpus, 256, cache)


def test_no_text_at_all(tmp_path):
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "val.txt").write_text("x")
    with pytest.raises(DataError, match="too small for it; the largest possible is 257"):
        load_tokenizer(open_corpus(str(tmp_path), tmp_path), 300, tmp_path / "cache")


def edited(file: Path, **changes) -> bytes:
    return json.dumps(json.loads(file.read_bytes()) | changes).encode()


def test_a_tokenizer_that_does_not_match_is_refused_and_replaced(small, tmp_path):
    tokenizer, corpus, cache = small
    (source,) = cache.glob("tokenizer-*.json")
    raw = source.read_bytes()
    tokens = json.loads(raw)["tokens"]
    assert json.loads(raw)["special_tokens"] == {BOS: SMALL - 1} and len(tokens) == SMALL - 1
    other = [base64.b64encode(b"zq%d" % i).decode() for i in range(2)]
    damaged = {
        "half": raw[: len(raw) // 2],
        "empty": b"",
        "no JSON": b"<html>",
        "a list": b"[]",
        "binary": b"\x80\x04\x95",
        "deep": b"[" * 100_000,
        "keys missing": b"{}",
        "checksum": edited(source, checksum="0" * 64),
        "token changed": edited(source, tokens=tokens[:-2] + other),
        "token missing": edited(source, tokens=tokens[:-1]),
        "no base64": edited(source, tokens=tokens[:-1] + ["%%"]),
        "numbers": edited(source, tokens=[1, 2]),
        "pattern": edited(source, pattern=".+"),
        "special tokens": edited(source, special_tokens={BOS: 0}),
        "format": edited(source, format="other"),
        "size": edited(source, vocab_size=SMALL + 1),
        "other corpus": edited(source, corpus="cd" * 32),
    }
    for name, content in damaged.items():
        file = tmp_path / source.name
        file.write_bytes(content)
        with pytest.raises(DataError) as info:
            read_tokenizer(file, SMALL, corpus.checksum)
        assert "\n" not in str(info.value) and source.name in str(info.value), name
        if name != "other corpus":
            with pytest.raises(DataError):
                read_tokenizer(file)
        if name not in ("half", "checksum", "other corpus"):
            continue
        notes = []
        assert load_tokenizer(corpus, SMALL, tmp_path, log=notes.append).checksum == tokenizer.checksum
        assert len(notes) == 2 and notes[0].startswith("notice: ") and "training it again" in notes[0], name
        assert read_tokenizer(file, SMALL, corpus.checksum).checksum == tokenizer.checksum
    with pytest.raises(DataError, match=f"has a vocabulary of {SMALL}, not 512; set data.vocab_size = {SMALL}"):
        read_tokenizer(source, 512)
    with pytest.raises(DataError, match="cannot read it"):
        read_tokenizer(tmp_path / "missing.json")


def test_a_valid_file_of_another_vocabulary_is_refused(small, tmp_path):
    """Checksums alone do not make it the right one."""
    tokens = train_bpe(documents("moby*")[:5], 400)
    save_tokenizer(make_tokenizer(tokens), tmp_path / "t.json")
    assert read_tokenizer(tmp_path / "t.json").vocab_size == 401
    for arguments in ((SMALL,), (401, "ab" * 32)):
        with pytest.raises(DataError):
            read_tokenizer(tmp_path / "t.json", *arguments)
    assert read_tokenizer(tmp_path / "t.json").checksum != small[0].checksum


def test_the_checksum_is_of_all_that_matters():
    tokens = [bytes([b]) for b in range(256)]
    sums = {
        make_tokenizer(tokens).checksum,
        make_tokenizer([*tokens, b"ab"]).checksum,
        make_tokenizer([*tokens, b"ac"]).checksum,
        make_tokenizer([*tokens, b"ab", b"ac"]).checksum,
        make_tokenizer([*tokens, b"ac", b"ab"]).checksum,
        make_tokenizer(tokens, pattern=r"[\s\S]").checksum,
    }
    assert len(sums) == 6
    for bad in (tokens[:-1], [*tokens, b"a"]):
        with pytest.raises(DataError, match="must differ from each other and hold every single byte"):
            make_tokenizer(bad)
    with pytest.raises(DataError, match="tiktoken refuses"):
        make_tokenizer(tokens, pattern="(")


def test_a_cache_that_cannot_be_written_is_found_out_before_training(small, tmp_path, monkeypatch):
    monkeypatch.setattr(tk, "train_bpe", lambda *_: pytest.fail("trained first"))
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", Path("/proc/nanotrn")):
        with pytest.raises(DataError, match="cannot write it.*data.cache_dir"):
            load_tokenizer(small[1], SMALL, folder)


def test_a_read_only_cache_that_holds_all_is_enough(small, monkeypatch):
    """Nothing is opened for writing."""
    real = builtins.open

    def guarded(file, mode="r", *args, **kwargs):
        assert not set(mode) & set("wax+"), file
        return real(file, mode, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", guarded)
    assert load_tokenizer(small[1], SMALL, small[2]).checksum == small[0].checksum
