"""Sudoku and mazes from local CSV files with the columns question and answer, as those of Sudoku-Extreme and Maze-Hard.

A Sudoku has its digits line by line, with . or 0 for a blank; a maze has the characters "# SGo", with o on the path.
The tokens are those of `puzzles`.
"""

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from qat_lora.errors import UserError, first_line
from qat_lora.experiments.athena import puzzles, symmetries
from qat_lora.experiments.athena.grids import turned

COLUMNS = ("question", "answer")
ROWS = 4096  # rows to decode at a time
OTHERS = 7  # rotations and reflections of a maze besides itself


@dataclass(frozen=True)
class Form:
    """What a table holds: Sudoku of a kind of `puzzles`, or mazes (kind None); side: of a grid, in cells."""

    kind: str | None
    side: int

    @property
    def vocab(self) -> int:
        return puzzles.vocab(self.kind) if self.kind else len(puzzles.MAZE)

    @property
    def name(self) -> str:
        return self.kind or f"{self.side}×{self.side} maze"

    @property
    def signs(self) -> dict[str, int]:
        """Token of each character."""
        if not self.kind:
            return {sign: token for token, sign in enumerate(puzzles.MAZE) if token}
        blanks = {".": puzzles.BLANK, "0": puzzles.BLANK}
        return blanks | {str(digit): digit + puzzles.BLANK for digit in range(1, self.side + 1)}

    def augmented(
        self, question: np.ndarray, answer: np.ndarray, count: int, seed: list[int]
    ) -> tuple[np.ndarray, np.ndarray]:
        """A row [L] and `count` augmentations of it, [1 + count, L]: random symmetries of a Sudoku, different rotations
        and reflections of a maze."""
        if not count:
            return question[None], answer[None]
        rng = np.random.default_rng(seed)
        rows = [np.tile(row, (1 + count, 1)) for row in (question, answer)]
        if self.kind:
            for row, images in zip(rows, symmetries.variant(self.kind, rows[0][1:], rows[1][1:], rng)):
                row[1:] = images
        else:
            for number, transform in enumerate(np.sort(rng.permutation(OTHERS)[:count]) + 1, 1):
                for row in rows:
                    row[number] = turned(row[0].reshape(self.side, self.side), transform).ravel()
        return rows[0], rows[1]

    def check_augmentations(self, count: int) -> None:
        if not self.kind and count > OTHERS:
            raise UserError(
                f"--augmentations {count}: a maze has only {OTHERS} other rotations and reflections; use {OTHERS}"
            )


@dataclass(frozen=True)
class Table:
    """A CSV file of `count` rows of one form."""

    path: Path
    form: Form
    count: int


def files_of(source: str, test_source: str | None) -> tuple[Path, Path] | None:
    """The CSV files of the training and the test rows: train.csv and test.csv of a folder, or two files; None if the
    sources are not tables."""
    path = Path(source)
    if path.is_dir() and (path / "train.csv").exists():
        test = Path(test_source) if test_source else path / "test.csv"
        return path / "train.csv", test / "test.csv" if test.is_dir() else test
    if path.suffix.lower() != ".csv":
        return None
    if test_source is None:
        raise UserError(f"--source {source} has no test rows; give their file with --test-source")
    return path, Path(test_source)


def open_table(path: Path, form: Form | None = None) -> Table:
    """A table of the form of its first row. Raises UserError if it has no rows, or another form than `form`."""
    count = sum(1 for _ in _lines(path))
    if not count:
        raise UserError(f"{path} has no rows; give a table of puzzles")
    found = _form(path)
    if form not in (None, found):
        raise UserError(f"{path} holds {found.name} rows, but the training rows are {form.name}; give the same kind")
    return Table(path, found, count)


def _form(path: Path) -> Form:
    line, (question, _) = next(_lines(path))
    side = math.isqrt(len(question))
    if not set(question) - set("0123456789."):
        kind = next((kind for kind in puzzles.BOXES if puzzles.side(kind) ** 2 == len(question)), None)
        if kind is None:
            raise UserError(
                f"{path} line {line}: the question has {len(question)} characters; a Sudoku has 16, 36 or 81"
            )
        return Form(kind, side)
    form = Form(None, side)
    odd = next((sign for sign in question if sign not in form.signs), None)
    if odd is not None:
        raise UserError(
            f"{path} line {line}: {odd!r} is in no puzzle; use digits and . for Sudoku, and the characters "
            f"{puzzles.MAZE[1:]!r} for mazes"
        )
    if side * side != len(question):
        raise UserError(f"{path} line {line}: the question has {len(question)} characters, so it is not a square maze")
    return form


def rows_of(table: Table) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Question and answer [L] (uint8) of each row. Raises UserError naming the line that is malformed."""
    path, form, lines = table.path, table.form, _lines(table.path)
    while chunk := list(islice(lines, ROWS)):
        tokens = [_tokens(path, form, chunk, column) for column in range(len(COLUMNS))]
        if form.kind:
            wrong = ((tokens[0] != puzzles.BLANK) & (tokens[0] != tokens[1])) | (tokens[1] == puzzles.BLANK)
            if wrong.any():
                line = chunk[int(wrong.any(1).argmax())][0]
                raise UserError(f"{path} line {line}: the answer has a blank or changes a given digit; correct it")
        yield from zip(*tokens)


def _tokens(path: Path, form: Form, chunk: list[tuple[int, tuple[str, str]]], column: int) -> np.ndarray:
    length, codes = form.side**2, np.zeros(256, np.uint8)
    for sign, token in form.signs.items():
        codes[ord(sign)] = token
    for line, texts in chunk:
        if len(texts[column]) != length:
            raise UserError(
                f"{path} line {line}: the {COLUMNS[column]} has {len(texts[column])} characters, but a {form.name} has "
                f"{length}; correct it"
            )
    joined = "".join(texts[column] for _, texts in chunk)
    found = codes[np.frombuffer(joined.encode("latin-1", "replace"), np.uint8)]
    if not found.all():
        at = int((found == 0).argmax())
        raise UserError(
            f"{path} line {chunk[at // length][0]}: {joined[at]!r} is in no {form.name}; use "
            f"{' '.join(map(repr, form.signs))}"
        )
    return found.reshape(-1, length)


def _lines(path: Path) -> Iterator[tuple[int, tuple[str, str]]]:
    """Line number, and question and answer as text, of each row of a table."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            header = next(reader, [])
            for name in (name for name in COLUMNS if name not in header):
                raise UserError(f"{path}: no column {name}; the first line must name it, but is {','.join(header)!r}")
            places = [header.index(name) for name in COLUMNS]
            for row in filter(None, reader):
                if len(row) <= max(places):
                    raise UserError(f"{path} line {reader.line_num} has only {len(row)} columns; complete the row")
                yield reader.line_num, (row[places[0]], row[places[1]])
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; check the path") from None
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as a CSV table ({first_line(error)}); restore it") from error
