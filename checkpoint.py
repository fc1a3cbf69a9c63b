"""Checkpoints: a folder with model.safetensors, optim.safetensors and state.json, written whole or not at all."""

import json
import os
import shutil
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

STATE = "state.json"


def save(folder: Path, model_state, optim_state, state):
    """Write a checkpoint folder. It is built beside its place, synced, and renamed, so a crash leaves no half one.

    model_state, optim_state: {name: tensor}; state: JSON-able.
    Raises OSError (no space left, ...) with nothing left behind.
    """
    folder, building = Path(folder), Path(folder).with_name(f"{Path(folder).name}.tmp")
    shutil.rmtree(building, ignore_errors=True)
    try:
        building.mkdir(parents=True)
        save_file(cpu(model_state), building / "model.safetensors")
        save_file(cpu(optim_state), building / "optim.safetensors")
        (building / STATE).write_text(json.dumps(state))
        for file in building.iterdir():
            sync(file)
        if folder.exists():
            shutil.rmtree(folder)
        os.replace(building, folder)
        sync(folder.parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(building, ignore_errors=True)
        raise OSError(f"could not write checkpoint {folder}: {error}") from error


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
    """The whole checkpoint with the highest step in a run folder, or None."""
    found = sorted(Path(run_dir).glob("checkpoints/step_*/" + STATE))
    found = [f.parent for f in found if not f.parent.name.endswith(".tmp")]
    return max(found, key=lambda f: int(f.name.removeprefix("step_"))) if found else None


def cpu(tensors):
    """Contiguous copies on the host; a view would be saved with all of its storage."""
    return {name: t.detach().cpu().contiguous() for name, t in tensors.items()}


def sync(path):
    """Flush a file or folder to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
