"""Find the files of a corpus, check them, and read their documents.

A corpus is "embedded" (data/corpus), "climbmix" (shards fetched once from the Hugging Face Hub) or a
folder of .parquet files (column `text`) and .txt files (one document each). What is wrong with a file
is a DataError; what is wrong with one document (null, empty, not UTF-8) is skipped and counted.

With several ranks, let rank 0 call `open_corpus`, `load_tokenizer` and `tokenize_split` first and the
others after a barrier: they then find everything in the cache.
"""

import errno
import hashlib
import json
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from tqdm import tqdm

EMBEDDED = Path(__file__).parent / "corpus"
CLIMBMIX = "karpathy/climbmix-400b-shuffle"
CLIMBMIX_FILES = 6543  # shard_00000.parquet ...; the last one is for validation
TRIES = 3  # of a download, with waits of 2 and 4 seconds between; recent clients try again on their own, too
BATCH_ROWS = 256  # documents read from a parquet file at a time
REMEMBER_BYTES = 2**24  # checksums of files from this size on are remembered
_DAMAGE = (pa.ArrowException, OSError, ValueError)  # what reading a damaged parquet file may raise


class DataError(Exception):
    """The corpus, the tokenizer or their cache cannot be used; the message is one line."""

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))


@dataclass
class Corpus:
    """Files of a corpus in fixed order, and what was skipped in those read so far."""

    name: str
    train_files: list[Path]
    val_files: list[Path]
    checksum: str  # hex SHA-256 over the contents of all files and the split they are in
    skipped: dict[Path, Counter] = field(default_factory=dict)  # {file: {"empty" | "null" | "not UTF-8": documents}}

    def files(self, split: str) -> list[Path]:
        """The files of "train" or "val"."""
        return {"train": self.train_files, "val": self.val_files}[split]

    def documents(self, files: Iterable[Path]) -> Iterator[str]:
        """Each document of `files` that has text, in order; the others are counted in `skipped`."""
        for file in files:
            counts = self.skipped[file] = Counter()  # anew: a file may be read twice
            for raw in _raw_documents(file):
                if raw is None:
                    counts["null"] += 1
                elif not raw:
                    counts["empty"] += 1
                else:
                    try:
                        yield raw.decode("utf-8")
                    except UnicodeDecodeError:
                        counts["not UTF-8"] += 1

    def skips(self, files: Iterable[Path]) -> dict[str, int]:
        """Skipped documents of `files` by reason, as far as they were read."""
        return dict(sum((self.skipped.get(file, Counter()) for file in files), Counter()))


def open_corpus(path: str, cache_dir: str | Path, shards: int = 5, log: Callable[[str], None] = print) -> Corpus:
    """The corpus at `path`: "embedded", "climbmix" or a folder. Raises DataError.

    `cache_dir` takes downloads and remembered checksums; `shards` is the number of ClimbMix training
    shards. In a folder, files with "val" in their name are for validation, else the last in sorted order.
    """
    cache_dir = Path(cache_dir)
    if path == "embedded":
        train, val = sorted(EMBEDDED.glob("sotu_train_*.parquet")), sorted(EMBEDDED.glob("sotu_val_*.parquet"))
        if not train or not val:
            raise DataError(f"{show(EMBEDDED)}: the embedded corpus is missing; restore it with git checkout")
    elif path == "climbmix":
        train, val = _fetch_climbmix(cache_dir / "climbmix", shards, log)
    else:
        train, val = _split_folder(Path(path).expanduser())
    for file in train + val:
        check_file(file)
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:  # hashing lets go of the GIL
        digests = list(threads.map(lambda file: file_sha256(file, cache_dir), train + val))
    train_digests, val_digests = digests[: len(train)], digests[len(train) :]
    twins = (set(train_digests) & set(val_digests)) - {hashlib.sha256(b"").hexdigest()}
    if twins:
        leaked = [file for file, digest in zip(val, val_digests, strict=True) if digest in twins]
        problem = f"{show(leaked[0])}: validation file with the content of a training file"
        if len(leaked) == len(val):
            raise DataError(f"{problem}: the score would mean nothing; remove one of the two")
        log(f"notice: {problem}, one of {len(leaked)} such files")
    whole = "\n".join(["train", *train_digests, "val", *val_digests])
    return Corpus(path, train, val, hashlib.sha256(whole.encode()).hexdigest())


def check_file(file: Path) -> None:
    """Raise DataError unless `file` can be opened and, if parquet, is whole and has a text column."""
    if file.suffix.lower() == ".parquet":
        _open_parquet(file).close()
    else:
        try:
            file.open("rb").close()
        except OSError as e:
            raise io_error(e, file, "read") from None


def file_sha256(file: Path, cache_dir: Path) -> str:
    """Hex SHA-256 of the content of `file`. Raises DataError.

    For large files it is remembered in `cache_dir` under everything that changes with a write (size,
    times, inode), so that later starts, and other ranks, need not read them again.
    """
    book = cache_dir / "checksums.json"
    try:
        stat = file.stat()
        key = f"{file.resolve()} {stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"
        if stat.st_size >= REMEMBER_BYTES:
            known = _read_book(book).get(key)
            if known:
                return known
        digest = hashlib.sha256()
        with file.open("rb") as f:
            while chunk := f.read(2**20):
                digest.update(chunk)
    except OSError as e:
        raise io_error(e, file, "read") from None
    if stat.st_size >= REMEMBER_BYTES and time.time_ns() - stat.st_mtime_ns > 2 * 10**9:
        with suppress(DataError):  # only a convenience; a file just written may change within a clock tick
            with atomic_file(book) as f:
                f.write(json.dumps(_read_book(book) | {key: digest.hexdigest()}, indent=0).encode())
    return digest.hexdigest()


def _read_book(book: Path) -> dict[str, str]:
    try:
        known = json.loads(book.read_text(encoding="utf-8"))
        return known if isinstance(known, dict) else {}
    except (OSError, ValueError):
        return {}


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A binary file to write that becomes `path` once whole and on disk; after an error nothing is left of it.

    Raises DataError for every OSError inside (no space, no permission).
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "xb") as f:
            yield f
            f.flush()
            os.fsync(f.fileno())
        os.replace(temporary, path)
    except OSError as e:
        raise io_error(e, path, "write") from None
    finally:
        with suppress(OSError):
            temporary.unlink()  # gone already if all went well


def io_error(error: OSError, path: Path, verb: str) -> DataError:
    """The DataError for an OSError at `path`: what could not be done, why, and a remedy."""
    remedies = {
        errno.ENOSPC: "free some space or choose another data.cache_dir",
        errno.EDQUOT: "free some space or choose another data.cache_dir",
        errno.EFBIG: "raise the limit on file sizes or choose another data.cache_dir",
    }
    default = "choose a data.cache_dir that can be written" if verb == "write" else "check path and permissions"
    reason = error.strerror or str(error)
    return DataError(f"{show(path)}: cannot {verb} it ({reason}); {remedies.get(error.errno, default)}")


def show(path: Path | str) -> str:
    """`path` for a message: printable, on one line."""
    text = str(path)
    return text if text.isprintable() else ascii(text)[1:-1]


def progress(items: Iterable, total: int, what: str, unit: str, log: Callable[[str], None]) -> Iterator:
    """The items of the (item, amount) pairs, with a bar of the amounts; if stderr is no terminal, a line each 5 s."""
    if sys.stderr.isatty():
        with tqdm(total=total, desc=what, unit=f" {unit}", unit_scale=True, leave=False) as bar:
            for item, amount in items:
                yield item
                bar.update(amount)
        return
    done, last = 0, time.monotonic()
    for item, amount in items:
        yield item
        done += amount
        if time.monotonic() - last > 5:
            last = time.monotonic()
            log(f"{what}: {done:,} of {total:,} {unit}")


def _split_folder(folder: Path) -> tuple[list[Path], list[Path]]:
    """Training and validation files of a folder, each sorted by name."""
    try:
        names = sorted(os.listdir(folder))  # the order of the file system is not to be trusted
    except FileNotFoundError:
        raise DataError(f'{show(folder)}: no such folder; data.path is a folder, "embedded" or "climbmix"') from None
    except NotADirectoryError:
        raise DataError(f"{show(folder)}: is a file; data.path is the folder that holds it") from None
    except (OSError, ValueError) as e:
        raise DataError(f"{show(folder)}: cannot be listed ({e}); check data.path") from None
    files = [folder / name for name in names if not name.startswith(".")]
    files = [f for f in files if f.suffix.lower() in (".parquet", ".txt") and not f.is_dir()]
    if not files:
        raise DataError(f"{show(folder)}: no .parquet or .txt file in it; check data.path")
    val = [f for f in files if "val" in f.name.lower()] or files[-1:]
    train = [f for f in files if "val" not in f.name.lower()] if val != files[-1:] else files[:-1]
    if not train:
        wanted = 'one without "val" in its name' if "val" in val[0].name.lower() else "a second one"
        raise DataError(f"{show(folder)}: nothing is left for training beside {val[0].name}; add {wanted}")
    return train, val


def _open_parquet(file: Path) -> pq.ParquetFile:
    """The parquet file, after a look at its footer and its text column."""
    try:
        parquet = pq.ParquetFile(file, page_checksum_verification=True)
        schema = parquet.schema_arrow
    except _DAMAGE as e:
        raise _parquet_error(file, e) from None
    if "text" not in schema.names:
        parquet.close()
        names = ", ".join(schema.names[:8]) or "none"
        raise DataError(f"{show(file)}: has no column text (its columns: {names}); rename the one with the documents")
    kind = schema.field("text").type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if str(kind) not in ("string", "large_string", "string_view", "binary", "large_binary", "binary_view"):
        parquet.close()
        raise DataError(f"{show(file)}: column text holds {kind}, not strings; convert it")
    return parquet


def _parquet_error(file: Path, error: Exception) -> DataError:
    """Say what the file seems to be instead."""
    try:
        with file.open("rb") as f:
            head = f.read(512)
    except OSError as e:
        return io_error(e, file, "read")
    if not head:
        return DataError(f"{show(file)}: is empty, not parquet; fetch it again")
    if head[:4] == b"PAR1":
        return DataError(f"{show(file)}: is a truncated or damaged parquet file ({error}); fetch it again")
    kind = "a web page" if head.lstrip()[:1] == b"<" else "something else"
    return DataError(f"{show(file)}: is no parquet file but {kind}; fetch it again")


def _raw_documents(file: Path) -> Iterator[bytes | None]:
    """The documents of a file as bytes; None for a null."""
    if file.suffix.lower() != ".parquet":
        try:
            yield file.read_bytes().removeprefix(b"\xef\xbb\xbf")  # the mark some editors put in front
        except OSError as e:
            raise io_error(e, file, "read") from None
        return
    with _open_parquet(file) as parquet:
        left = parquet.metadata.num_rows
        batches = parquet.iter_batches(batch_size=BATCH_ROWS, columns=["text"])
        while True:
            try:
                batch = next(batches, None)
                if batch is None:
                    break
                column = batch.column(0)
                if pa.types.is_dictionary(column.type):
                    column = column.dictionary_decode()
                texts = column.cast(pa.large_binary()).to_pylist()  # bytes: arrow does not check strings
            except _DAMAGE as e:
                raise _parquet_error(file, e) from None
            yield from texts
            left -= len(texts)
        if left:
            raise _parquet_error(file, ValueError(f"{abs(left)} rows too {'few' if left > 0 else 'many'}"))


def count_documents(files: Iterable[Path]) -> int:
    """Documents in `files`, the ones that will be skipped included, without reading them. Raises DataError."""
    total = 0
    for file in files:
        if file.suffix.lower() == ".parquet":
            with _open_parquet(file) as parquet:
                total += parquet.metadata.num_rows
        else:
            total += 1
    return total


def _fetch_climbmix(folder: Path, shards: int, log: Callable[[str], None]) -> tuple[list[Path], list[Path]]:
    """Training and validation shards in `folder`, the missing ones fetched first."""
    if not 1 <= shards < CLIMBMIX_FILES:
        raise DataError(f"data.shards = {shards}: must be from 1 to {CLIMBMIX_FILES - 1}")
    names = [f"shard_{i:05d}.parquet" for i in [*range(shards), CLIMBMIX_FILES - 1]]
    missing = []
    for name in names:
        try:
            check_file(folder / name)
        except DataError as e:
            if os.path.exists(folder / name):
                log(f"notice: {str(e).rpartition('; ')[0]}; fetching it again")
                with suppress(OSError):
                    (folder / name).unlink()
            missing.append(name)
    for name in progress(((n, 1) for n in missing), len(missing), "ClimbMix", "shards", log):
        _download(folder, name, log)
        check_file(folder / name)
    files = [folder / name for name in names]
    return files[:-1], files[-1:]


def _download(folder: Path, name: str, log: Callable[[str], None]) -> None:
    """Fetch one shard; the Hub's client resumes a broken transfer and renames only a whole file."""
    import huggingface_hub  # slow to import, and needed by few runs
    from huggingface_hub import constants, utils

    what, remedy = f"{name} of {CLIMBMIX}", 'set data.path to "embedded" or to a folder of your own'
    if constants.HF_HUB_OFFLINE:
        raise DataError(f"{what} cannot be fetched while HF_HUB_OFFLINE is set; unset it, or {remedy}")
    hopeless = (utils.EntryNotFoundError, utils.RepositoryNotFoundError)
    local = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EACCES, errno.EROFS, errno.ENOTDIR)
    for attempt in range(TRIES):
        try:
            huggingface_hub.hf_hub_download(CLIMBMIX, name, repo_type="dataset", local_dir=folder)
            return
        except Exception as e:  # the client lets through whatever its HTTP library raises
            if isinstance(e, OSError) and e.errno in local:
                raise io_error(e, folder / name, "write") from None
            # "not found here" (no network, no copy) is an EntryNotFoundError too, but worth another try
            no_use = isinstance(e, hopeless) and not isinstance(e, utils.LocalEntryNotFoundError)
            cause = e.__cause__ or e  # of "not found here" the cause says more
            lines = str(cause).strip().splitlines() or ["no reason given"]
            reason = f"{type(cause).__name__}: {lines[0][:200]}"
            if no_use or attempt == TRIES - 1:
                raise DataError(f"{what} cannot be fetched ({reason}); check the network, or {remedy}") from None
            wait = 2 ** (attempt + 1)
            log(f"notice: {name}: {reason}; trying again in {wait} s")
            time.sleep(wait)
