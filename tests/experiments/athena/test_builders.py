"""Datasets from ARC tasks and from tables of Sudoku and mazes, read back with a decoder of this file's own."""

import csv
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from arc_tasks import arc_task, arc_tasks, write_folder, write_subset

from qat_lora.errors import UserError
from qat_lora.experiments.athena import grids, tables
from qat_lora.experiments.athena.building import build_tables, build_tasks
from qat_lora.experiments.athena.puzzles import as_text, solve
from qat_lora.experiments.athena.rows import draw, load
from qat_lora.experiments.athena.tasks import check_names, check_solved, read_tasks

TRAINED, TESTED = ("mirror", "flip", "recolour", "double"), ("turn", "across")


# -- an independent reader -------------------------------------------------------------------------------------------
def grid_at(row: np.ndarray) -> tuple[list[list[int]], tuple[int, int]]:
    """The grid on a canvas and its place, after checking that everything else is an end marker or padding."""
    cells = [row[line * 30 : line * 30 + 30].tolist() for line in range(30)]
    places = [(y, x) for y in range(30) for x in range(30) if cells[y][x] > 1]
    (top, left), (bottom, right) = places[0], places[-1]
    assert len(places) == (bottom - top + 1) * (right - left + 1), "the grid is no rectangle"
    ends = {(bottom + 1, x) for x in range(left, right + 1)} | {(y, right + 1) for y in range(top, bottom + 1)}
    ends = {(y, x) for y, x in ends if y < 30 and x < 30}
    assert {(y, x) for y in range(30) for x in range(30) if cells[y][x] == 1} == ends
    return [[cell - 2 for cell in line[left : right + 1]] for line in cells[top : bottom + 1]], (top, left)


def read_side(folder: Path) -> tuple[dict, list[list[tuple[int, list]]]]:
    """dataset.json and the groups, each a list of puzzles: identifier and rows."""
    arrays = {path.stem.removeprefix("all__"): np.load(path) for path in folder.glob("*.npy")}
    assert arrays["inputs"].dtype == arrays["labels"].dtype == np.uint8
    starts, firsts = arrays["puzzle_indices"], arrays["group_indices"]
    rows = list(zip(arrays["inputs"], arrays["labels"]))
    puzzles = [
        (int(number), rows[one:other]) for number, one, other in zip(arrays["puzzle_identifiers"], starts, starts[1:])
    ]
    return json.loads((folder / "dataset.json").read_text()), [
        puzzles[one:other] for one, other in itertools.pairwise(firsts)
    ]


def plain(grid, name: str) -> list[list[int]]:
    """A grid with the augmentation in a name undone by trying which image leads to it."""
    if "|||" not in name:
        return grid
    transform, colours = name.split("|||")[1:]
    back = [colours.index(str(colour)) for colour in range(10)]
    grid = np.array([[back[cell] for cell in line] for line in grid])
    undo = {
        "t0": lambda g: g, "t1": lambda g: np.rot90(g, -1), "t2": lambda g: np.rot90(g, 2), "t3": np.rot90,
        "t4": np.fliplr, "t5": np.flipud, "t6": np.transpose, "t7": lambda g: np.rot90(np.transpose(g), 2),
    }  # fmt: skip
    return undo[transform](grid).tolist()


def pairs_of(task: dict, *sides: str) -> list[tuple]:
    return [(pair["input"], pair.get("output")) for side in sides for pair in task[side]]


# -- ARC -------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def tasks():
    return arc_tasks(tests=2)


@pytest.fixture(scope="module")
def arc(tasks, tmp_path_factory):
    """A dataset of six tasks, two of them tested, with 20 augmentations each."""
    folder = tmp_path_factory.mktemp("arc")
    trained = write_subset(folder / "json" / "arc_training", {name: tasks[name] for name in TRAINED})
    tested = write_folder(folder / "old", {name: tasks[name] for name in TESTED})
    train, test = read_tasks(trained, "--source"), read_tasks(tested, "--test-source")
    build_tasks(folder / "data", train, test, 20, seed=0)
    return folder / "data"


def test_every_row_of_every_augmentation_shows_a_pair_of_its_task(arc, tasks):
    names = json.loads((arc / "identifiers.json").read_text())
    assert names[0] == "<blank>" and len(set(names)) == len(names) == 1 + 6 * 21
    seen = []
    for side in ("train", "test"):
        facts, groups = read_side(arc / side)
        puzzles = [puzzle for group in groups for puzzle in group]
        rows = sum(len(rows) for _, rows in puzzles)
        wanted = {"pad_id": 0, "ignore_label_id": 0, "blank_identifier_id": 0, "vocab_size": 12, "seq_len": 900}
        wanted |= {"num_puzzle_identifiers": 127, "total_groups": len(groups), "total_puzzles": len(puzzles)}
        assert facts == wanted | {"mean_puzzle_examples": rows / len(puzzles), "sets": ["all"]}
        assert len(groups) == (6 if side == "train" else 2) and all(len(group) == 21 for group in groups)
        for group in groups:
            task = names[group[0][0]]
            assert "|||" not in task and {names[number].split("|||")[0] for number, _ in group} == {task}
            shown = ("test",) if side == "test" else ("train",) if task in TESTED else ("train", "test")
            for number, rows in group:
                decoded = [[grid_at(row) for row in pair] for pair in rows]
                found = [tuple(plain(grid, names[number]) for grid, _ in pair) for pair in decoded]
                assert found == pairs_of(tasks[task], *shown)
                assert all(one == other for (_, one), (_, other) in decoded), "input and output are shifted together"
                shifts = [place for (_, place), _ in decoded]
                assert (0, 0) in shifts and (side == "train" or set(shifts) == {(0, 0)})
                seen += shifts
            images = [sorted(rows_key(rows)) for _, rows in group]
            assert side == "train" or len({*map(tuple, images)}) == len(images)
    assert max(y for y, _ in seen) > 20 and max(x for _, x in seen) > 20


def rows_key(rows) -> list[bytes]:
    return [b"".join(row.tobytes() for row in pair) for pair in rows]


def test_a_tested_task_has_the_same_identifier_on_both_sides(arc):
    train, test = ({puzzle[0] for group in read_side(arc / side)[1] for puzzle in group} for side in ("train", "test"))
    assert test < train and len(test) == 42 and train == set(range(1, 127))


def test_the_files_are_read_as_training_reads_them(arc, tasks):
    train, test = load(str(arc))
    assert train.kind is None and train.identifiers_count == 127 and (train.length, train.vocab) == (900, 12)
    assert len(train) == 21 * (4 * 5 + 2 * 3) and len(test) == 21 * 2 * 2 and train.groups.updates(1, 1) == 26
    assert json.loads((arc / "test_puzzles.json").read_text()) == {name: tasks[name] for name in sorted(TESTED)}


def test_augmentations_that_repeat_an_earlier_one_are_skipped(tmp_path):
    square = [[1, 1], [1, 1]]  # all rotations are the same, and there are nine colours
    task = {"train": [{"input": square, "output": square}], "test": [{"input": [[0]], "output": [[0]]}]}
    read = read_tasks(write_folder(tmp_path / "a", {"square": task}), "--source")
    other = read_tasks(write_folder(tmp_path / "b", {"other": arc_task("turn")}), "--source")
    build_tasks(tmp_path / "data", read, other, 100, seed=0)
    group = read_side(tmp_path / "data" / "train")[1][0]
    shown = {grid_at(rows[0][0])[0][0][0] for _, rows in group}
    assert len(group) == 9 and shown == set(range(1, 10))


def test_the_seed_decides_everything(arc, tasks, tmp_path):
    def built(name: str, seed: int):
        train, test = (read_tasks(write_folder(tmp_path / key, {key: tasks[key]}), "") for key in ("flip", "turn"))
        build_tasks(tmp_path / name, train, test, 5, seed)
        return {path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*.*")}

    assert built("a", 1) == built("b", 1) != built("c", 2)


@pytest.mark.parametrize("size", [(30, 30), (30, 2), (1, 30), (1, 1)])
def test_end_markers_outside_the_canvas_are_left_out(size):
    grid = np.random.default_rng(0).integers(0, 10, size).astype(np.uint8)
    assert grid_at(grids.canvas(grid)) == (grid.tolist(), (0, 0))
    assert (grids.cropped(grids.canvas(grid)[None])[0] == grid).all()


def test_undoing_an_augmentation_by_its_name_gives_the_grid_back():
    rng, grid = np.random.default_rng(0), np.arange(10, dtype=np.uint8).reshape(2, 5)
    images = set()
    for transform in range(8):
        colours = np.append(0, rng.permutation(9) + 1).astype(np.uint8)
        image = grids.changed(grid, transform, colours)
        name = grids.name_of("a|b", transform, colours)
        task, undo = grids.undoing(name)
        assert task == "a|b" and undo(image).tolist() == grid.tolist() == plain(image.tolist(), name)
        images.add(grids.turned(grid, transform).tobytes() + bytes(grids.turned(grid, transform).shape))
    assert len(images) == 8
    for bad in ("x|||t8|||0123456789", "x|||t1|||0123", "x|||t1|||0123456788", "x|||1"):
        with pytest.raises(UserError, match="is not the name of a puzzle"):
            grids.undoing(bad)


def test_a_crop_is_the_largest_coloured_rectangle_at_the_top_left():
    rng = np.random.default_rng(1)
    rows = rng.choice([0, 1, 2, 5, 11], p=[0.02, 0.02, 0.32, 0.32, 0.32], size=(200, 900))
    rows[0], rows[1] = 0, 7
    for row, found in zip(rows, grids.cropped(rows)):
        cells, best = row.reshape(30, 30), (0, 0)
        for height in range(1, 31):
            for width in range(1, 31):
                if (cells[:height, :width] >= 2).all() and height * width > best[0] * best[1]:
                    best = height, width
        assert found.size == best[0] * best[1] and (found == cells[: found.shape[0], : found.shape[1]] - 2).all()


# -- tests without a solution ----------------------------------------------------------------------------------------
def test_rows_without_a_solution_come_last_and_have_no_labels(tasks, tmp_path):
    known = write_subset(tmp_path / "arc_evaluation", {"across": tasks["across"]})
    unknown = write_subset(tmp_path / "arc_test", {"turn": tasks["turn"]}, solved=False)
    train = read_tasks(write_folder(tmp_path / "train", {"flip": tasks["flip"]}), "--source")
    built = build_tasks(tmp_path / "data", train, read_tasks(f"{unknown},{known}", "--test-source"), 3, seed=0)
    assert built.unknown == 8 and built.test == 16
    labels = np.load(tmp_path / "data" / "test" / "all__labels.npy")
    assert labels[:8].any(1).all() and not labels[8:].any()
    heldout, every = load(str(tmp_path / "data"))[1], load(str(tmp_path / "data"), unlabelled=True)[1]
    assert (len(heldout), heldout.unlabelled, len(every), every.unlabelled) == (8, 8, 16, 0)
    assert isinstance(heldout.inputs, np.memmap) and isinstance(heldout.labels, np.memmap), "a copy"
    content = json.loads((tmp_path / "data" / "test_puzzles.json").read_text())
    assert [set(pair) for pair in content["turn"]["test"]] == [{"input"}] * 2 and content["across"] == tasks["across"]
    with pytest.raises(
        UserError, match=r"task turn has a test with no output, and .*arc_test_solutions\.json does not"
    ):
        check_solved(read_tasks(unknown, "--source"))


# -- tables ----------------------------------------------------------------------------------------------------------
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


def build(folder: Path, train: Path, test: Path, augmentations: int = 0, subsample: int | None = None, seed: int = 0):
    table = tables.open_table(train)
    return build_tables(folder, table, tables.open_table(test, table.form), augmentations, subsample, seed)


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
        assert found == [[g.tolist() for g in pair] for pair in wanted]
    assert len(read_side(tmp_path / "data" / "test")[1]) == 1
    assert json.loads((tmp_path / "data" / "identifiers.json").read_text()) == ["<blank>"]
    assert load(str(tmp_path / "data"))[0].groups.updates(1, 1) == 3
    with pytest.raises(UserError, match="--augmentations 8: a maze has only 7"):
        build(tmp_path / "more", train, test, augmentations=8)
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


def test_a_subsample_is_random_and_repeatable(tmp_path):
    rows = texts("sudoku4", 12)
    train, test = write_table(tmp_path / "train.csv", rows[:10]), write_table(tmp_path / "test.csv", rows[10:])
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert build(tmp_path / name, train, test, subsample=4, seed=seed).train == 4
    a, b, c = (load(str(tmp_path / name))[0] for name in "abc")
    assert a.fingerprint == b.fingerprint != c.fingerprint and len(load(str(tmp_path / "a"))[1]) == 2
    with pytest.raises(UserError, match=r"--subsample 11 is more than the 10 in .*train\.csv; use at most 10"):
        build(tmp_path / "d", train, test, subsample=11)


# -- bad input -------------------------------------------------------------------------------------------------------
GOOD = ("1.34" * 4, "1234" * 4)


@pytest.mark.parametrize("rows, header, said", [
    ([GOOD], ("source", "puzzle", "answer", "rating"), r"t\.csv: no column question; the first line must name it"),
    ([GOOD, ("1.3x" * 4, GOOD[1])], None, r"t\.csv line 3: 'x' is in no sudoku4; use '\.'"),
    ([GOOD, ("1.3é" * 4, GOOD[1])], None, r"line 3: 'é' is in no sudoku4"),
    ([GOOD, ("1.3日" * 4, GOOD[1])], None, r"line 3: '日' is in no sudoku4"),
    ([GOOD, (GOOD[0], "123")], None, "line 3: the answer has 3 characters, but a sudoku4 has 16"),
    ([GOOD, (GOOD[0], "2134" * 4)], None, "line 3: the answer has a blank or changes a given digit"),
    ([GOOD, (GOOD[0], GOOD[0])], None, "line 3: the answer has a blank"),
    ([("#S G#", "#SoG#")], None, "line 2: the question has 5 characters, so it is not a square maze"),
    ([("12345", "12345")], None, "line 2: the question has 5 characters; a Sudoku has 16, 36 or 81"),
    ([("#S?G", "#S?G")], None, r"line 2: '\?' is in no puzzle"), ([], None, "has no rows"),
])  # fmt: skip
def test_an_error_names_the_line_of_a_table_and_nothing_is_left(rows, header, said, tmp_path):
    args = {} if header is None else {"header": header}
    path = write_table(tmp_path / "t.csv", rows, **args)
    with pytest.raises(UserError, match=said) as error:
        build(tmp_path / "data", path, path)
    assert len(str(error.value).splitlines()) == 1 and [each.name for each in tmp_path.iterdir()] == ["t.csv"]


def test_a_short_row_or_a_binary_table_is_refused(tmp_path):
    (tmp_path / "a.csv").write_text("source,question,answer\nx,1.34\n")
    (tmp_path / "b.csv").write_bytes(b"source,question,answer\nx,\xff\xfe,y\n")
    with pytest.raises(UserError, match=r"a\.csv line 2 has only 2 columns"):
        tables.open_table(tmp_path / "a.csv")
    with pytest.raises(UserError, match=r"b\.csv cannot be read as a CSV table"):
        tables.open_table(tmp_path / "b.csv")
    with pytest.raises(UserError, match=r"c\.csv: no such file"):
        tables.open_table(tmp_path / "c.csv")


def grid(**changes):
    """A task with one changed grid: first train pair's output."""
    task = arc_task("turn")
    task["train"][0] |= changes
    return json.dumps(task)


@pytest.mark.parametrize("content, said", [
    (grid(output=[[0] * 31]), r"bad\.json: task bad, train pair 1, output is 1×31; a grid has at most 30×30"),
    (grid(output=[[0, 10]]), "train pair 1, output: row 1 holds 10; a colour is a number from 0 to 9"),
    (grid(output=[[0, True]]), "row 1 holds True"), (grid(output=[[0, None]]), "row 1 holds None"),
    (grid(output=[[1.0]]), r"row 1 holds 1\.0"), (grid(input=[[1], [1, 2]]), "row 2 has 2 cells, row 1 has 1"),
    (grid(input=[]), r"train pair 1, input is \[\], not a list of rows"), (grid(input=[[]]), r"input is \[\[\]\]"),
    (grid(output=None), "train pair 1 has no output"), (grid()[:-20], r"bad\.json is damaged"),
    ('{"train": [], "test": []}', r"train is \[\], not a list of pairs"), ("[]", "not a JSON object"),
    ("{}", "holds no tasks"), ('{"a": 3}', "task a is 3, not an object"), ('{"a|||b": {}}', "must not be empty or"),
    ('{"a": {"train": [{"output": []}]}}', 'train pair 1 is .*, not an object with an "input"'),
])  # fmt: skip
def test_an_error_names_the_file_and_the_grid(content, said, tmp_path):
    (tmp_path / "bad.json").write_text(content)
    with pytest.raises(UserError, match=said) as error:
        read_tasks(str(tmp_path), "--source")
    assert len(str(error.value).splitlines()) == 1


def test_solutions_must_match_the_tests(tasks, tmp_path):
    prefix = write_subset(tmp_path / "arc_training", {"flip": tasks["flip"]})
    for solutions, said in (
        ({}, "task flip is not there, but has 2 tests"), ({"flip": [[[1]]]}, "task flip has 1 solutions, but has 2"),
        ({"flip": [[[1]], [[11]]]}, "task flip, solution 2: row 1 holds 11"), ({"flip": 3}, "task flip has 3, but"),
    ):  # fmt: skip
        Path(f"{prefix}_solutions.json").write_text(json.dumps(solutions))
        with pytest.raises(UserError, match=rf"arc_training_solutions\.json: {said}"):
            read_tasks(prefix, "--source")


def test_sources_are_files_folders_or_prefixes(tasks, tmp_path):
    first = write_subset(tmp_path / "both" / "arc_a", {"flip": tasks["flip"]})
    write_subset(tmp_path / "both" / "arc_b", {"turn": tasks["turn"]})
    write_folder(tmp_path / "deep" / "training", {"flip": tasks["flip"]})
    only = write_subset(tmp_path / "only" / "arc_a", {"mirror": tasks["mirror"]})
    for source, names in (
        (first, ["flip"]), (f"{first}_challenges.json", ["flip"]), (tmp_path / "only", ["mirror"]),
        (tmp_path / "deep" / "training", ["flip"]), (tmp_path / "deep" / "training" / "flip.json", ["flip"]),
    ):  # fmt: skip
        assert [task.name for task in read_tasks(str(source), "--source")] == names
    for source, said in (
        (tmp_path / "both", "--source .*both holds 2 subsets; name those that you mean: .*arc_a, .*arc_b"),
        (tmp_path / "deep", "holds neither train.csv nor .json files; give a folder in it, e.g. .*training"),
        (tmp_path / "none", "--source .*none: no such file or folder, and no .*none_challenges.json"),
    ):
        with pytest.raises(UserError, match=said):
            read_tasks(str(source), "--source")
    with pytest.raises(UserError, match=r"task flip is both in .*arc_a_challenges\.json and in .*flip\.json"):
        read_tasks(f"{first}, {tmp_path}/deep/training", "--source")
    with pytest.raises(UserError, match="task mirror is both"):
        check_names(2 * [*read_tasks(only, "a")] + read_tasks(only, "b"))


# -- killed ----------------------------------------------------------------------------------------------------------
SLOWLY = """
import sys, time
from pathlib import Path
from qat_lora.experiments.athena import building
from qat_lora.experiments.athena.tasks import read_tasks

asked = building._rows
def slow(pairs, rng):
    print("writing", flush=True)
    time.sleep(0.2)
    return asked(pairs, rng)
building._rows = slow
building.build_tasks(Path("data"), read_tasks("a", "a"), read_tasks("b", "b"), 30, 0)
"""


def test_a_killed_build_leaves_no_dataset_and_the_next_one_succeeds(tmp_path):
    sources = [write_folder(tmp_path / name, {rule: arc_task(rule)}) for name, rule in (("a", "flip"), ("b", "turn"))]
    child = subprocess.Popen([sys.executable, "-c", SLOWLY], cwd=tmp_path, stdout=subprocess.PIPE)
    child.stdout.readline()
    time.sleep(0.3)
    os.kill(child.pid, signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert not (tmp_path / "data").exists() and {path.name for path in tmp_path.iterdir()} <= {"a", "b", ".data.part"}
    build_tasks(tmp_path / "data", *(read_tasks(source, "--source") for source in sources), 2, seed=0)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "data"}
    assert len(load(str(tmp_path / "data"))[0]) == 3 * (4 + 3)
