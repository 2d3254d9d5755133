"""Sudoku and mazes generated from a seed, each with a provably unique answer.

A puzzle is a row of tokens: its grid, read line by line. 0 is padding. Sudoku: 1 is a blank, d + 1 the digit d. Maze: 1
to 5 are the characters "# SGo"; the answer has "o" on the path from S to G.
"""

import functools
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from qat_lora.errors import UserError
from qat_lora.run.console import progress

BOXES = {"sudoku4": (2, 2), "sudoku6": (2, 3), "sudoku9": (3, 3)}  # rows and columns of a box
BLANK = 1
WALL, FLOOR, START, GOAL, PATH = range(1, 6)
MAZE = "?# SGo"
PATIENCE = 2000  # draws in a row without a new puzzle before a kind counts as exhausted
SHORT = {"sudoku4": 2000, "sudoku6": 2000, "sudoku9": 300}  # limit on draws in a row with too few blanks; takes seconds
MOST_BLANKS = {"sudoku4": 12, "sudoku6": 28, "sudoku9": 64}  # with fewer clues no Sudoku has a unique answer
GRIDS = {"sudoku4": 288, "sudoku6": 28_200_960, "sudoku9": 6_670_903_752_021_072_936_960}  # full grids
# Number of 4×4 puzzles by number of blanks: those with a unique answer, and the minimal ones among them, where
# removing any clue makes the answer ambiguous. With fewer than 4 clues the answer is never unique.
UNIQUE_4X4 = (288, 4608, 34560, 161280, 522624, 1239552, 2204928, 2958336, 2961024, 2141184, 1041408, 284160, 25728)
MINIMAL_4X4 = {10: 1536, 11: 58368, 12: 25728}
TREES = {5: 4, 7: 192, 9: 100_352}  # spanning trees over the cells of a maze, by its side


def side(kind: str) -> int:
    """Side of a kind's grid in cells; for an unknown kind raises UserError that lists the known ones."""
    if kind in BOXES:
        return BOXES[kind][0] * BOXES[kind][1]
    size = int(kind[4:]) if re.fullmatch(r"maze[1-9]\d{0,2}", kind) else 0
    if size < 5 or size % 2 == 0:
        raise UserError(
            f"kind {kind!r} is not one of {', '.join(BOXES)}, mazeN with N odd from 5 to 999; use e.g. maze9"
        )
    return size


def vocab(kind: str) -> int:
    """Number of tokens of a kind, padding and blank included."""
    return side(kind) + 2 if kind in BOXES else len(MAZE)


def as_text(kind: str, tokens: np.ndarray) -> str:
    """A row of tokens [L] as lines of characters; "." is a blank, "?" padding."""
    signs = "?." + "123456789" if kind in BOXES else MAZE
    return "\n".join("".join(signs[token] for token in line) for line in np.reshape(tokens, (side(kind), -1)))


def read_puzzles(kind: str, lines: Iterable[str]) -> Iterator[np.ndarray]:
    """Puzzles [L], each as soon as its last line has been read, from lines of text: the form of `as_text`, a grid or
    all of it in one line. Blank lines separate nothing. In a Sudoku "0" is a blank, too, and spaces and frames (| + -)
    are ignored; in a maze "." is a floor, too. Raises UserError that names the line and what is wrong in it."""
    n, cells, first = side(kind), [], 1
    if kind in BOXES:
        codes = {".": BLANK, "0": BLANK} | {str(digit): digit + 1 for digit in range(1, n + 1)}
    else:
        codes = {"#": WALL, " ": FLOOR, ".": FLOOR, "S": START, "G": GOAL}
    for number, line in enumerate(lines, 1):
        line = re.sub(r"[\s|+-]", "", line) if kind in BOXES else line.rstrip("\r\n")
        if not line.strip() and len(line) != n:
            continue
        odd = next((sign for sign in line if sign not in codes), None)
        if odd is not None:
            raise UserError(f"line {number}: {odd!r} is in no {kind}; use {' '.join(map(repr, codes))}")
        if len(line) != n and (cells or len(line) != n * n):
            raise UserError(f"line {number} has {len(line)} cells; a {kind} has {n} in a line, or {n * n} in one")
        first = first if cells else number
        cells += [codes[sign] for sign in line]
        if len(cells) == n * n:
            grid, inner = np.reshape(cells, (n, n)), np.s_[1:-1, 1:-1]
            if kind not in BOXES and not cells.count(START) == cells.count(GOAL) == (grid[inner] == START).sum() == 1:
                raise UserError(f"the maze from line {first} on needs one S and one G inside it; correct it")
            if kind not in BOXES and (grid != WALL).sum() != (grid[inner] != WALL).sum():
                raise UserError(f"the maze from line {first} on needs walls (#) all around; correct it")
            yield grid.ravel()
            cells = []
    if cells:
        raise UserError(f"the {kind} from line {first} on has {len(cells)} of {n * n} cells; add its other lines")


def verdict(kind: str, question: np.ndarray, found: np.ndarray) -> str:
    """Whether an answer [L] to a puzzle [L] is right, in words."""
    if kind in BOXES:
        right, _ = solve(question)
        if not len(right):
            return "the puzzle has no answer: its digits contradict each other"
        if len(right) > 1:
            kept = (found == question)[question != BLANK].all()
            return f"{'right' if kept and len(solve(found)[0]) else 'wrong'}; the puzzle has several answers"
        wrong = int((found != right[0]).sum())
    else:
        n, wanted = side(kind), question.copy()
        start, goal = (int(np.flatnonzero(question == token)[0]) for token in (START, GOAL))
        try:
            way = _way(question, n, start, goal)
        except IndexError:  # all that S reaches has been visited
            return "the puzzle has no answer: walls part S from G"
        wanted[[cell for cell in way if cell not in (start, goal)]] = PATH
        wrong = int((found != wanted).sum())
    return f"wrong in {wrong} of {len(found)} cells" if wrong else "right"


# -- solving ---------------------------------------------------------------------------------------------------------
@functools.cache
def _units(kind: str) -> tuple[tuple[int, int, int], ...]:
    """For each cell, the numbers of its row, column and box, where all 3n rows, columns and boxes are numbered
    together."""
    (tall, wide), n = BOXES[kind], side(kind)
    return tuple((r, n + c, 2 * n + r // tall * tall + c // wide) for r in range(n) for c in range(n))


class _Board:
    """A Sudoku during search. Digits are bits; `used` holds those of each unit; `guesses` counts the digits tried in
    cells with more than one candidate."""

    def __init__(self, kind: str):
        n = side(kind)
        self.units, self.full = _units(kind), (1 << n) - 1
        self.digits, self.used, self.guesses = [0] * n * n, [0] * 3 * n, 0
        self.orders = [[1 << d for d in range(n)]] * (n * n)

    def free(self, cell: int) -> int:
        row, column, box = self.units[cell]
        return self.full & ~(self.used[row] | self.used[column] | self.used[box])

    def flip(self, cell: int, digit: int) -> None:
        """Place a digit in an empty cell, or remove it."""
        self.digits[cell] ^= digit
        for unit in self.units[cell]:
            self.used[unit] ^= digit

    def search(self, blanks: list[int], limit: int, found: list[list[int]]) -> None:
        """Add the ways to fill the blanks to `found`, until it has `limit`. The cell with the fewest candidates comes
        first."""
        if not blanks:
            found.append(self.digits.copy())
            return
        units, used, full, least = self.units, self.used, self.full, 99
        for cell in blanks:  # free() inlined: this loop takes most of the time
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
    """The first `limit` solutions of a Sudoku, and how many digits were tried in cells with more than one candidate.

    puzzle: tokens [L] or [side, side], which may contradict each other; solutions [≤ limit, L] uint8. If it finds
    fewer than `limit`, there are no others, so a single one with limit=2 proves uniqueness. Raises UserError if the
    puzzle is not a Sudoku.
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
    """Tokens of digits given as bits; 0, no digit, becomes a blank."""
    return np.frexp(np.array(digits, float))[1].astype(np.uint8) + BLANK


# -- drawing ---------------------------------------------------------------------------------------------------------
def possible(kind: str, blanks: tuple[float, float]) -> float:
    """How many different puzzles of a kind `generate` can make: exact for 4×4 Sudoku and mazes up to 9×9, inf for
    larger mazes, an upper bound for other Sudoku. blanks: see `generate`."""
    n = side(kind)
    if kind not in BOXES:
        places = (n // 2) ** 2
        return TREES.get(n, math.inf) * places * (places - 1)  # start and goal are different cells
    low, high = (round(share * (n * n)) for share in blanks)
    if blanks[0] == 1 and kind == "sudoku4":
        return sum(MINIMAL_4X4.values())
    if kind == "sudoku4":
        return sum(UNIQUE_4X4[low : high + 1])
    return GRIDS[kind] * sum(math.comb(n * n, k) for k in range(high + 1))


def check_request(kind: str, count: int, blanks: tuple[float, float], flag: str) -> None:
    """Raise UserError if `generate` cannot make `count` puzzles; flag: the option that sets `count`, for messages."""
    cells = side(kind) ** 2
    low, high = blanks
    if count < 1:
        raise UserError(f"{flag} {count} must be at least 1")
    if not 0 < low <= high <= 1:
        raise UserError(
            f"--least-blanks {low} and --most-blanks {high} must satisfy 0 < least ≤ most ≤ 1; use e.g. 0.4 and 1"
        )
    if kind in BOXES and low < 1 and round(low * cells) > (most := MOST_BLANKS[kind]):
        raise UserError(
            f"--least-blanks {low:g}: no {kind} with one answer has more than {most} of its {cells} cells blank; lower "
            f"it to {_share(most, cells)} or less, or use 1 for as many blanks as each puzzle allows"
        )
    if count > (there := possible(kind, blanks)):
        given = f" with {low:g} to {high:g} of the cells blank" if kind in BOXES else ""
        raise UserError(f"{flag}: {count} puzzles are more than the {there} {kind} that exist{given}; lower it")


def generate(
    kind: str, count: int, seed: int, blanks: tuple[float, float] = (0.4, 1.0), flag: str = "--count"
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`count` different puzzles: questions and answers [count, L] uint8, difficulty [count].

    A Sudoku is a random full grid from which clues are removed in random order, except those that the unique answer
    needs. The number of blanks is drawn between two shares of the cells, and is at most the number of clues that could
    be removed; a lower share of 1 means as many blanks as possible. Its difficulty is the `guesses` that `solve` needs
    to prove the answer unique. A maze is a random spanning tree with a start and a goal, so exactly one path joins
    them; its difficulty is the path's length in steps. Draw i depends only on (seed, i). Draws that repeat an earlier
    puzzle or that allow too few blanks are skipped. Raises UserError naming `flag`, the option that sets `count`, if
    the kind has too few puzzles, and naming --least-blanks if draws do not reach the lower share.
    """
    check_request(kind, count, blanks, flag)
    found, last, tell, short = {}, 0, progress(), []
    for number in itertools.count():
        rng = np.random.default_rng([seed, number])
        if kind in BOXES:
            answer, removed = _emptied(kind, rng)
            if blanks[0] < 1 and len(removed) < round(blanks[0] * side(kind) ** 2):
                short.append(len(removed))
                if len(short) < SHORT[kind]:
                    continue
                cells = side(kind) ** 2
                raise UserError(
                    f"--least-blanks {blanks[0]:g}: {len(short)} draws of {kind} in a row left fewer than "
                    f"{round(blanks[0] * cells)} of {cells} cells blank; lower it to "
                    f"{_share(sorted(short)[len(short) // 2], cells)}, which half of them reach, or use 1 for as many "
                    "blanks as each puzzle allows"
                )
            short.clear()
            question, difficulty = _question(kind, rng, answer, removed, blanks)
        else:
            question, answer, difficulty = _maze(side(kind), rng)
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


def _share(blanks: int, cells: int) -> float:
    """The share of blanks among the cells, rounded down to a whole percent."""
    return math.floor(100 * blanks / cells) / 100


def _emptied(kind: str, rng: np.random.Generator) -> tuple[np.ndarray, list[int]]:
    """A full grid [L], and cells of which all, or any subset, can be emptied without creating a second answer."""
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
    return answer, removed


def _question(
    kind: str, rng: np.random.Generator, answer: np.ndarray, removed: list[int], blanks: tuple[float, float]
) -> tuple[np.ndarray, int]:
    """A full grid with some of the `removed` cells blank, and its difficulty."""
    least, most = (min(round(share * len(answer)), len(removed)) for share in blanks)
    question = answer.copy()
    question[removed[: rng.integers(least, most, endpoint=True)]] = BLANK
    solutions, guesses = solve(question)
    if len(solutions) != 1 or (solutions[0] != answer).any():
        raise AssertionError(f"{kind} {question.tolist()} has another answer")
    return question, guesses


def _another(board: _Board, cell: int, digit: int, blanks: list[int]) -> bool:
    """Whether the board has a solution with another digit in this empty cell."""
    found = []
    for other in board.orders[cell]:
        if other & board.free(cell) & ~digit and not found:
            board.flip(cell, other)
            board.search(blanks, 1, found)
            board.flip(cell, other)
    return bool(found)


def _maze(size: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, int]:
    """Question, answer and path length of a random maze: Kruskal's algorithm on the cells at odd places, with the walls
    between them in random order."""
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
    """The root of a cell's tree in a union-find forest `root`, with path halving."""
    while root[cell] != cell:
        root[cell] = cell = root[root[cell]]
    return cell


def _way(grid: np.ndarray, size: int, start: int, goal: int) -> list[int]:
    """The path from the goal back to the start, both included."""
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


def draw_answer(kind: str, question, label, found, segments: int, path: Path) -> None:
    """Plot a question and its answer side by side: given cells black, right ones green, wrong ones on red."""
    from qat_lora.run.plots import pyplot

    n, maze = side(kind), kind.startswith("maze")
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(8, 4.3))
    for axis, tokens, title in zip(
        axes, (question, found), ("question", f"answer after {segments} segment{'s' * (segments > 1)}")
    ):
        axis.set(xlim=(0, n), ylim=(n, 0), xticks=[], yticks=[], aspect="equal", title=title)
        for place, (token, given, wanted) in enumerate(zip(tokens.tolist(), question.tolist(), label.tolist())):
            row, column = divmod(place, n)
            colour = "black" if token == given else "tab:green"
            if axis is axes[1] and token != wanted:
                axis.add_patch(plt.Rectangle((column, row), 1, 1, color="tab:red", alpha=0.4, zorder=2))
            if maze and token == WALL:
                axis.add_patch(plt.Rectangle((column, row), 1, 1, color="0.25"))
            elif maze or token > BLANK:
                text = MAZE[token] if maze else str(token - BLANK)
                axis.text(column + 0.5, row + 0.55, text, color=colour, ha="center", va="center", fontsize=120 / n)
        if not maze:
            high, wide = BOXES[kind]
            for line in range(n + 1):
                axis.axhline(line, color="black", linewidth=2.5 if line % high == 0 else 0.5)
                axis.axvline(line, color="black", linewidth=2.5 if line % wide == 0 else 0.5)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
