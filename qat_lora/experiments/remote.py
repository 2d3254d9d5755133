"""Checkpoints on a bucket: a copy of each, with what its run needs to go on elsewhere."""

import shutil
from pathlib import Path

from qat_lora.errors import UserError
from qat_lora.run.rundir import say
from qat_lora.urls import check_writable, newest, prune, pull_newest, push

KEEP = 2
BESIDE = ("config.yaml", "metrics.jsonl", "manifest.json")  # of a run directory; with the last it is one


def copy_out(run_path: Path, checkpoint: Path, url: str) -> None:
    """Copy a checkpoint to `url`, a folder or a bucket, with the files of its run directory; older copies go."""
    push(checkpoint, url, [run_path / name for name in BESIDE])
    prune(url, KEEP)


def bring_back(url: str, folder: Path) -> None:
    """Make the run directory `folder` from the newest copy at `url`; nothing where it is a run already or there is no
    copy. Raises UserError where no later copy could be written."""
    check_writable(url)
    if (folder / "manifest.json").exists():
        return
    found = pull_newest(url, folder / "checkpoints")
    if found:
        for name in BESIDE:
            shutil.move(found / name, folder / name)
        say(f"{found.name} of {url} brought back to {folder}")


def check_unused(url: str) -> None:
    """Raise UserError where a new run would bury another's checkpoints, or could write none."""
    check_writable(url)
    if (there := newest(url)) is not None:
        raise UserError(f"--checkpoint-path {url} holds {there} of a run; --resume auto goes on, or give another")
