"""Sudoku and mazes out of a seed: questions with one answer each, proved so, their symmetries and canonical forms.

A puzzle is a row of tokens, its grid read line by line. 0 is the pad. Sudoku: 1 a blank, d + 1 the digit d. Maze: 1 to
5 are the characters "# SGo"; the answer has "o" on the way from S to G.
"""

import functools
import itertools
import math
import re

import numpy as np

from qat_lora.data.progress import counted, progress
from qat_lora.errors import UserError

BOXES = {"sudoku4": (2, 2), "sudoku6": (2, 3), "sudoku9": (3, 3)}  # rows and columns of a box
BLANK = 1
WALL, FLOOR, START, GOAL, PATH = range(1, 6)
MAZE = "?# SGo"
PATIENCE = 2000  # draws in a row that are all known before a kind counts as exhausted
GRIDS = {"sudoku4": 288, "sudoku6": 28_200_960, "sudoku9": 6_670_903_752_021_072_936_960}  # full grids
# 4×4 puzzles by number of blanks: those with exactly one answer, and of them the minimal ones, which no longer have one
# answer once any clue is removed. Fewer than 4 clues never determine one answer.
UNIQUE_4X4 = (288, 4608, 34560, 161280, 522624, 1239552, 2204928, 2958336, 2961024, 2141184, 1041408, 284160, 25728)
MINIMAL_4X4 = {10: 1536, 11: 58368, 12: 25728}
TREES = {5: 4, 7: 192, 9: 100_352}  # spanning trees over the places of a maze, by its side


def side(kind: str) -> int:
    """Lines of the grid of a kind; raises UserError naming the kinds for an unknown one."""
    if kind in BOXES:
        return BOXES[kind][0] * BOXES[kind][1]
    size = int(kind[4:]) if re.fullmatch(r"maze[1-9]\d{0,2}", kind) else 0
    if size < 5 or size % 2 == 0:
        raise UserError(
            f"kind {kind!r} is not one of {', '.join(BOXES)}, mazeN with N odd from 5 to 999; use e.g. maze9"
        )
    return size


def vocab(kind: str) -> int:
    """Tokens of a kind, pad and blank included."""
    return side(kind) + 2 if kind in BOXES else len(MAZE)


def as_text(kind: str, tokens: np.ndarray) -> str:
    """A row of tokens [L] as lines of characters; a dot is a blank, ? a pad."""
    signs = "?." + "123456789" if kind in BOXES else MAZE
    return "\n".join("".join(signs[token] for token in line) for line in np.reshape(tokens, (side(kind), -1)))


# -- solving ---------------------------------------------------------------------------------------------------------
@functools.cache
def _units(kind: str) -> tuple[tuple[int, int, int], ...]:
    """Of each cell the numbers of its row, column and box, which are all different."""
    (tall, wide), n = BOXES[kind], side(kind)
    return tuple((r, n + c, 2 * n + r // tall * tall + c // wide) for r in range(n) for c in range(n))


class _Board:
    """A Sudoku under search: digits are bits, `used` holds those of each unit, and `guesses` counts the digits tried
    where there was a choice."""

    def __init__(self, kind: str):
        n = side(kind)
        self.units, self.full = _units(kind), (1 << n) - 1
        self.digits, self.used, self.guesses = [0] * n * n, [0] * 3 * n, 0
        self.orders = [[1 << d for d in range(n)]] * (n * n)

    def free(self, cell: int) -> int:
        row, column, box = self.units[cell]
        return self.full & ~(self.used[row] | self.used[column] | self.used[box])

    def flip(self, cell: int, digit: int) -> None:
        """Put a digit on an empty cell, or take it away."""
        self.digits[cell] ^= digit
        for unit in self.units[cell]:
            self.used[unit] ^= digit

    def search(self, blanks: list[int], limit: int, found: list[list[int]]) -> None:
        """Add to `found` what fills the blanks, up to `limit`; the cell with the fewest digits left comes first."""
        if not blanks:
            found.append(self.digits.copy())
            return
        units, used, full, least = self.units, self.used, self.full, 99
        for cell in blanks:  # free() in place: this loop is where the time goes
            row, column, box = units[cell]
            free = full & ~(used[row] | used[column] | used[box])
            if (count := free.bit_count()) < least:
                chosen, choices, least = cell, free, count
                if count < 2:
                    break
        rest = [cell for cell in blanks if cell != chosen]
        for digit in self.orders[chosen]:
            if digit & choices:
                self.guesses += least > 1
                self.flip(chosen, digit)
                self.search(rest, limit, found)
                self.flip(chosen, digit)
                if len(found) >= limit:
                    return


def solve(puzzle: np.ndarray, limit: int = 2) -> tuple[np.ndarray, int]:
    """The first `limit` solutions of a Sudoku and the digits that were tried where there was a choice.

    puzzle [L] or [side, side] tokens, which may contradict each other; solutions [≤ limit, L] uint8. Fewer than `limit`
    are all there are, so one of limit=2 is the proof of uniqueness. Raises UserError for what is no Sudoku.
    """
    cells = np.asarray(puzzle).ravel().tolist()
    kind = next((kind for kind in BOXES if side(kind) ** 2 == len(cells)), None)
    if kind is None or not all(BLANK <= token < vocab(kind) for token in cells):
        raise UserError(
            f"not a Sudoku: {len(cells)} cells with tokens {min(cells, default=0)} to {max(cells, default=0)}"
        )
    board, blanks, found = _Board(kind), [], []
    for cell, token in enumerate(cells):
        if token == BLANK:
            blanks.append(cell)
        elif not board.free(cell) & (digit := 1 << token - 2):
            return np.empty((0, len(cells)), np.uint8), 0
        else:
            board.flip(cell, digit)
    board.search(blanks, limit, found)
    return _tokens(found).reshape(-1, len(cells)), board.guesses


def _tokens(digits: list) -> np.ndarray:
    """Tokens of digits as bits; 0, no digit, becomes a blank."""
    return np.frexp(np.array(digits, float))[1].astype(np.uint8) + BLANK


# -- drawing ---------------------------------------------------------------------------------------------------------
def possible(kind: str, blanks: tuple[float, float]) -> float:
    """How many different puzzles of a kind `generate` can make: the exact number for 4×4 Sudoku and mazes up to 9×9,
    inf for larger mazes, an upper bound for other Sudoku. blanks: least and largest share of the cells."""
    n = side(kind)
    if kind not in BOXES:
        places = (n // 2) ** 2
        return TREES.get(n, math.inf) * places * (places - 1)  # start and goal are two different places
    low, high = (round(share * (n * n)) for share in blanks)
    if kind == "sudoku4":  # with fewer blanks than asked for, only minimal ones
        return sum(UNIQUE_4X4[low : high + 1]) + sum(count for k, count in MINIMAL_4X4.items() if k < low)
    return GRIDS[kind] * sum(math.comb(n * n, k) for k in range(high + 1))


def check_request(kind: str, count: int, blanks: tuple[float, float], flag: str) -> None:
    """Raise UserError if `generate` cannot make that many; flag: the option that `count` comes from, for messages."""
    side(kind)
    low, high = blanks
    if count < 1:
        raise UserError(f"{flag} {count} must be at least 1")
    if not 0 < low <= high <= 1:
        raise UserError(f"shares of blanks {low} to {high} must rise within (0, 1]; use e.g. (0.4, 1.0)")
    if count > (there := possible(kind, blanks)):
        given = f" with {low:g} to {high:g} of the cells blank" if kind in BOXES else ""
        raise UserError(f"{flag}: {count} puzzles are more than the {there} {kind} that exist{given}; lower it")


def generate(
    kind: str, count: int, seed: int, blanks: tuple[float, float] = (0.4, 1.0), flag: str = "--count"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`count` different puzzles: questions and answers [count, L] uint8, difficulty [count].

    A Sudoku is a random full grid whose clues went in random order while the answer stayed unique, back to a number of
    blanks drawn between two shares of the cells, the upper at most what could be removed; its difficulty is the number
    of digits that `solve` tries to prove it unique. A maze is a random spanning tree between two of its cells, so that
    there is one way; its difficulty is the way's length in steps. Draw i is a function of (seed, i) alone; draws
    that repeat an earlier puzzle are left out. Raises UserError naming `flag`, the option that `count` comes from, if
    the kind has too few puzzles.
    """
    check_request(kind, count, blanks, flag)
    low, high = blanks
    found, last, tell = {}, 0, progress()
    for number in itertools.count():
        rng = np.random.default_rng([seed, number])
        question, answer, difficulty = _sudoku(kind, rng, low, high) if kind in BOXES else _maze(side(kind), rng)
        if (key := question.tobytes()) not in found:
            found[key], last = (question, answer, difficulty), number
        tell(f"{len(found):,} of {count:,} {kind} drawn")
        if len(found) == count:
            break
        if number - last >= PATIENCE:
            raise UserError(
                f"{flag}: {count} puzzles are more than the {len(found)} {kind} that could be found: {PATIENCE} draws "
                "in a row gave nothing new; lower it"
            )
    questions, answers, difficulties = zip(*found.values())
    return np.stack(questions), np.stack(answers), np.array(difficulties)


def _sudoku(kind: str, rng: np.random.Generator, low: float, high: float) -> tuple[np.ndarray, np.ndarray, int]:
    cells = side(kind) ** 2
    board, full = _Board(kind), []
    standard, board.orders = board.orders, rng.permuted(board.orders, axis=1).tolist()
    board.search(rng.permutation(cells).tolist(), 1, full)
    board.orders, answer = standard, _tokens(full[0])
    for cell, digit in enumerate(full[0]):
        board.flip(cell, digit)
    removed = []
    for cell in rng.permutation(cells).tolist():
        board.flip(cell, digit := full[0][cell])
        if _another(board, cell, digit, removed):
            board.flip(cell, digit)
        else:
            removed.append(cell)
    most = len(removed)
    target = rng.integers(min(round(low * cells), most), min(round(high * cells), most), endpoint=True)
    question = answer.copy()
    question[removed[:target]] = BLANK
    solutions, guesses = solve(question)
    if len(solutions) != 1 or (solutions[0] != answer).any():
        raise AssertionError(f"{kind} {question.tolist()} has another answer")
    return question, answer, guesses


def _another(board: _Board, cell: int, digit: int, blanks: list[int]) -> bool:
    """Whether the board can be filled with another digit in this empty cell."""
    found = []
    for other in board.orders[cell]:
        if other & board.free(cell) & ~digit and not found:
            board.flip(cell, other)
            board.search(blanks, 1, found)
            board.flip(cell, other)
    return bool(found)


def _maze(size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
    """Kruskal's tree over the cells at odd places in a random order of the walls between them."""
    across = size // 2
    cell = np.arange(across**2).reshape(across, across)
    walls = [*zip(cell[:, :-1].flat, cell[:, 1:].flat), *zip(cell[:-1].flat, cell[1:].flat)]
    places = np.add.outer(np.arange(1, size, 2) * size, np.arange(1, size, 2)).ravel().tolist()
    grid, root = np.full(size * size, WALL, np.uint8), list(range(across**2))
    grid[places] = FLOOR
    for wall in rng.permutation(walls).tolist():
        one, other = (root_of(root, end) for end in wall)
        if one != other:
            root[one] = other
            grid[(places[wall[0]] + places[wall[1]]) // 2] = FLOOR
    start, goal = rng.choice(places, 2, replace=False).tolist()
    way = _way(grid, size, start, goal)
    answer = grid.copy()
    answer[way] = PATH
    for maze in (grid, answer):
        maze[start], maze[goal] = START, GOAL
    return grid, answer, len(way) - 1


def root_of(root: list[int], cell: int) -> int:
    """The root of a cell's tree in a union-find forest `root`, whose paths are halved on the way."""
    while root[cell] != cell:
        root[cell] = cell = root[root[cell]]
    return cell


def _way(grid: np.ndarray, size: int, start: int, goal: int) -> list[int]:
    """The places from the goal back to the start, both included."""
    came, front, open_ = {start: start}, [start], grid != WALL
    while goal not in came:
        place = front.pop()
        for near in (place - size, place - 1, place + 1, place + size):
            if open_[near] and near not in came:
                came[near] = place
                front.append(near)
    way = [goal]
    while way[-1] != start:
        way.append(came[way[-1]])
    return way


# -- symmetries ------------------------------------------------------------------------------------------------------
def variant(
    kind: str, questions: np.ndarray, answers: np.ndarray, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Each row [N, L] in a random symmetry of its kind, question and answer alike.

    Sudoku: digits renamed; bands, stacks and the lines in them permuted; transposed where that keeps the boxes. Maze:
    turned and mirrored. Pads stay pads.
    """
    n, rows = side(kind), np.arange(len(questions))[:, None]
    if kind not in BOXES:
        places = _dihedral(n)[rng.integers(8, size=len(questions))]
        return questions[rows, places], answers[rows, places]
    tall, wide = BOXES[kind]
    across, down = _lines(len(questions), n, tall, rng), _lines(len(questions), n, wide, rng)
    places = across[:, :, None] * n + down[:, None, :]
    if tall == wide:
        flipped = rng.random(len(questions)) < 0.5
        places[flipped] = places[flipped].transpose(0, 2, 1)
    places = places.reshape(len(questions), -1)
    names = np.tile(np.arange(n + 2, dtype=questions.dtype), (len(questions), 1))
    names[:, 2:] = rng.permuted(names[:, 2:], axis=1)
    return names[rows, questions[rows, places]], names.astype(answers.dtype)[rows, answers[rows, places]]


def _lines(count: int, n: int, thick: int, rng: np.random.Generator) -> np.ndarray:
    """`count` random orders [count, n] of n lines that keep each bundle of `thick` together."""
    within = rng.random((count, n // thick, thick)).argsort(-1)
    bundles = rng.random((count, n // thick, 1)).argsort(1)
    return (bundles * thick + within).reshape(count, n)


@functools.cache
def _dihedral(n: int) -> np.ndarray:
    """[8, n²]: the places that each turn and mirror image of a square takes its cells from."""
    square = np.arange(n * n).reshape(n, n)
    return np.stack([np.rot90(s, turns).ravel() for s in (square, square.T) for turns in range(4)])


@functools.cache
def _orders(n: int, thick: int) -> np.ndarray:
    """All orders [G, n] of n lines that keep each bundle of `thick` together."""
    bundles = np.arange(n).reshape(-1, thick)
    images = [
        sum(image, ())
        for order in itertools.permutations(bundles.tolist())
        for image in itertools.product(*map(itertools.permutations, order))
    ]
    return np.array(images)


# -- canonical forms -------------------------------------------------------------------------------------------------
def answer_class(kind: str, answers: np.ndarray) -> list[bytes]:
    """Of each full grid [N, L] of a Sudoku the least one that symmetries and new names for the digits make of it: equal
    for two grids exactly where one is a symmetry of the other. 2 classes of 4×4, 49 of 6×6, 5,472,730,538 of 9×9."""
    if kind not in BOXES:
        raise UserError(f"kind {kind!r} has no classes of answers; its questions have forms")
    n = side(kind)
    grids = np.asarray(answers, np.intp).reshape(-1, n, n) - 2
    return [_least(kind, grid) for grid in counted(grids, f"{kind} compared by symmetry")]


def _least(kind: str, grid: np.ndarray) -> bytes:
    """The least image of a full grid of 0 … n − 1.

    It starts with 0 … n − 1, so a first line and an order of the columns name all digits, and the order of the other
    lines follows: by first column. Only where the second line is least is the whole image made.
    """
    (tall, wide), n = BOXES[kind], len(grid)
    columns, bands = _orders(n, wide), np.arange(n).reshape(-1, tall)
    mates = np.array([[line for line in band if line != first] for band in bands for first in band])
    parts = []
    for turned in (grid, grid.T) if tall == wide else (grid,):
        lines = turned[:, columns]  # [n, G, n]
        names = lines.argsort(-1)  # [first, G, digit]: its name where this line is the first
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
    """Of each question [N, L] of a 4×4 Sudoku or a maze the least one that its symmetries make of it; the digits of a
    Sudoku are named by first appearance."""
    if kind in BOXES and kind != "sudoku4":
        raise UserError(f"kind {kind!r} has too many symmetries for forms of questions; its answers have classes")
    questions, what = np.asarray(questions, np.uint8), f"{kind} compared by symmetry"
    if kind not in BOXES:
        return [min(map(bytes, question[_dihedral(side(kind))])) for question in counted(questions, what)]
    lines = _orders(4, 2)
    places = (lines[:, None, :, None] * 4 + lines[None, :, None, :]).reshape(-1, 4, 4)
    places = np.concatenate([places, places.transpose(0, 2, 1)]).reshape(-1, 16)
    return [min(map(bytes, _renamed(question[places]))) for question in counted(questions, what)]


def _renamed(images: np.ndarray) -> np.ndarray:
    """Digits of 4×4 questions [G, 16] named by first appearance."""
    firsts = np.stack([np.where((there := images == digit).any(1), there.argmax(1), 16) for digit in range(2, 6)], 1)
    names = np.concatenate([np.tile([0, BLANK], (len(images), 1)), firsts.argsort(1).argsort(1) + 2], 1)
    return np.take_along_axis(names.astype(np.uint8), images.astype(np.intp), 1)
