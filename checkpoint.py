"""Checkpoints: a folder with model.safetensors, optim.safetensors and state.json, written whole or not at all."""

import json
import os
import re
import shutil
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

STATE = "state.json"


def save(folder: Path, model_state, optim_state, state):
    """Write a checkpoint folder. It is built beside its place, synced, and renamed, so a crash leaves no half one,
    and what stood there before stays readable, as `<folder>.old`, until the new one is in place.

    model_state, optim_state: {name: tensor}; state: JSON-able.
    Raises OSError (no space left, ...) with the folder as it was.
    """
    folder = Path(folder)
    building, old = (folder.with_name(folder.name + end) for end in (".tmp", ".old"))
    shutil.rmtree(building, ignore_errors=True)
    try:
        put_back(folder, old)
        building.mkdir(parents=True)
        save_file(on_cpu(model_state), building / "model.safetensors")
        save_file(on_cpu(optim_state), building / "optim.safetensors")
        (building / STATE).write_text(json.dumps(state))
        for path in (*building.iterdir(), building):
            sync(path)
        if folder.exists():
            os.replace(folder, old)
        os.replace(building, folder)
        sync(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(building, ignore_errors=True)
        with suppress(OSError):  # `newest` finds it under the other name too
            put_back(folder, old)
        raise OSError(f"could not write checkpoint {folder}: {error}") from error


def put_back(folder, old):
    """Undo a replacement that stopped half-way."""
    if old.exists():
        if folder.exists():
            shutil.rmtree(old)
        else:
            os.replace(old, folder)


def load(folder: Path, device="cpu"):
    """(model_state, optim_state, state) of a checkpoint folder. Raises OSError in one line where it is not whole."""
    folder = Path(folder)
    try:
        state = json.loads((folder / STATE).read_text())
        model = load_file(folder / "model.safetensors", device=str(device))
        optim = load_file(folder / "optim.safetensors", device=str(device))
    except (OSError, ValueError, SafetensorError) as error:
        raise OSError(f"checkpoint {folder} can not be read: {error}") from error
    return model, optim, state


def newest(run_dir: Path):
    """The whole checkpoint with the highest step in a run folder, or None. One that was about to be replaced
    (`.old`) counts only where the one that replaces it is missing."""
    found = []
    for file in Path(run_dir).glob("checkpoints/*/" + STATE):
        if match := re.fullmatch(r"step_([0-9]+)(\.old)?", file.parent.name):
            found.append((int(match[1]), match[2] is None, file.parent))
    return max(found)[2] if found else None


def on_cpu(tensors):
    """The tensors on the host and contiguous: a view would be saved with all of its storage."""
    return {name: t.detach().cpu().contiguous() for name, t in tensors.items()}


def sync(path):
    """Flush a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
