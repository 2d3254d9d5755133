"""Stand-ins for a run's session and data, so that a script's own loop trains without a run: to record, watch or try its
graphs, where only shapes matter, and in checks and benchmarks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from qat_lora.ahead.recording import RecordingBackend
    from qat_lora.ahead.trial import Trial
    from qat_lora.ahead.watching import WatchingBackend
    from qat_lora.backend.eager import TorchBackend


class Rehearsal:
    """Stands in for a run's Session: an evaluation, then the backend's number of updates of each stage, each in a
    phase. The first may have graphs of its own; those that follow are all alike."""

    resumed, offset = None, 0

    def __init__(self, backend: RecordingBackend | Trial | WatchingBackend, tokens: int):
        """tokens: of an update, over all chips."""
        self.backend, self.tokens = backend, tokens

    def steps(self, stage: str, total: int, state, load, evaluate=None) -> Iterator[int]:
        if evaluate:
            with self.backend.phase(f"{stage}: evaluation"):
                self.backend.noted(evaluate(0))
        count = min(self.backend.updates, max(2, total))
        for step in range(1, count + 1):
            self.backend.is_last = step == count
            with self.backend.phase(f"{stage}: {'first update' if step == 1 else 'update'}", self.tokens):
                yield step

    def record(self, **metrics) -> None:
        """A line of the log is fetched between steps, and adds nothing to a graph."""
        self.backend.noted(metrics)


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

    def record(self, **metrics) -> None:
        self.figures.append(metrics)


def repeated(backend: RecordingBackend | Trial | WatchingBackend, name: str, tokens: int) -> Iterator[None]:
    """The backend's number of updates, each in a phase `name`, for what is no stage of a run."""
    for number in range(backend.updates):
        backend.is_last = number + 1 == backend.updates
        with backend.phase(name, tokens):
            yield


class SameRows(Dataset):
    """`count` rows that are all the same."""

    fingerprint = ""

    def __init__(self, count: int, **row: Tensor):
        self.count, self.row = count, row

    def kept(self, i: int) -> int:
        return int(self.row["mask"].sum()) if "mask" in self.row else len(self.row.get("weights", [1]))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.row
