"""The workers of one job and how they exchange values outside the accelerator. Gradients go through Backend.reduce."""

import pickle
import re
import signal
import socket
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

from qat_lora.errors import UserError, first_line
from qat_lora.hosts.environment import AGAIN

HEARSAY = 2  # seconds that a failing worker waits to hear whether another worker failed first
LINGER = 4  # seconds that a failed worker keeps its relay open for the others


class Flag:
    """threading.Event without its lock, which could deadlock when one signal handler interrupts another."""

    def __init__(self):
        self._up = False

    def is_set(self) -> bool:
        return self._up

    def set(self) -> None:
        self._up = True

    def clear(self) -> None:
        self._up = False


SIGTERM = Flag()  # this process was asked to stop


class AnotherFailed(UserError):
    """The job has ended because of another worker; the message says which and why."""


class WorkerLost(UserError):
    """A worker can no longer be reached, and may not have been able to report why."""


def lost(error: RuntimeError) -> WorkerLost:
    """What a collective's broken connection means."""
    why = re.sub(r"^\[\S+:\d+\] ", "", first_line(error))  # without the position in gloo's source
    return WorkerLost(f"the connection to another worker is lost ({why}); {AGAIN}")


class Group:
    """This worker's place among `world_size` workers. A single worker needs no link.

    link: its hosts.link.Link. relay: the job's hosts.relay.Relay if this process serves it; the process then leaves
    last. Every worker makes the same calls in the same order. Values are pickled, so they must come from this job
    alone.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, link: Any = None, relay: Any = None):
        self.rank, self.world_size, self.link, self.relay = rank, world_size, link, relay

    @property
    def neighbours(self) -> list[int]:
        """The ranks of the workers on this one's host, in order."""
        if not self.link:
            return [self.rank]
        return [m.rank for m in self.link.members if m.machine == self.link.members[self.rank].machine]

    @property
    def leads(self) -> bool:
        """Whether this worker is the first on its host."""
        return self.neighbours[0] == self.rank

    def name(self, rank: int) -> str:
        """A worker's readable name, with its host."""
        return str(self.link.members[rank]) if self.link else f"worker {rank}"

    def waiting(self):
        """Within this context the worker only waits for others; SIGTERM may end the process if they never come."""
        return self.link.waiting() if self.link else nullcontext()

    @contextmanager
    def losing_none(self):
        """Like `waiting`, but raises WorkerLost if a collective's connection breaks."""
        try:
            with self.waiting():
                yield
        except RuntimeError as error:  # gloo raises nothing more specific
            if type(error).__name__ == "OutOfMemoryError":
                raise
            raise lost(error) from error

    def gather(self, value: Any) -> list:
        """The values of all workers, in rank order. Raises UserError if another worker has failed."""
        if self.world_size == 1:
            return [value]
        with self.waiting():
            return [pickle.loads(each) for each in self.link.exchange(pickle.dumps(value))]

    def on_main(self, function: Callable[[], Any]) -> Any:
        """Run function() on worker 0 and return its result on all workers. If it raises SystemExit, all workers raise
        it; if it raises UserError, the others raise AnotherFailed, which names worker 0's host."""
        result = error = None
        if self.rank == 0:
            try:
                result = function()
            except (UserError, SystemExit) as raised:
                error = raised
        result, error = self.gather((result, error))[0]
        if self.rank and isinstance(error, UserError):
            raise AnotherFailed(f"{self.name(0)} failed: {error}")
        if error is not None:
            raise error
        return result

    @contextmanager
    def main_first(self):
        """Worker 0 runs this block first, so that the others find what it downloads."""
        if self.rank:
            self.gather(None)
        yield
        if not self.rank:
            self.gather(None)

    def agree(self, values: dict[str, tuple[Any, str]], fix: str, common: bool = False) -> None:
        """Raise UserError in every worker if the values of any worker differ from worker 0's. values: {name: (value,
        the value as the error shows it)}; fix: how to fix it. common: ignore names that either worker lacks."""
        first, *others = self.gather(values)
        for rank, theirs in enumerate(others, 1):
            for name in sorted(first.keys() & theirs.keys() if common else first.keys() | theirs.keys()):
                (one, shown), (two, shown_too) = first.get(name, (None, None)), theirs.get(name, (None, None))
                if one != two:
                    raise UserError(
                        f"the workers differ: {name} is {shown} for {self.name(0)}, {shown_too} for {self.name(rank)}; "
                        f"{fix}"
                    )

    def stop(self, wanted: bool) -> bool:
        """Whether any worker wants to stop. If so, all workers now save, however long that takes."""
        stopping = any(self.gather(wanted))
        if self.link:
            self.link.stopping = stopping
        return stopping

    def fail(self, error: BaseException) -> str | None:
        """Tell the others that this worker ends with `error`, unless the job has already ended. Returns what this
        worker has to print, so that each terminal shows the reason once: a line in place of its own error, "" for its
        own error, None for nothing."""
        if not self.link:
            return ""
        line = f"{self.name(self.rank)} failed: {' '.join(str(error).split()) or type(error).__name__}"
        if isinstance(error, SystemExit):
            line = f"{self.name(self.rank)} ended with exit code {error.code}; {AGAIN}"
        follows = isinstance(error, WorkerLost | AnotherFailed)
        if follows:  # the relay knows more, or will within moments
            self.link.reporting = True
            self.link.over.wait(HEARSAY)
        ending = self.link.fail(line, HEARSAY)
        if not self.link.speaks(ending):
            return None
        mine = ending.said and ending.culprit == self.rank
        return "" if mine or (isinstance(error, UserError) and not follows) else ending.line

    def linger(self) -> None:
        """Call this before the process ends with an error. If it serves the relay, it gives the others time to hear
        why."""
        if self.link:
            self.link.leave_reaper()
        if self.relay:
            self.link.disconnect()
            self.relay.empty.wait(LINGER)

    def close(self) -> None:
        """Wait until all workers have finished. Raises AnotherFailed if one fails before that."""
        if self.link:
            self.link.leave()
        if self.relay:
            self.relay.empty.wait()


ALONE = Group()


# -- SIGTERM ---------------------------------------------------------------------------------------------------------
# Python runs signal handlers in the main thread, and only when library code there returns. Python's wakeup file
# descriptor, this socket, gets the signal number at once.
_WOKEN, _WAKES = socket.socketpair()
_WOKEN.setblocking(False)
_WAKES.setblocking(False)
_stopped_at: float | None = None


def notice_sigterm() -> None:
    """From here on the first SIGTERM sets the flag SIGTERM and further ones are ignored until the process ends, so that
    what is written after the last step (plots, summaries) is not lost. Python allows signal handlers in the main thread
    only: in another thread this does nothing, and the main thread has to call it."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(_WAKES.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, _note_sigterm)


def stopped_at() -> float | None:
    """When this process was first asked to stop (time.monotonic()), even if its main thread does not know yet."""
    global _stopped_at
    with suppress(BlockingIOError):
        if signal.SIGTERM in _WOKEN.recv(2**12) and _stopped_at is None:
            _stopped_at = time.monotonic()
    return _stopped_at


def _note_sigterm(*_) -> None:
    SIGTERM.set()
    # Python removes its own handlers while the interpreter shuts down; SIG_IGN stays
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
