"""Grids of ARC tasks, the rows of tokens that show them, and their augmentations.

A row is a canvas of 30×30 cells, read line by line: 0 is padding, 1 the end marker, c + 2 the colour c. The grid stands
at the top left or, in training, anywhere; end markers fill the line below it and the column to its right. The encoding,
the numbers of the transforms and the names of the puzzles are those of the Tiny Recursive Model (arXiv 2510.04871).
"""

import re
from collections.abc import Callable, Sequence

import numpy as np

from qat_lora.errors import UserError

SIDE = 30
LENGTH = SIDE * SIDE
COLOURS = 10
END, FIRST = 1, 2  # tokens: the end marker, and colour 0
VOCAB = FIRST + COLOURS
BLANK = "<blank>"  # name of identifier 0
# Transform t: TURNS[t] quarter turns to the left and, from 4 on, a mirror image of the result, left to right. So 4
# mirrors left to right, 5 upside down, 6 on the main diagonal and 7 on the other one.
TURNS = (0, 1, 2, 3, 0, 2, 3, 1)
UNDONE = (0, 3, 2, 1, 4, 5, 6, 7)  # the transform that undoes each
NAME = re.compile(r"(.+?)\|\|\|t([0-7])\|\|\|(\d{10})", re.DOTALL)


def turned(grid: np.ndarray, transform: int) -> np.ndarray:
    """A grid [height, width] under one of the eight rotations and reflections."""
    grid = np.rot90(grid, TURNS[transform])
    return grid[:, ::-1] if transform >= 4 else grid


def changed(grid: np.ndarray, transform: int, colours: np.ndarray) -> np.ndarray:
    """A grid under a transform, with each colour c renamed to colours[c]."""
    return turned(colours[grid], transform)


def name_of(task: str, transform: int, colours: Sequence[int]) -> str:
    """Name of an augmented task, e.g. 0a1b2c3d|||t5|||0312456789."""
    return f"{task}|||t{transform}|||{''.join(map(str, colours))}"


def undoing(name: str) -> tuple[str, Callable[[np.ndarray], np.ndarray]]:
    """The task that a puzzle is an augmentation of, and the function that undoes the augmentation of a grid. Raises
    UserError if the name is malformed."""
    if "|||" not in name:
        return name, lambda grid: grid
    found = NAME.fullmatch(name)
    if not found or len(set(found[3])) < COLOURS:
        raise UserError(f"{name!r} is not the name of a puzzle, such as ID|||t5|||0312456789; rebuild the folder")
    undone, back = UNDONE[int(found[2])], np.argsort([int(digit) for digit in found[3]]).astype(np.uint8)
    return found[1], lambda grid: changed(grid, undone, back)


def canvas(grid: np.ndarray, down: int = 0, right: int = 0) -> np.ndarray:
    """The row of tokens [900] (uint8) of a grid whose top left cell is at line `down` and column `right`."""
    (height, width), cells = grid.shape, np.zeros((SIDE, SIDE), np.uint8)
    below, beside = down + height, right + width
    cells[down:below, right:beside] = grid + FIRST
    cells[below : below + 1, right:beside] = END
    cells[down:below, beside : beside + 1] = END
    return cells.ravel()


def cropped(rows: np.ndarray) -> list[np.ndarray]:
    """The grids that rows of tokens [N, 900] show: of each, the largest rectangle from the top left corner that holds
    only colours; 0×0 if there is none. The lower one counts if two are equally large."""
    cells = np.asarray(rows).reshape(-1, SIDE, SIDE)
    coloured = (cells >= FIRST) & (cells < VOCAB)
    widths = np.minimum.accumulate(np.logical_and.accumulate(coloured, 2).sum(2), 1)  # down to each line
    areas = widths * np.arange(1, SIDE + 1)
    heights = np.where(areas.any(1), areas.argmax(1) + 1, 0)
    widths = np.where(heights > 0, widths[np.arange(len(cells)), heights - 1], 0)
    return [(grid[:height, :width] - FIRST).astype(np.uint8) for grid, height, width in zip(cells, heights, widths)]
