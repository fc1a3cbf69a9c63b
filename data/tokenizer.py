"""Train a byte-level BPE tokenizer once per corpus and vocabulary size, keep it in a file, use it through tiktoken.

The `tokenizers` library finds the merges; tiktoken encodes with the same split pattern and the merges
as ranks, and gives the same ids. The file is JSON (pattern, special tokens, tokens in base64) with a
checksum: nothing in it is executed, nothing is fetched.
"""

import base64
import hashlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
import tokenizers

from data.corpus import Corpus, DataError, atomic_file, io_error, show

BOS = "<|bos|>"
FORMAT = "nanotrn tokenizer 1"
MIN_VOCAB = 257  # the bytes and BOS
TRAIN_CHARS = 400_000_000  # characters to learn the merges from: more changes little and takes minutes

# How text is cut into pieces before merging; no merge crosses a cut. In this order:
#   an ending such as 's or 'll | a word with one leading space or sign | up to two digits |
#   a run of signs with the line ends behind it | white space up to a line end |
#   white space but for the last one before a word, which goes with the word | other white space.
# Every character matches one of them, so nothing is lost. All repeats are bounded: an endless run of one
# character would take a merging time that is quadratic in its length, or overflow tiktoken's stack.
SPLIT = "|".join(
    [
        r"['’](?:[sdmtSDMT]|[lL][lL]|[vV][eE]|[rR][eE])",
        r"[^\r\n\p{L}\p{M}\p{N}]?[\p{L}\p{M}]{1,32}",
        r"\p{N}{1,2}",
        r" ?[^\s\p{L}\p{M}\p{N}]{1,32}[\r\n]{0,32}",
        r"\s{0,32}[\r\n]",
        r"\s{1,32}(?!\S)",
        r"\s{1,32}",
    ]
)


@dataclass
class Tokenizer:
    """A tiktoken encoding and what the rest of a run needs to know about it."""

    encoding: tiktoken.Encoding
    vocab_size: int  # special tokens included
    bos_id: int  # the last id
    token_bytes: np.ndarray  # int32 (vocab_size,): UTF-8 bytes of each token, 0 for special tokens
    checksum: str  # hex SHA-256 of pattern, tokens and special tokens

    def encode_batch(self, texts: list[str], threads: int = 0) -> list[np.ndarray]:
        """The ids of each text, uint32 (tokens,), without BOS. Special tokens spelled out in a text are plain text.

        `threads` 0 means one per core. Raises DataError for a text that UTF-8 cannot hold (half a surrogate pair).
        """
        with ThreadPoolExecutor(threads or cores()) as pool:  # tiktoken lets go of the GIL
            return list(pool.map(self._encode, texts))

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD. Raises DataError for an id out of range."""
        ids = np.array(ids if isinstance(ids, (list, np.ndarray)) else list(ids), dtype=np.int64)
        if len(outside := ids[(ids < 0) | (ids >= self.vocab_size)]):
            raise DataError(f"token id {outside[0]} is not in this tokenizer of {self.vocab_size} tokens")
        return self.encoding.decode(ids.tolist())

    def _encode(self, text: str) -> np.ndarray:
        try:
            text.encode("utf-8")  # tiktoken would put U+FFFD for what cannot be encoded
        except UnicodeEncodeError as e:
            raise DataError(f"text with half a surrogate pair at character {e.start} cannot be encoded") from None
        return np.array(self.encoding.encode_ordinary(text), dtype=np.uint32)


def load_tokenizer(
    corpus: Corpus, vocab_size: int, cache_dir: str | Path, log: Callable[[str], None] = print
) -> Tokenizer:
    """The tokenizer of `vocab_size` tokens for the training files of `corpus`: from `cache_dir`, else trained and kept.

    A damaged file in the cache is replaced with a notice: training anew gives the same tokenizer.
    Raises DataError if the corpus has too little text for `vocab_size` or the cache cannot be written.
    """
    if not MIN_VOCAB <= vocab_size <= 2**31:
        raise DataError(f"data.vocab_size = {vocab_size}: must be at least {MIN_VOCAB}, the bytes and {BOS}")
    path = Path(cache_dir) / f"tokenizer-{corpus.checksum[:16]}-{vocab_size}.json"
    if os.path.exists(path):
        try:
            return read_tokenizer(path, vocab_size, corpus.checksum)
        except DataError as e:
            log(f"notice: {str(e).rpartition('; ')[0]}; training it again")
    start = time.monotonic()
    with atomic_file(path) as f:  # before the work: a cache that cannot be written is found out at once
        tokens = train_bpe(_some_documents(corpus), vocab_size - 1)
        if len(tokens) < vocab_size - 1:
            raise DataError(
                f"data.vocab_size = {vocab_size}: the training text of {show(corpus.name)} is too small for it; "
                f"the largest possible is {len(tokens) + 1}"
            )
        tokenizer = make_tokenizer(tokens)
        f.write(_file_content(tokenizer, corpus.checksum))
    log(f"tokenizer: trained {vocab_size:,} tokens in {time.monotonic() - start:.1f} s, kept in {show(path)}")
    return tokenizer


def train_bpe(texts: Iterable[str], size: int) -> list[bytes]:
    """The tokens of a byte-level BPE in order of rank, `size` of them or as many as the texts have merges for.

    The 256 single bytes come first. The same texts give the same tokens.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")  # unset, the library warns at every later fork
    bpe = _untrained()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=alphabet, special_tokens=[], show_progress=sys.stderr.isatty()
    )
    bpe.train_from_iterator(texts, trainer)
    letters = _byte_of_letter()
    tokens = sorted(bpe.get_vocab().items(), key=lambda item: item[1])
    return [bytes(letters[c] for c in token) for token, _ in tokens]


def make_tokenizer(tokens: list[bytes], pattern: str = SPLIT) -> Tokenizer:
    """The Tokenizer of mergeable `tokens` in order of rank, with BOS behind them. Raises DataError."""
    if len(set(tokens)) < len(tokens) or not {bytes([b]) for b in range(256)} <= set(tokens):
        raise DataError("the tokens of a tokenizer must differ from each other and hold every single byte")
    specials = {BOS: len(tokens)}
    try:
        encoding = tiktoken.Encoding(
            name="nanotrn",
            pat_str=pattern,
            mergeable_ranks={token: rank for rank, token in enumerate(tokens)},
            special_tokens=specials,
        )
    except ValueError as e:
        raise DataError(f"tiktoken refuses the tokenizer ({e})") from None
    token_bytes = np.array([len(t) for t in tokens] + [0] * len(specials), dtype=np.int32)
    return Tokenizer(encoding, len(token_bytes), specials[BOS], token_bytes, _digest(_content(pattern, tokens)))


def save_tokenizer(tokenizer: Tokenizer, path: str | Path, corpus_checksum: str = "") -> None:
    """Write the tokenizer to a JSON file; it appears whole or not at all. Raises DataError."""
    with atomic_file(Path(path)) as f:
        f.write(_file_content(tokenizer, corpus_checksum))


def read_tokenizer(path: str | Path, vocab_size: int = 0, corpus_checksum: str = "") -> Tokenizer:
    """The tokenizer in a file of `save_tokenizer`. Raises DataError if the file is damaged or is another one
    than `vocab_size` and `corpus_checksum` (where given) say.
    """
    path = Path(path)
    try:
        data = json.loads(path.read_bytes())
        content = {key: data[key] for key in ("format", "pattern", "special_tokens", "tokens")}
        tokens = [base64.b64decode(token, validate=True) for token in content["tokens"]]
        checksum, corpus, size, pattern = data["checksum"], data["corpus"], data["vocab_size"], content["pattern"]
    except OSError as e:
        raise io_error(e, path, "read") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise DataError(f"{show(path)}: is no tokenizer file of nanotrn, or a damaged one; delete it") from None
    if _digest(content) != checksum or _content(pattern, tokens) != content or size != len(tokens) + 1:
        raise DataError(f"{show(path)}: does not match its checksum; delete it")
    if vocab_size and size != vocab_size:
        raise DataError(f"{show(path)}: has a vocabulary of {size}, not {vocab_size}; set data.vocab_size = {size}")
    if corpus_checksum and corpus != corpus_checksum:
        raise DataError(f"{show(path)}: is for another corpus ({corpus[:16]}, not {corpus_checksum[:16]}); delete it")
    return make_tokenizer(tokens, pattern)


def cores() -> int:
    """CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _content(pattern: str, tokens: list[bytes]) -> dict:
    """What makes a tokenizer: equal content, equal ids."""
    return {
        "format": FORMAT,
        "pattern": pattern,
        "special_tokens": {BOS: len(tokens)},
        "tokens": [base64.b64encode(token).decode() for token in tokens],
    }


def _file_content(tokenizer: Tokenizer, corpus_checksum: str) -> bytes:
    tokens = [tokenizer.encoding.decode_single_token_bytes(i) for i in range(tokenizer.bos_id)]
    content = _content(tokenizer.encoding._pat_str, tokens)
    extra = {"checksum": _digest(content), "corpus": corpus_checksum, "vocab_size": tokenizer.vocab_size}
    return json.dumps(extra | content, indent=0).encode()


def _digest(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _some_documents(corpus: Corpus) -> Iterator[str]:
    """Training documents up to TRAIN_CHARS, an equal share of every file."""
    share = TRAIN_CHARS // len(corpus.train_files)
    for file in corpus.train_files:
        left = share
        for text in corpus.documents([file]):
            yield text[:left]
            left -= len(text)
            if left <= 0:
                break


def _untrained() -> tokenizers.Tokenizer:
    """The BPE of the `tokenizers` library before training, with our split."""
    pre = tokenizers.pre_tokenizers
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    split = pre.Split(tokenizers.Regex(SPLIT), behavior="isolated")
    bpe.pre_tokenizer = pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    return bpe


def _byte_of_letter() -> dict[str, int]:
    """The byte behind each letter of the library's byte-level alphabet.

    The alphabet of GPT-2: bytes that print in Latin-1 stand for themselves, the others, in order, for U+0100 on.
    """
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [b for b in range(256) if b not in printing]
    return {chr(b): b for b in printing} | {chr(256 + i): b for i, b in enumerate(others)}
