"""Tokens in files: written once for all processes of a host, and read in blocks so that memory use stays constant."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from qat_lora.errors import UserError
from qat_lora.run.console import say
from qat_lora.run.files import cannot_write, new_folder, read_json, sha256, write_json

META = "meta.json"
NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)  # raised by network file systems without locks
Found = TypeVar("Found")


def token_type(vocab: int) -> np.dtype:
    """The data type of tokens in a file, little-endian: uint16 for a vocabulary up to 65,536, else int32."""
    return np.dtype("<u2" if vocab <= 2**16 else "<i4")


class Tokens:
    """A stream of tokens [T] in a file of data type `kind` (see `token_type`).

    tokens[start:stop] reads that part as a tensor int64 [stop − start]. The file stays open, so it can be deleted while
    it is in use.
    """

    def __init__(self, path: Path, kind: np.dtype):
        self.file, self.kind = os.open(path, os.O_RDONLY), kind
        weakref.finalize(self, os.close, self.file)
        self.count = os.fstat(self.file).st_size // kind.itemsize

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, part: slice) -> Tensor:
        start, stop, _ = part.indices(self.count)
        size = self.kind.itemsize
        # not a memory map: the pages it touches would count as this process's memory
        read = os.pread(self.file, max(0, stop - start) * size, start * size)
        return torch.from_numpy(np.frombuffer(read, self.kind).astype(np.int64))


def write_meta(folder: Path, values: dict) -> None:
    """Write meta.json to a folder of finished files: `values`, and checksums of the files and of the values."""
    sums = {file.name: sha256(file) for file in sorted(folder.iterdir()) if not file.name.startswith(".")}
    write_json(folder / META, {"values": values, "values_sha256": _sum(values), "sha256": sums})


def read_meta(folder: Path) -> dict:
    """The values that `write_meta` wrote. Raises UserError if anything in the folder is damaged or missing."""
    content = read_json(folder / META)
    try:
        whole = content["values_sha256"] == _sum(content["values"])
        bad = [name for name, wanted in content["sha256"].items() if sha256(folder / name) != wanted]
    except (KeyError, TypeError, AttributeError, OSError) as error:
        raise UserError(f"{folder} is damaged ({error})") from error
    if bad or not whole:
        raise UserError(f"{folder / (bad or [META])[0]} is damaged (its checksum is wrong)")
    return content["values"]


def _sum(values: dict) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def cached(path: Path | None, write: Callable[[Path], None], read: Callable[[Path], Found]) -> Found:
    """Return read(path); if the folder is missing or damaged (read raises UserError), first make it with write(folder).

    The folder is either complete or absent. One process of a host makes it while the others wait; they then read it.
    Without a path, a temporary folder is used and deleted before this returns. Raises UserError if the folder cannot be
    written.
    """
    if path is None:
        try:
            with TemporaryDirectory(prefix="qat_lora-") as folder:
                write(Path(folder))
                return read(Path(folder))
        except OSError as error:
            raise cannot_write(Path(gettempdir()), error) from error
    if (found := _read(path, read, None)) is not None:
        return found
    with _turn(path.parent):
        found = _read(path, read, say)
        if found is None:
            with new_folder(path) as folder:
                write(folder)
            found = read(path)
    return found


def _read(path: Path, read: Callable[[Path], Found], tell: Callable | None) -> Found | None:
    """read(path), or None; with `tell` a damaged folder is reported and removed."""
    if not path.exists():
        return None
    try:
        return read(path)
    except UserError as error:
        if tell:
            tell(f"{error}; rebuilding it")
            shutil.rmtree(path)
        return None


@contextmanager
def _turn(folder: Path) -> Iterator[None]:
    """A lock: only one process of this host holds it at a time; it is released when that process dies."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = open(folder / ".lock", "ab")  # noqa: SIM115 — closed below
    except OSError as error:
        raise cannot_write(folder, error) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for the process that is writing to {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise cannot_write(folder, error) from error
        yield
