"""Folders that may be in a bucket: gs://, s3:// or any other URL that fsspec opens."""

import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import fsspec

from qat_lora.errors import FULL_DISK, STOPS, UserError, first_line
from qat_lora.run.checkpoint import COPIES, KEEP, copies_of
from qat_lora.run.console import say

LAST = "meta.json"  # written last: a checkpoint without it is incomplete
CLOUDS = {"gs": "gcsfs", "gcs": "gcsfs", "s3": "s3fs", "az": "adlfs", "abfs": "adlfs"}


class Missing(UserError, FileNotFoundError):
    """No file or folder at a URL."""


@contextmanager
def opened(url: str) -> Iterator[tuple[fsspec.AbstractFileSystem, str]]:
    """Yield (file system, path in it) for a folder or URL. Any error in the block becomes a UserError with the URL."""
    protocol = url.split("://")[0] if "://" in url else "file"
    try:
        yield fsspec.core.url_to_fs(url)
    except (UserError, *STOPS):
        raise
    except ImportError as error:
        fix = f"pip install {CLOUDS[protocol]}" if protocol in CLOUDS else first_line(error)
        raise UserError(f"{url}: the package for {protocol}:// is missing; {fix}, or use a folder") from error
    except FileNotFoundError:
        raise Missing(f"{url}: no such file or folder; check the address") from None
    except BaseException as error:  # each cloud package has its own exceptions
        full = isinstance(error, OSError) and error.errno in FULL_DISK
        fix = "free some space there" if full else "check the address and your permissions there"
        raise UserError(f"{url} cannot be used ({type(error).__name__}: {first_line(error)}); {fix}") from error


@contextmanager
def local_folder(url: str) -> Iterator[Path]:
    """Yield a local folder: `url` itself, or a temporary copy of a folder in a bucket."""
    if "://" not in url:
        yield Path(url)
        return
    with tempfile.TemporaryDirectory() as copy:
        with opened(url) as (files, path):
            if not files.isdir(path):
                raise FileNotFoundError
            _get(files, path, Path(copy))
        yield Path(copy)


def _get(files: fsspec.AbstractFileSystem, path: str, folder: Path) -> None:
    for name in files.find(path):
        target = folder / name[len(path) :].lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        files.get_file(name, str(target))


# -- checkpoints -----------------------------------------------------------------------------------------------------
def _whole(files: fsspec.AbstractFileSystem, path: str) -> list[int]:
    """Steps of the complete checkpoints at `path`, newest first."""
    files.invalidate_cache()
    if not files.exists(path):
        return []
    names = [name.rstrip("/").rsplit("/", 1)[-1] for name in files.ls(path, detail=False)]
    steps = [int(name[5:]) for name in names if name.startswith("step_") and name[5:].isdecimal()]
    return sorted((step for step in steps if files.exists(f"{path}/step_{step}/{LAST}")), reverse=True)


def check_writable(url: str) -> None:
    """Raise UserError if a folder or URL cannot be written to; it is created if it does not exist."""
    with opened(url) as (files, path):
        files.makedirs(path, exist_ok=True)
        files.pipe_file(f"{path}/.probe", b"may I?")
        files.rm_file(f"{path}/.probe")


def newest(url: str) -> str | None:
    """Name of the newest complete checkpoint at a URL, or None."""
    with opened(url) as (files, path):
        return next((f"step_{step}" for step in _whole(files, path)), None)


def push(checkpoint: Path, url: str, beside: Sequence[Path] = ()) -> None:
    """Copy a checkpoint's folder to a URL, under its own name, together with the files in `beside`."""
    with opened(url) as (files, path):
        target = f"{path}/{checkpoint.name}"
        if files.exists(target):  # left by a run that then resumed from an earlier step
            files.rm(target, recursive=True)
        files.makedirs(target, exist_ok=True)
        for file in sorted([*beside, *checkpoint.iterdir()], key=lambda file: file.name == LAST):
            files.put_file(str(file), f"{target}/{file.name}")


def pull(url: str, folder: Path) -> list[Path]:
    """Copy all complete checkpoints into `folder`; returns their paths, newest first. They may still be damaged."""
    found = []
    with opened(url) as (files, path):
        for step in _whole(files, path):
            target, part = folder / f"step_{step}", folder / f".part_{step}"
            for there in (part, target):  # left by a process that died here
                shutil.rmtree(there, ignore_errors=True)
            _get(files, f"{path}/step_{step}", part)
            found.append(part.rename(target))
    return found


def prune(url: str, keep: int) -> None:
    """Remove all complete checkpoints at a URL except the newest `keep`."""
    with opened(url) as (files, path):
        for step in _whole(files, path)[keep:]:
            files.rm(f"{path}/step_{step}", recursive=True)


# Copied with every checkpoint; manifest.json comes last, because a folder that has it counts as a run.
BESIDE = ("config.yaml", "metrics.jsonl", "manifest.json")


def copy_out(run_path: Path, checkpoint: Path, url: str) -> None:
    """Copy a checkpoint, with the files of its run directory that it needs, to the folder or bucket `url`; remove old
    copies."""
    copies = {run_path / "checkpoints" / COPIES / total for total in _copies(checkpoint)}
    push(checkpoint, url, [*(run_path / name for name in BESIDE), *sorted(copies)])
    prune(url, KEEP)


def bring_back(url: str, folder: Path, check: Callable[[Path], object]) -> None:
    """Restore the run directory `folder` from the copies at `url`, unless it already holds a run or there is no copy.

    check(path) raises UserError if config.yaml and manifest.json in `path` belong to another run; this happens before
    anything is changed. bring_back also raises UserError if `url` cannot be written to.
    """
    check_writable(url)
    if (step := newest(url)) is None:
        return
    with tempfile.TemporaryDirectory() as there:
        with opened(f"{url}/{step}") as (files, path):
            for name in BESIDE:
                files.get_file(f"{path}/{name}", f"{there}/{name}")
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
            for total in _copies(found):
                (found / total).replace(found.parent / COPIES / total)
        for name in BESIDE:
            shutil.move(f"{there}/{name}", folder / name)
    say(f"restored {step} from {url} to {folder}")


def _copies(checkpoint: Path) -> set[str]:
    """The names of the file copies that a checkpoint relies on; none for a damaged one, which is set aside later."""
    try:
        return copies_of(checkpoint)
    except UserError:
        return set()


def check_unused(url: str) -> None:
    """Raise UserError if `url` holds checkpoints of another run, or cannot be written to."""
    check_writable(url)
    if (there := newest(url)) is not None:
        raise UserError(
            f"--checkpoint-path {url} holds {there} of a run; resume it with --resume auto, or give another folder or "
            "URL"
        )
