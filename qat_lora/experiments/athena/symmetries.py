"""Symmetries of Sudoku and mazes, and canonical forms under them; tokens as in puzzles.py."""

import functools
import itertools

import numpy as np

from qat_lora.errors import UserError
from qat_lora.experiments.athena.puzzles import BLANK, BOXES, side
from qat_lora.run.console import watched


# -- symmetries ------------------------------------------------------------------------------------------------------
def variant(
    kind: str, questions: np.ndarray, answers: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Each row [N, L] under a random symmetry of its kind, the same for question and answer.

    Sudoku: digits renamed; bands, stacks and the lines within them permuted; transposed if the boxes are square. Maze:
    rotated and mirrored. Padding stays.
    """
    n, rows = side(kind), np.arange(len(questions))[:, None]
    if kind not in BOXES:
        places = dihedral(n)[rng.integers(8, size=len(questions))]
        return questions[rows, places], answers[rows, places]
    tall, wide = BOXES[kind]
    across, down = _lines(len(questions), n, tall, rng), _lines(len(questions), n, wide, rng)
    places = across[:, :, None] * n + down[:, None, :]
    if tall == wide:
        flipped = rng.random(len(questions)) < 0.5
        places[flipped] = places[flipped].transpose(0, 2, 1)
    places = places.reshape(len(questions), n * n)
    names = np.tile(np.arange(n + 2, dtype=questions.dtype), (len(questions), 1))
    names[:, 2:] = rng.permuted(names[:, 2:], axis=1)
    return names[rows, questions[rows, places]], names.astype(answers.dtype)[rows, answers[rows, places]]


def _lines(count: int, n: int, thick: int, rng: np.random.Generator) -> np.ndarray:
    """`count` random orders [count, n] of n lines that keep each bundle of `thick` lines together."""
    within = rng.random((count, n // thick, thick)).argsort(-1)
    bundles = rng.random((count, n // thick, 1)).argsort(1)
    return (bundles * thick + within).reshape(count, n)


@functools.cache
def dihedral(n: int) -> np.ndarray:
    """[8, n²]: for each rotation and reflection of a square, the places that its cells come from."""
    square = np.arange(n * n).reshape(n, n)
    return np.stack([np.rot90(s, turns).ravel() for s in (square, square.T) for turns in range(4)])


@functools.cache
def _orders(n: int, thick: int) -> np.ndarray:
    """All orders [G, n] of n lines that keep each bundle of `thick` lines together."""
    bundles = np.arange(n).reshape(-1, thick)
    images = [
        sum(image, ())
        for order in itertools.permutations(bundles.tolist())
        for image in itertools.product(*map(itertools.permutations, order))
    ]
    return np.array(images)


# -- canonical forms -------------------------------------------------------------------------------------------------
def answer_class(kind: str, answers: np.ndarray) -> list[bytes]:
    """The smallest image of each full Sudoku grid [N, L] under symmetries and renaming of digits. Two grids have the
    same one if and only if one is a symmetry of the other. There are 2 classes of 4×4, 49 of 6×6 and 5,472,730,538 of
    9×9."""
    n = side(kind)
    grids = np.asarray(answers, np.intp).reshape(-1, n, n) - 2
    return [_least(kind, grid) for grid in watched(grids, f"comparing {kind} by symmetry", len(grids))]


def _least(kind: str, grid: np.ndarray) -> bytes:
    """The smallest image of a full grid of 0 … n − 1.

    It starts with 0 … n − 1, so the choice of a first line and of a column order names all digits. The other lines are
    then sorted by their first column. The whole image is built only where the second line is smallest.
    """
    (tall, wide), n = BOXES[kind], len(grid)
    columns, bands = _orders(n, wide), np.arange(n).reshape(-1, tall)
    mates = np.array([[line for line in band if line != first] for band in bands for first in band])
    parts = []
    for turned in (grid, grid.T) if tall == wide else (grid,):
        lines = turned[:, columns]  # [n, G, n]
        names = lines.argsort(-1)  # [first, G, digit]: its name if this line is the first
        seconds = np.take_along_axis(names[:, None], lines[mates], -1)  # [first, mate, G, n]
        nearest = seconds[..., :1].argmin(1, keepdims=True)
        second = np.take_along_axis(seconds, nearest, 1)[:, 0] @ n ** np.arange(n)[::-1]
        parts.append((second, lines, names))
    least, images = min(second.min() for second, _, _ in parts), []
    for second, lines, names in parts:
        for first, order in zip(*np.nonzero(second == least)):
            image = names[first, order][lines[:, order]]
            within = image[:, 0].reshape(-1, tall).argsort(-1) + bands[:, :1]
            images.append(image[within[image[within[:, 0], 0].argsort()].ravel()].astype(np.uint8).tobytes())
    return min(images)


def form(kind: str, questions: np.ndarray) -> list[bytes]:
    """The smallest image of each question [N, L] of a 4×4 Sudoku or a maze under its symmetries; the digits of a Sudoku
    are named by first appearance."""
    if kind in BOXES and kind != "sudoku4":
        raise UserError(f"kind {kind!r} has too many symmetries to compare questions; compare its answers by class")
    questions, what = np.asarray(questions, np.uint8), f"comparing {kind} by symmetry"
    if kind not in BOXES:
        images = (question[dihedral(side(kind))] for question in watched(questions, what, len(questions)))
        return [min(map(bytes, image)) for image in images]
    lines = _orders(4, 2)
    places = (lines[:, None, :, None] * 4 + lines[None, :, None, :]).reshape(-1, 4, 4)
    places = np.concatenate([places, places.transpose(0, 2, 1)]).reshape(-1, 16)
    return [min(map(bytes, _renamed(question[places]))) for question in watched(questions, what, len(questions))]


def _renamed(images: np.ndarray) -> np.ndarray:
    """4×4 questions [G, 16] with digits named by first appearance."""
    firsts = np.stack([np.where((there := images == digit).any(1), there.argmax(1), 16) for digit in range(2, 6)], 1)
    names = np.concatenate([np.tile([0, BLANK], (len(images), 1)), firsts.argsort(1).argsort(1) + 2], 1)
    return np.take_along_axis(names.astype(np.uint8), images.astype(np.intp), 1)
