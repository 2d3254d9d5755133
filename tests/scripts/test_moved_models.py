"""Caches, students and adapters work with their model wherever it is moved, and with no other model; a faulty model
gives one line before anything is written."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from small import CACHE, LEARNS, SMALL, damage

from qat_lora.lora.adapter import save_adapter
from qat_lora.lora.add import add_adapter
from qat_lora.models.loading import load_model
from qat_lora.quant.student import load_student

PPL = ["--length", 16, "--max-windows", 2, "--device", "cpu", "--dataset", "embedded"]


@pytest.fixture
def here(sharp_model_dir, tmp_path, monkeypatch):
    """A working directory with the model in m/."""
    shutil.copytree(sharp_model_dir, tmp_path / "m")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def made(make_files, here):
    """The same with a cache c/, a QAT run r/ and a recovery run l/, all made from the model `m`."""
    make_files("m")
    return here


def change(folder) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def use_everything(run, model: str) -> None:
    """Run every script that uses the files of `made` with the model at another path, and resume r and l."""
    base, short = ["--model", model], ["--max-new-tokens", 2, "--device", "cpu"]
    student, adapter = [*base, "--checkpoint", "r/best.pt"], ["--adapter", "l/adapter"]
    run("measure_perplexity", *student, *adapter, *PPL)
    run("run_inference", *student, "--compare", "--prompt", "A", *short)
    run("run_legal_assistant", *student, *adapter, "--question", "A?", *short)
    run("build_kd_cache", *base, "--cache-dir", "c", *CACHE)
    for folder, command in (
        ("r", ["train_qat", "--cache-dir", "./c", *LEARNS]),
        ("l", ["train_recovery_lora", "--v2-checkpoint", "./r/best.pt", "--kd-cache-dir", "./c", *SMALL]),
    ):
        finished = Path(folder, "summary.json").read_text()
        with pytest.raises(SystemExit):
            run(*command, "--output-dir", folder, *base, "--resume", "auto")
        assert Path(folder, "summary.json").read_text() == finished
    runs = ["--qat-run", "r", "--recovery-run", "l", "--cache-dir", "c"]
    run("report_recovery", *base, *runs, "--rows", 4, "--new-tokens", 2, "--device", "cpu")
    run("export_model", *student, *adapter, "--format", "hf", "--output-dir", f"exports/{model.replace('/', '_')}")
    dry = ["--cache-dir", "c", "--dry-run", *SMALL]
    run("train_qat", *base, "--from", "r/best.pt", "--mlp", "int4/g32", *dry)
    run("train_recovery_lora", *student, *dry)


def test_a_model_is_recognised_under_another_spelling_of_its_path_and_after_moving(
    run, refuse, made, tmp_path_factory, monkeypatch
):
    use_everything(run, "./m")
    load_adapters_from_elsewhere(made, tmp_path_factory.mktemp("elsewhere"), monkeypatch)
    (made / "m").rename(made / "moved")
    use_everything(run, str(made / "moved"))
    message = refuse("measure_perplexity", "--checkpoint", "r/best.pt", *PPL)
    assert "which cannot be read" in message and "--model" in message
    change(made / "moved")
    base, start = ["--model", "moved"], ["--model", "moved", "--checkpoint", "r/best.pt"]
    new = ["--cache-dir", "c", "--output-dir", "new", *SMALL]
    for script, *flags in (
        ("measure_perplexity", *start, *PPL),
        ("build_kd_cache", *base, "--cache-dir", "c", *CACHE),
        ("train_qat", *base, "--cache-dir", "c", "--output-dir", "r", "--resume", "auto", *LEARNS),
        ("train_qat", *start, *new),
        ("export_model", *start, "--output-dir", "new"),
        ("train_recovery_lora", *start, *new),
    ):
        message = refuse(script, *flags)
        assert "m'" in message and "'moved'" in message and ("ingerprint" in message or "base is" in message)
    assert not (made / "new").exists()
    (made / "moved").rename(made / "m")
    assert "which has changed since" in refuse("measure_perplexity", "--checkpoint", "r/best.pt", *PPL)


# -- adapters --------------------------------------------------------------------------------------------------------
def load_adapters_from_elsewhere(made, elsewhere, monkeypatch):
    """Load the adapters of recovery and of the export with only PEFT, from another working directory."""
    with monkeypatch.context() as patch:
        patch.chdir(elsewhere)
        for folder in (made / "l", made / "exports" / "._m"):
            adapted = AutoPeftModelForCausalLM.from_pretrained(folder / "adapter")
        student, _ = load_student(made / "r" / "best.pt")
        weight = adapted.get_base_model().model.layers[0].mlp.up_proj.base_layer.weight
        assert torch.equal(weight, student.model.layers[0].mlp.up_proj.weight)


def test_an_adapter_of_a_full_precision_model_recognises_that_model(run, refuse, here):
    save_adapter(add_adapter(load_model("m"), 4, 8, ("q",), 0), here / "adapter", None)
    (here / "m").rename(here / "moved")
    flags = ["--model", "moved", "--adapter", "adapter", *PPL]
    run("measure_perplexity", *flags)
    change(here / "moved")
    message = refuse("measure_perplexity", *flags)
    assert "trained on another model (fingerprint" in message and "moved" in message
    (here / "adapter" / "origin.json").unlink()  # as from other programs: nothing records the base model
    run("measure_perplexity", *flags)


# -- nothing is left behind ------------------------------------------------------------------------------------------
def test_a_refused_model_leaves_nothing_behind(refuse, here, cache):
    unknown, mute, cut = (shutil.copytree("m", here / name) for name in ("unknown", "mute", "cut"))
    config = json.loads((unknown / "config.json").read_text())
    (unknown / "config.json").write_text(json.dumps(config | {"model_type": "foo"}))
    for file in mute.glob("token*"):
        file.unlink()
    damage(cut / "model.safetensors", "truncated")
    for name, part in {"unknown": "does not know", "mute": "has no tokenizer", "cut": "damaged"}.items():
        for dry in ([], ["--dry-run"]):
            assert part in refuse("build_kd_cache", "--model", name, "--cache-dir", "new", *CACHE, *dry)
            flags = ["--model", name, "--cache-dir", cache, "--output-dir", "run", *SMALL]
            assert part in refuse("train_qat", *flags, *dry)
    assert not (here / "new").exists() and not (here / "run").exists() and not (here / "runs").exists()
