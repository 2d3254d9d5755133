"""The workers of one job, and what they tell each other on the host. Gradients go another way: Backend.reduce."""

import pickle
import signal
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

from torch.distributed import Store

from qat_lora.errors import UserError

LINGER = 4  # seconds that a failed worker keeps its store for the others
PART = 4 * 2**20  # bytes of a value in the store, which refuses 8 MiB
PATIENCE = 1800  # seconds without an answer before a worker gives up, as long as gloo waits
SIGTERM = threading.Event()  # this process was asked to stop


class Group:
    """This worker's place among `world_size`, and a store that all of them reach. One worker needs no store.

    Every worker makes the same calls in the same order; values are pickled, so they come from this job alone.
    """

    def __init__(self, rank: int = 0, world_size: int = 1, store: Store | None = None, serves: bool = False):
        self.rank, self.world_size, self.store = rank, world_size, store
        self.serves = serves  # the store ends with this process, so it leaves last
        self.calls, self.written = 0, []

    def gather(self, value: Any) -> list:
        """What each worker gave, in the order of ranks. Raises UserError once another worker has failed."""
        if self.world_size == 1:
            return [value]
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

    def is_first_to_fail(self) -> bool:
        """Note in the store that this worker fails; False where another has: what follows from that needs no report."""
        if self.world_size == 1:
            return True
        try:
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
            self.store.set(f"closed/{self.rank}", "")
            if self.serves:
                self._wait([f"closed/{rank}" for rank in range(self.world_size)])

    def _wait(self, keys: list[str]) -> None:
        started, pause = time.monotonic(), 1e-4
        while not self.store.check(keys):  # the store's own wait knows nothing of failures, and warns of every timeout
            if self.store.check(["failed"]):
                raise UserError("another worker has failed; its message says why")
            if time.monotonic() - started > PATIENCE:
                late = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
                raise UserError(f"worker {late[0]} has not answered for {PATIENCE} s; end the job and --resume auto")
            time.sleep(pause)
            pause = min(1.5 * pause, 0.01)


ALONE = Group()


def notice_sigterm() -> None:
    """From now on SIGTERM only sets the event of that name. In the main thread alone, as Python asks."""
    signal.signal(signal.SIGTERM, lambda *_: SIGTERM.set())


@contextmanager
def sigterm_noticed():
    """Within this context SIGTERM only sets the event. A worker in a thread is served by its process's main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    notice_sigterm()
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
