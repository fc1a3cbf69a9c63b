"""checkpoint.py: what is saved comes back bit by bit; whatever breaks, and wherever, a whole checkpoint remains."""

import errno
import json
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

import checkpoint

FILES = ["model.safetensors", "optim.safetensors", "state.json"]


@pytest.fixture(autouse=True)
def fresh_seed():
    """New inputs every run; the seed is printed with a failure."""
    torch.set_num_threads(1)
    seed = random.SystemRandom().randrange(2**32)
    print(f"torch.manual_seed({seed})")
    torch.manual_seed(seed)


def content(step):
    """Some state: odd shapes, several dtypes, a scalar, views of one storage, extreme values."""
    base = torch.randn(6, 5)
    model = {
        "w": torch.randn(3, 1, 7),
        "top": base[:2],
        "bottom": base[2:],
        "transposed": torch.randn(4, 3).T,
        "half": torch.randn(11).bfloat16(),
        "odd": torch.tensor([float("nan"), float("inf"), -0.0, 1e-45]),
        "parameter": torch.nn.Parameter(torch.randn(2)),
    }
    optim = {"t": torch.tensor(step), "a+b.buffer": torch.randn(5, 2, 3), "empty": torch.zeros(0, 4)}
    state = {"step": step, "config": 'é "quoted"\n', "loader": {"position": [1, 2**60], "rng": None}, "x": 0.1 + 0.2}
    return model, optim, state


def bits(t):
    return t.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same(found, expected):
    for a, b in zip(found[:2], expected[:2], strict=True):
        assert a.keys() == b.keys()
        for name in a:
            assert a[name].dtype == b[name].dtype and a[name].shape == b[name].shape
            assert torch.equal(bits(a[name]), bits(b[name])), name
    assert found[2] == expected[2]


def step_dir(run, step):
    return run / "checkpoints" / f"step_{step:08d}"


def one_line(error):
    text = str(error.value)
    return "\n" not in text and len(text) < 500


def test_round_trip(tmp_path):
    expected = content(7)
    checkpoint.save(step_dir(tmp_path, 7), *expected)  # makes the folders above, too
    assert_same(checkpoint.load(step_dir(tmp_path, 7)), expected)
    assert sorted(f.name for f in step_dir(tmp_path, 7).iterdir()) == FILES
    assert [f.name for f in (tmp_path / "checkpoints").iterdir()] == ["step_00000007"]
    assert json.loads((step_dir(tmp_path, 7) / "state.json").read_text())["step"] == 7


def test_saving_changes_nothing_and_a_view_is_saved_without_its_storage(tmp_path):
    big = torch.randn(1000, 100)
    kept = big.clone()
    checkpoint.save(tmp_path / "a", {"row": big[3]}, {"t": torch.tensor(1)}, {})
    assert torch.equal(big, kept) and (tmp_path / "a" / "model.safetensors").stat().st_size < 1000
    model, _, _ = checkpoint.load(tmp_path / "a")
    assert torch.equal(model["row"], big[3])


def test_saving_over_a_checkpoint_replaces_it(tmp_path):
    folder = step_dir(tmp_path, 3)
    checkpoint.save(folder, *content(3))
    expected = content(3)
    checkpoint.save(folder, *expected)
    assert_same(checkpoint.load(folder), expected)
    assert [f.name for f in folder.parent.iterdir()] == [folder.name]


def test_newest(tmp_path):
    assert checkpoint.newest(tmp_path) is None
    assert checkpoint.newest(tmp_path / "missing") is None
    (tmp_path / "checkpoints").mkdir()
    assert checkpoint.newest(tmp_path) is None
    for step in (9, 100, 20):
        checkpoint.save(step_dir(tmp_path, step), *content(step))
    assert checkpoint.newest(tmp_path) == step_dir(tmp_path, 100)
    checkpoint.save(tmp_path / "checkpoints" / "step_123456789", *content(1))  # nine digits
    assert checkpoint.newest(tmp_path).name == "step_123456789"


@pytest.mark.parametrize(
    "name",
    ["trial", "step_00000500.tmp", "step_final", "step_", "step_00000500.bak", "step_00000500 (copy)", "step_1_0"],
)
def test_newest_passes_over_other_names(tmp_path, name):
    checkpoint.save(tmp_path / "checkpoints" / name, *content(500))
    assert checkpoint.newest(tmp_path) is None
    checkpoint.save(step_dir(tmp_path, 4), *content(4))
    assert checkpoint.newest(tmp_path) == step_dir(tmp_path, 4)


def test_newest_passes_over_a_folder_without_state_and_a_file(tmp_path):
    checkpoint.save(step_dir(tmp_path, 4), *content(4))
    step_dir(tmp_path, 5).mkdir()
    step_dir(tmp_path, 6).write_text("no folder")
    assert checkpoint.newest(tmp_path) == step_dir(tmp_path, 4)


# ---------------------------------------------------------------------------------------------------- broken files


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.99])
def test_a_truncated_file_is_one_line(tmp_path, name, share):
    checkpoint.save(tmp_path / "c", *content(1))
    file = tmp_path / "c" / name
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    with pytest.raises(OSError, match="c can not be read") as error:
        checkpoint.load(tmp_path / "c")
    assert one_line(error)


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_or_folder_is_one_line(tmp_path, name):
    with pytest.raises(OSError, match="nowhere") as error:
        checkpoint.load(tmp_path / "nowhere")
    assert one_line(error)
    checkpoint.save(tmp_path / "c", *content(1))
    (tmp_path / "c" / name).unlink()
    with pytest.raises(OSError, match="c can not be read") as error:
        checkpoint.load(tmp_path / "c")
    assert one_line(error)


class Trap:
    """Unpickling this makes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", ["pickle", "torch", "html", "zeros", "random"])
def test_foreign_content_is_one_line_and_never_run(tmp_path, name, kind):
    checkpoint.save(tmp_path / "c", *content(1))
    trap = Trap(tmp_path / "sprung")
    if kind == "torch":
        torch.save({"w": trap}, tmp_path / "c" / name)
    else:
        data = {"pickle": pickle.dumps(trap), "html": b"<html>404</html>", "zeros": bytes(64)}
        (tmp_path / "c" / name).write_bytes(data.get(kind, b"\xff" + random.randbytes(200)))
    with pytest.raises(OSError, match="c can not be read") as error:
        checkpoint.load(tmp_path / "c")
    assert one_line(error) and not trap.path.exists()


# ---------------------------------------------------------------------------------------------------- failed writes


class Killed(BaseException):
    """The process ends here: no handler runs."""


def interrupt(patch, at, after, failure):
    """Make the `at`-th call that changes the disk inside `checkpoint.save` raise failure(), before or after its work.

    Returns a list whose length is the number of such calls.
    """
    calls = []

    def wrap(owner, name):
        real = getattr(owner, name)

        def call(*args, **kwargs):
            calls.append(name)
            if len(calls) == at:
                if after:
                    real(*args, **kwargs)
                raise failure()
            return real(*args, **kwargs)

        patch.setattr(owner, name, call)

    wrap(checkpoint, "save_file")
    wrap(Path, "write_text")
    wrap(os, "fsync")
    wrap(os, "replace")
    wrap(os, "rename")
    real_rmtree = shutil.rmtree

    def rmtree(path, ignore_errors=False, **kwargs):
        calls.append("rmtree")
        if len(calls) == at:
            if after:
                real_rmtree(path, ignore_errors=ignore_errors, **kwargs)
            if failure is Killed or not ignore_errors:
                raise failure()
            return None
        return real_rmtree(path, ignore_errors=ignore_errors, **kwargs)

    patch.setattr(shutil, "rmtree", rmtree)
    return calls


class FullDisk(OSError):
    def __init__(self):
        super().__init__(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("failure", [Killed, FullDisk])
@pytest.mark.parametrize("place", ["new", "same"])
def test_a_failure_at_any_point_leaves_a_whole_checkpoint(tmp_path, place, failure, after):
    """The old one, or the new one: where a step is saved again in its own folder, too."""
    old, new = content(1), content(1 if place == "same" else 2)
    new[2]["marker"] = "new"
    at, done = 0, False
    while not done:
        at += 1
        run = tmp_path / str(at)
        checkpoint.save(step_dir(run, 1), *old)
        with pytest.MonkeyPatch.context() as patch:
            calls = interrupt(patch, at, after, failure)
            try:
                checkpoint.save(step_dir(run, new[2]["step"]), *new)
                done = len(calls) < at
            except (Killed, OSError) as error:
                assert isinstance(error, Killed) == (failure is Killed)
        where = f"call {at}, {calls[-1]}, fails"
        found = checkpoint.newest(run)
        assert found is not None, f"{where}: no checkpoint left of {[str(p.name) for p in run.rglob('*')]}"
        loaded = checkpoint.load(found)
        assert_same(loaded, new if "marker" in loaded[2] else old)
        checkpoint.save(step_dir(run, 3), *content(3))  # what was left behind is in nobody's way
        checkpoint.save(step_dir(run, 1), *content(1))
        assert checkpoint.newest(run) == step_dir(run, 3)
    assert at > 5


@pytest.mark.parametrize(
    "error",
    [FullDisk(), SafetensorError("I/O error: No space left on device (os error 28)")],
    ids=["os", "safetensors"],
)
@pytest.mark.parametrize("file", [1, 2])
def test_a_full_disk_is_one_line_and_leaves_nothing_behind(tmp_path, monkeypatch, error, file):
    checkpoint.save(step_dir(tmp_path, 1), *content(1))
    calls = []

    def save_file(tensors, path):
        calls.append(path)
        Path(path).write_bytes(b"half of it")
        if len(calls) == file:
            raise error

    monkeypatch.setattr(checkpoint, "save_file", save_file)
    with pytest.raises(OSError, match="could not write checkpoint .*step_00000002.*No space left") as raised:
        checkpoint.save(step_dir(tmp_path, 2), *content(2))
    assert one_line(raised) and len(calls) == file
    assert [f.name for f in (tmp_path / "checkpoints").iterdir()] == ["step_00000001"]


def test_a_place_that_can_not_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="could not write checkpoint") as raised:
        checkpoint.save(tmp_path / "file" / "step_00000001", *content(1))
    assert one_line(raised)


def test_what_a_killed_run_left_is_cleared(tmp_path):
    leftover = tmp_path / "checkpoints" / "step_00000001.tmp"
    leftover.mkdir(parents=True)
    (leftover / "state.json").write_text("{")
    (leftover / "stray").write_text("")
    assert checkpoint.newest(tmp_path) is None
    expected = content(1)
    checkpoint.save(step_dir(tmp_path, 1), *expected)
    assert_same(checkpoint.load(step_dir(tmp_path, 1)), expected)
    assert not leftover.exists() and sorted(f.name for f in step_dir(tmp_path, 1).iterdir()) == FILES
