"""Faults of runs, checkpoints and training give one line that names the fault and its fix, and no data is lost."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small import damage, full_disk
from transformers import LlamaConfig, LlamaForCausalLM

from qat_lora.quant.student import read_student
from qat_lora.run import options
from qat_lora.run.checkpoint import load_checkpoint
from qat_lora.train import loop


# -- runs and checkpoints --------------------------------------------------------------------------------------------
def test_runs_are_never_overwritten_or_mixed(refuse, run, qat, tmp_path):
    run("train_qat", *qat)
    finished = tmp_path / "run"
    before = {path.name: path.read_bytes() for path in finished.iterdir() if path.is_file()}
    assert "already holds a run" in refuse("train_qat", *qat)
    message = refuse("train_qat", *qat, "--resume", "auto", "--config", "q2_g64")
    assert "another config" in message and "attn is 'balanced2/g32' there, 'int2/g64' here" in message
    assert "no run there" in refuse("train_qat", *qat, "--resume", tmp_path / "nowhere")
    assert {path.name: path.read_bytes() for path in finished.iterdir() if path.is_file()} == before
    assert load_checkpoint(finished)[2]["step"] == 2


def test_lost_files_are_restored_or_the_resume_is_refused(refuse, run, qat, tmp_path):
    """The metrics record the best state; without them a worse one would overwrite the best checkpoint."""
    folder = tmp_path / "run"
    flags = [*qat, "--max-steps", 4, "--save-every", 2, "--eval-every", 2, "--resume", "auto"]
    run("train_qat", *flags)
    best, metrics = folder / "best.pt", folder / "metrics.jsonl"
    for lost in ([best, folder / "checkpoints" / "step_4"], [metrics]):
        before = best.read_bytes(), metrics.read_bytes()
        for path in (folder / "summary.json", *lost):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        run("train_qat", *flags)
        assert best.read_bytes() == before[0] and (best in lost or metrics.read_bytes() == before[1])
    (folder / "summary.json").unlink()
    metrics.unlink()
    shutil.rmtree(folder / "checkpoints" / "files")
    message = refuse("train_qat", *flags)
    assert "metrics.jsonl has changed since step 4" in message and "--output-dir" in message
    assert best.read_bytes() == before[0]


def test_layer_steps_from_a_student_with_the_same_quantisers_are_refused(refuse, qat, tiny_student, tmp_path):
    flags = [*qat, "--from", tiny_student, "--attn", "lut4/r4", "--layer-steps", 1, "--layer-rows", 4]
    for dry in ([], ["--dry-run"]):
        assert "use --layer-steps 0" in refuse("train_qat", *flags, *dry)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("attn, trained", [("balanced2/g32", False), ("lut4/r4", True)])
def test_a_student_is_marked_untrained_if_its_quantisers_change(run, qat, tiny_student, tmp_path, attn, trained):
    run("train_qat", *qat, "--from", tiny_student, "--attn", attn, "--max-steps", 0)
    assert read_student(tmp_path / "run" / "best.pt")["info"]["trained"] is trained


def test_a_student_is_refused_if_its_folder_now_holds_a_model_of_another_shape(
    refuse, recovery, tiny_student, tiny_model_dir, tiny_tokenizer, tmp_path
):
    other = LlamaConfig.from_pretrained(tiny_model_dir, hidden_size=128)
    LlamaForCausalLM(other).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    torch.save(read_student(tiny_student) | {"model": str(tmp_path / "model")}, tmp_path / "best.pt")
    message = refuse("train_recovery_lora", *recovery, "--checkpoint", tmp_path / "best.pt")
    assert "best.pt" in message and "which has changed since" in message


@pytest.mark.parametrize("kind", ["truncated", "flipped", "empty", "missing"])
def test_a_damaged_student_is_named(refuse, recovery, tiny_student, tmp_path, kind):
    path = Path(shutil.copy(tiny_student, tmp_path / "best.pt"))
    damage(path, kind)
    assert str(path) in refuse("train_recovery_lora", *recovery, "--checkpoint", path)


# -- training that goes wrong ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("rate", ["1e12", "1e38"])
def test_a_diverging_loss_stops_the_run_and_keeps_the_last_good_checkpoint(refuse, qat, tmp_path, monkeypatch, rate):
    for module in (options, loop):  # allows rates at which the loss diverges at once
        monkeypatch.setattr(module, "check_range", lambda *_, **__: None)
    flags = ["--learning-rate", rate, "--warmup-steps", 0, "--max-steps", 8, "--save-every", 1, "--log-every", 1]
    message = refuse("train_qat", *qat, *flags, "--clip-grad-norm", 0, "--layer-steps", 1, "--layer-rows", 4)
    assert "not finite" in message and "step " in message and "--learning-rate" in message
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed" and f"step {summary['step']}" in message
    tensors, _, meta = load_checkpoint(tmp_path / "run")
    assert meta["step"] < summary["step"]
    assert [name for name, value in tensors.items() if not value.isfinite().all()] == []


def test_full_disk_while_saving(refuse, run, qat, tmp_path):
    """Whichever file is being written: the error is one line, and the run resumes from its last checkpoint."""
    flags = [*qat, "--max-steps", 4, "--save-every", 1, "--output-dir"]
    run("train_qat", *flags, tmp_path / "whole")
    end = load_checkpoint(tmp_path / "whole")[0]
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "whole").rglob("*") if path.is_file()}
    for file in ("best.pt", "model.safetensors", "trainer.pt"):
        folder = tmp_path / file
        with full_disk(sizes[file] - 1):
            message = refuse("train_qat", *flags, folder)
        assert "could not be written" in message and "free some space" in message
        assert not [path for path in folder.rglob("*") if "part" in path.name]
        run("train_qat", *flags, folder, "--resume", "auto")
        resumed = load_checkpoint(folder)[0]
        assert all(torch.equal(resumed[name], end[name]) for name in end)


def test_full_disk_while_saving_an_adapter(refuse, run, recovery, tmp_path):
    with full_disk(8_000):
        assert "adapter could not be written" in refuse("train_recovery_lora", *recovery)
    run("train_recovery_lora", *recovery, "--resume", "auto")
    assert load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
