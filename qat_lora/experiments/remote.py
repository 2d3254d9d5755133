"""Copies of checkpoints in a bucket, with everything that is needed to resume the run elsewhere."""

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from qat_lora.errors import UserError
from qat_lora.run.checkpoint import COPIES, kept_files
from qat_lora.run.rundir import say
from qat_lora.urls import check_writable, fetch, newest, prune, pull, push

KEEP = 2
BESIDE = ("config.yaml", "metrics.jsonl", "manifest.json")  # of a run directory; with the last it is one


def copy_out(run_path: Path, checkpoint: Path, url: str) -> None:
    """Copy a checkpoint to `url`, a folder or a bucket, with the files of its run directory; older copies go."""
    kept = {run_path / "checkpoints" / COPIES / total for total in _kept(checkpoint)}
    push(checkpoint, url, [*(run_path / name for name in BESIDE), *sorted(kept)])
    prune(url, KEEP)


def bring_back(url: str, folder: Path, check: Callable[[Path], object]) -> None:
    """Make the run directory `folder` from the copies at `url`; nothing where it is a run already or there is no copy.

    check(path) raises UserError where config.yaml and manifest.json in `path` are of another run. So does bring_back,
    before anything is touched, and where no later copy could be written.
    """
    check_writable(url)
    if (step := newest(url)) is None:
        return
    with tempfile.TemporaryDirectory() as there:
        fetch(f"{url}/{step}", BESIDE, Path(there))
        try:
            check(Path(there))
        except UserError as error:
            raise UserError(str(error).replace(there, f"{url}/{step}")) from error
        if (folder / "manifest.json").exists():
            return
        for found in pull(url, folder / "checkpoints"):
            for name in BESIDE:
                (found / name).unlink(missing_ok=True)
            (found.parent / COPIES).mkdir(exist_ok=True)
            for total in _kept(found):
                (found / total).replace(found.parent / COPIES / total)
        for name in BESIDE:
            shutil.move(f"{there}/{name}", folder / name)
    say(f"{step} of {url} brought back to {folder}")


def _kept(checkpoint: Path) -> set[str]:
    """The names of the file copies that a checkpoint relies on; none for a damaged one, which is set aside later."""
    try:
        return kept_files(checkpoint)
    except UserError:
        return set()


def check_unused(url: str) -> None:
    """Raise UserError where a new run would bury another's checkpoints, or could write none."""
    check_writable(url)
    if (there := newest(url)) is not None:
        raise UserError(
            f"--checkpoint-path {url} holds {there} of a run; resume it with --resume auto, or give another folder or "
            "URL"
        )
