"""Files that are either whole or not there, and folders that one process at a time writes."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from qat_lora.errors import UserError, first_line


def write_atomically(path: Path, write: Callable[[BinaryIO], None]) -> None:
    """Call write(file) on a temporary file beside `path`, flush it to disk, rename it; a failure leaves `path` alone.

    Raises UserError naming the path when it cannot be written (a full disk, no permission).
    """
    part = path.with_name(path.name + ".part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(part, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
    except (OSError, RuntimeError) as error:  # torch.save reports a full disk as RuntimeError
        raise cannot_write(path, error) from error
    finally:
        part.unlink(missing_ok=True)


def cannot_write(path: Path, error: Exception) -> UserError:
    root = error
    while root and not isinstance(root, OSError):  # torch.save hides a full disk behind an error of its own
        root = root.__context__
    in_the_way = isinstance(root, FileExistsError | NotADirectoryError | IsADirectoryError)
    mend = "give another path" if in_the_way else "free some space or rights"
    return UserError(f"{path} could not be written ({first_line(root or error)}); {mend}; earlier files are untouched")


def lock(folder: Path) -> BinaryIO:
    """Make `folder` and keep it for this process until it ends, however it ends.

    Returns the open lock file; dropping it gives the folder free. Raises UserError where another process has it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "ab")  # noqa: SIM115 — it stays open
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


def write_json(path: Path, content: dict) -> None:
    write_atomically(path, lambda file: file.write((json.dumps(content, indent=2) + "\n").encode()))


def read_json(path: Path) -> dict:
    """A JSON object from a file; raises UserError naming the file where it is missing or damaged."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file") from None
    except (ValueError, OSError) as error:
        raise UserError(f"{path} is damaged ({error})") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged (not a JSON object)")
    return content


def sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write into that becomes `path` at the end of the block, whole; a failure leaves nothing of it.

    Raises UserError where `path` is there already and not empty, where another process is writing it, and where it
    cannot be written.
    """
    check_new(path)
    part = path.resolve().with_name(f".{path.resolve().name}.part")
    held = lock(part)
    try:
        for old in set(part.iterdir()) - {part / ".lock"}:  # of a process that was killed
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        yield part
        (part / ".lock").unlink()
        for file in filter(Path.is_file, part.rglob("*")):
            with open(file, "rb") as opened:
                os.fsync(opened.fileno())
        part.rename(path)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        held.close()
        shutil.rmtree(part, ignore_errors=True)


def check_new(path: Path) -> None:
    """Raise UserError where `path` is a file or a folder that holds something."""
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        raise UserError(f"{path} is there already and nothing is overwritten; give another folder, or delete it")
