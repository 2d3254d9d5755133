"""gemma3-270m, from a package with a tiny model in it, in every script that takes a model: files made from it record
its name, and a missing package gives one line."""

import json
from pathlib import Path

import pytest
import torch
from packaged import NAME
from small import SMALL

from qat_lora.kd.cache import read_manifest
from qat_lora.quant.student import read_student

TEXT = ["--dataset", "embedded", "--length", 16]
CPU = ["--device", "cpu"]


@pytest.fixture
def made(make_files, gemma_package, tmp_path, monkeypatch):
    """A working directory with a folder of the model's name, a cache c/, a QAT run r/ and a recovery run l/."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir()
    make_files(NAME)
    return tmp_path


def test_files_made_from_it_record_its_name_and_load_elsewhere(
    run, made, gguf_file, tmp_path_factory, monkeypatch, capsys
):
    assert read_manifest(made / "c")[0].teacher == NAME
    assert torch.load(made / "r" / "best.pt", weights_only=True)["model"] == NAME
    adapter = json.loads((made / "l" / "adapter" / "adapter_config.json").read_text())
    assert adapter["base_model_name_or_path"] == "google/gemma-3-270m"

    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    student, adapter = made / "r" / "best.pt", made / "l" / "adapter"
    assert read_student(student)["model"] == read_student(student, NAME)["model"] == NAME
    capsys.readouterr()
    ppl = ["--checkpoint", student, "--adapter", adapter, *TEXT, "--max-windows", 2, *CPU, "--json"]
    run("measure_perplexity", *ppl, "--teacher", NAME)
    facts = json.loads(capsys.readouterr().out)
    assert facts["model"] == facts["teacher"] == NAME and "Q4_K_M" in facts["note"]
    run("measure_perplexity", *ppl, "--teacher", gguf_file, "--model", gguf_file)
    assert json.loads(capsys.readouterr().out)["kl"] == facts["kl"]
    asked = ["--checkpoint", student, "--adapter", adapter, "--max-new-tokens", 2, *CPU]
    run("run_inference", *asked, "--compare", "--prompt", "A")
    assert "Q4_K_M" in capsys.readouterr().out
    run("run_legal_assistant", *asked, "--question", "A?")
    for kind in ("hf", "gguf"):
        run("export_model", "--checkpoint", student, "--adapter", adapter, "--format", kind, "--output-dir", kind)
    runs = ["--qat-run", made / "r", "--recovery-run", made / "l", "--cache-dir", made / "c", "--output", "report.md"]
    run("report_recovery", *runs, "--rows", 4, "--new-tokens", 2, *CPU)
    assert "Q4_K_M" in Path("report.md").read_text()


MISSING = f"error: model {NAME}: its package is missing; make setup-zoo installs it (240 MB, under Gemma's terms)\n"


@pytest.mark.parametrize(
    "script, flags",
    [
        ("build_kd_cache", ["--model", NAME, "--cache-dir", "c"]),
        ("train_qat", ["--model", NAME, "--cache-dir", "c", *SMALL]),
        ("train_musclebob_improved", ["--model", NAME, *CPU]),
        ("train_cot_sft", ["--model", NAME, *CPU]),
        ("measure_perplexity", ["--model", NAME, *TEXT, *CPU]),
        ("measure_perplexity", ["--model", "MODEL", "--teacher", NAME, *TEXT, *CPU]),
        ("run_inference", ["--model", NAME, "--prompt", "A", *CPU]),
        ("run_legal_assistant", ["--model", NAME, "--question", "A?", *CPU]),
        ("qat_quality", ["--config", "gemma", *CPU]),
    ],
)
def test_a_missing_package_gives_one_line(
    refusal, no_gemma, sharp_cache, tiny_model_dir, tmp_path, monkeypatch, script, flags
):
    places = {"c": str(sharp_cache) if script == "train_qat" else "c", "MODEL": tiny_model_dir}
    monkeypatch.chdir(tmp_path)
    assert refusal(script, *(places.get(flag, flag) for flag in flags)) == MISSING
    assert not list(tmp_path.iterdir()), "a refused run leaves no files"
