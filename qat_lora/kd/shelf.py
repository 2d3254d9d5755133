"""The shards of a cache in a bucket that a process holds."""

import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator

from torch import Tensor

from qat_lora.errors import UserError
from qat_lora.run.buckets import POLL, check_wanted

WINDOW = 64  # shards that an epoch mixes the rows of, if a split has more, see data.batches.order_by_file
MOST = 2 * WINDOW  # shards of a split on this machine's disk: those of two windows
RETRY = 5.0  # seconds to wait after a failed read-ahead

Shard = dict[str, Tensor]


class Shelf:
    """At most MOST shards, which fetch(name) gets: the ones used last and, read ahead by a thread, those of the next
    updates. count: how many there are in all."""

    def __init__(self, fetch: Callable[[str], Shard], count: int):
        self.fetch, self.count = fetch, count
        self.held: dict[str, Shard] = {}  # the least recently used first
        self.fetching: set[str] = set()
        self.needed: Counter[str] = Counter()  # how many of the next updates use a shard, the first ones first
        self.changed = threading.Condition()

    def get(self, name: str) -> Shard:
        """A shard, fetched now if it is not here. Raises UserError if that fails."""
        with self.changed:
            while name in self.fetching:
                check_wanted(name)
                self.changed.wait(POLL)
            if name in self.held:
                self.held[name] = self.held.pop(name)
                return self.held[name]
            self.fetching.add(name)
            while self.held and len(self.held) + len(self.fetching) > MOST:
                spare = (old for old in self.held if not self.needed[old])
                del self.held[next(spare, next(iter(self.held)))]
        shard = None
        try:
            shard = self.fetch(name)
            return shard
        finally:
            with self.changed:
                if shard is not None:
                    self.held[name] = shard
                self.fetching.remove(name)
                self.changed.notify_all()

    def ahead(self, updates: Iterator[list[int]], name_of: Callable[[int], str]) -> Iterator[list[int]]:
        """Yield the rows of each update while a thread fetches the shards of the next ones. name_of(row): its shard."""
        coming: deque[tuple[list[int], list[str]]] = deque()
        stop = threading.Event()
        thread = threading.Thread(target=self._read_ahead, args=(stop,), daemon=True)
        thread.stop = stop

        def end() -> None:
            stop.set()
            thread.join()  # soon: whatever it waits for is abandoned

        thread.start()
        ended = weakref.finalize(stop, end)  # runs once, at exit at the latest; see TorchBackend.prefetch
        try:
            while True:
                most = min(MOST, self.count)
                while (not coming or len(self.needed) < most) and (rows := next(updates, None)):
                    names = list(dict.fromkeys(map(name_of, rows)))
                    coming.append((rows, names))
                    self._need(names, 1)
                if not coming:
                    return
                yield coming[0][0]
                self._need(coming.popleft()[1], -1)
        finally:
            ended()
            for _, names in coming:
                self._need(names, -1)

    def _need(self, names: list[str], change: int) -> None:
        with self.changed:
            self.needed.update(dict.fromkeys(names, change))
            self.needed = +self.needed  # without those that no update needs
            self.changed.notify_all()

    def _read_ahead(self, stop: threading.Event) -> None:
        while not stop.is_set():
            with self.changed:
                there = self.held.keys() | self.fetching
                missing = next((name for name in self.needed if name not in there), None)
                if missing is None or (len(there) >= MOST and all(self.needed[name] for name in self.held)):
                    self.changed.wait(POLL)
                    continue
            try:
                self.get(missing)
            except UserError:  # if it lasts, the update that needs the shard raises it
                stop.wait(RETRY)
