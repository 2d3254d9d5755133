"""Rows of puzzles and of text: what the model sees, how they are split, and how they are stored."""

import json
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch

from qat_lora.errors import UserError
from qat_lora.experiments.athena.model import IGNORE
from qat_lora.experiments.athena.puzzles import solve
from qat_lora.experiments.athena.rows import BLANK_TOKEN, BYTE, END, PAD, corpus, draw, load, save, split
from qat_lora.experiments.athena.symmetries import answer_class, form

TEXTS = [
    {"prompt": "2+2=", "response": "4"},
    {"prompt": "3+5=", "response": "8", "iterations": 3},
    {"prompt": "2+2=", "response": "four", "iterations": 1},
    {"prompt": "é", "response": "è"},
]


def text(**changes):
    return corpus(**{"rows": TEXTS, "where": "t.jsonl", "length": 12, "causal": False, "iterations": 2} | changes)[0]


# -- batches ---------------------------------------------------------------------------------------------------------
def test_a_batch_holds_rows_unchanged_or_under_a_symmetry():
    rows = draw("sudoku4", 10, 0)
    at = np.array([3, 0, 3])
    plain, guises = rows.batch(at), rows.batch(at, np.random.default_rng(0))
    assert plain["inputs"].tolist() == rows.inputs[at].tolist() and plain["inputs"].dtype == torch.int64
    assert plain["labels"].shape == (3, 16) and plain["budgets"].tolist() == plain["identifiers"].tolist() == [0] * 3
    assert (guises["inputs"] != plain["inputs"]).any()
    for question, answer in zip(guises["inputs"], guises["labels"]):
        assert (torch.from_numpy(solve(question.numpy())[0][0].astype(int)) == answer).all()


def test_the_fingerprint_covers_everything_that_training_sees():
    rows = draw("sudoku4", 5, 0)
    assert rows.fingerprint == draw("sudoku4", 5, 0).fingerprint != draw("sudoku4", 5, 1).fingerprint
    assert text().fingerprint != text(iterations=1).fingerprint != text(causal=True).fingerprint


# -- splitting -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["sudoku4", "sudoku6", "maze7"])
def test_no_held_out_row_is_a_symmetry_of_a_training_row(kind):
    rows = draw(kind, 150, 0)
    train, heldout = split(rows, 0.2, 0)
    assert len(train) + len(heldout) == 150 and 15 <= len(heldout) <= 30

    def keys(part):
        return set(answer_class(kind, part.labels) if kind == "sudoku6" else form(kind, part.inputs))

    assert not keys(train) & keys(heldout)
    assert split(rows, 0.2, 0)[1].fingerprint == heldout.fingerprint != split(rows, 0.2, 1)[1].fingerprint
    if kind == "sudoku6":  # shows that this test can fail
        assert keys(rows.first(135)) & keys(rows.take(np.arange(135, 150))), "a split by string would leak"


def test_causal_text_is_split_by_its_whole_prompt():
    """The last byte of the prompt has a label, the first byte of the answer."""
    texts = [{"prompt": str(n), "response": "same"} for n in range(4)]
    assert [len(side) for side in split(text(rows=texts, causal=True), 0.5, 0)] == [2, 2]


@pytest.mark.parametrize("causal", [False, True])
def test_text_is_split_by_its_prompt(causal):
    for seed in range(5):
        train, heldout = split(text(causal=causal), 0.5, seed)
        assert len(train) == len(heldout) == 2
        prompts = [{bytes(row[:3].astype(np.uint8)) for row in part.inputs} for part in (train, heldout)]
        assert not prompts[0] & prompts[1]


def test_a_split_with_an_empty_side_is_refused():
    with pytest.raises(UserError, match="essentially the same"):
        split(draw("maze7", 1, 0), 0.5, 0)
    with pytest.raises(UserError, match=r"--heldout-fraction 1\.0"):
        split(draw("maze7", 3, 0), 1.0, 0)
    assert [len(side) for side in split(draw("maze7", 3, 0), 0.01, 0)] == [2, 1], "at least one"


# -- text ------------------------------------------------------------------------------------------------------------
def test_text_inputs_hide_the_response_and_its_length_and_only_the_response_has_labels():
    rows = text()
    assert (rows.inputs[0] == rows.inputs[2]).all(), "the input reveals whether the response is 4 or four"
    assert rows.inputs[0].tolist() == [BYTE + b for b in b"2+2="] + [BLANK_TOKEN] * 8
    assert rows.labels[0].tolist() == [IGNORE] * 4 + [BYTE + ord("4"), END] + [IGNORE] * 6
    assert rows.labels[2].tolist() == [IGNORE] * 4 + [BYTE + b for b in b"four"] + [END] + [IGNORE] * 3
    assert rows.budgets.tolist() == [2, 3, 1, 2] and rows.vocab == BYTE + 256
    assert rows.inputs[3, :2].tolist() == [BYTE + b for b in "é".encode()]


def test_causal_text_has_the_next_token_as_label():
    rows = text(causal=True)
    assert rows.causal
    assert rows.inputs[2].tolist() == [BYTE + b for b in b"2+2=four"] + [PAD] * 4
    assert rows.labels[2].tolist() == [IGNORE] * 3 + [BYTE + b for b in b"four"] + [END] + [IGNORE] * 4
    for inputs, labels in zip(rows.inputs, rows.labels):
        asked = np.flatnonzero(labels != IGNORE)
        assert (inputs[asked[1:]] == labels[asked[:-1]]).all()


def test_rows_that_are_too_long_are_counted():
    rows, long = corpus(TEXTS, "t.jsonl", 6, False, 0)
    assert (len(rows), long) == (3, 1)  # 4 + four + end are 9
    assert corpus(TEXTS, "t.jsonl", 8, True, 0)[1] == 0, "causal: the end is not an input"


@pytest.mark.parametrize("rows, said", [
    ([{"prompt": "a"}], "t.jsonl row 1: response is None, but must be text; the row has prompt"),
    ([{"prompt": "a", "response": 4}], "row 1: response is 4"), ([{"prompt": "", "response": "b"}], "prompt is ''"),
    ([{"prompt": "a", "response": "b", "iterations": -1}], "iterations -1 is not a whole number"),
    ([{"prompt": "a", "response": "b", "iterations": True}], "iterations True"),
    ([{"prompt": "\ud800", "response": "b"}], "prompt is not UTF-8 text"),
    ([{"prompt": "a" * 20, "response": "b"}], "none of 1 rows fits --length 12"),
])  # fmt: skip
def test_an_error_names_the_unusable_text(rows, said):
    with pytest.raises(UserError, match=said):
        text(rows=rows)


# -- files -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def sudoku():
    """16 training and 4 held-out rows."""
    return split(draw("sudoku4", 20, 0), 0.2, 0)


@pytest.fixture
def written(sudoku, tmp_path):
    save(tmp_path / "data", *sudoku)
    return tmp_path / "data"


@pytest.mark.parametrize("rows", [draw("sudoku4", 20, 0), text(), text(causal=True)], ids=["sudoku", "text", "causal"])
def test_saved_rows_load_unchanged(rows, tmp_path):
    sides = split(rows, 0.3, 0)
    save(tmp_path / "data", *sides)
    for one, other in zip(sides, load(str(tmp_path / "data"))):
        assert one.fingerprint == other.fingerprint and (one.difficulty == other.difficulty).all()
        assert (one.kind, one.causal, one.vocab) == (other.kind, other.causal, other.vocab)


def test_a_dataset_loads_from_a_bucket(written):
    files = fsspec.filesystem("memory")
    files.put(str(written), "/bucket/data", recursive=True)
    assert load("memory://bucket/data")[0].fingerprint == load(str(written))[0].fingerprint
    with pytest.raises(UserError, match="memory://bucket/nowhere: no such file or folder"):
        load("memory://bucket/nowhere")


def test_a_trm_dataset_loads_with_its_identifiers(written):
    """It lacks our own keys, and stores the identifier of a puzzle with several rows once."""
    rows = load(str(written))[0]
    for side in ("train", "test"):
        facts = json.loads((written / side / "dataset.json").read_text())
        del facts["kind"], facts["causal"]
        (written / side / "dataset.json").write_text(json.dumps(facts | {"num_puzzle_identifiers": 3}))
        for name in ("budgets", "difficulty"):
            (written / side / f"all__{name}.npy").unlink()
    np.save(written / "train" / "all__puzzle_identifiers.npy", [2, 1])
    np.save(written / "train" / "all__puzzle_indices.npy", [0, 5, len(rows)])
    np.save(written / "train" / "all__group_indices.npy", [0, 1, 2])
    found, _ = load(str(written))
    assert found.kind is None and found.identifiers_count == 3 and (found.inputs == rows.inputs).all()
    assert found.identifiers.tolist() == [2] * 5 + [1] * (len(rows) - 5) and not found.budgets.any()


MEASURE = """
import resource, sys
import numpy as np
from qat_lora.experiments.athena.rows import load

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

before = peak()
train, heldout = load(sys.argv[1])
train.fingerprint, train.updates(1, 8)
chosen = train.chosen(0, 8)
for _ in range(50):
    train.batch(next(chosen))
print(peak() - before, train.unlabelled)
"""


@pytest.mark.parametrize("kind, unlabelled", [("u1", 0), ("i4", 0), ("i8", 0), ("u1", 9)])
def test_a_trm_dataset_takes_little_more_memory_than_its_files(tmp_path, kind, unlabelled):
    size, length = {"u1": 300_000, "i4": 75_000, "i8": 37_500}[kind], 200  # 120 MB
    for side, count in (("train", size), ("test", 100)):
        (tmp_path / side).mkdir()
        facts = {
            "seq_len": length,
            "vocab_size": 12,
            "num_puzzle_identifiers": 1,
            "ignore_label_id": 0,
            "sets": ["all"],
        }
        (tmp_path / side / "dataset.json").write_text(json.dumps(facts))
        cells = np.resize(np.arange(1, 12, dtype=kind), (count, length))
        labels = cells.copy()
        labels[:unlabelled] = 0
        groups = np.arange(0, count + 1, 4)
        parts = {"inputs": cells, "labels": labels, "puzzle_identifiers": np.zeros(count, "i4"),
                 "puzzle_indices": np.arange(count + 1), "group_indices": groups}  # fmt: skip
        for name, values in parts.items():
            np.save(tmp_path / side / f"all__{name}.npy", values)
    stored = sum(file.stat().st_size for file in tmp_path.rglob("*.npy"))
    done = subprocess.run([sys.executable, "-c", MEASURE, tmp_path], capture_output=True, text=True, check=True)
    used, left_out = map(int, done.stdout.split())
    assert used <= 1.5 * stored and left_out == unlabelled, used / stored


def test_a_dataset_beyond_this_machines_memory_is_refused_before_it_is_read(written, monkeypatch):
    monkeypatch.setattr("qat_lora.backend.machine.host_memory", lambda: 1000)
    with pytest.raises(UserError, match=r"data \(the arrays in its train/ and test/\) needs at least"):
        load(str(written))


def header(old: bytes, new: bytes):
    """A change to the header of an array's file."""
    return lambda path: path.write_bytes(path.read_bytes().replace(old, new, 1))


def changed(name: str, change):
    """change(the values of an array)."""
    return f"train/all__{name}.npy", lambda path: np.save(path, change(np.load(path)))


def facts(**changes):
    def change(path):
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return "train/dataset.json", change


def archive(path):
    with open(path, "wb") as file:
        np.savez(file, a=[1])


INPUTS, GROUPS = "train/all__inputs.npy", "group_indices"
NO_ARRAY = "all__inputs.npy is not a readable NumPy array .*; copy the folder again"


@pytest.mark.parametrize("damage, said", [
    (facts(vocab_size=5, kind=None), "all__inputs.npy holds values from 1 to 5; they must be from 0 to 4"),
    (facts(seq_len=81, kind=None), r"all__inputs.npy holds 16×16 values .*dataset.json says N×81"),
    (facts(seq_len=None), "train/dataset.json: seq_len is None, not a whole number from 1 to"),
    (facts(kind="sudoku6"), "vocab_size 6 and seq_len 16 do not match kind sudoku6"),
    (facts(kind="chess"), "kind 'chess' is not one of"), (facts(sets=["a"]), r"sets is \['a'\]"),
    (facts(causal=True), "causal is True in train and False in test"),
    (facts(vocab_size=7, kind=None), "vocab is 7 in train and 6 in test"),
    (facts(kind="sudoku5"), "train/dataset.json: kind is 'sudoku5', which is unknown"),
    (facts(ignore_label_id="0"), "ignore_label_id is '0', not a whole number or null"),
    (facts(num_puzzle_identifiers=2), "identifiers_count is 2 in train and 1 in test"),
    (changed("labels", lambda a: a * (a != a[0, 0])), "cells without a label, but a sudoku4 needs one in each"),
    (changed("budgets", lambda a: a.astype(np.int64) + 2**40), "they must be from 0 to 2147483647"),
    ((INPUTS, archive), "an archive"), (changed("labels", lambda a: a[:-1]), "all__labels.npy holds 15×16 values"),
    (changed("inputs", lambda a: a[:0]), "all__inputs.npy is empty"),
    (changed("inputs", lambda a: a / 2), "of type float64"), (changed("inputs", lambda a: -a), "values from -5"),
    (changed("puzzle_identifiers", lambda a: a + 1), "values from 1 to 1; they must be from 0 to 0"),
    (changed("puzzle_indices", lambda a: a[::-1]), "does not rise from 0 to the row count 16"),
    (changed(GROUPS, lambda a: a[:-1]), "group_indices.npy does not rise from 0 to the puzzle count 16"),
    (changed(GROUPS, lambda a: a + (a == 3)), "all__group_indices.npy does not rise"),  # one is empty
    (changed(GROUPS, lambda a: a[:, None]), "all__group_indices.npy holds 17×1 values"),
    (changed("labels", lambda a: a * (np.arange(16)[:, None] > 3)), "cells without a label, but a sudoku4 needs"),
    ((INPUTS, Path.unlink), "train/all__inputs.npy: no such file"),
    ((INPUTS, lambda path: path.write_bytes(b"x" * 99)), NO_ARRAY), ((INPUTS, header(b"{", b"(")), NO_ARRAY),
    ((INPUTS, header(b"\x93NUMPY", b"\x92NUMPY")), "all__inputs.npy .*Python objects, which were not loaded"),
    (("test/dataset.json", lambda path: path.write_text("{")), "test/dataset.json is damaged"),
    (("test", lambda path: path.rename(path.with_name("dev"))), "data/test: no such folder"),
])  # fmt: skip
def test_an_error_names_the_unreadable_file(damage, said, written):
    name, change = damage
    change(written / name)
    with pytest.raises(UserError, match=said):
        load(str(written))


def test_save_does_not_overwrite_a_dataset(written):
    with pytest.raises(UserError, match="already exists"):
        save(written, *load(str(written)))


def test_a_full_disk_gives_a_one_line_error_and_leaves_no_files(tmp_path):
    rows = split(draw("sudoku4", 300, 0), 0.2, 0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (9000, before[1]))  # bytes per file, like a disk that fills up
    try:
        with pytest.raises(UserError) as error:
            save(tmp_path / "data", *rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    said = str(error.value)
    assert said.startswith(f"{tmp_path / 'data'} could not be written") and "File too large" in said and "free" in said
    assert "requested" not in said and len(said.splitlines()) == 1 and not list(tmp_path.iterdir())


# -- groups ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def as_groups(written):
    """as_groups(puzzles=…, groups=…): rewrites train/ as the Tiny Recursive Model's builders would, and loads it;
    puzzles and groups: where each begins, and the end of the last."""

    def rewritten(*, puzzles: list[int], groups: list[int]):
        name, change = facts(kind=None)
        for side in ("train", "test"):
            change(written / name.replace("train", side))
        ones = {"puzzle_indices": puzzles, "group_indices": groups, "puzzle_identifiers": [0] * (len(puzzles) - 1)}
        for name, values in ones.items():
            np.save(written / "train" / f"all__{name}.npy", np.array(values, np.int32))
        return load(str(written))

    return rewritten


def test_groups_are_saved_and_loaded(sudoku, written, as_groups, tmp_path):
    alone = load(str(written))[0]
    assert alone.group is None and alone.fingerprint == sudoku[0].fingerprint
    rows, heldout = as_groups(puzzles=[0, 1, 4, 6, 16], groups=[0, 3, 4])
    assert rows.puzzle.tolist() == [0, 1, 1, 1, 2, 2] + [3] * 10 and rows.group.tolist() == [0] * 6 + [1] * 10
    assert heldout.group is None
    plain = replace(rows, puzzle=None, group=None)
    assert rows.fingerprint != plain.fingerprint != replace(rows, group=rows.puzzle).fingerprint
    save(tmp_path / "again", rows.take(np.random.default_rng(0).permutation(16)), heldout)
    again = load(str(tmp_path / "again"))[0]
    assert again.group.tolist() == rows.group.tolist() and again.puzzle.tolist() == rows.puzzle.tolist()
    assert (again.inputs[0] == rows.inputs[0]).all()
    found = json.loads((tmp_path / "again" / "train" / "dataset.json").read_text())
    assert (found["total_groups"], found["total_puzzles"], found["mean_puzzle_examples"]) == (2, 4, 4.0)


def test_rows_of_a_group_stay_on_one_side():
    rows, numbers = draw("maze7", 60, 0), np.arange(60, dtype=np.int32)
    train, heldout = split(replace(rows, puzzle=numbers, group=numbers // 5), 0.3, 0)
    assert len(train) + len(heldout) == 60 and 0 < len(heldout) <= 18
    assert not set(train.group) & set(heldout.group)
    assert not set(form("maze7", train.inputs)) & set(form("maze7", heldout.inputs))
    assert train.first(7).group.tolist() == train.group[:7].tolist()
    places = [number * len(train) // 7 for number in range(7)]
    assert np.array_equal(train.spread(7).inputs, train.inputs[places]) and places[-1] > 7
    assert len(train.spread(10**6)) == len(train)


# -- rows without a label --------------------------------------------------------------------------------------------
def unlabel(written, side: str, rows) -> None:
    """Remove the labels of some rows."""
    path = written / side / "all__labels.npy"
    labels = np.load(path)
    labels[rows] = 0
    np.save(path, labels)


def test_rows_without_a_label_are_left_out(written, as_groups):
    whole, _ = as_groups(puzzles=[0, 1, 4, 6, 16], groups=[0, 3, 4])
    unlabel(written, "train", [0, 2, *range(6, 16)])
    unlabel(written, "test", [0])
    train, heldout = load(str(written))
    assert (train.unlabelled, heldout.unlabelled, len(heldout)) == (12, 1, 3)
    assert (train.inputs == whole.inputs[[1, 3, 4, 5]]).all() and train.puzzle.tolist() == [1, 1, 2, 2]
    assert train.group.tolist() == [0] * 4 and train.updates(10, 2) == 10, "one group of two puzzles of two rows"
    unlabel(written, "test", slice(None))
    with pytest.raises(UserError, match=r"test/all__labels\.npy holds no label at all"):
        load(str(written))


def test_groups_of_one_remaining_row_each_are_dropped(written, as_groups):
    rows, _ = as_groups(puzzles=[0, 2, *range(3, 17)], groups=list(range(16)))
    assert rows.group.tolist() == [0, 0, *range(1, 15)]
    unlabel(written, "train", [0])
    assert load(str(written))[0].group is None
