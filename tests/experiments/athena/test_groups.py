"""Which rows an update takes from grouped puzzles, whatever update a run starts at."""

from collections import Counter
from itertools import chain, islice

import numpy as np
import pytest

from qat_lora.experiments.athena.groups import Groups


def groups_of(*sizes: tuple[int, ...]) -> Groups:
    """One group per tuple and one puzzle per number in it; the number is the puzzle's row count."""
    puzzle = np.repeat(np.arange(sum(map(len, sizes))), [rows for group in sizes for rows in group])
    group = np.repeat(np.arange(len(sizes)), [sum(group) for group in sizes])
    return Groups.of(puzzle, group)


MIXED = groups_of((1, 4), (2,), (3, 3, 5), (1, 1))
AUGMENTED = groups_of(*[(1,) * 5] * 180)


def updates(groups: Groups, count: int, batch: int, seed: int = 0, start: int = 0) -> list[list[int]]:
    return [rows.tolist() for rows in islice(groups.chosen_rows(seed, batch, start), count)]


def puzzle_of(groups: Groups, row: int) -> int:
    return int(np.searchsorted(groups.starts, row, side="right")) - 1  # these groups have their rows in order


@pytest.mark.parametrize(
    "groups, epochs, batch, wanted",
    [(AUGMENTED, 100, 64, 281), (AUGMENTED, 1, 768, 1), (MIXED, 10, 8, 12), (groups_of((7,), (3,)), 3, 5, 6)],
)
def test_updates_are_epochs_times_groups_times_mean_puzzle_size_over_batch(groups, epochs, batch, wanted):
    assert groups.updates(epochs, batch) == wanted  # mixed: 10 · 4 groups · 20 rows / 8 puzzles / 8 = 12.5


def test_an_epoch_has_one_puzzle_of_each_group():
    """Also if some updates take rows of two epochs."""
    rows = [*chain(*updates(AUGMENTED, 10, 54))]
    epochs = [rows[first : first + 180] for first in range(0, 540, 180)]
    for epoch in epochs:
        assert sorted(row // 5 for row in epoch) == list(range(180))
    assert epochs[0] != epochs[1] and len(set(rows)) > 350, "each epoch draws new puzzles"
    drawn = Counter(row % 5 for row in chain(*updates(AUGMENTED, 100, 180)))
    assert all(abs(drawn[k] - 3600) < 300 for k in range(5))


def test_an_update_takes_all_rows_of_a_puzzle_and_of_the_last_one_those_that_fit():
    taken = updates(MIXED, 400, 6)
    assert {len(rows) for rows in taken} == {6}
    whole = [rows for rows in taken if [puzzle_of(MIXED, row) for row in rows[:5]] == [5] * 5]
    orders = {tuple(rows[:5]) for rows in whole}
    assert len(orders) > 10 and all(sorted(order) == [13, 14, 15, 16, 17] for order in orders), "in random order"
    cut = {rows[-1] for rows in taken if puzzle_of(MIXED, rows[-1]) == 1 and puzzle_of(MIXED, rows[-2]) != 1}
    assert cut == {1, 2, 3, 4}, "the row that still fits is random, too"


@pytest.mark.parametrize("groups", [MIXED, AUGMENTED])
@pytest.mark.parametrize("batch", [1, 7, 64, 1000])
def test_a_stream_started_later_equals_the_rest_of_the_whole_one(groups, batch):
    """Also if a batch has more rows than an epoch."""
    whole = updates(groups, 12, batch)
    assert all(len(rows) == batch for rows in whole)
    for start in (1, 7, 11):
        assert updates(groups, 12 - start, batch, start=start) == whole[start:]
    assert whole != updates(groups, 12, batch, seed=1)


def test_rows_of_a_puzzle_need_not_be_adjacent():
    groups = Groups.of(np.array([4, 2, 4, 9, 2, 4]), np.array([7, 3, 7, 3, 3, 7]))
    assert groups.order.tolist() == [1, 4, 3, 0, 2, 5]
    assert groups.starts.tolist() == [0, 2, 3, 6] and groups.firsts.tolist() == [0, 2, 3]
    for rows in updates(groups, 50, 4):
        assert set(rows) >= {0, 2, 5} or set(rows) & {1, 3, 4}
