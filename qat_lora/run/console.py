"""Console output for people: lines above a progress bar, warnings, and the progress of a long job."""

import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from io import TextIOWrapper
from typing import Any, TextIO, TypeVar

from tqdm import tqdm

from qat_lora.errors import STOPS, UserError, first_line

tqdm.set_lock(threading.RLock())  # tqdm's own lock is a semaphore, which a killed worker would leave behind

PAUSE = 10.0  # seconds before the first line about progress, and between lines
Item = TypeVar("Item")


def progress() -> Callable[[str], None]:
    """A function that prints the line it is given on stderr, unless it printed one within the last PAUSE seconds."""
    last = time.monotonic()

    def tell(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= PAUSE:
            say(line, sys.stderr)
            last = time.monotonic()

    return tell


def watched(
    items: Iterable[Item], what: str, total: int, size: Callable[[Item], int] = lambda _: 1, shown: bool = True
) -> Iterator[Item]:
    """Iterate over `items` and show the progress: a bar with the time left on a terminal, plain lines elsewhere.

    A job shorter than PAUSE seconds shows nothing. size(item): how much an item counts towards `total`. shown: False in
    all workers but the first.
    """
    bar = tqdm(total=total, desc=what, delay=PAUSE / 2, leave=False, disable=None if shown else True)
    tell, done, started = progress(), 0, time.monotonic()
    with bar:
        for item in items:
            yield item
            done += size(item)
            bar.update(size(item))
            if shown and bar.disable and done < total:
                tell(f"{what}: {done:,} of {total:,}, {time_left(done, total, time.monotonic() - started)}")


def time_left(done: int, total: int, seconds: float) -> str:
    """The time left of a job that took `seconds` so far, in words: "2 min 10 s left"."""
    left = round(seconds / max(done, 1) * (total - done))
    hours, minutes = left // 3600, left % 3600 // 60
    if hours:
        return f"{hours} h {minutes} min left"
    return f"{minutes} min {left % 60} s left" if minutes else f"{left} s left"


def say(line: str, file: TextIO | None = None) -> None:
    """Print a line for people, above a progress bar if there is one; on stdout unless another file is given."""
    file = file or sys.stdout
    tqdm.write(line, file=file)
    file.flush()


def typed_lines(what: str) -> Iterator[str]:
    """The lines of standard input, stripped; on a terminal it says first that it waits for a `what` per line. Raises
    UserError if standard input is closed."""
    if sys.stdin is None:
        raise UserError(f"each line of stdin is a {what}, but stdin is closed; open it, or see --help for an option")
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if sys.stdin.isatty():
        say(f"type one {what} per line; end with Ctrl-D")
    yield from map(str.strip, sys.stdin)


def command(script: str, *words: str, **options) -> str:
    """A shell command that runs scripts/<script>.py with these words and options, quoted; options that are None are
    left out."""
    for name, value in options.items():
        words += () if value is None else (f"--{name.replace('_', '-')}", str(value))
    return f"python scripts/{script}.py {shlex.join(words)}"


def summarise(made: dict[str, Any], quality: list[str], *following: str) -> None:
    """Print the closing lines of a run: the files it made ({what: path}), its quality compared with a baseline, and
    what to run next."""
    say("\n" + "\n".join(f"made     {what}: {path}" for what, path in made.items() if path))
    for line in quality:
        say(f"quality  {line}")
    for command in following:
        say(f"next     {command}")


def compared(value: float, before: float, what: str) -> str:
    """A figure (lower is better) next to its earlier value: "0.7022 nats/token; before training 1.8891"."""
    value, before = (round(number, 4) + 0.0 for number in (value, before))  # + 0.0: no "-0.0000"
    gain = "" if value < before else ": no gain"
    return f"{value:.4f} nats/token; {what} {before:.4f}{gain}"


def attempt(what: str, function: Callable[..., Any], *args) -> Any:
    """Return function(*args). If it fails, print a warning and return None, so that the program continues.

    Use it for things that a run can do without, such as plots. what: the subject of the warning.
    """
    try:
        return function(*args)
    except STOPS:
        raise
    except BaseException as error:  # plotting and network libraries can raise anything
        say(f"warning: {what} failed ({first_line(error)}); the run continues without it")
        return None
