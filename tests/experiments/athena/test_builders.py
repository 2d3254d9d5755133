"""Datasets from ARC tasks, read back with a decoder of this file's own."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from puzzle_files import arc_task, arc_tasks, read_side, write_folder, write_subset

from qat_lora.errors import UserError
from qat_lora.experiments.athena import arc as arcs
from qat_lora.experiments.athena.arc import build_tasks
from qat_lora.experiments.athena.rows import load
from qat_lora.experiments.athena.writing import new_dataset

TRAINED, TESTED = ("mirror", "flip", "recolour", "double"), ("turn", "across")


def read_tasks(sources, option: str, files: dict[str, Path] | None = None) -> dict[str, dict]:
    return arcs.read_tasks(str(sources), option, {} if files is None else files)


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
        train, test = (read_tasks(write_folder(tmp_path / key, {key: tasks[key]}), "a") for key in ("flip", "turn"))
        build_tasks(tmp_path / name, train, test, 5, seed)
        return {path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*.*")}

    assert built("a", 1) == built("b", 1) != built("c", 2)


@pytest.mark.parametrize("size", [(30, 30), (30, 2), (1, 30), (1, 1)])
def test_end_markers_outside_the_canvas_are_left_out(size):
    grid = np.random.default_rng(0).integers(0, 10, size).astype(np.uint8)
    assert grid_at(arcs.canvas(grid)) == (grid.tolist(), (0, 0))
    assert (arcs.cropped(arcs.canvas(grid)[None])[0] == grid).all()


def test_undoing_an_augmentation_by_its_name_gives_the_grid_back():
    rng, grid = np.random.default_rng(0), np.arange(10, dtype=np.uint8).reshape(2, 5)
    images = set()
    for transform in range(8):
        colours = np.append(0, rng.permutation(9) + 1).astype(np.uint8)
        image = arcs.turned(colours[grid], transform)
        name = f"a|b|||t{transform}|||{''.join(map(str, colours))}"
        task, undo = arcs.undoing(name)
        assert task == "a|b" and undo(image).tolist() == grid.tolist() == plain(image.tolist(), name)
        images.add(arcs.turned(grid, transform).tobytes() + bytes(arcs.turned(grid, transform).shape))
    assert len(images) == 8
    for bad in ("x|||t8|||0123456789", "x|||t1|||0123", "x|||t1|||0123456788", "x|||1"):
        with pytest.raises(UserError, match="is not the name of a puzzle"):
            arcs.undoing(bad)


def test_a_crop_is_the_largest_coloured_rectangle_at_the_top_left():
    rng = np.random.default_rng(1)
    rows = rng.choice([0, 1, 2, 5, 11], p=[0.02, 0.02, 0.32, 0.32, 0.32], size=(200, 900))
    rows[0], rows[1] = 0, 7
    for row, found in zip(rows, arcs.cropped(rows)):
        cells, best = row.reshape(30, 30), (0, 0)
        for height in range(1, 31):
            for width in range(1, 31):
                if (cells[:height, :width] >= 2).all() and height * width > best[0] * best[1]:
                    best = height, width
        assert found.size == best[0] * best[1] and (found == cells[: found.shape[0], : found.shape[1]] - 2).all()


# -- tests without a solution ----------------------------------------------------------------------------------------
def test_rows_without_a_solution_have_no_labels_and_the_same_identifiers(tasks, tmp_path, capsys):
    known = write_subset(tmp_path / "arc_evaluation", {"across": tasks["across"]})
    unknown = write_subset(tmp_path / "arc_test", {"turn": tasks["turn"]}, solved=False)
    train = read_tasks(write_folder(tmp_path / "train", {"flip": tasks["flip"]}), "--source")
    build_tasks(tmp_path / "data", train, read_tasks(f"{known},{unknown}", "--test-source"), 3, seed=0)
    said = capsys.readouterr().out
    assert "16 rows in" in said and "8 rows of test/ have no known solution" in said
    labels = np.load(tmp_path / "data" / "test" / "all__labels.npy")
    assert labels[:8].any(1).all() and not labels[8:].any()
    heldout, every = load(str(tmp_path / "data"))[1], load(str(tmp_path / "data"), unlabelled=True)[1]
    assert (len(heldout), heldout.unlabelled, len(every), every.unlabelled) == (8, 8, 16, 0)
    assert isinstance(heldout.inputs, np.memmap) and isinstance(heldout.labels, np.memmap), "a copy"
    content = json.loads((tmp_path / "data" / "test_puzzles.json").read_text())
    assert [set(pair) for pair in content["turn"]["test"]] == [{"input"}] * 2 and content["across"] == tasks["across"]
    said = r"arc_test_challenges\.json: task turn, test pair 1 has no output; .* add it or \*_solutions\.json"
    with pytest.raises(UserError, match=said):
        read_tasks(unknown, "--source")


# -- bad input -------------------------------------------------------------------------------------------------------
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
    ("{}", "holds no tasks"), ('{"a": 3}', "task a must be an object"), ('{"a|||b": {}}', r"a\|\|\|b must .* without"),
    ('{"": {}}', "its name not empty"),
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
        ({}, r"task flip has None, not 2 solutions"), ({"flip": [[[1]]]}, r"task flip has \[\[\[1\]\]\], not 2 sol"),
        ({"flip": [[[1]], [[11]]]}, "task flip, solution 2: row 1 holds 11"), ({"flip": 3}, "task flip has 3, not 2"),
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
        assert list(read_tasks(source, "--source")) == names
    for source, said in (
        (tmp_path / "both", "--source .*both holds 2 subsets; name those that you mean: .*arc_a, .*arc_b"),
        (tmp_path / "deep", "no folder with train.csv or .json files; give one of these, e.g. .*training"),
        (tmp_path / "none", "--source .*none: no such file, no .*none_challenges.json, and no folder"),
    ):
        with pytest.raises(UserError, match=said):
            read_tasks(source, "--source")
    with pytest.raises(UserError, match=r"task flip is both in .*arc_a_challenges\.json and in .*flip\.json"):
        read_tasks(f"{first}, {tmp_path}/deep/training", "--source")
    files: dict[str, Path] = {}
    read_tasks(only, "--source", files)
    with pytest.raises(UserError, match="task mirror is both"):
        read_tasks(only, "--test-source", files)


# -- killed ----------------------------------------------------------------------------------------------------------
SLOWLY = """
import sys, time
from pathlib import Path
from qat_lora.experiments.athena import arc

asked = arc._rows
def slow(pairs, rng=None):
    print("writing", flush=True)
    time.sleep(0.2)
    return asked(pairs, rng)
arc._rows = slow
arc.build_tasks(Path("data"), arc.read_tasks("a", "a", {}), arc.read_tasks("b", "b", {}), 30, 0)
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


# -- memory ----------------------------------------------------------------------------------------------------------
MEASURE = """
import sys
from qat_lora.backend.machine import hand_back_memory
from qat_lora.experiments.athena.rows import load

def own():
    hand_back_memory()
    lines = open("/proc/self/status").read().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon"))

before = own()
train, heldout = load(sys.argv[1])
train.fingerprint, heldout.fingerprint, train.groups
chosen = train.chosen(0, 8)
for _ in range(50):
    train.batch(next(chosen))
print(own() - before, len(heldout), heldout.unlabelled)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_neither_identifiers_nor_rows_without_a_solution_make_loading_copy_a_dataset(tmp_path):
    """90 MB of rows. A copy of those of test/ that have labels would take 40 MB of a process's own memory."""
    rng = np.random.default_rng(0)
    with new_dataset(tmp_path / "data", arcs.LENGTH, arcs.VOCAB, 2501 * ["puzzle"]) as (_, *sides):
        for name, side in zip(("train", "test"), sides):
            for group in range(25):
                rows = rng.integers(1, 12, (1000, arcs.LENGTH), np.uint8)
                labels = rows * (name == "train" or group < 22)
                side.group((1 + 100 * group + at, rows[at * 10 :][:10], labels[at * 10 :][:10]) for at in range(100))
    stored = sum(file.stat().st_size for file in tmp_path.rglob("*.npy"))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path / "data"], capture_output=True, text=True, check=True
    )
    used, labelled, unlabelled = map(int, done.stdout.split())
    assert used < 0.1 * stored and (labelled, unlabelled) == (22_000, 3_000), used / stored
