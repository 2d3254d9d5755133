"""Flags of small runs, and damaging files, for the tests of bad input."""

from pathlib import Path

SMALL = ["--max-steps", "2", "--batch-size", "4", "--eval-rows", "4", "--device", "cpu", "--precision", "fp32"]


def damage(path: Path, kind: str) -> None:
    data = bytearray(path.read_bytes())
    if kind == "truncated":
        data = data[: len(data) // 2]
    elif kind == "flipped":
        data[len(data) // 2] ^= 1
    elif kind == "empty":
        data = b""
    path.write_bytes(data)
