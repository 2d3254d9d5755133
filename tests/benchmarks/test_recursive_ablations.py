"""The ablations: one line per variant and a picture from the measured runs; finished runs are not run again."""

import json

import pytest

from qat_lora.errors import UserError
from qat_lora.run.command_line import parse


@pytest.fixture(scope="module")
def bench(load_script):
    return load_script("recursive_ablations")


def test_seeds_that_are_not_numbers_are_refused(bench):
    with pytest.raises(UserError, match="--seeds a,b is not a list of whole numbers"):
        bench.main(parse(bench.Config, "recursive_ablations", ["--seeds", "a,b"]))


def test_the_table_and_the_picture_show_what_was_measured(bench, tmp_path, monkeypatch, capsys):
    called = []

    def call(script, *words):
        called.append(script)
        name = next(word for word in words if word.startswith("output_dir=")).removeprefix("output_dir=")
        (tmp_path / name).mkdir(parents=True)
        lines = [
            {"step": 0, "heldout_exact_full": 0.0, "heldout_exact": 0.0},
            {"step": 5, "loss": 1.0},
            {"step": 9, "heldout_exact_full": len(called) / 100, "heldout_exact": 0.01},
        ]
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        (tmp_path / name / "summary.json").write_text('{"status": "finished"}')

    monkeypatch.setattr(bench, "call", call)
    cfg = parse(bench.Config, "recursive_ablations", ["--output-dir", str(tmp_path / "out")])
    bench.main(cfg)
    assert called == ["scripts/build_puzzle_data.py", *["pretrain.py"] * 4] * 2
    assert "no average, seeds 0,1: 3.0% (1.0%), 8.0% (1.0%) at update 9" in capsys.readouterr().out
    assert (tmp_path / "out" / "curves.png").stat().st_size > 5000
    bench.main(cfg)
    assert len(called) == 10
