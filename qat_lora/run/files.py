"""Files that are either complete or absent, folders that only one process at a time may write, and checksums of a
finished run's files, so that later readers notice if one has changed."""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from qat_lora.errors import UserError, first_line, is_of_output, said

# How libraries that raise no OSError report a failed write: tokenizers, safetensors, numpy, torch's zip writer.
WRITE_FAULT = re.compile(
    r"\(os error \d+\)|I/O error|No space left|quota exceeded|requested and \d+ written|"
    "PytorchStreamWriter failed|unexpected pos"
)
SUMS = "checksums.json"
# Not covered by it: they have their own checksums or may change later.
ASIDE = {SUMS, "summary.json", "checkpoints", "plots", "report.html", "tensorboard", "wandb"}
NO_ROOM = 2**16  # bytes: a disk with less than this left is full
HELD: dict[Path, BinaryIO] = {}  # the open lock files of this process, by folder


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn any exception in this block that reports a failed write (a full disk, no permission) into a UserError that
    names `path`. Other exceptions, and those from standard output, pass through unchanged."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # tokenizers raises nothing more specific
        if _write_fault(error) is None or is_of_output(error):
            raise
        raise cannot_write(path, error) from error


def _write_fault(error: BaseException | None) -> str | None:
    """Why a file could not be written, or None if the exception does not report a failed write."""
    chain = []
    while error is not None:
        chain.append(error)
        error = error.__cause__ or error.__context__
    for found in (link for link in chain if isinstance(link, OSError)):
        return found.strerror or first_line(found)
    for text in filter(WRITE_FAULT.search, map(said, chain)):
        return "No space left on device" if "No space left" in text else text.strip().splitlines()[0][:120]
    return None


def write_atomically(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Call write(file) on a temporary file next to `path`, flush it to disk and rename it. A failure leaves
    `path` as it was.

    Raises UserError with the path if it cannot be written (a full disk, no permission).
    """
    part = path.with_name(path.name + ".part")
    try:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(part, "wb") as file:
                write(file)
                file.flush()
                os.fsync(file.fileno())
            part.rename(path)
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)


def copy_file(source: Path, target: Path) -> None:
    """Copy a file of any size, atomically as `write_atomically` does."""
    with open(source, "rb") as opened:
        write_atomically(target, lambda file: shutil.copyfileobj(opened, file, 2**20))


def cannot_write(path: Path, error: Exception) -> UserError:
    """The error for a path that could not be written, with the reason and how to fix it."""
    reason = _write_fault(error) or first_line(error)
    root = error
    while root and not isinstance(root, OSError):
        root = root.__cause__ or root.__context__
    if isinstance(root, FileExistsError | NotADirectoryError | IsADirectoryError):
        return UserError(f"{path} could not be written ({reason}); give another path; earlier files are untouched")
    if getattr(root, "errno", None) is None and _is_full(path):  # the library does not say why
        reason = "No space left on device"
    fix = "free some space" if "No space" in reason or "quota" in reason else "free some space or check the permissions"
    return UserError(f"{path} could not be written ({reason}); {fix}; earlier files are untouched")


def _is_full(path: Path) -> bool:
    there = next((folder for folder in path.absolute().parents if folder.is_dir()), None)
    return there is not None and shutil.disk_usage(there).free < NO_ROOM


def lock(folder: Path) -> BinaryIO:
    """Create `folder` and lock it for this process until the process ends, however it ends.

    Returns the open lock file; closing it releases the lock. If this process locks the folder again, e.g. to restart a
    run that was interrupted in a notebook, the earlier lock is released. Raises UserError if another process holds it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if earlier := HELD.pop(folder.resolve(), None):
            earlier.close()
        file = HELD[folder.resolve()] = open(folder / ".lock", "ab")  # noqa: SIM115 — it stays open
    except OSError as error:
        raise cannot_write(folder, error) from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another process is writing {folder}; wait for it, or give another folder") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):  # a network file system without locks
            raise cannot_write(folder, error) from error
    return file


def as_json(content: dict | list) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def write_json(path: Path, content: dict | list) -> None:
    write_atomically(path, lambda file: file.write(as_json(content)))


def read_json(path: Path, kind: type = dict):
    """A JSON object (kind=list: array) from a file; raises UserError with its name if it is missing or damaged."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; restore it, or check the path") from None
    except UserError:
        raise
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is damaged ({error}); restore it from a copy, or create it again") from error
    if not isinstance(content, kind):
        what = "array" if kind is list else "object"
        raise UserError(f"{path} is damaged (not a JSON {what}); restore it from a copy, or create it again")
    return content


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder that becomes `path` at the end of the block; a failure removes it.

    Raises UserError if `path` already exists and is not empty, if another process is writing it, or if it cannot be
    written.
    """
    check_new(path)
    part = path.resolve().with_name(f".{path.resolve().name}.part")
    held = lock(part)
    try:
        with writing(path):
            for old in set(part.iterdir()) - {part / ".lock"}:  # left by a process that was killed
                shutil.rmtree(old) if old.is_dir() else old.unlink()
            yield part
            (part / ".lock").unlink()
            for file in filter(Path.is_file, part.rglob("*")):
                with open(file, "rb") as opened:
                    os.fsync(opened.fileno())
            part.rename(path)
    except UserError as error:
        raise UserError(str(error).replace(str(part), str(path))) from error
    finally:
        held.close()
        shutil.rmtree(part, ignore_errors=True)


def check_new(path: Path) -> None:
    """Raise UserError if `path` is a file or a folder that is not empty."""
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise UserError(f"{path} already exists and nothing is overwritten; give another path, or delete it")


# -- checksums of a finished run -------------------------------------------------------------------------------------
def write_sums(path: Path, unwritten: dict[str, bytes]) -> None:
    """Record the sha256 of each file of a run directory. unwritten: {name: content} of files still to be written."""
    files = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
    sums = {str(file): sha256(path / file) for file in files if file.parts[0] not in ASIDE and file.name[0] != "."}
    sums |= {name: hashlib.sha256(content).hexdigest() for name, content in unwritten.items()}
    write_json(path / SUMS, dict(sorted(sums.items())))


def check_files(path: Path, *names: str) -> None:
    """Raise UserError if a file or folder of a finished run has changed since the run wrote it. Files that the run did
    not have are not checked, nor are unfinished runs."""
    if not (path / SUMS).exists():
        return
    for name, wanted in read_json(path / SUMS).items():
        if name not in names and not name.startswith(tuple(f"{folder}/" for folder in names)):
            continue
        if not (path / name).is_file():
            raise UserError(f"{path / name} is missing; restore it, or train again with another --output-dir")
        if sha256(path / name) != wanted:
            raise UserError(
                f"{path / name} has changed since the run wrote it (checksum); restore it, or train again with "
                "another --output-dir"
            )
