"""scripts/build_puzzle_data.py writes rows of puzzles and of text that pretrain.py reads."""

import json

import pytest

from qat_lora.backend import machine
from qat_lora.errors import UserError
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
