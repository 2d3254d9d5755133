"""Datasets from tables of Sudoku and mazes."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
from puzzle_files import read_side

from qat_lora.errors import UserError
from qat_lora.experiments.athena import tables
from qat_lora.experiments.athena.puzzles import as_text, solve
from qat_lora.experiments.athena.rows import draw, load


def write_table(path: Path, rows: list[tuple[str, str]], header=("source", "question", "answer", "rating")) -> Path:
    path.parent.mkdir(exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(("made", *row, 3) for row in rows)
    return path


def texts(kind: str, count: int, seed: int = 0) -> list[tuple[str, str]]:
    rows = draw(kind, count, seed)
    return [tuple(as_text(kind, row).replace("\n", "") for row in pair) for pair in zip(rows.inputs, rows.labels)]


def build(folder: Path, train: Path, test: Path, augmentations: int = 0, seed: int = 0) -> None:
    name, rows = tables.read_table(train)
    tables.build_tables(folder, name, rows, tables.read_table(test, name)[1], augmentations, seed)


def test_all_rotations_and_reflections_of_a_maze_form_a_group(tmp_path):
    maze = texts("maze9", 4)
    train, test = write_table(tmp_path / "train.csv", maze[:3]), write_table(tmp_path / "test.csv", maze[3:])
    build(tmp_path / "data", train, test, augmentations=7)
    facts, groups = read_side(tmp_path / "data" / "train")
    assert (facts["seq_len"], facts["vocab_size"], facts["num_puzzle_identifiers"]) == (81, 6, 1)
    for group, pair in zip(groups, maze[:3], strict=True):
        assert [number for number, _ in group] == [0] * 8 and all(len(rows) == 1 for _, rows in group)
        signs = [["# SGo".index(sign) + 1 for sign in text] for text in pair]
        first = [np.array(row).reshape(9, 9) for row in signs]
        wanted = [[np.rot90(g, k) for g in first] for k in range(4)]
        wanted += [[change(g) for g in first] for change in (np.fliplr, np.flipud, np.transpose)]
        wanted.append([np.fliplr(np.rot90(g)) for g in first])
        found = [[row.reshape(9, 9).tolist() for row in rows[0]] for _, rows in group]
        wanted = [[g.tolist() for g in pair] for pair in wanted]
        assert found[0] == wanted[0] and sorted(found) == sorted(wanted)
    assert len(read_side(tmp_path / "data" / "test")[1]) == 1
    assert json.loads((tmp_path / "data" / "identifiers.json").read_text()) == ["<blank>"]
    assert load(str(tmp_path / "data"))[0].groups.updates(1, 1) == 3
    build(tmp_path / "few", train, test, augmentations=2)
    group = read_side(tmp_path / "few" / "train")[1][0]
    assert len({rows[0][0].tobytes() for _, rows in group}) == 3


def test_a_maze_of_even_size_is_read(tmp_path):
    rows = [("####S G#####SG##"[:16], "####SoG#####SG##"[:16])]
    train = write_table(tmp_path / "train.csv", rows)
    build(tmp_path / "data", train, train)
    assert load(str(tmp_path / "data"))[0].length == 16


def test_augmentations_of_a_sudoku_are_sudokus_with_the_matching_answer(tmp_path):
    rows = texts("sudoku9", 3)
    train = write_table(tmp_path / "train.csv", [(q.replace(".", "0"), a) for q, a in rows[:2]])
    build(tmp_path / "data", train, write_table(tmp_path / "test.csv", rows[2:]), augmentations=5)
    facts, groups = read_side(tmp_path / "data" / "train")
    assert (facts["seq_len"], facts["vocab_size"], facts["total_groups"], facts["total_puzzles"]) == (81, 11, 2, 12)
    for group, (question, answer) in zip(groups, rows):
        assert (group[0][1][0][0] == [1 if sign == "." else int(sign) + 1 for sign in question]).all()
        assert (group[0][1][0][1] == [int(sign) + 1 for sign in answer]).all()
        assert len({pair[0].tobytes() for _, (pair,) in group}) == 6
        for _, (pair,) in group:
            assert (solve(pair[0])[0] == pair[1]).all() and len(solve(pair[0])[0]) == 1
    question = read_side(tmp_path / "data" / "test")[1][0][0][1][0][0]
    assert (question == [1 if sign == "." else int(sign) + 1 for sign in rows[2][0]]).all()


# -- bad input -------------------------------------------------------------------------------------------------------
GOOD = ("1.34" * 4, "1234" * 4)


@pytest.mark.parametrize("rows, header, said", [
    ([GOOD], ("source", "puzzle", "answer", "rating"), r"t\.csv: no column question; the first line must name it"),
    ([GOOD, ("1.3x" * 4, GOOD[1])], None, r"t\.csv line 3: 'x' is in no sudoku4; use '\.'"),
    ([GOOD, ("1.3é" * 4, GOOD[1])], None, r"line 3: 'é' is in no sudoku4"),
    ([GOOD, ("1.3日" * 4, GOOD[1])], None, r"line 3: '日' is in no sudoku4"),
    ([GOOD, (GOOD[0], "123")], None, "line 3: the answer has 3 characters, a sudoku4 has 16"),
    ([GOOD, (GOOD[0], "2134" * 4)], None, "line 3: the answer has a blank or changes a given digit"),
    ([GOOD, (GOOD[0], GOOD[0])], None, "line 3: the answer has a blank"),
    ([("#S G#", "#SoG#")], None, "line 2: the question has 5 characters, so it is not a square maze"),
    ([("12345", "12345")], None, "line 2: the question has 5 characters; a Sudoku has 16, 36 or 81"),
    ([("#S?G", "#S?G")], None, r"line 2: '\?' is in no 2×2 maze; use '#'"), ([], None, "has no rows"),
])  # fmt: skip
def test_an_error_names_the_line_of_a_table_and_nothing_is_left(rows, header, said, tmp_path):
    args = {} if header is None else {"header": header}
    path = write_table(tmp_path / "t.csv", rows, **args)
    with pytest.raises(UserError, match=said) as error:
        build(tmp_path / "data", path, path)
    assert len(str(error.value).splitlines()) == 1 and [each.name for each in tmp_path.iterdir()] == ["t.csv"]


def test_a_short_row_or_a_binary_table_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("source,question,answer\n" + f"x,{GOOD[0]}\n")
    (tmp_path / "b.csv").write_bytes(b"source,question,answer\nx,\xff\xfe,y\n")
    with pytest.raises(UserError, match=r"a\.csv line 2: the answer has 0 characters"):
        tables.read_table(tmp_path / "a.csv")
    with pytest.raises(UserError, match=r"b\.csv cannot be read as a CSV table"):
        tables.read_table(tmp_path / "b.csv")
    with pytest.raises(UserError, match=r"c\.csv cannot be read as a CSV table .*No such file"):
        tables.read_table(tmp_path / "c.csv")
