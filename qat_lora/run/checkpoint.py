"""Checkpoints: a directory that is either whole or not there."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from qat_lora.backend.group import ALONE, Group
from qat_lora.errors import UserError
from qat_lora.run.files import cannot_write, read_json, sha256, write_atomically
from qat_lora.run.rundir import say

FILES = ("model.safetensors", "trainer.pt")
KEEP = 2  # the newest, and one to fall back to when the newest is damaged


def save_checkpoint(
    run_path: Path, step: int, tensors: dict[str, Tensor], trainer: dict, meta: dict, keep: int = KEEP
) -> Path:
    """Write checkpoints/step_N and name it in LATEST (which is for people: resuming takes the newest whole one).

    tensors: the model's, on the CPU, tied ones once. trainer: optimiser, RNG, counters; plain values and tensors.
    meta: plain values. Checkpoints beyond `keep` are removed afterwards. A failure (a full disk) removes the
    half-written directory and leaves the others.
    """
    folder = run_path / "checkpoints"
    target, part = folder / f"step_{step}", folder / f".part_{step}"
    try:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        save_file({name: t.contiguous() for name, t in tensors.items()}, part / FILES[0])
        meta = {"step": step, **meta}
        with open(part / FILES[1], "wb") as file:
            torch.save({"meta": meta, "state": trainer}, file)
        sums = {name: sha256(part / name) for name in FILES}
        (part / "meta.json").write_text(json.dumps({**meta, "sha256": sums}, indent=2))
        for path in part.iterdir():
            _sync(path)
        shutil.rmtree(target, ignore_errors=True)
        part.rename(target)
        _sync(folder)
    except (OSError, RuntimeError, SafetensorError) as error:  # torch and safetensors have their own for a full disk
        shutil.rmtree(part, ignore_errors=True)
        raise cannot_write(target, error) from error
    write_atomically(folder / "LATEST", lambda file: file.write(target.name.encode()))
    for path in _newest_first(folder)[keep:]:
        shutil.rmtree(path, ignore_errors=True)
    return target


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _newest_first(folder: Path) -> list[Path]:
    numbered = [path for path in folder.glob("step_*") if path.name.removeprefix("step_").isdecimal()]
    return sorted(numbered, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def load_checkpoint(run_path: Path, group: Group = ALONE) -> tuple[dict[str, Tensor], dict, dict] | None:
    """(tensors, trainer, meta) of the newest whole checkpoint of a run; None where there is none at all.

    A damaged one is named and set aside; raises UserError where every one is damaged. Of a group of workers the first
    chooses, and all read: the hosts of a job share one run directory.
    """
    path = group.on_main(lambda: _newest_whole(run_path))
    if path is None:
        return None
    if not path.is_dir():
        raise UserError(f"checkpoint {path} is not there on this host; the hosts of a job share one run directory")
    return read_checkpoint(path)


def _newest_whole(run_path: Path) -> Path | None:
    folder = run_path / "checkpoints"
    if folder.is_dir():
        for part in folder.glob(".part_*"):
            shutil.rmtree(part, ignore_errors=True)
    found = _newest_first(folder) if folder.is_dir() else []
    for path in found:
        try:
            _check(path)
            return path
        except UserError as error:
            say(f"{error}; it is set aside, trying the one before")
            aside = path.with_name(f"damaged_{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
    if found or list(folder.glob("damaged_step_*")):
        raise UserError(f"no whole checkpoint is left in {folder}; start again with another --output-dir")
    return None


def read_checkpoint(path: Path) -> tuple[dict[str, Tensor], dict, dict]:
    """One checkpoint directory; raises UserError naming the file that is missing or damaged."""
    _check(path)
    trainer = torch.load(path / FILES[1], weights_only=True, map_location="cpu")
    return load_file(path / FILES[0]), trainer["state"], trainer["meta"]


def _check(path: Path) -> None:
    sums = read_json(path / "meta.json").get("sha256")
    for name in FILES:
        if not (path / name).is_file():
            raise UserError(f"checkpoint {path}: {name} is missing")
        if not isinstance(sums, dict) or sha256(path / name) != sums.get(name):
            raise UserError(f"checkpoint {path}: {name} is damaged (checksum)")
