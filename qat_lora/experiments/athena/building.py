"""Datasets in the published format from ARC tasks and from tables of Sudoku or mazes."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qat_lora.errors import UserError
from qat_lora.experiments.athena import grids
from qat_lora.experiments.athena.tables import Table, rows_of
from qat_lora.experiments.athena.tasks import Pair, Task
from qat_lora.experiments.athena.writing import Side, write_names
from qat_lora.run.console import watched
from qat_lora.run.files import new_folder

TRIES = 5  # attempts at an augmentation that is no duplicate, per augmentation wanted


@dataclass(frozen=True)
class Built:
    """Numbers of a dataset: rows in train/ and in test/, puzzles in train/, and rows of test/ without a label."""

    train: int
    test: int
    puzzles: int
    unknown: int = 0


def sample(count: int, subsample: int | None, what: str, rng: np.random.Generator) -> np.ndarray:
    """Which of `count` training puzzles to use, as numbers in order; None: all."""
    if subsample is None:
        return np.arange(count)
    if subsample > count:
        raise UserError(f"--subsample {subsample} is more than the {count} in {what}; use at most {count}")
    return np.sort(rng.choice(count, subsample, replace=False))


# -- tables ----------------------------------------------------------------------------------------------------------
def build_tables(
    folder: Path, train: Table, test: Table, augmentations: int, subsample: int | None, seed: int
) -> Built:
    """Write the rows of two tables to a new folder; in train/ each row and its augmentations form a group."""
    form = train.form
    form.check_augmentations(augmentations)
    chosen = np.zeros(train.count, bool)
    chosen[sample(train.count, subsample, str(train.path), np.random.default_rng(seed))] = True
    with (
        new_folder(folder) as part,
        Side(part / "train", form.side**2, form.vocab) as examples,
        Side(part / "test", form.side**2, form.vocab) as tests,
    ):
        for number, row in enumerate(watched(rows_of(train), "writing train/", train.count)):
            if chosen[number]:
                images = form.augmented(*row, augmentations, [seed, number])
                examples.group((0, *pair) for pair in zip(*(rows[:, None] for rows in images)))
        for question, answer in watched(rows_of(test), "writing test/", test.count):
            tests.group([(0, question[None], answer[None])])
        for side in (examples, tests):
            side.finish(identifiers=1)
        write_names(part, [grids.BLANK])
    return Built(examples.rows, tests.rows, examples.rows)


# -- ARC -------------------------------------------------------------------------------------------------------------
def build_tasks(folder: Path, train: list[Task], test: list[Task], augmentations: int, seed: int) -> Built:
    """Write tasks to a new folder. A task and its augmentations form a group, each a puzzle with its own identifier.

    train/ gets all pairs of the tasks in `train` and the demonstrations of those in `test`, test/ the tests of the
    latter, with the same identifiers. A test without a known output gets a row without labels. Identifiers depend on
    the order of the tasks only, not on which outputs are known.
    """
    names, unknown = [grids.BLANK], 0
    tasks = [*((task, False) for task in train), *((task, True) for task in test)]
    with (
        new_folder(folder) as part,
        Side(part / "train", grids.LENGTH, grids.VOCAB) as examples,
        Side(part / "test", grids.LENGTH, grids.VOCAB) as tests,
    ):
        for number, (task, held) in enumerate(watched(tasks, "writing tasks", len(tasks))):
            rng = np.random.default_rng([seed, number])
            learned, asked = [], []
            for name, pairs in puzzles_of(task, augmentations, rng):
                shown = len(task.train) if held else len(pairs)
                learned.append((len(names), *_rows(pairs[:shown], rng)))
                if held:
                    asked.append((len(names), *_rows(pairs[shown:], None)))
                    unknown += sum(output is None for _, output in pairs[shown:])
                names.append(name)
            examples.group(learned)
            if held:
                tests.group(asked)
        for side in (examples, tests):
            side.finish(identifiers=len(names))
        write_names(part, names)
        content = {task.name: task.as_json() for task in test}
        (part / "test_puzzles.json").write_text(json.dumps(content), encoding="utf-8")
    return Built(examples.rows, tests.rows, len(names) - 1, unknown)


def puzzles_of(task: Task, augmentations: int, rng: np.random.Generator) -> Iterator[tuple[str, list[Pair]]]:
    """Name and pairs (demonstrations, then tests) of a task and of its augmentations: a random transform and a random
    permutation of the colours 1 to 9. One whose pairs are those of an earlier one is skipped, so a task with many
    symmetries or few colours may have fewer augmentations."""
    pairs, found = [*task.train, *task.test], set()
    name, transform, colours = task.name, 0, np.arange(grids.COLOURS, dtype=np.uint8)
    for _ in range(1 + TRIES * augmentations):
        images = [tuple(None if g is None else grids.changed(g, transform, colours) for g in pair) for pair in pairs]
        key = tuple(sorted(b"".join(map(_key, pair)) for pair in images))
        if key not in found:
            found.add(key)
            yield name, images
        if len(found) > augmentations:
            return
        transform, colours[1:] = int(rng.integers(8)), rng.permutation(colours[1:])
        name = grids.name_of(task.name, transform, colours)


def _key(grid: np.ndarray | None) -> bytes:
    return b"\0\0" if grid is None else bytes(grid.shape) + grid.tobytes()


def _rows(pairs: list[Pair], rng: np.random.Generator | None) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and labels [pairs, 900]. With `rng`, input and output of a pair are shifted together by a random distance,
    except for one random pair."""
    rows = np.zeros((2, len(pairs), grids.LENGTH), np.uint8)
    unmoved = rng.integers(len(pairs)) if rng else None
    for number, pair in enumerate(pairs):
        down = right = 0
        if rng and number != unmoved:
            shapes = [grid.shape for grid in pair if grid is not None]
            down, right = (int(rng.integers(grids.SIDE - max(size) + 1)) for size in zip(*shapes))
        for row, grid in zip(rows[:, number], pair):
            if grid is not None:
                row[:] = grids.canvas(grid, down, right)
    return rows[0], rows[1]
