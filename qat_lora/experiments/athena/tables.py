"""Sudoku and mazes from local CSV files with the columns question and answer, as those of Sudoku-Extreme and Maze-Hard.

A Sudoku has its digits line by line, with . or 0 for a blank; a maze has the characters "# SGo", with o on the path.
The tokens are those of `puzzles`.
"""

import csv
import math
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from qat_lora.errors import UserError, first_line
from qat_lora.experiments.athena import puzzles, symmetries
from qat_lora.experiments.athena.writing import BLANK, new_dataset
from qat_lora.run.console import watched

COLUMNS = ("question", "answer")
OTHERS = 7  # rotations and reflections of a maze besides itself


def files_of(source: str, test_source: str | None) -> tuple[Path, Path] | None:
    """The CSV files of the training and the test rows; None if the sources are not tables."""
    path, test = Path(source), Path(test_source or source)
    if (path / "train.csv").exists():
        path /= "train.csv"
    elif path.suffix.lower() != ".csv":
        return None
    elif test_source is None:
        raise UserError(f"--source {source} has no test rows; give their file with --test-source")
    return path, test / "test.csv" if test.is_dir() else test


def read_table(path: Path, name: str | None = None) -> tuple[str, np.ndarray]:
    """What a table holds, a Sudoku of `puzzles` or e.g. "30×30 maze", and the tokens [N, 2, L] (uint8) of its questions
    and answers. Raises UserError naming the line that is malformed, or if the first row is not a `name`."""
    tokens = bytearray()
    for line, texts in _lines(path):
        where = f"{path} line {line}"
        if not tokens:
            found, length, signs = _form_of(texts[0], where)
            codes = bytes(signs.get(chr(code), 0) for code in range(256))
        for column, text in zip(COLUMNS, texts):
            row = text.encode("ascii", "replace").translate(codes)
            if len(row) != length:
                raise UserError(f"{where}: the {column} has {len(row)} characters, a {found} has {length}; correct it")
            if 0 in row:
                raise UserError(f"{where}: {text[row.index(0)]!r} is in no {found}; use {' '.join(map(repr, signs))}")
            tokens += row
    if not tokens:
        raise UserError(f"{path} has no rows; give a table of puzzles")
    if name not in (None, found):
        raise UserError(f"{path} holds {found} rows, but the training rows are {name}; give the same kind")
    pairs = np.frombuffer(tokens, np.uint8).reshape(-1, 2, length)
    question, answer = pairs[:, 0], pairs[:, 1]
    if found in puzzles.BOXES:
        wrong = ((question != answer) & (question != puzzles.BLANK)) | (answer == puzzles.BLANK)
        for number in np.flatnonzero(wrong.any(1))[:1]:
            line, _ = next(islice(_lines(path), number, None))
            raise UserError(f"{path} line {line}: the answer has a blank or changes a given digit; correct it")
    return found, pairs


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line number, and question and answer as text, of each row of a table."""
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            for column in COLUMNS:
                if column not in (reader.fieldnames or ()):
                    raise UserError(f"{path}: no column {column}; the first line must name it")
            for row in reader:
                yield reader.line_num, [row[column] or "" for column in COLUMNS]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read as a CSV table ({first_line(error)}); check the path") from error


def _form_of(question: str, where: str) -> tuple[str, int, dict[str, int]]:
    """Name and length of the puzzles that start with this one, and the token of each character in them."""
    length, side = len(question), math.isqrt(len(question))
    if question[:1] in ".0123456789":
        if length not in (16, 36, 81):
            raise UserError(f"{where}: the question has {length} characters; a Sudoku has 16, 36 or 81")
        signs = {".": puzzles.BLANK} | {str(digit): digit + puzzles.BLANK for digit in range(side + 1)}
        return f"sudoku{side}", length, signs
    if side * side != length:
        raise UserError(f"{where}: the question has {length} characters, so it is not a square maze")
    return f"{side}×{side} maze", length, {sign: token for token, sign in enumerate(puzzles.MAZE) if token}


def build_tables(folder: Path, name: str, train: np.ndarray, test: np.ndarray, augmentations: int, seed: int) -> None:
    """Write the rows [N, 2, L] of two tables to a new folder; in train/ a row and its augmentations form a group."""
    with new_dataset(folder, train.shape[2], puzzles.vocab(name), [BLANK]) as (_, examples, tests):
        for number, pair in enumerate(watched(train, "writing train/", len(train))):
            images = augmented(name, pair, augmentations, np.random.default_rng([seed, number]))
            examples.group((0, question[None], answer[None]) for question, answer in zip(*images))
        for question, answer in test:
            tests.group([(0, question[None], answer[None])])


def augmented(name: str, pair: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """A question and its answer [2, L] and `count` augmentations of them, [2, 1 + count, L]: random symmetries of a
    Sudoku, different rotations and reflections of a maze, at most OTHERS."""
    if name in puzzles.BOXES:
        copies = pair[:, None].repeat(count, 1)
        return np.concatenate([pair[:, None], symmetries.variant(name, *copies, rng)], 1)
    others = 1 + rng.choice(OTHERS, count, replace=False)
    return pair[:, symmetries.dihedral(math.isqrt(pair.shape[1]))[[0, *others]]]
