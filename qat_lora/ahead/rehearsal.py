"""Stand-ins for a run's session, so that a script's own loop trains without a run: to record, watch or try its
graphs, where only shapes matter, and in checks and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qat_lora.backend.eager import TorchBackend


class Rehearsal:
    """Stands in for a run's Session: an evaluation, then the backend's number of updates of each stage, each in a
    phase. The first may have graphs of its own; those that follow are all alike."""

    resumed, offset = None, 0

    def __init__(self, backend: Rehearsing, tokens: int, anchor=None):
        self.backend, self.tokens, self.anchor = backend, tokens, anchor

    def steps(self, stage: str, total: int, state, load, evaluate=None) -> Iterator[int]:
        if evaluate:
            with self.backend.phase(f"{stage}: evaluation"):
                self.backend.noted(evaluate(0))
        count = min(self.backend.updates, max(2, total))
        for step in range(1, count + 1):
            self.backend.is_last = step == count
            with self.backend.phase(f"{stage}: {'first update' if step == 1 else 'update'}", self.tokens):
                yield step

    def period(self, step: int, total: int) -> tuple[int, int]:
        return step, total

    def record(self, **metrics) -> None:
        """A line of the log is fetched between steps, and adds nothing to a graph."""
        self.backend.noted(metrics)


class Rehearsing:
    """A backend that records, watches or tries a script's own loop: what the three have in common."""

    updates = 2  # that a rehearsal makes
    is_last = False

    def rehearsal(self, tokens: int, anchor=None) -> Rehearsal:
        """The session of a rehearsal. tokens: of an update, over all chips; anchor: see Session."""
        return Rehearsal(self, tokens, anchor)

    def repeated(self, name: str, tokens: int) -> Iterator[None]:
        """The number of updates, each in a phase `name`, for what is no stage of a run."""
        for number in range(self.updates):
            self.is_last = number + 1 == self.updates
            with self.phase(name, tokens):
                yield


class Updates:
    """Stands in for a run's Session: updates `first` to `last` of a stage (by default all), without evaluations and
    files. figures: what each update recorded; after(number): called after each update."""

    def __init__(
        self, backend: TorchBackend, first: int = 1, last: int | None = None,
        after: Callable[[int], object] = lambda number: None,
    ):  # fmt: skip
        self.backend, self.first, self.last, self.after = backend, first, last, after
        self.figures: list[dict] = []

    def steps(self, stage: str, total: int, state, load, evaluate=None) -> Iterator[int]:
        for step in range(self.first, (self.last or total) + 1):
            yield step
            self.after(step)

    def period(self, step: int, total: int) -> tuple[int, int]:
        return step, total

    def record(self, **metrics) -> None:
        self.figures.append(metrics)
