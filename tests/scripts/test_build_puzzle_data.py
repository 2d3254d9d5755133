"""scripts/build_puzzle_data.py writes rows of puzzles and of text that pretrain.py reads and solve_puzzles.py
evaluates."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from puzzle_files import arc_tasks, write_folder, write_subset

from qat_lora.backend import machine
from qat_lora.errors import UserError
from qat_lora.experiments.athena import evaluation
from qat_lora.experiments.athena.rows import load


@pytest.fixture
def build(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *words: run("build_puzzle_data", *words)


def test_puzzles_depend_only_on_the_seed(build, tmp_path, capsys):
    build("--dry-run")
    assert "2,000 sudoku6 would go to data/puzzles, 10% of them held out" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        build("kind=sudoku4", "count=30", "--heldout-fraction", "0.2", f"output_dir={folder}", f"seed={seed}")
    a, b, c = (load(folder) for folder in "abc")
    assert [part.fingerprint for part in a] == [part.fingerprint for part in b] != [part.fingerprint for part in c]
    assert len(a[0]) + len(a[1]) == 30 and 1 <= len(a[1]) <= 6 and a[0].kind == "sudoku4"
    printed = capsys.readouterr().out
    assert "30 sudoku4, quartiles of the difficulty: 0 0 0 0 0" in printed and "rows in a/train" in printed


def test_most_blanks_limits_the_share_of_blanks(build):
    build("kind=sudoku6", "count=20", "output_dir=easy", "--least-blanks", "0.2", "--most-blanks", "0.3")
    train, _ = load("easy")
    assert ((train.inputs == 1).mean(1) <= 0.31).all()


def test_a_corpus_becomes_rows_without_the_longer_ones(build, tmp_path, capsys):
    rows = [{"prompt": f"{n}+1=", "response": str(n + 1)} for n in range(20)] + [{"prompt": "x" * 99, "response": "y"}]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build("corpus=pairs.jsonl", "length=16", "iterations=3", "output_dir=pairs")
    train, heldout = load("pairs")
    assert len(train) + len(heldout) == 20 and train.kind is None and set(train.budgets) == {3}
    assert "20 rows of 16 bytes; 1 longer rows left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, said",
    [
        (["kind=sudoku7"], "kind 'sudoku7' is not one of"), (["count=0"], "--count 0 must be at least 1"),
        (["count=1000000000000", "kind=sudoku9"], "--count 1000000000000 needs at least 1,296,000.0 GB of memory"),
        (["count=100000", "kind=sudoku4", "--least-blanks", "1"], "--count: 100000 puzzles are more than the 85632"),
        (["count=49", "kind=maze5", "--dry-run"], "--count: 49 puzzles are more than the 48 maze5 that exist"),
        (["count=9", "heldout_fraction=1"], "--heldout-fraction 1.0 must be above 0 and below 1"),
        (["heldout_fraction=2", "--dry-run"], "--heldout-fraction 2.0"),
        (["corpus=pairs.jsonl", "iterations=5000000000"], "--iterations 5000000000 must be at least 0 and below"),
        (["kind=sudoku9", "--least-blanks", "0.8", "--dry-run"], "--least-blanks 0.8: no sudoku9 with one answer has"),
        (["least_blanks=0.9", "most_blanks=0.5"], "--least-blanks 0.9 and --most-blanks 0.5"),
        (["corpus=none.jsonl"], "no such file"), (["corpus=pairs.jsonl", "length=1"], "--length 1 must be from 2"),
        (["corpus=pairs.jsonl"], "pairs.jsonl row 2: response is None"), (["output_dir=pairs.jsonl"], "already exists"),
    ],
)  # fmt: skip
def test_an_error_names_the_bad_input_and_nothing_is_written(build, tmp_path, words, said):
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a", "response": "b"}\n{"prompt": "a"}\n')
    with pytest.raises(UserError, match=said):
        build(*words)
    assert [path.name for path in tmp_path.iterdir()] == ["pairs.jsonl"]


def test_a_corpus_too_large_for_memory_is_refused_before_allocating_rows(build, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "host_memory", lambda: 10**8)
    (tmp_path / "pairs.jsonl").write_text("".join(f'{{"prompt": "{n}", "response": "b"}}\n' for n in range(9)))
    build("corpus=pairs.jsonl", "length=100", "output_dir=pairs", "--dry-run")
    with pytest.raises(UserError, match=r"9 rows of --length 1000000 needs at least 0\.1 GB of .*lower --length"):
        build("corpus=pairs.jsonl", "length=1000000")


# -- published puzzles -----------------------------------------------------------------------------------------------
SUDOKU = "source,question,answer,rating\n" + "".join(f"x,{'1.34' * 4},{'1234' * 4},{n}\n" for n in range(3))
TABLES = {"s/train.csv": SUDOKU, "s/test.csv": SUDOKU, "m/train.csv": "question,answer\n####S G##,####SoG##\n"}


@pytest.fixture
def sources(tmp_path):
    """Tables of Sudoku (s) and mazes (m), ARC tasks in both layouts (arc/arc_training, arc/arc_test, old)."""
    for name, text in TABLES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    write_subset(tmp_path / "arc" / "arc_training", arc_tasks(["flip", "mirror", "recolour"]))
    write_subset(tmp_path / "arc" / "arc_test", arc_tasks(["turn"], tests=2), solved=False)
    write_folder(tmp_path / "old", arc_tasks(["across"]))


def test_tables_are_recognised_by_their_content(build, sources, capsys):
    build("source=s", "augmentations=4", "subsample=2", "--dry-run")
    said = capsys.readouterr().out
    assert "3 rows of sudoku4 in s/train.csv, 3 in s/test.csv" in said
    assert "at most 10 training and 3 test rows would go to data/puzzles" in said
    build("source=s", "augmentations=4", "subsample=2", "output_dir=sudoku")
    train, test = load("sudoku")
    assert (len(train), len(test), train.updates(1, 1)) == (10, 3, 2) and train.kind is None
    assert "10 rows (10 puzzles) in sudoku/train, 3 rows in sudoku/test" in capsys.readouterr().out
    build("source=m/train.csv", "test_source=m/train.csv", "augmentations=7", "output_dir=mazes")
    assert "1 rows of 3×3 maze in m/train.csv" in capsys.readouterr().out and len(load("mazes")[0]) == 8


def test_a_subsample_is_random_and_repeatable(build, sources, tmp_path):
    rows = [f"{('1234' * 4)[:n]:.<16},{'1234' * 4}" for n in range(12)]  # n digits are given
    for name, part in (("train", rows[:10]), ("test", rows[10:])):
        (tmp_path / "s" / f"{name}.csv").write_text("\n".join(["question,answer", *part]))
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        build("source=s", "subsample=4", f"seed={seed}", f"output_dir={name}")
    a, b, c = (load(name)[0] for name in "abc")
    assert a.fingerprint == b.fingerprint != c.fingerprint and len(a) == len(c) == 4 and len(load("a")[1]) == 2


def test_arc_tasks_are_read_from_both_layouts(build, sources, capsys):
    words = ["source=arc/arc_training", "test_source=old,arc/arc_test", "augmentations=3", "output_dir=arc_data"]
    build(*words, "--dry-run")
    said = capsys.readouterr().out
    assert "3 tasks to train on from arc/arc_training, 2 to test on from old,arc/arc_test" in said
    assert "at most 72 training and 12 test rows" in said  # 4 · (3 · 4 + 2 · 3), 4 · (1 + 2)
    build(*words)
    assert "8 rows of test/ have no known solution; they are answered, but not measured" in capsys.readouterr().out
    train, test = load("arc_data")
    assert len(train) == 72 and (len(test), test.unlabelled) == (4, 8)
    build("source=arc/arc_training", "test_source=arc/arc_test", "subsample=1", "output_dir=blind")
    assert "pretrain.py needs some solutions to measure with" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"blind/test/all__labels\.npy holds no label at all"):
        load("blind")
    train, test = load("blind", unlabelled=True)
    assert len(train) == 4 + 3 and len(test) == 2


@pytest.mark.parametrize("words, said", [
    (["source=s", "corpus=a.jsonl"], "--source and --corpus exclude each other"),
    (["augmentations=3"], "--test-source, --augmentations and --subsample need --source"),
    (["source=m"], r"m/test\.csv cannot be read as a CSV table .*No such file"),
    (["source=m/train.csv"], "has no test rows; give their file with"),
    (["source=m", "test_source=s/test.csv"], "s/test.csv holds sudoku4 rows, but the training rows are 3×3 maze"),
    (["source=m", "test_source=m/train.csv", "augmentations=8"], "--augmentations 8: a maze has only 7"),
    (["source=s", "subsample=4"], "--subsample 4 is more than the 3 in s/train.csv"),
    (["source=old"], "ARC tasks need --test-source"), (["source=old", "test_source=nowhere"], "--test-source nowhere"),
    (["source=arc/arc_test", "test_source=old"], "arc/arc_test_challenges.json: task turn, test pair 1 has no output"),
    (["source=old", "test_source=old"], "task across is both in old/across.json and in old/across.json"),
    (["source=old", "test_source=arc/arc_test", "subsample=2"], "--subsample 2 is more than the 1 in old"),
    (["source=old", "test_source=arc"], "--test-source arc holds 2 subsets"), (["source=s", "output_dir=m"], "already"),
    (["source="], "--source is empty"), (["source=old,", "test_source=old"], "--source old, has an empty name"),
])  # fmt: skip
def test_an_error_names_the_bad_source_and_nothing_is_written(build, sources, tmp_path, words, said):
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=said) as error:
        build(*words)
    assert sorted(tmp_path.rglob("*")) == before and len(str(error.value).splitlines()) == 1


# -- from tasks to votes ---------------------------------------------------------------------------------------------
TINY = "global_batch_size=4 max_steps=2 eval_rows=0 halt_max_segments=2 arch.num_heads=2 arch.hidden_size=16 "
TINY += "arch.L_layers=1 arch.H_cycles=1 arch.L_cycles=1 device_type=cpu forward_dtype=float32 compile=off lr_warmup=0"


def test_a_run_on_arc_tasks_is_evaluated_by_a_vote(run, build, sources, capsys):
    build("source=arc/arc_training", "test_source=old,arc/arc_test", "augmentations=3", "output_dir=data")
    run("pretrain", *TINY.split(), "data_path=data", "output_dir=run")
    words = ["--run", "run", "--device", "cpu", "--precision", "fp32", "--batch-size", "5"]
    run("solve_puzzles", *words, "--evaluate", "data", "--answers", "out/submission.json")
    said = capsys.readouterr().out
    assert "rows   4 of data" in said and "full   0.0% of the rows" in said
    assert re.search(r"vote   pass@1 0\.0%, pass@2 0\.0%.* of 2 tasks", said)
    answers = json.loads(Path("out/submission.json").read_text())
    assert [len(answers[name]) for name in ("across", "turn")] == [1, 2]
    assert all(set(pair) == {"attempt_1", "attempt_2"} for tests in answers.values() for pair in tests)
    for side in ("train", "test"):
        values = np.load(f"data/{side}/all__labels.npy")
        np.save(f"data/{side}/all__labels.npy", values * (side == "train"))
    run("solve_puzzles", *words, "--evaluate", "data")
    said = capsys.readouterr().out
    assert "rows   0 of data" in said and "vote   pass@1" in said
    with pytest.raises(UserError, match=r"--answers a\.json needs --evaluate FOLDER with ARC tasks"):
        run("solve_puzzles", *words, "--evaluate", "sudoku", "--answers", "a.json")


def test_right_answers_to_every_augmentation_win_the_vote(run, build, sources, capsys, monkeypatch):
    """With the model's answers replaced by the labels, all tasks are solved."""
    build("source=arc/arc_training", "test_source=old", "augmentations=3", "output_dir=data")
    run("pretrain", *TINY.split(), "data_path=data", "output_dir=run")

    def answered(model, batch, segments, backend):
        right, ones = batch["labels"].clamp(min=0), torch.ones(len(batch["labels"]))
        return evaluation.Answers(right, right, ones.long(), ones * 0.5), torch.zeros(right.shape)

    monkeypatch.setattr(evaluation, "answer", answered)
    run("solve_puzzles", "--run", "run", "--device", "cpu", "--evaluate", "data")
    said = capsys.readouterr().out
    assert "vote   pass@1 100.0%, pass@2 100.0%, pass@5 100.0%, pass@10 100.0% of 1 tasks" in said
