"""Grouped rows: an epoch takes all rows of one puzzle from each group, as the Tiny Recursive Model does."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Groups:
    """Which rows belong to which puzzle, and which puzzles to which group (e.g. the augmentations of one puzzle).

    order [N]: row numbers, sorted so that the rows of a puzzle and the puzzles of a group are adjacent.
    starts [P + 1]: index into `order` of each puzzle's first row. firsts [G + 1]: index of each group's first puzzle.
    Both end with the total. No puzzle or group is empty.
    """

    order: np.ndarray
    starts: np.ndarray
    firsts: np.ndarray

    @classmethod
    def of(cls, puzzle: np.ndarray, group: np.ndarray) -> "Groups":
        """Build from each row's puzzle and group numbers (from 0), [N] each; a puzzle is in only one group."""
        order = np.lexsort((puzzle, group))
        begins = np.flatnonzero(np.diff(puzzle[order], prepend=-1))
        firsts = np.flatnonzero(np.diff(group[order][begins], prepend=-1))
        return cls(order, np.append(begins, len(order)), np.append(firsts, len(begins)))

    def updates(self, epochs: int, batch_size: int) -> int:
        """Number of whole updates in `epochs` epochs, at least 1. An epoch counts as groups × mean rows per puzzle."""
        groups, puzzles, rows = len(self.firsts) - 1, len(self.starts) - 1, len(self.order)
        return max(1, epochs * groups * rows // (puzzles * batch_size))

    def chosen_rows(self, seed: int, batch_size: int, start: int = 0) -> Iterator[np.ndarray]:
        """Yield the row numbers [batch_size] of every update from update `start` (0-based) on, endlessly; they depend
        only on the seed and the update number.

        An epoch takes the groups in random order and one random puzzle from each. An update takes puzzles in this order
        until it is full, with each puzzle's rows in random order, and only as many rows of the last puzzle as fit. If
        an epoch ends within an update, the update continues with the next epoch.
        """
        # before: the number of rows before each puzzle, and in all; at: index of the next puzzle
        epoch, at, picked, before = 0, 0, np.zeros(0, np.intp), np.zeros(1, np.intp)
        for update in range(2**63):
            while before[-1] - before[at] < batch_size:
                picked = np.concatenate([picked[at:], self._epoch(seed, epoch)])
                epoch, at, before = epoch + 1, 0, np.append(0, np.cumsum(self._sizes(picked)))
            first, at = at, int(np.searchsorted(before, before[at] + batch_size))
            if update >= start:
                yield self._rows(picked[first:at], batch_size, np.random.default_rng([seed, update, 1]))

    def _epoch(self, seed: int, epoch: int) -> np.ndarray:
        """One random puzzle from each group, with the groups in random order."""
        rng = np.random.default_rng([seed, epoch])
        groups = rng.permutation(len(self.firsts) - 1)
        return rng.integers(self.firsts[groups], self.firsts[groups + 1])

    def _sizes(self, puzzles: np.ndarray) -> np.ndarray:
        return self.starts[puzzles + 1] - self.starts[puzzles]

    def _rows(self, puzzles: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
        sizes = self._sizes(puzzles)
        total = sizes.sum()
        places = np.arange(total) + np.repeat(self.starts[puzzles] - (np.cumsum(sizes) - sizes), sizes)
        shuffled = np.lexsort((rng.random(total), np.repeat(np.arange(len(puzzles)), sizes)))
        return self.order[places[shuffled][:count]]
