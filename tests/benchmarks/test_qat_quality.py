"""The quality benchmark: impossible settings are refused before anything is built, and the report is correct."""

import json
import subprocess
import sys
import time
from pydoc_data.topics import topics
from types import SimpleNamespace

import pytest

from qat_lora.run.command_line import parse


@pytest.mark.parametrize(
    "flags, part",
    [
        (["--grids", "lut2/r32"], "is not a group quantiser"),
        (["--grids", "int8/g64"], "of 2 or 4 bits"),
        (["--grids", "balanced2/g64"], "torchao has int grids alone"),
        (["--grids", "int2/g64+offset", "--methods", "autoround-ext"], "autoround has int grids alone"),
        (["--grids", "int2/g64,int4/g128"], "576 inputs are not divisible by group 128"),
        (["--methods", "llama.cpp", "--grids", "int2/g32/s8"], "llama.cpp has no type of this grid; use q2_0"),
        (["--methods", "awq"], "'awq' is not one of rtn, mse"),
        (["--seeds", "a"], "--seeds a"),
        (["--steps", "23"], "--steps 23 must be at least 24"),
        (["--cell", "int2/g64,ours,7"], "is not a cell of"),
    ],
)
def test_impossible_settings_are_refused(refusal, tmp_path, flags, part):
    assert part in refusal("qat_quality", "--output-dir", tmp_path / "out", *flags)
    assert not (tmp_path / "out").exists()


def test_results_of_other_settings_are_not_mixed(load_script, tmp_path):
    bench = load_script("qat_quality")
    for _ in range(2):
        bench.check_settings({"steps": 40, "text": "a"}, tmp_path)
    for change, words in (({"steps": 80}, "steps 40, not 80"), ({"text": "b"}, "text a, not b")):
        with pytest.raises(bench.UserError, match=f"holds results with {words}"):
            bench.check_settings({"steps": 40, "text": "a"} | change, tmp_path)


def row(method, stage, seed, kl, seconds=100):
    text = {"ppl": 40.0 + seed, "kl": kl, "gap": 0.4, "teacher": 31.98}
    return {
        "cell": f"int2/g64,{method},{seed}", "grid": "int2/g64", "method": method, "stage": stage, "seed": seed,
        "commit": "abc1234", "steps": 8, "seconds": seconds, "core_seconds": 150, "peak_memory_mb": 2000, "bits": 2.25,
        "text": text,
    }  # fmt: skip


def test_the_report_gives_mean_and_range_over_seeds(load_script, tmp_path):
    report = load_script("quality_report")
    rows = [row("gptq", "gptq", 0, 1.4), row("ours", "qat", 0, 0.5), row("ours", "qat", 1, 0.7, seconds=None)]
    report.write_report(rows, tmp_path, "A model on a machine.")
    lines = (tmp_path / "report.md").read_text().splitlines()
    assert "## int2/g64, 8 updates" in lines
    assert "| gptq | 2.25 | 40.000 | 1.400 | 0.400 | 100 | 150 | 2000 | 1 |" in lines
    ours = next(line for line in lines if line.startswith("| ours: qat |"))
    assert "0.600 (0.500–0.700)" in ours and "| 100 | 150 (150–150) |" in ours and ours.endswith("| 2 |")
    assert (tmp_path / "kl.png").read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def measure(load_script, sharp_model_dir, tmp_path, monkeypatch):
    """measure(methods): the rows of complete cells on the tiny model; only the first cell has a process of its own."""
    bench, started = load_script("qat_quality"), []
    (tmp_path / "text.txt").write_text("\n".join(topics[key] for key in sorted(topics))[:60_000])
    flags = ["--dataset", tmp_path / "text.txt", "--other-dataset", tmp_path / "text.txt", "--device", "cpu"]
    flags += ["--precision", "fp32", "--grids", "int2/g64", "--seeds", "0", "--steps", "24", "--measured", "4"]
    flags += ["--calibration-rows", "4", "--model", sharp_model_dir, "--output-dir", tmp_path / "out"]

    def cell(command: list[str]) -> subprocess.CompletedProcess:
        started.append(command)
        if len(started) == 1:
            return subprocess.run(command)
        bench.main(parse(bench.Config, "qat_quality", command[2:]))
        return subprocess.CompletedProcess(command, 0)

    def run(methods: str) -> list[dict]:
        monkeypatch.setattr(bench, "subprocess", SimpleNamespace(run=cell))
        monkeypatch.setattr(bench, "RANKS", {4: bench.PROJECTIONS})
        monkeypatch.setattr(sys, "argv", ["qat_quality.py", *map(str, flags), "--methods", methods])
        bench.main(parse(bench.Config, "qat_quality", sys.argv[1:]))
        return [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]

    return run


def test_our_methods_from_text_to_report(measure, tmp_path):
    rows = measure("mse,loftq,ours,ranks")
    kl = {f"{row['method']} {row['stage']}": row["text"]["kl"] for row in rows}
    first, *stages = kl
    assert first == "mse mse" and stages[:3] == ["loftq adapter", "ours layers", "ours qat"] and len(stages) == 5
    assert all(0 < value < 20 for value in kl.values()) and kl["ours qat"] < kl["mse mse"]
    bits, adapter = dict(zip(kl, (row["bits"] for row in rows))), stages[3]
    assert bits["mse mse"] == bits["ours qat"] == 2.25 and bits[adapter] == bits["loftq adapter"] > 2.25
    assert f"| {adapter.replace(' ', ': ', 1)} |" in (tmp_path / "out" / "report.md").read_text()
    assert measure("mse,loftq,ours,ranks") == rows, "the same command again has nothing left to do"


def test_a_cell_costs_what_its_processes_took_until_a_file_was_written(load_script, tmp_path):
    quality, file = load_script("quality_bench"), tmp_path / "file"
    busy = "import time\nwhile time.process_time() < {}: pass"
    clock = quality.Clock(True, quality.core_seconds())
    with clock.stopped():
        exec(busy.format(time.process_time() + 3))
    script = f"{busy.format(3)}\nopen({str(file)!r}, 'w').close()\n{busy.format(6)}\nraise SystemExit(3)"
    assert clock.run([sys.executable, "-c", script]) == 3
    until = clock.cost(file)
    assert 1 <= until["core_seconds"] <= 4 and 6 <= clock.cost()["core_seconds"] <= 7
    with clock.stopped():
        exec(busy.format(time.process_time() + 2))
    assert clock.cost(file) == until and clock.cost()["core_seconds"] <= 7, "a pause counts for what came before it"
    assert quality.Clock(False).cost() == {"seconds": None, "core_seconds": None}


@pytest.mark.peer
def test_autoround_starts_from_the_same_rows_and_its_codes_are_ours(measure):
    rows = measure("mse,autoround-light,autoround-light-ext")
    kl = [row["text"]["kl"] for row in rows]
    assert max(kl[1:]) < kl[0] and kl[1] != kl[2] and rows[0]["core_seconds"]


@pytest.mark.peer
def test_torchao_trains_on_the_same_rows(measure):
    rows = measure("torchao,torchao-text")
    assert [row["stage"] for row in rows] == ["qat", "qat"] and rows[0]["text"]["kl"] < rows[1]["text"]["kl"]
