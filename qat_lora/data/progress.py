"""Progress lines of a long job every few seconds, for terminals and log files alike."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from qat_lora.run.rundir import say

PAUSE = 5.0  # least seconds between two lines
Row = TypeVar("Row")


def progress() -> Callable[[str], None]:
    """A function that prints the line it is given, unless it printed one within the last PAUSE seconds."""
    last = time.monotonic()

    def tell(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= PAUSE:
            say(line)
            last = time.monotonic()

    return tell


def counted(rows: Sequence[Row], what: str) -> Iterator[Row]:
    """Iterate over `rows`, printing how many are done every PAUSE seconds; what: the end of that line."""
    tell = progress()
    for number, row in enumerate(rows):
        tell(f"{number:,} of {len(rows):,} {what}")
        yield row
