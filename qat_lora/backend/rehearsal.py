"""Stands in for a run's session and data while its graphs are recorded: only shapes matter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from qat_lora.backend.recording import RecordingBackend


class Rehearsal:
    """Stands in for a run's Session: an evaluation, then two updates of each stage, each recorded as a phase. The
    first may have graphs of its own; the second is one of those that follow."""

    resumed, offset = None, 0

    def __init__(self, backend: RecordingBackend, tokens: int):
        """tokens: of an update, over all chips."""
        self.backend, self.tokens = backend, tokens

    def steps(self, stage: str, total: int, state, load, evaluate=None) -> Iterator[int]:
        if evaluate:
            with self.backend.phase(f"{stage}: evaluation"):
                evaluate(0)
        for step, name in ((1, "first update"), (2, "update")):
            with self.backend.phase(f"{stage}: {name}", self.tokens):
                yield step

    def record(self, **metrics) -> None:
        """A line of the log is fetched between steps, and adds nothing to a graph."""


class SameRows(Dataset):
    """`count` rows that are all the same."""

    fingerprint = ""

    def __init__(self, count: int, **row: Tensor):
        self.count, self.row = count, row

    def kept(self, i: int) -> int:
        return int(self.row["mask"].sum()) if "mask" in self.row else 1

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.row
