"""The benchmark of several attempts: how it chooses the noise, what it prints, and that nothing is measured twice."""

import numpy as np
import pytest

from qat_lora.errors import UserError
from qat_lora.experiments.athena.attempts import Accuracy
from qat_lora.experiments.athena.rows import draw, save, split
from qat_lora.run.command_line import parse


@pytest.fixture(scope="module")
def bench(load_script):
    return load_script("recursive_attempts")


@pytest.mark.parametrize("option", ["--seeds", "--noises"])
def test_lists_that_are_not_numbers_are_refused(bench, option):
    with pytest.raises(UserError, match=f"{option} a,b is not a list of numbers"):
        bench.main(parse(bench.Config, "recursive_attempts", [option, "a,b"]))


def test_the_share_won_back_is_net_of_rows_lost(bench):
    assert bench.won_back(0.6, 0.8) == pytest.approx(0.5) and bench.won_back(0.5, 0.25) == -0.5
    assert bench.won_back(1.0, 1.0) == 0.0


def test_noise_is_chosen_on_other_rows_than_it_is_measured_on(bench, tmp_path, monkeypatch, capsys):
    sides, called, measured = split(draw("sudoku4", 60, 0), 0.5, 0), [], []

    def call(script, *words):
        called.append(script)
        folder = next(word for word in words if word.startswith("output_dir=")).removeprefix("output_dir=")
        if script != "pretrain.py":
            return save(tmp_path / folder, *sides)
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "summary.json").write_text('{"status": "finished"}')

    def measure(_, rows, segments, batch_size, count, noise, seed, backend):
        measured.append((rows.inputs, count, noise, seed))
        best = {0.3: 0.7, 1.0: 0.8}[noise]
        return {1: Accuracy(0.5, 0.5, 0.5), count: Accuracy(best, 0.55, best + 0.1)}

    monkeypatch.setattr(bench, "call", call)
    monkeypatch.setattr(bench, "opened", lambda run, backend: (None, 3))
    monkeypatch.setattr(bench, "measure_attempts", measure)
    words = ["--seeds", "0,1", "--choosing-rows", "4", "--measured-rows", "6", "--attempts", "32", "--device", "cpu"]
    cfg = parse(bench.Config, "recursive_attempts", [*words, "--output-dir", str(tmp_path / "out")])
    bench.main(cfg)
    said = capsys.readouterr().out
    assert called == ["scripts/build_puzzle_data.py", "pretrain.py"] * 2
    assert [each[1:] for each in measured] == [
        (count, noise, seed) for count in (16, 32) for noise in (0.3, 1.0) for seed in (0, 1)
    ]
    assert all(np.array_equal(rows, sides[1].inputs[:4]) for rows, *_ in measured[:4])
    assert all(np.array_equal(rows, sides[1].inputs[4:10]) for rows, *_ in measured[4:])
    assert "noise 1: 80.0% / 80.0%, 90.0% / 90.0%" in said
    assert "32: 80.0% / 80.0%, 55.0% / 55.0%, 90.0% / 90.0%" in said
    assert "one attempt misses (chosen): 60.0% / 60.0%" in said and "noise 1 (chosen), 6 other rows" in said
    assert (tmp_path / "out" / "attempts.png").stat().st_size > 5000
    bench.main(cfg)
    assert len(called) == 4 and len(measured) == 8
