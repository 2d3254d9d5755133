"""Scripts print their memory estimate, and refuse what cannot fit before they read any weight."""

import re

import pytest
from small import CPU
from transformers import AutoConfig, AutoTokenizer

from qat_lora.backend import machine
from qat_lora.models import loading

LEAST = 4e5  # bytes; the weights of `tiny_model_dir` alone take more
LINE = re.compile(r"^memory of a worker's process \(estimated; the peak is in .+\): .+, total \d+\.\d\d GB$", re.M)


@pytest.fixture
def flags(tiny_model_dir, tiny_student, qat, recovery, tmp_path):
    """flags(script): flags to run it on the tiny model."""
    train = ["--model", tiny_model_dir, "--output-dir", tmp_path / "run"]
    student = ["--checkpoint", tiny_student]
    every = {
        "build_kd_cache": ["--model", tiny_model_dir, "--cache-dir", tmp_path / "c", "--length", 16, "--max-rows", 8],
        "train_qat": qat,
        "train_recovery_lora": recovery,
        "measure_perplexity": [*student, "--teacher", tiny_model_dir, "--length", 16, "--max-windows", 2],
        "train_cot_sft": [*train, "--count", 60, "--length", 500, "--epochs", 9],
        "train_musclebob_improved": [*train, "--max-prompt-length", 250, "--num-samples", 16],
        "export_model": [*student, "--output-dir", tmp_path / "out"],
        "run_inference": [*student, "--prompt", "Hello", "--raw"],
    }
    return lambda script: [*every[script], *CPU[: 2 if script == "export_model" else 4]]


ESTIMATED = (
    "build_kd_cache", "train_qat", "train_recovery_lora", "measure_perplexity", "train_cot_sft",
    "train_musclebob_improved",
)  # fmt: skip


@pytest.mark.parametrize("script", ESTIMATED)
def test_a_dry_run_prints_one_line_with_the_total_memory_and_writes_nothing(run, flags, tmp_path, capsys, script):
    run(script, *flags(script), "--dry-run")
    assert len(LINE.findall(capsys.readouterr().out)) == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("script", [*ESTIMATED, "export_model", "run_inference"])
def test_a_model_that_cannot_fit_is_refused_before_any_weight_is_read(run, refuse, flags, monkeypatch, script):
    load = loading._load

    def small(kind, name, **options):
        assert kind in (AutoConfig, AutoTokenizer), "weights are read"
        return load(kind, name, **options)

    monkeypatch.setattr(loading, "_load", small)
    monkeypatch.setattr(machine, "host_memory", lambda: LEAST)
    message = refuse(script, *flags(script))
    assert re.search(r"vocabulary 512.* needs at least 0\.0 GB of memory, but there is only 0\.0 GB; lower ", message)
    if script in ESTIMATED:
        assert "width 64" in message and "; lower --" in message
