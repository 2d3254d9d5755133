"""Faults of runs, checkpoints and training give one line that names the fault and its fix, and no data is lost."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small import SMALL, damage

from qat_lora.kd import training
from qat_lora.quant.student import read_student
from qat_lora.run import options
from qat_lora.run.checkpoint import load_checkpoint
from qat_lora.train import loop

ROOT = Path(__file__).resolve().parents[2]


# -- runs and checkpoints --------------------------------------------------------------------------------------------
@pytest.fixture
def finished(run, qat, tmp_path):
    """A finished run in tmp_path/run."""
    run("train_qat", *qat)
    return tmp_path / "run"


def test_runs_are_never_overwritten_or_mixed(refuse, run, finished, qat):
    before = {path.name: path.read_bytes() for path in finished.iterdir() if path.is_file()}
    assert "already holds a run" in refuse("train_qat", *qat)
    message = refuse("train_qat", *qat, "--resume", "auto", "--config", "q2_g64")
    assert "another config" in message and "attn is 'balanced2/g32' there, 'int2/g64' here" in message
    assert "no run there" in refuse("train_qat", *qat, "--resume", finished.parent / "nowhere")
    assert {path.name: path.read_bytes() for path in finished.iterdir() if path.is_file()} == before
    assert load_checkpoint(finished)[2]["step"] == 2


def test_a_deleted_best_checkpoint_is_restored(run, qat, tmp_path):
    flags = [*qat, "--max-steps", 4, "--save-every", 2, "--eval-every", 2, "--resume", "auto"]
    run("train_qat", *flags)
    best = (tmp_path / "run" / "best.pt").read_bytes()
    (tmp_path / "run" / "summary.json").unlink()
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_4")
    (tmp_path / "run" / "best.pt").unlink()
    run("train_qat", *flags)
    assert (tmp_path / "run" / "best.pt").read_bytes() == best


def test_lost_metrics_are_restored_or_the_resume_is_refused(refuse, run, qat, tmp_path):
    """They record the best state; without them a worse one would overwrite the best checkpoint."""
    run("train_qat", *qat, "--max-steps", 4, "--save-every", 2)
    folder, flags = tmp_path / "run", [*qat, "--max-steps", 4, "--save-every", 2, "--resume", "auto"]
    best, metrics = (folder / "best.pt").read_bytes(), (folder / "metrics.jsonl").read_bytes()
    (folder / "summary.json").unlink()
    (folder / "metrics.jsonl").unlink()
    run("train_qat", *flags)
    assert (folder / "metrics.jsonl").read_bytes() == metrics and (folder / "best.pt").read_bytes() == best
    (folder / "summary.json").unlink()
    (folder / "metrics.jsonl").unlink()
    shutil.rmtree(folder / "checkpoints" / "files")
    message = refuse("train_qat", *flags)
    assert "metrics.jsonl has changed since step 4" in message and "--output-dir" in message
    assert (folder / "best.pt").read_bytes() == best


def test_layer_steps_from_a_student_with_the_same_quantisers_are_refused(refuse, qat, tiny_student, tmp_path):
    flags = [*qat, "--from", tiny_student, "--attn", "lut4/r4", "--layer-steps", 1, "--layer-rows", 4]
    for dry in ([], ["--dry-run"]):
        assert "use --layer-steps 0" in refuse("train_qat", *flags, *dry)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("attn, trained", [("balanced2/g32", False), ("lut4/r4", True)])
def test_a_student_is_marked_untrained_if_its_quantisers_change(run, qat, tiny_student, tmp_path, attn, trained):
    run("train_qat", *qat, "--from", tiny_student, "--attn", attn, "--max-steps", 0)
    assert read_student(tmp_path / "run" / "best.pt")["info"]["trained"] is trained


def test_a_checkpoint_of_another_model_is_refused(refuse, tiny_student, cache, tmp_path):
    flags = ["--checkpoint", tiny_student, "--kd-cache-dir", cache, "--output-dir", tmp_path / "run", *SMALL]
    message = refuse("train_recovery_lora", *flags, "--model", "smollm2-135m")
    assert str(tiny_student) in message and "smollm2-135m" in message and "--model" in message


@pytest.mark.parametrize("change", ["hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_student_is_refused_if_its_model_folder_has_changed(
    refuse, tiny_student, tiny_model_dir, tiny_tokenizer, cache, tmp_path, change
):
    """The student file names a folder that now holds a model of another shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    other = tmp_path / "model"
    values = {"hidden_size": 128, "num_hidden_layers": 3, "vocab_size": 600}
    LlamaForCausalLM(LlamaConfig.from_pretrained(tiny_model_dir, **{change: values[change]})).save_pretrained(other)
    tiny_tokenizer.save_pretrained(other)
    content = read_student(tiny_student) | {"model": str(other)}
    torch.save(content, tmp_path / "best.pt")
    message = refuse("train_recovery_lora", "--checkpoint", tmp_path / "best.pt", "--kd-cache-dir", cache, *SMALL)
    assert "best.pt" in message and "does not fit" in message


@pytest.mark.parametrize("kind", ["truncated", "flipped", "empty", "missing"])
def test_damaged_student_is_named(refuse, tiny_student, cache, tmp_path, kind):
    path = tmp_path / "best.pt"
    if kind != "missing":
        shutil.copy(tiny_student, path)
        damage(path, kind)
    message = refuse("train_recovery_lora", "--checkpoint", path, "--kd-cache-dir", cache, *SMALL)
    assert str(path) in message


@pytest.mark.parametrize("content", [{"weights": 1}, [1], {"format": "qat_lora.student.1"}])
def test_a_file_that_is_not_a_student_is_named(refuse, cache, tmp_path, content):
    torch.save(content, tmp_path / "best.pt")
    message = refuse("train_recovery_lora", "--checkpoint", tmp_path / "best.pt", "--kd-cache-dir", cache, *SMALL)
    assert "best.pt" in message


# -- training that goes wrong ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("rate", ["1e12", "1e30", "1e38"])
def test_a_diverging_loss_stops_the_run_and_keeps_the_last_good_checkpoint(refuse, qat, tmp_path, monkeypatch, rate):
    for module in (options, loop, training):  # allows rates at which the loss diverges at once
        monkeypatch.setattr(module, "check_range", lambda *_, **__: None)
    flags = ["--learning-rate", rate, "--warmup-steps", 0, "--max-steps", 8, "--save-every", 1, "--log-every", 1]
    message = refuse("train_qat", *qat, *flags, "--clip-grad-norm", 0, "--layer-steps", 1, "--layer-rows", 4)
    assert "not finite" in message and "step " in message and "--learning-rate" in message
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "failed" and f"step {summary['step']}" in message
    tensors, _, meta = load_checkpoint(tmp_path / "run")
    assert meta["step"] < summary["step"]
    assert [name for name, value in tensors.items() if not value.isfinite().all()] == []


@pytest.mark.parametrize("file", ["best.pt", "model.safetensors", "trainer.pt"])
def test_full_disk_while_saving(refuse, run, qat, tmp_path, file):
    """Whichever file is being written: the error is one line, and the run resumes from its last checkpoint."""
    whole = [*qat, "--max-steps", 4, "--save-every", 1, "--output-dir", tmp_path / "whole"]
    run("train_qat", *whole)
    sizes = {path.name: path.stat().st_size for path in (tmp_path / "whole").rglob("*") if path.is_file()}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (sizes[file] - 1, hard))
    try:
        message = refuse("train_qat", *qat, "--max-steps", 4, "--save-every", 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "could not be written" in message and "free some space" in message
    assert not [path for path in (tmp_path / "run").rglob("*") if "part" in path.name]
    run("train_qat", *qat, "--max-steps", 4, "--save-every", 1, "--resume", "auto")
    ends = [load_checkpoint(tmp_path / folder)[0] for folder in ("run", "whole")]
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[1])


def test_full_disk_while_saving_an_adapter(refuse, run, tiny_student, cache, tmp_path):
    flags = ["--checkpoint", tiny_student, "--kd-cache-dir", cache, "--output-dir", tmp_path / "run", *SMALL]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8_000, hard))
    try:
        message = refuse("train_recovery_lora", *flags)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "adapter could not be written" in message
    run("train_recovery_lora", *flags, "--resume", "auto")
    assert load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")


# -- the process -----------------------------------------------------------------------------------------------------
def test_an_unreachable_hub_gives_one_line_and_exit_code_2(tmp_path):
    """The hub refuses the connection."""
    command = [sys.executable, "scripts/train_qat.py", "--model", "nobody/nothing", "--cache-dir", str(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9"}, capture_output=True, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "train_qat: loading PyTorch\n")
    assert done.stderr.startswith("error: model 'nobody/nothing'") and done.stderr.count("\n") == 1
    assert "smollm2-135m" in done.stderr
