"""What a program says to people: lines above a progress bar, warnings, and the progress of a long job."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

from qat_lora.errors import STOPS, first_line

tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a worker that is killed leaves behind

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


def say(line: str) -> None:
    """A line for people, above a progress bar if there is one."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()


def attempt(what: str, function: Callable[..., Any], *args) -> Any:
    """function(*args), or None if it fails: then a warning is printed and the program continues. For what a run can do
    without, such as plots. what: the subject of the warning."""
    try:
        return function(*args)
    except STOPS:
        raise
    except BaseException as error:  # plotting and network libraries raise anything
        say(f"warning: {what} failed ({first_line(error)}); the run continues without")
        return None
