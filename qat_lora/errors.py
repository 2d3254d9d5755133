"""The one exception that means "the input is at fault", and the one way in which an error ends a program."""

import errno
import os
import sys
import traceback

FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(ValueError):
    """Bad input. The message names the value and the mend, on one line."""


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__).rstrip(". ")


def report(error: BaseException, with_traceback: bool = False) -> int:
    """Say on stderr, in one line, what ended a program; the exit code that goes with it.

    Bad input, a full disk or memory: 2. What nobody foresaw: 1. Ctrl-C: 130. SystemExit keeps its own code, unsaid.
    """
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, KeyboardInterrupt):
        return 130
    if with_traceback:
        traceback.print_exception(error)
    line, code = first_line(error), 1
    if isinstance(error, UserError):
        line, code = " ".join(str(error).split()), 2
    elif isinstance(error, BrokenPipeError):  # the reader of our output has had enough
        os._exit(141)
    elif isinstance(error, OSError):
        mend = "free some space and --resume auto" if error.errno in FULL_DISK else "mend that and start again"
        line, code = f"{error.filename or 'a file'}: {error.strerror or error}; {mend}", 2
    elif type(error).__name__ == "OutOfMemoryError" or "can't allocate memory" in str(error):  # torch on GPU, CPU
        line, code = f"out of memory ({line[:120]}); make the batch, the rows or the model smaller", 2
    else:
        line = f"{type(error).__name__}: {line}" + ("" if with_traceback else "; unforeseen: --debug shows where")
    print(f"error: {line}", file=sys.stderr, flush=True)
    return code
