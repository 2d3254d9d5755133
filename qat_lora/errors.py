"""UserError for bad input, how an error ends a program, and the standard output that every program uses."""

import errno
import importlib
import os
import pickle
import select
import signal
import sys
import threading
import traceback
from contextlib import contextmanager, suppress
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TextIO

ROOT = Path(__file__).resolve().parents[1]  # of the checkout
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# These end a program or a generator. Anything else that a third-party package raises, even SystemExit or asyncio's
# CancelledError, is that package's fault: `except STOPS: raise`, then `except BaseException`.
STOPS = (KeyboardInterrupt, GeneratorExit)
AGAIN = "run the command again (training: with --resume auto)"
OUTPUT = "standard output"  # the file name in OSErrors from standard output


class UserError(ValueError):
    """Bad input. The message is one line that names the bad value and how to fix it."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type."""
    return next(iter(said(error).strip().splitlines()), type(error).__name__).rstrip(". ")


def one_line(error: BaseException, longest: int = 160) -> str:
    """An exception's whole message on one line, cut to `longest` characters, or its type."""
    return " ".join(said(error).split()).rstrip(". ")[:longest] or type(error).__name__


def said(error: BaseException) -> str:
    """An exception's message; "" if its __str__ fails."""
    if isinstance(error, pickle.UnpicklingError):  # its own message advises running the file
        return "it holds something other than tensors, and none of it was run"
    try:
        return str(error)
    except STOPS:
        raise
    except BaseException:  # the __str__ of a third-party class may fail
        return ""


def to_stderr(line: str) -> None:
    """Print a line on stderr, at once."""
    with suppress(OSError, ValueError, AttributeError):  # standard error is closed
        print(line, file=sys.stderr, flush=True)


class Output:
    """Standard output whose OSErrors contain its name, as those of a file contain the file's."""

    def __init__(self, stream: TextIO):
        self.stream = stream

    def __getattr__(self, name):
        return getattr(self.stream, name)

    def write(self, text: str) -> int:
        with self._named():
            return self.stream.write(text)

    def flush(self) -> None:
        with self._named():
            self.stream.flush()

    @contextmanager
    def _named(self):
        try:
            yield
        except OSError as error:
            error.filename = OUTPUT
            raise


def nowhere() -> TextIO:
    """A stream that discards what is written to it."""
    stream = open(os.devnull, "w", errors="replace")  # noqa: SIM115
    os.set_inheritable(stream.fileno(), True)  # child processes inherit it in place of a closed one
    return stream


def open_output() -> None:
    """Make standard output an `Output` that replaces characters a terminal cannot show, such as → or ±. If standard
    output or standard error is closed (`>&-`), what is printed to it is dropped."""
    sys.stdout, sys.stderr = sys.stdout or nowhere(), sys.stderr or nowhere()
    if not isinstance(sys.stdout, Output):
        sys.stdout.reconfigure(errors="replace")
        sys.stdout = Output(sys.stdout)


def is_of_output(error: BaseException) -> bool:
    """Whether the error came from writing to standard output."""
    return isinstance(error, OSError) and error.filename == OUTPUT


def _drop(stream: TextIO) -> None:
    """Drop what could not be written to standard output or error; it would fail again when the process ends."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def ignore_sigterm() -> None:
    """Call this last in a process, when everything is saved. Otherwise a SIGTERM during Python's shutdown would end the
    process with exit code 143, as if something had been lost."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def load_package(name: str, what: str, otherwise: str = "", install: str = "") -> ModuleType:
    """Import a package that only `what` (an option or a task) needs. otherwise: what to do without the package.
    install: its name for pip, if that is another.

    Raises UserError naming `what` and the package, whatever the import raises: a broken installation may even raise
    SystemExit.
    """
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except STOPS:
        raise
    except BaseException as error:
        install = install or package
        reason, fix = first_line(error), f"pip install {install}"
        if not (isinstance(error, ModuleNotFoundError) and error.name == package):
            reason = f"{package} cannot be imported ({type(error).__name__}: {reason})"
            fix = f"pip install --force-reinstall {install}"
        raise UserError(f"{what}: {reason}; {fix}{otherwise}") from error


def installed_version(package: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def explain_missing_packages() -> None:
    """In the scripts of a checkout, make a failed import end the program with one line that says how to install the
    missing package; --debug shows the traceback."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)  # None in `python -c` and in a notebook
    if script is None or Path(script).resolve().parent not in (ROOT, ROOT / "scripts") or "--debug" in sys.argv:
        return
    show = sys.excepthook

    def explain(kind: type, error: BaseException, trace) -> None:
        if isinstance(error, KeyboardInterrupt):  # while packages load; the exit code is enough
            return None
        if not isinstance(error, ImportError):
            return show(kind, error, trace)
        fix = "run `make setup` and use .venv/bin/python, or pip install -r requirements.txt"
        print(f"error: {first_line(error)}: the installation is incomplete; {fix}", file=sys.stderr)

    sys.excepthook = explain


def report(error: BaseException, with_traceback: bool = False) -> int:
    """Print the error that ended a program on stderr, in one line, and return its exit code.

    Bad input, a full disk, out of memory: 2. An unexpected error: 1. Ctrl-C: 130. SystemExit keeps its own code,
    silently. If the reader of our output has closed the pipe (`| head`), the process ends silently with 141.
    """
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, BrokenPipeError) and _output_is_closed():
        os._exit(141)
    if with_traceback and not is_of_output(error):
        traceback.print_exception(error)
    line, code = first_line(error), 1
    if isinstance(error, UserError):
        line, code = " ".join(str(error).split()), 2
    elif is_of_output(error):
        _drop(sys.stdout)
        line, code = f"{OUTPUT} could not be written ({error.strerror or line}); send it elsewhere and {AGAIN}", 2
    elif isinstance(error, ConnectionError):
        line, code = f"a connection broke ({line}); check the network and run the command again", 2
    elif isinstance(error, OSError):
        fix = f"free some space and {AGAIN}" if error.errno in FULL_DISK else "fix that and start again"
        line, code = f"{error.filename or 'a file'}: {error.strerror or line}; {fix}", 2
    elif type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in said(error):  # torch on GPU, CPU
        line, code = f"out of memory ({line[:120]}); make the batch, the rows or the model smaller", 2
    else:
        line = f"{type(error).__name__}: {line}" + (
            "" if with_traceback else "; unexpected error, rerun with --debug for the traceback"
        )
    try:
        print(f"error: {line}", file=sys.stderr, flush=True)
    except OSError:  # then only the exit code can report the error
        _drop(sys.stderr)
    return code


def _output_is_closed() -> bool:
    """Whether the reader of our standard output has closed the pipe."""
    try:
        poll = select.poll()
        poll.register(1, 0)
        return any(event & (select.POLLERR | select.POLLNVAL) for _, event in poll.poll(0))
    except (OSError, ValueError, AttributeError):  # no such descriptor; no poll on this system
        return True
