"""Checkpoints: directories that are either complete or absent, with copies of the files that a resumed run needs."""

import json
import os
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qat_lora.errors import UserError, first_line
from qat_lora.hosts.group import ALONE, Group
from qat_lora.run.console import say
from qat_lora.run.files import check_files, copy_file, read_json, sha256, write_atomically, writing
from qat_lora.run.hosts import shared_file

MODEL, TRAINER = "model.safetensors", "trainer.pt"
SHARDS = "shards"  # folder in place of MODEL if the model is shared out over workers, see backend/sharding.py
KEEP = 2  # the newest, and one to fall back to if it is damaged
COPIES = "files"  # folder in checkpoints/ with one copy of each file, named by its sha256


def save_checkpoint(
    run_path: Path, step: int, tensors: dict[str, Tensor] | Path, trainer: dict, meta: dict, keep: int = KEEP,
    files: Sequence[str] = (),
) -> Path:  # fmt: skip
    """Write checkpoints/step_N and name it in LATEST (for people: a run resumes from its newest intact checkpoint).

    tensors: the model's, on the CPU, each tied tensor once, or a folder of shards, which is moved. trainer: optimiser,
    RNG and counters, as plain values and tensors. meta: plain values. files: files and folders of the run directory
    that a resumed run relies on, e.g. best.pt; meta.json stores their checksums and checkpoints/files a copy of each,
    from which `restore_files` restores them. Then all but the newest `keep` checkpoints are removed. A failure (a full
    disk) removes the half-written directory and leaves the others.
    """
    folder = run_path / "checkpoints"
    target, part = folder / f"step_{step}", folder / f".part_{step}"
    try:
        with writing(target):
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
            if isinstance(tensors, Path):
                tensors.rename(part / SHARDS)
            else:
                save_file({name: t.contiguous() for name, t in tensors.items()}, part / MODEL)
            copies = {name: _copy(run_path / name, folder / COPIES) for name in _existing(run_path, files)}
            meta = {"step": step, **meta, "files": copies}
            with open(part / TRAINER, "wb") as file:
                torch.save({"meta": meta, "state": trainer}, file)
            sums = {name: sha256(part / name) for name in _existing(part, [MODEL, SHARDS, TRAINER])}
            (part / "meta.json").write_text(json.dumps({**meta, "sha256": sums}, indent=2), encoding="utf-8")
            for path in part.rglob("*"):
                _sync(path)
            shutil.rmtree(target, ignore_errors=True)
            part.rename(target)
            _sync(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    write_atomically(folder / "LATEST", lambda file: file.write(target.name.encode()))
    for path in _newest_first(folder)[keep:]:
        shutil.rmtree(path, ignore_errors=True)
    _drop_copies(folder)
    return target


def checkpoints_of(run_path: Path) -> list[Path]:
    """The checkpoints of a run, the newest first, intact or not."""
    return _newest_first(run_path / "checkpoints")


# -- the run's files -------------------------------------------------------------------------------------------------
def _existing(run_path: Path, files: Sequence[str]) -> list[str]:
    """The given files that exist, and every file in given folders, as sorted paths relative to the run."""
    found = [run_path / name for name in files]
    found += [inner for path in found if path.is_dir() for inner in path.rglob("*")]
    return sorted(str(path.relative_to(run_path)) for path in found if path.is_file())


def _copy(path: Path, copies: Path) -> str:
    """Copy a file to the folder `copies`, named by its sha256, unless it is already there; returns the sha256."""
    total = sha256(path)
    if not (copies / total).exists():
        copy_file(path, copies / total)
    return total


def copies_of(path: Path) -> set[str]:
    """The names of the copies that a checkpoint relies on. Raises UserError if its meta.json is damaged."""
    copies = read_json(path / "meta.json").get("files")
    if not isinstance(copies, dict) or not all(isinstance(total, str) for total in copies.values()):
        raise UserError(f"checkpoint {path}: meta.json is damaged (files)")
    return set(copies.values())


def _drop_copies(folder: Path) -> None:
    """Remove the copies that no checkpoint refers to."""
    named: set[str] = set()
    for path in _newest_first(folder):
        try:
            named |= copies_of(path)
        except UserError:  # a damaged checkpoint may refer to any copy
            return
    for copy in (folder / COPIES).glob("*"):
        if copy.name not in named:
            copy.unlink(missing_ok=True)


def restore_files(run_path: Path, copies: dict[str, str], files: Sequence[str], step: int) -> None:
    """Restore `files` of a run directory to their state at a checkpoint; copies: {name: sha256} from its meta.json.

    Files that are missing, damaged or from a later step are restored from their copies. Files that did not exist at the
    checkpoint are removed; the run writes them again. Raises UserError if a file and its copy are both missing or
    damaged.
    """
    for name in set(_existing(run_path, files)) - copies.keys():
        (run_path / name).unlink()
    for name in files:
        if (run_path / name).is_dir() and not _existing(run_path, [name]):
            shutil.rmtree(run_path / name)  # an empty folder would be mistaken for a finished one
    for name, total in copies.items():
        path, copy = run_path / name, run_path / "checkpoints" / COPIES / total
        if path.is_file() and sha256(path) == total:
            continue
        if not copy.is_file() or sha256(copy) != total:
            raise UserError(
                f"{path} has changed since step {step} (checksum), and its copy {copy} is missing or damaged, too; "
                "restore one of them, or start again with another --output-dir"
            )
        if not path.is_file():
            say(f"{path} was missing; restored from the checkpoint")
        copy_file(copy, path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _newest_first(folder: Path) -> list[Path]:
    numbered = [path for path in folder.glob("step_*") if path.name.removeprefix("step_").isdecimal()]
    return sorted(numbered, key=lambda path: int(path.name.removeprefix("step_")), reverse=True)


def load_checkpoint(run_path: Path, group: Group = ALONE) -> tuple[dict[str, Tensor] | Path, dict, dict] | None:
    """(tensors or the folder of shards, trainer, meta) of a run's newest intact checkpoint; None if it has no
    checkpoint at all.

    Damaged checkpoints are reported and set aside; raises UserError if all are damaged. Worker 0 chooses the
    checkpoint and sends its files to workers that do not have them, except shards, which all hosts have to share.
    """
    path = group.on_main(lambda: _newest_whole(run_path))
    if path is None:
        return None
    whole = group.on_main((path / MODEL).exists)
    if not whole and not (path / SHARDS).is_dir():
        raise UserError(f"{path / SHARDS} is not on this host; put --output-dir where all hosts read and write")
    model_file = shared_file(path / MODEL, group) if whole else nullcontext()
    with model_file as model, shared_file(path / TRAINER, group) as trainer:
        try:
            state = torch.load(trainer, weights_only=True, map_location="cpu")
            return load_file(model) if whole else path / SHARDS, state["state"], state["meta"]
        except Exception as error:  # right checksums, wrong content; weights_only never runs code from a pickle
            raise UserError(
                f"checkpoint {path}: {TRAINER} is not a trainer state ({first_line(error)}), "
                "so it was not saved by this program; start again with another --output-dir"
            ) from error


def _newest_whole(run_path: Path) -> Path | None:
    folder = run_path / "checkpoints"
    for part in folder.glob(".part_*"):
        shutil.rmtree(part, ignore_errors=True)
    found = _newest_first(folder)
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
        raise UserError(f"no intact checkpoint is left in {folder}; start again with another --output-dir")
    return None


def _check(path: Path) -> None:
    sums = read_json(path / "meta.json").get("sha256")
    copies_of(path)
    if not isinstance(sums, dict) or TRAINER not in sums:
        raise UserError(f"checkpoint {path}: meta.json is damaged (sha256)")
    for name, total in sums.items():
        if not (path / name).is_file():
            raise UserError(f"checkpoint {path}: {name} is missing")
        if sha256(path / name) != total:
            raise UserError(f"checkpoint {path}: {name} is damaged (checksum)")


def read_best(run: Path, *others: str) -> dict:
    """The content of a finished run's best.pt, on the CPU. others: further files of the run that the caller reads.
    Raises UserError if the run has no best.pt yet, or if one of the files is missing, damaged or changed."""
    path = run / "best.pt"
    if not run.is_dir():
        raise UserError(f"{run}: no such run directory; check the path")
    if not path.exists():
        raise UserError(f"{run} holds no best.pt: it is no run of this experiment, or has not finished; resume it")
    check_files(run, "best.pt", *others)
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch's reader raises errors of many kinds
        raise UserError(f"{path} is damaged ({first_line(error)}); restore it, or train again") from error
