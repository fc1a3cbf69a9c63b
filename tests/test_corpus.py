"""data/corpus.py: which files, which documents, and what is said about bad ones."""

import errno
import hashlib
import http.server
import os
import random
import re
import subprocess
import sys
import threading
from pathlib import Path

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import corpus
from data.corpus import DataError, atomic_file, check_file, count_documents, file_sha256, open_corpus

ROOT = Path(__file__).parent.parent


def parquet(file: Path, texts, **options) -> Path:
    array = texts if isinstance(texts, (pa.Array, pa.ChunkedArray)) else pa.array(texts, pa.string())
    pq.write_table(pa.table({"text": array}), file, **options)
    return file


def strings(*values: bytes) -> pa.Array:
    """A string column of bytes that need not be UTF-8."""
    offsets = [0]
    for value in values:
        offsets.append(offsets[-1] + len(value))
    buffers = [None, pa.array(offsets, pa.int32()).buffers()[1], pa.py_buffer(b"".join(values))]
    return pa.StringArray.from_buffers(len(values), buffers[1], buffers[2])


def fails(match: str, function, *args) -> None:
    """`function` raises a DataError of one line that matches."""
    with pytest.raises(DataError, match=match) as info:
        function(*args)
    assert "\n" not in str(info.value)


def opened(folder: Path, tmp_path: Path, log=print) -> corpus.Corpus:
    return open_corpus(str(folder), tmp_path / "cache", log=log)


def test_embedded(tmp_path):
    c = open_corpus("embedded", tmp_path)
    assert [f.name for f in c.train_files] == [f"sotu_train_0000{i}.parquet" for i in range(4)]
    assert [f.name for f in c.val_files] == ["sotu_val_00000.parquet"]
    train, val = list(c.documents(c.train_files)), list(c.documents(c.val_files))
    assert (len(train), len(val)) == (2753, 131) == (count_documents(c.train_files), count_documents(c.val_files))
    assert sum(len(t.encode()) for t in train) == 10_268_215  # as its README says
    assert not set(train) & set(val)
    assert not c.skips(c.train_files)
    direct = [t for f in c.train_files for t in pq.read_table(f)["text"].to_pylist()]
    assert train == direct
    assert not list(tmp_path.iterdir())  # small: nothing to remember


def test_folder_order_and_split(tmp_path):
    folder = tmp_path / "f"
    folder.mkdir()
    names = [f"part_{i:02d}.parquet" for i in range(8)] + ["my_VAL_1.parquet", "a_val.txt", "b.txt"]
    for name in random.sample(names, len(names)):  # the order of creation must not matter
        (folder / name).write_text(name) if name.endswith("txt") else parquet(folder / name, [name])
    for name in (".hidden.parquet", "README.md", "part_09.parquet.tmp"):
        (folder / name).write_text("not a part of it")
    (folder / "sub.parquet").mkdir()
    c = opened(folder, tmp_path)
    assert [f.name for f in c.train_files] == ["b.txt"] + [f"part_{i:02d}.parquet" for i in range(8)]
    assert [f.name for f in c.val_files] == ["a_val.txt", "my_VAL_1.parquet"]
    assert list(c.documents(c.train_files)) == [f.name for f in c.train_files]
    for f in c.val_files:
        f.unlink()
    c = opened(folder, tmp_path)
    assert [f.name for f in c.val_files] == ["part_07.parquet"] and len(c.train_files) == 8


def test_checksum_follows_content_and_split_only(tmp_path):
    def make(name, contents):
        folder = tmp_path / name
        folder.mkdir()
        for file, text in contents.items():
            (folder / file).write_text(text)
        return opened(folder, tmp_path).checksum

    one = make("1", {"a.txt": "x", "b.txt": "y", "val.txt": "z"})
    assert one == make("2", {"val.txt": "z", "b.txt": "y", "a.txt": "x"})
    others = [
        make("3", {"a.txt": "y", "b.txt": "x", "val.txt": "z"}),
        make("4", {"a.txt": "x", "b.txt": "yy", "val.txt": "z"}),
        make("5", {"a.txt": "x", "b_val.txt": "y", "val.txt": "z"}),
        make("6", {"a.txt": "x", "b.txt": "y", "val.txt": "zz"}),
    ]
    assert len({one, *others}) == 5


@pytest.mark.parametrize("kind", ["string", "large_string", "binary", "dictionary", "row groups"])
def test_column_types(tmp_path, kind):
    texts = ["one", None, "", "zwei\n", "三", "one"]
    array = pa.array(texts, pa.string())
    if kind == "dictionary":
        array = array.dictionary_encode()
    elif kind != "row groups":
        array = array.cast({"string": pa.string(), "large_string": pa.large_string(), "binary": pa.binary()}[kind])
    file = parquet(tmp_path / "a.parquet", array, row_group_size=2 if kind == "row groups" else 100)
    check_file(file)
    c = corpus.Corpus("c", [file], [], "")
    for _ in range(2):  # reading again does not count twice
        assert list(c.documents([file])) == ["one", "zwei\n", "三", "one"]
        assert c.skips([file]) == {"null": 1, "empty": 1}


def test_skips_are_counted_and_nothing_else_is_lost(tmp_path):
    folder = tmp_path / "f"
    folder.mkdir()
    long = "ä" * 5_000_000  # 10 MB
    bad = strings(b"good", b"\xff\xfe", b"", long.encode(), b"\xed\xa0\x80", "é".encode("latin-1"), b"last")
    parquet(folder / "a.parquet", bad)
    (folder / "b.txt").write_bytes("naïve".encode("latin-1"))
    (folder / "c.txt").write_bytes("\ufeffwith a mark\r\n".encode())
    (folder / "d.txt").write_bytes(b"")
    (folder / "e.txt").write_bytes(b"\xef\xbb\xbf")
    (folder / "val.txt").write_bytes("wide".encode("utf-16"))
    c = opened(folder, tmp_path)
    assert list(c.documents(c.train_files)) == ["good", long, "last", "with a mark\r\n"]
    assert c.skips(c.train_files) == {"not UTF-8": 4, "empty": 3}
    assert list(c.documents(c.val_files)) == [] and c.skips(c.val_files) == {"not UTF-8": 1}


def test_bad_folders(tmp_path):
    fails("no such folder", opened, tmp_path / "missing", tmp_path)
    fails(r"no \.parquet or \.txt", opened, tmp_path, tmp_path)
    file = tmp_path / "only.txt"
    file.write_text("x")
    fails("is a file", opened, file, tmp_path)
    fails("beside only.txt; add a second one", opened, tmp_path, tmp_path)
    file.rename(tmp_path / "val.txt")
    fails('without "val"', opened, tmp_path, tmp_path)
    (tmp_path / "a.txt").symlink_to(tmp_path / "nowhere")
    fails("a.txt: cannot read it", opened, tmp_path, tmp_path)
    fails("cannot be listed", open_corpus, "a\0b", tmp_path)


def test_bad_parquet(tmp_path):
    good = parquet(tmp_path / "good.parquet", ["some text"] * 1000).read_bytes()
    cases = {
        b"<!DOCTYPE html><html>rate limited</html>": "but a web page",
        b"\n <Error>AccessDenied</Error>": "but a web page",
        b"version https://git-lfs.github.com/spec/v1": "no parquet file but something else",
        b"": "empty, not parquet",
        good[: len(good) // 2]: "truncated",
        good[:-1]: "truncated",
        good[:4]: "truncated",
    }
    folder = tmp_path / "f"
    folder.mkdir()
    parquet(folder / "val.parquet", ["v"])
    for content, message in cases.items():
        (folder / "a.parquet").write_bytes(content)
        fails(rf"a\.parquet: is .*{message}", opened, folder, tmp_path)
    pq.write_table(pa.table({"content": ["x"], "id": [1]}), folder / "a.parquet")
    fails(r"no column text \(its columns: content, id\)", opened, folder, tmp_path)
    for values, kind in (([1], "int64"), ([["x"]], "list")):
        pq.write_table(pa.table({"text": values}), folder / "a.parquet")
        fails(f"column text holds {kind}", opened, folder, tmp_path)


def test_damage_inside_a_parquet_file_is_an_error_of_one_line(tmp_path):
    """Random bytes overwritten: with page checksums the right text or a DataError, without never another error."""
    rng = random.Random()
    texts = [f"{i}: " + "".join(rng.choices("abc de\n", k=rng.randrange(200))) for i in range(300)]
    file, errors = tmp_path / "a.parquet", 0
    for checksums in (True, False):
        parquet(file, texts, row_group_size=100, write_page_checksum=checksums)
        whole = file.read_bytes()
        for _ in range(60):
            damaged = bytearray(whole)
            for _ in range(rng.choice([1, 5])):
                damaged[rng.randrange(len(damaged))] = rng.randrange(256)
            file.write_bytes(damaged)
            c = corpus.Corpus("c", [file], [], "")
            try:
                found = list(c.documents([file]))
                assert found == texts or not checksums
                assert len(found) + sum(c.skips([file]).values()) == len(texts)
            except DataError as e:
                assert "\n" not in str(e) and "a.parquet" in str(e)
                errors += 1
    assert errors > 10


def test_validation_text_in_training_is_refused(tmp_path):
    folder = tmp_path / "f"
    folder.mkdir()
    for name in ("a.parquet", "b.parquet", "val_1.parquet", "val_2.parquet"):
        parquet(folder / name, [name])
    parquet(folder / "val_1.parquet", ["a.parquet"])
    notes = []
    opened(folder, tmp_path, notes.append)
    assert len(notes) == 1 and "val_1.parquet: validation file with the content of a training file" in notes[0]
    parquet(folder / "val_2.parquet", ["b.parquet"])
    fails("the score would mean nothing", opened, folder, tmp_path)


def test_remembered_checksums_follow_the_file(tmp_path, monkeypatch):
    monkeypatch.setattr(corpus, "REMEMBER_BYTES", 10)
    file, cache = tmp_path / "x", tmp_path / "cache"
    book = cache / "checksums.json"

    def right():
        return file_sha256(file, cache) == hashlib.sha256(file.read_bytes()).hexdigest()

    file.write_bytes(b"a" * 100)
    assert right() and not book.exists()  # too fresh: it may change within a tick of the file system's clock
    os.utime(file, (1, 1))
    assert right() and book.exists()
    opened_files = []
    real = Path.open
    monkeypatch.setattr(Path, "open", lambda self, *a, **k: opened_files.append(self) or real(self, *a, **k))
    assert file_sha256(file, cache) == hashlib.sha256(b"a" * 100).hexdigest()
    assert file not in opened_files
    file.write_bytes(b"b" * 100)
    os.utime(file, (1, 1))  # same size, same time; the change time can not be set back
    assert right()
    for junk in (b"{", b"[1]", b"\xff"):
        book.write_bytes(junk)
        assert right()


def test_atomic_file(tmp_path):
    path = tmp_path / "deep" / "er" / "x"
    with atomic_file(path) as f:
        f.write(b"one")
        assert not path.exists()
    assert path.read_bytes() == b"one"
    with path.open("rb") as reader:  # who has the old one open keeps it
        with atomic_file(path) as f:
            f.write(b"new")
        assert reader.read() == b"one" and path.read_bytes() == b"new"
    with pytest.raises(KeyboardInterrupt), atomic_file(path) as f:
        f.write(b"two")
        raise KeyboardInterrupt
    with pytest.raises(DataError, match="No space left.*free some space"), atomic_file(path) as f:
        f.write(b"three")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert path.read_bytes() == b"new" and list(path.parent.iterdir()) == [path]


def test_write_errors_of_the_system(tmp_path, monkeypatch):
    def write(path):
        with atomic_file(path) as f:
            f.write(b"x" * 100_000)

    (tmp_path / "file").write_text("")
    fails("cannot write it.*choose a data.cache_dir", write, tmp_path / "file" / "x")  # its folder is a file
    fails("cannot write it", write, Path("/proc/nanotrn/x"))  # a folder nobody can write to

    def no_space(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", no_space)  # where a full disk shows up late
    fails("No space left", write, tmp_path / "x")
    assert [f.name for f in tmp_path.iterdir()] == ["file"]


def test_file_size_limit(tmp_path):
    """A real limit of the system on the size of files, in a process of its own."""
    code = (
        "import resource, sys; from pathlib import Path; from data.corpus import atomic_file, DataError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "try:\n"
        "    with atomic_file(Path(sys.argv[1])) as f: f.write(b'x' * 10**6)\n"
        "except DataError as e: print(e)\n"
    )
    run = subprocess.run([sys.executable, "-c", code, tmp_path / "x"], cwd=ROOT, capture_output=True, text=True)
    assert "cannot write it (File too large); raise the limit" in run.stdout and run.stdout.count("\n") == 1
    assert not list(tmp_path.iterdir())


# ---- ClimbMix, with a small stand-in for the Hub ----


class Hub(http.server.BaseHTTPRequestHandler):
    """Serves `files`; breaks off the first transfer of each name in `breaks` half-way; notes what was asked."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer(send=False)

    def do_GET(self):
        self.answer(send=True)

    def answer(self, send: bool):
        name = self.path.rsplit("/", 1)[-1]
        body, span = self.server.files.get(name), self.headers.get("Range")
        self.server.asked.append((self.command, name, span))
        if body is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            return self.end_headers()
        start = int(re.match(r"bytes=(\d+)-", span).group(1)) if span and send else 0
        self.send_response(206 if start else 200)
        self.send_header("ETag", f'"{hashlib.sha256(body).hexdigest()}"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body) - start))
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
        if send and name in self.server.breaks:
            self.server.breaks.remove(name)
            body, self.close_connection = body[: len(body) // 2], True
        self.end_headers()
        if send:
            self.wfile.write(body[start:])


@pytest.fixture
def hub(tmp_path):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.daemon_threads = True
    server.files, server.breaks, server.asked = {}, set(), []
    for name in ("shard_00000.parquet", "shard_00001.parquet", "shard_06542.parquet"):
        texts = [name + "".join(random.choices("abcdefgh ", k=3000)) for _ in range(100)]
        server.files[name] = parquet(tmp_path / name, texts).read_bytes()
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(tmp_path: Path, shards: int, endpoint: str, **variables) -> subprocess.CompletedProcess:
    """open_corpus("climbmix") in a process of its own: the client reads its settings when imported."""
    code = (
        "import sys, time; from data.corpus import open_corpus, DataError; sleep = time.sleep\n"
        "time.sleep = lambda s: sleep(s / 1000)\n"
        "try: c = open_corpus('climbmix', sys.argv[1], int(sys.argv[2])); print([f.name for f in c.train_files + "
        "c.val_files], len(list(c.documents(c.train_files))))\n"
        "except DataError as e: print('DataError', e)\n"
    )
    settings = {"HF_ENDPOINT": endpoint, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home")} | variables
    settings |= {"no_proxy": "127.0.0.1", "HF_HUB_DOWNLOAD_TIMEOUT": "5"}
    arguments = [sys.executable, "-c", code, tmp_path / "cache", str(shards)]
    run = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, env=os.environ | settings, timeout=60)
    assert run.returncode == 0, run.stderr
    return run


def test_climbmix_is_fetched_once_and_resumed(hub, tmp_path):
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    texts = [os.urandom(120_000).hex() for _ in range(100)]  # larger than what the client receives before it writes
    file = parquet(tmp_path / "large.parquet", texts, compression="none", use_dictionary=False)
    hub.files["shard_00001.parquet"] = file.read_bytes()
    hub.breaks.add("shard_00001.parquet")
    expected = "['shard_00000.parquet', 'shard_00001.parquet', 'shard_06542.parquet'] 200"
    assert fetch(tmp_path, 2, endpoint).stdout.splitlines()[-1] == expected
    folder = tmp_path / "cache" / "climbmix"
    assert {f.name: f.read_bytes() for f in folder.glob("*.parquet")} == hub.files
    half = len(hub.files["shard_00001.parquet"]) // 2
    spans = [int(span[6:-1]) for command, name, span in hub.asked if command == "GET" and span]
    assert spans and all(0 < start <= half for start in spans)  # went on where it broke off
    hub.asked.clear()
    (folder / "shard_00000.parquet").write_bytes(b"<html>")
    run = fetch(tmp_path, 2, endpoint)
    assert "is no parquet file but a web page; fetching it again" in run.stdout and expected in run.stdout
    assert {name for _, name, _ in hub.asked if name.startswith("shard")} == {"shard_00000.parquet"}
    # all there: no network needed; fewer shards than there are: only those asked for
    assert fetch(tmp_path, 2, "http://127.0.0.1:9").stdout.strip() == expected
    assert fetch(tmp_path, 1, "http://127.0.0.1:9").stdout.startswith("['shard_00000.parquet', 'shard_06542")


def test_climbmix_errors(hub, tmp_path):
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    run = fetch(tmp_path, 3, endpoint)  # shard 2 does not exist there
    assert re.search(r"DataError shard_00002.parquet of .* cannot be fetched", run.stdout)
    assert "trying again" not in run.stdout
    hub.files["shard_00002.parquet"] = b"<html>log in first</html>"
    assert "DataError" in (out := fetch(tmp_path, 3, endpoint).stdout) and "web page" in out
    out = fetch(tmp_path / "none", 1, "http://127.0.0.1:9").stdout.splitlines()
    assert len(out) == corpus.TRIES and out[-1].startswith("DataError shard_00000.parquet of")
    assert all("trying again in" in line for line in out[:-1])
    assert "HF_HUB_OFFLINE is set" in fetch(tmp_path / "none", 1, endpoint, HF_HUB_OFFLINE="1").stdout


def test_climbmix_retries(tmp_path, monkeypatch):
    calls, waits, notes = [], [], []

    def flaky(repo, name, repo_type, local_dir):
        calls.append(name)
        if len(calls) in (1, 2):
            raise ConnectionError("reset by peer\nand more")
        local_dir.mkdir(parents=True, exist_ok=True)
        parquet(local_dir / name, [f"text of {name}"])

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", flaky)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(corpus.time, "sleep", waits.append)
    c = open_corpus("climbmix", tmp_path, 1, log=notes.append)
    assert calls == ["shard_00000.parquet"] * 3 + ["shard_06542.parquet"] and waits == [2, 4]
    assert list(c.documents(c.val_files)) == ["text of shard_06542.parquet"]
    assert all("reset by peer; trying again" in note for note in notes) and len(notes) == 2

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", full)
    fails("cannot write it .No space left.*free some space", open_corpus, "climbmix", tmp_path, 2)
    for shards in (0, 6543):
        fails("must be from 1 to 6542", open_corpus, "climbmix", tmp_path, shards)


def test_progress_without_a_terminal(monkeypatch):
    now, lines = [0.0], []
    monkeypatch.setattr(corpus.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    for item in corpus.progress(((i, 10) for i in range(20)), 200, "reading", "files", lines.append):
        now[0] += 1.0
        assert item == len([None] * item)
    assert lines == [f"reading: {n} of 200 files" for n in (60, 120, 180)]
