"""Flags of small runs, damaged files and full disks, for the tests of bad input."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CPU = ["--device", "cpu", "--precision", "fp32"]
SMALL = ["--max-steps", "2", "--batch-size", "4", "--eval-rows", "4", *CPU]
LEARNS = [*SMALL, "--max-steps", 6, "--init", "rtn", "--learning-rate", 3e-3, "--warmup-steps", 0]  # QAT, at once
CACHE = ["--length", 16, "--max-rows", 32, "--heldout-fraction", 0.25, "--rows-per-shard", 8, *CPU]
IN_SHARDS = ["--dataset", "embedded", "--length", 24, "--max-rows", 30, "--rows-per-shard", 4, "--batch-size", 3]


def damage(path: Path, kind: str) -> None:
    """Make a file truncated, flipped (in one bit), empty or missing."""
    data = bytearray(path.read_bytes())
    if kind == "missing":
        return path.unlink()
    if kind == "truncated":
        data = data[: len(data) // 2]
    elif kind == "flipped":
        data[len(data) // 2] ^= 1
    elif kind == "empty":
        data = b""
    path.write_bytes(data)


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Inside the block no file can grow beyond `size` bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
