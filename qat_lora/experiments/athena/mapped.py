"""Arrays that stay in their files, mapped into memory, which all processes of a host share."""

import mmap
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from qat_lora.errors import UserError, first_line

PIECE = 2**24  # bytes of a mapped array to read at a time
AGAIN = "; copy the folder again, or rebuild it"


def array_of(path: Path, shown: str, below: int, shape: tuple) -> np.ndarray:
    """Map a file of whole numbers from 0 to `below` − 1 of shape `shape` (None: any size) into memory."""
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise UserError(f"{shown}: no such file{AGAIN}") from None
    except Exception as error:  # NumPy parses the header as Python and may raise any error
        objects = "pickle" in str(error) or "Python objects" in str(error)
        reason = "it holds Python objects, which were not loaded" if objects else first_line(error)
        raise UserError(f"{shown} is not a readable NumPy array ({reason}){AGAIN}") from error
    if not isinstance(values, np.ndarray):
        raise UserError(f"{shown} is an archive of arrays (.npz), not one array{AGAIN}")
    wanted = "×".join("N" if n is None else str(n) for n in shape)
    right = values.ndim == len(shape) and all(n in (None, there) for n, there in zip(shape, values.shape))
    if not right or not np.issubdtype(values.dtype, np.integer):
        raise UserError(
            f"{shown} holds {'×'.join(map(str, values.shape))} values of type {values.dtype}; dataset.json says "
            f"{wanted} whole numbers{AGAIN}"
        )
    if not values.size:
        raise UserError(f"{shown} is empty{AGAIN}")
    ends = [(piece.min(), piece.max()) for piece in pieces(values)]
    least, most = min(low for low, _ in ends), max(high for _, high in ends)
    if least < 0 or most >= below:
        raise UserError(f"{shown} holds values from {least} to {most}; they must be from 0 to {below - 1}{AGAIN}")
    return values


def pieces(values: np.ndarray) -> Iterator[np.ndarray]:
    """An array's rows in order, about PIECE bytes at a time."""
    step = _step(values)
    for first in range(0, len(values), step):
        yield values[first : first + step]
        _let_go(values)


def taken(values: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """The rows with these numbers; not a copy if they are consecutive."""
    if len(indices) and (np.diff(indices) == 1).all():
        return values[indices[0] : indices[-1] + 1]
    taken, step = np.empty((len(indices), *values.shape[1:]), values.dtype), _step(values)
    for first in range(0, len(indices), step):
        taken[first : first + step] = values[indices[first : first + step]]
        _let_go(values)
    return taken


def _step(values: np.ndarray) -> int:
    return max(1, PIECE * len(values) // max(1, values.nbytes))


def _let_go(values: np.ndarray) -> None:
    """Take what has been read of a mapped file out of this process's memory; the next access maps it again."""
    if isinstance(values, np.memmap):
        values._mmap.madvise(mmap.MADV_DONTNEED)
