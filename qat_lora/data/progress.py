"""A line now and then on how far a long job has come, for a terminal and a log file alike."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from qat_lora.run.rundir import say

PAUSE = 5.0  # seconds between two lines
Row = TypeVar("Row")


def progress() -> Callable[[str], None]:
    """A function that says the line it is given, unless it has said one within the last PAUSE seconds."""
    last = time.monotonic()

    def tell(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= PAUSE:
            say(line)
            last = time.monotonic()

    return tell


def counted(rows: Sequence[Row], what: str) -> Iterator[Row]:
    """The same rows; a line now and then says how many of them are done."""
    tell = progress()
    for number, row in enumerate(rows):
        tell(f"{number:,} of {len(rows):,} {what}")
        yield row
