"""The workers of one job and how they exchange values on the host. Gradients go through Backend.reduce instead."""

import os
import pickle
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed import Store

from qat_lora.errors import UserError, first_line

HEARSAY = 2  # seconds that a worker which lost another one waits for that one to report why
LINGER = 4  # seconds that a failed worker keeps its store for the others
PART = 4 * 2**20  # bytes of a value in the store, which refuses 8 MiB
PATIENCE = 1800  # seconds without an answer before a worker gives up, as long as gloo waits
RENDEZVOUS = 300  # seconds within which all workers have to arrive
NOTICE = 20  # seconds of waiting for them before a line is printed
SIGTERM = threading.Event()  # this process was asked to stop


class AnotherFailed(UserError):
    """Another worker has failed and reports why; this one has nothing to add."""


class WorkerLost(UserError):
    """A worker cannot be reached any more, and may not have been able to report why."""


class Misplaced(UserError):
    """This worker does not belong to the job that it joined: a wrong WORLD_SIZE, or a RANK that is taken."""


@contextmanager
def losing_none():
    """Turn a broken connection, of the store or of a collective, into WorkerLost within this context."""
    try:
        yield
    except RuntimeError as error:  # gloo raises nothing more specific
        why = re.sub(r"^\[\S+:\d+\] ", "", first_line(error))  # without the line of gloo's source
        raise WorkerLost(
            f"the connection to another worker is lost ({why}); read that worker's message, then resume with --resume "
            "auto"
        ) from error


def _is_dead(pid: int) -> bool:
    """Whether a process of this host has ended; a zombie, which its parent has not waited for yet, has."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except ProcessLookupError:
        return True
    except OSError:  # another user's, or a system without /proc
        return False


def _host() -> str:
    """A name of this host, or of this container on it: processes with the same name see each other's process ids."""
    namespace = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {namespace.stat().st_ino if namespace.exists() else ''}"


class Group:
    """This worker's place among `world_size`, and a store that all of them reach. One worker needs no store.

    Every worker makes the same calls in the same order; values are pickled, so they come from this job alone.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, store: Store | None = None, serves: bool = False):
        self.rank, self.world_size, self.store = rank, world_size, store
        self.serves = serves  # the store ends with this process, so it leaves last
        self.calls, self.written = 0, []
        self.processes: dict[int, int] = {}  # process ids of the workers of this host, by rank; filled by `meet`

    def meet(self, where: str) -> None:
        """Return once all workers have arrived; `where` is the address of the store, for messages.

        Raises UserError naming the workers that have not arrived within RENDEZVOUS seconds, or the variable in which
        this worker contradicts the others. Then the others stop too, unless they are complete without this one.
        """
        keys = [f"here/{rank}" for rank in range(self.world_size)]
        with losing_none():
            world_size = int(self.store.compare_set("world_size", "", str(self.world_size)))
            twice = self.store.add(f"{keys[self.rank]}/count", 1) > 1
            if world_size != self.world_size:
                raise Misplaced(
                    f"WORLD_SIZE={self.world_size} contradicts WORLD_SIZE={world_size} of another worker at {where}; "
                    "give every worker the same"
                )
            if twice:
                raise Misplaced(f"RANK={self.rank} is taken by another worker at {where}; give each its own RANK")
            self.store.set(keys[self.rank], pickle.dumps((_host(), os.getpid())))
            self._wait(keys, RENDEZVOUS, where)
            self.store.set("complete", "")
            everyone = [pickle.loads(place) for place in self.store.multi_get(keys)]
        self.processes = {rank: pid for rank, (host, pid) in enumerate(everyone) if host == _host()}

    def gather(self, value: Any) -> list:
        """What each worker gave, in the order of ranks. Raises UserError once another worker has failed."""
        if self.world_size == 1:
            return [value]
        with losing_none():
            return self._gather(value)

    def _gather(self, value: Any) -> list:
        keys, content = [f"{self.calls}/{rank}" for rank in range(self.world_size)], pickle.dumps(value)
        parts = [content[at : at + PART] for at in range(0, len(content), PART)]
        mine = [f"{keys[self.rank]}/{number}" for number in range(len(parts) - 1)]
        for key, part in zip(mine, parts[1:]):
            self.store.set(key, part)
        self.store.set(keys[self.rank], len(parts).to_bytes(4) + parts[0])  # the last to come
        self._wait(keys)
        values = []
        for key, first in zip(keys, self.store.multi_get(keys)):
            rest = [self.store.get(f"{key}/{number}") for number in range(int.from_bytes(first[:4]) - 1)]
            values.append(pickle.loads(first[4:] + b"".join(rest)))
        for key in self.written:  # everyone is in this call, so everyone has read the one before
            self.store.delete_key(key)
        self.calls, self.written = self.calls + 1, [keys[self.rank], *mine]
        return values

    def on_main(self, function: Callable[[], Any]) -> Any:
        """function() of worker 0, known to all; a UserError or SystemExit of it is raised in all."""
        result = error = None
        if self.rank == 0:
            try:
                result = function()
            except (UserError, SystemExit) as raised:
                error = raised
        result, error = self.gather((result, error))[0]
        if error is not None:
            raise error
        return result

    @contextmanager
    def main_first(self):
        """Worker 0 goes through this context before the others enter it: what it downloads, they find."""
        if self.rank:
            self.gather(None)
        yield
        if not self.rank:
            self.gather(None)

    def agree(self, values: dict) -> None:
        """Raise UserError, in every worker, where one has other values than worker 0."""
        everyone = self.gather(values)
        for rank, theirs in enumerate(everyone):
            for key in sorted(values):
                if theirs.get(key) != everyone[0].get(key):
                    raise UserError(
                        f"the workers were started with different configs: {key} is {everyone[0].get(key)!r} on worker "
                        f"0, {theirs.get(key)!r} on worker {rank}; give every worker the same command"
                    )

    def is_first_to_fail(self, error: BaseException) -> bool:
        """Note in the store that this worker fails; False where another has: what follows from that needs no report."""
        if self.world_size == 1:
            return True
        if isinstance(error, AnotherFailed):
            return False
        try:
            if isinstance(error, Misplaced):
                if not self.store.check(["complete"]):
                    self.store.add("failed", 1)  # the worker that should have come instead is missing
                return True
            ends = time.monotonic() + HEARSAY
            while isinstance(error, WorkerLost) and not self.store.check(["failed"]) and time.monotonic() < ends:
                time.sleep(0.05)
            first = self.store.add("failed", 1) == 1
            ends = time.monotonic() + LINGER
            while self.serves and self.store.add("failed", 0) < self.world_size and time.monotonic() < ends:
                time.sleep(0.1)  # the others still have to read it
            return first
        except RuntimeError:  # the store has gone, and with it the worker that held it
            return True

    def close(self) -> None:
        """Wait until nobody needs this worker any more."""
        if self.world_size > 1:
            with losing_none():
                self.store.set(f"closed/{self.rank}", "")
                if self.serves:
                    self._wait([f"closed/{rank}" for rank in range(self.world_size)])

    def _wait(self, keys: list[str], patience: float | None = None, where: str = "") -> None:
        """Return once the store has every key, one per worker. patience: seconds, PATIENCE by default. where: the
        address of the rendezvous, if this is one. Raises UserError if another worker has failed or died, or time is
        up."""
        started, pause, due, told = time.monotonic(), 1e-4, 1.0, not where
        patience = patience or PATIENCE
        while not self.store.check(keys):  # the store's own wait knows nothing of failures, and warns of every timeout
            if self.store.check(["failed"]):
                raise AnotherFailed("another worker has failed; its message says why")
            waited = time.monotonic() - started
            if waited > min(due, patience):
                due += 1
                late = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                self._check_alive(late)
                who = f"worker{'s' * (len(late) > 1)} {', '.join(map(str, late))}"
                if waited > patience and where:
                    raise UserError(
                        f"{who} of {self.world_size} did not arrive at {where} within {patience:g} s; start every RANK "
                        f"from 0 to {self.world_size - 1} with the same MASTER_ADDR and MASTER_PORT"
                    )
                if waited > patience:
                    raise UserError(
                        f"no answer from {who} for {patience:g} s; end the job, then resume with --resume auto"
                    )
                if waited > NOTICE and not told:
                    told = True
                    if self.rank == 0:
                        say(f"waiting for {who} of {self.world_size} at {where}")
            time.sleep(pause)
            pause = min(1.5 * pause, 0.01)

    def _check_alive(self, late: list[int]) -> None:
        """Raise WorkerLost if one of these workers is a process of this host that has died without a report."""
        for rank in late:
            if rank in self.processes and _is_dead(self.processes[rank]) and not self.store.check(["failed"]):
                raise WorkerLost(
                    f"worker {rank} has died (process {self.processes[rank]}); end the others, then resume with "
                    "--resume auto"
                )


ALONE = Group()


def say(line: str) -> None:
    """Print a line on stderr, at once."""
    print(line, file=sys.stderr, flush=True)


def notice_sigterm() -> None:
    """From here on the first SIGTERM sets the event SIGTERM and further ones are ignored, until the very end of the
    process: what is written after the last step (plots, summaries) must not be lost. Python allows signal handlers in
    the main thread only, so in another thread this does nothing and the main thread has to call it."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _note_sigterm)


def _note_sigterm(*_) -> None:
    SIGTERM.set()
    # Python removes its own handlers while the interpreter shuts down; SIG_IGN stays
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
