"""The three scripts end to end on the tiny model, and resuming runs whose process was killed at any moment."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forked import ROOT, kill
from records import assert_same_files, curve, lines, newest, summary
from safetensors.torch import load_file

from qat_lora.quant.student import read_student
from qat_lora.run.checkpoint import KEEP

TINY = ["--batch-size", "4", "--device", "cpu", "--precision", "fp32"]
LAYER_STEPS, BLOCKS, STEPS = 3, 2, 10
SHORT = "--warmup-steps 2 --seed 1 --mlp lut2/r4 --learning-rate 3e-3 --eval-rows 16"
SHORT = [*SHORT.split(), *TINY]
QAT = f"--layer-steps {LAYER_STEPS} --layer-rows 8 --max-steps {STEPS} --layer-learning-rate 2e-3 --clip-grad-norm 0"
QAT = [*f"{QAT} --init gptq --log-every 3 --save-every 4 --eval-every 5".split(), *SHORT]
RECOVERY = "--max-steps 8 --warmup-steps 2 --learning-rate 1e-2 --log-every 3 --save-every 3 --eval-every 4"
RECOVERY = [*RECOVERY.split(), *["--eval-rows", "20", "--recovery-r", "8"], *TINY]
RECORD = "run.session.Session.record"  # called right after an update
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # compiles in half the time


def assert_same_end(one: Path, other: Path, *files: str) -> None:
    """Assert that two finished runs logged the same figures and have the same parameters and files."""
    assert lines(one) == lines(other)
    assert summary(one)["status"] == summary(other)["status"] == "finished"
    assert summary(one)["best"] == summary(other)["best"] and newest(one).name == newest(other).name
    assert_same_files(newest(one), newest(other), "model.safetensors")
    assert_same_files(one, other, *files)
    states = [torch.load(newest(run) / "trainer.pt", weights_only=True)["state"] for run in (one, other)]
    assert torch.equal(*(state["rng"][0]["torch"] for state in states))


def assert_complete(run: Path, steps: int) -> None:
    """Assert that the run directory is complete: each file exists and is readable."""
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["experiment"] == Path(manifest["argv"][0]).stem
    assert manifest["device"] == "cpu (fp32)"
    end = summary(run)
    assert end["status"] == "finished" and end["bits_per_weight"] > 2
    assert end["seconds"] and end["peak_memory_mb"] > 0
    assert (run / "plots" / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert newest(run).name == f"step_{steps}"
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert len(kept) == KEEP + 2 and {"LATEST", "files", f"step_{steps}"} < set(kept)
    assert {path.name for path in newest(run).iterdir()} == {"model.safetensors", "trainer.pt", "meta.json"}
    assert not [path for path in run.rglob("*") if "part" in path.name]
    logged = [line for line in lines(run) if "loss" in line]
    assert logged[-1]["step"] == steps and logged[-1].keys() >= {"step", "stage", "loss", "lr", "tokens", "grad_norm"}


# -- the pipeline ----------------------------------------------------------------------------------------------------
def build_flags(model, directory) -> list:
    size = ["--length", 32, "--max-rows", 200, "--heldout-fraction", 0.1, "--rows-per-shard", 32]
    return ["--model", model, "--cache-dir", directory, *size, *TINY]


@pytest.fixture(scope="module")
def pipeline(forks, sharp_model_dir, tmp_path_factory):
    """Folder of a complete, uninterrupted pipeline: cache/, qat/, recovery/."""
    folder = tmp_path_factory.mktemp("pipeline")
    forks.execute("build_kd_cache", *build_flags(sharp_model_dir, folder / "cache"))
    model = ["--model", sharp_model_dir, "--cache-dir", folder / "cache"]
    forks.execute("train_qat", *model, *QAT, "--output-dir", folder / "qat")
    student = ["--checkpoint", folder / "qat" / "best.pt", "--kd-cache-dir", folder / "cache"]
    forks.execute("train_recovery_lora", *student, *RECOVERY, "--output-dir", folder / "recovery")
    return folder


@pytest.fixture
def train_qat(forks, pipeline, sharp_model_dir):
    """train_qat(run, *flags, …): the script on the pipeline's cache; resumes an existing run."""

    def train(run: Path, *flags, **how) -> str:
        cache = ["--model", sharp_model_dir, "--cache-dir", pipeline / "cache"]
        return forks.execute("train_qat", *cache, "--output-dir", run, "--resume", "auto", *(flags or QAT), **how)

    return train


@pytest.fixture
def recover(forks, pipeline):
    def train(run: Path, *flags, **how) -> str:
        student = ["--checkpoint", pipeline / "qat" / "best.pt", "--output-dir", run, "--resume", "auto"]
        return forks.execute("train_recovery_lora", *student, *RECOVERY, *flags, **how)

    return train


def test_qat_leaves_a_complete_run_and_a_better_student(pipeline):
    run = pipeline / "qat"
    assert_complete(run, LAYER_STEPS * BLOCKS + STEPS)
    kl = curve(run, "heldout_kl", "qat")
    assert len(kl) == 3 and min(kl) < kl[0]  # by how much, and when, depends on how the CPU rounds sums
    assert len(curve(run, "block", "layers")) == LAYER_STEPS * BLOCKS // 3
    assert read_student(run / "best.pt")["info"]["heldout_kl"] == min(kl)
    assert read_student(run / "layerwise.pt")["spec"] == read_student(run / "best.pt")["spec"]


def test_recovery_leaves_a_complete_run_and_a_peft_adapter(pipeline):
    run = pipeline / "recovery"
    assert_complete(run, 8)
    kl = curve(run, "heldout_kl")
    assert min(kl) < kl[0]  # by .012 to .025 for students of five seeds: more than CPUs differ in
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 8 and "k_proj" not in config["target_modules"]
    adapter = load_file(run / "adapter" / "adapter_model.safetensors")
    assert len(adapter) == BLOCKS * 6 * 2 and all("lora_" in name for name in adapter)
    assert any(value.abs().sum() > 0 for name, value in adapter.items() if "lora_B" in name)


@pytest.mark.parametrize("mode", ["sft", "recover"])
def test_recovery_trains_on_text_too(recover, pipeline, tmp_path, mode):
    rows = [{"instruction": f"Count to {n}.", "output": " ".join(map(str, range(n)))} for n in range(1, 60)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = ["--dataset", tmp_path / "chats.jsonl" if mode == "sft" else "embedded", "--length", 32, "--max-rows", 40]
    recover(tmp_path / "run", "--mode", mode, *text, "--heldout-fraction", 0.2, "--anchor-cache", pipeline / "cache")
    nll = curve(tmp_path / "run", "heldout_nll")
    assert min(nll) < nll[0]
    assert (tmp_path / "run" / "adapter" / "adapter_config.json").is_file()


# -- killed at any moment, then --resume auto ------------------------------------------------------------------------
def test_qat_killed_again_and_again_resumes_to_the_same_bits(train_qat, pipeline, tmp_path):
    run, whole = tmp_path / "run", pipeline / "qat"
    deaths = (
        kill("run.rundir.Run.log", 1, after=True),  # layer stage: logged, and nothing saved
        kill(RECORD, 5),  # second block, after a save, in the middle of a log interval
        kill("run.session.save_checkpoint", 1, after=True),  # between the stages
        kill("run.checkpoint._sync", 1),  # the first checkpoint end to end is written, but not yet renamed
        kill("run.rundir.Run.log", 4, after=True),  # the log and best.pt are newer than the checkpoint
        kill("run.checkpoint.save_file", 1),  # inside a save
        kill("run.rundir.Run.finish", 1),  # trained to the end, no summary yet
    )
    for death in deaths:
        train_qat(run, death=death)
        assert not (run / "summary.json").exists()
        assert lines(run) == lines(whole)[: len(lines(run))], f"before {death}"
    train_qat(run)
    assert_same_end(run, whole, "best.pt", "layerwise.pt")
    assert not [path for path in run.rglob("*") if "part" in path.name]
    assert len(json.loads((run / "manifest.json").read_text())["resumed"]) == len(deaths)


def test_recovery_resumes_to_the_same_bits(recover, pipeline, tmp_path):
    run, cache = tmp_path / "run", ["--kd-cache-dir", pipeline / "cache"]
    said = recover(run, *cache, death=(RECORD, 4, signal.SIGTERM, False))
    assert summary(run) == {"status": "preempted", "step": 4} and newest(run).name == "step_4"
    assert "SIGTERM: saved step 4" in said
    recover(run, *cache, death=kill(RECORD, 3))  # after the save of step 6
    recover(run, *cache, death=kill("lora.adapter.write_origin", 1))  # trained, the adapter is incomplete
    recover(run, *cache)
    assert_same_end(run, pipeline / "recovery", "adapter/adapter_model.safetensors")


def test_a_killed_cache_build_resumes_to_the_same_bytes(forks, pipeline, sharp_model_dir, tmp_path):
    flags = build_flags(sharp_model_dir, tmp_path / "cache")
    forks.execute("build_kd_cache", *flags, death=kill("kd.cache.as_json", 2))  # a shard is not yet in the manifest
    forks.execute("build_kd_cache", *flags, death=kill("kd.cache._targets", 3))  # in a pass of the teacher
    forks.execute("build_kd_cache", *flags)

    files = [path.name for path in (pipeline / "cache").iterdir() if path.name != "summary.json"]
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {*files, "summary.json"}
    assert_same_files(tmp_path / "cache", pipeline / "cache", *files)


# -- XLA -------------------------------------------------------------------------------------------------------------
@pytest.mark.deep
@pytest.mark.xla
def test_train_qat_on_xla_compiles_nothing_after_its_first_step(pipeline, sharp_model_dir, tmp_path):
    run, cache = tmp_path / "run", ["--model", sharp_model_dir, "--cache-dir", pipeline / "cache"]
    flags = "--init rtn --max-steps 4 --eval-every 2 --log-every 1 --device xla --accumulation-steps 2"
    script = [sys.executable, ROOT / "scripts" / "train_qat.py", *cache, "--output-dir", run]
    env = os.environ | {"PJRT_DEVICE": "CPU", "XLA_FLAGS": QUICK}
    done = subprocess.run([*map(str, script), *SHORT, *flags.split()], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    compiles = curve(run, "compiles", "qat")
    assert compiles[0] > 0 and compiles[0] == compiles[-1] and len(compiles) == 4
    assert summary(run)["compiles"] == compiles[-1] and summary(run)["fallbacks"] == 0
    kl = curve(run, "heldout_kl", "qat")
    assert min(kl) < kl[0]
    assert read_student(run / "best.pt"), "readable in this process, which has not imported torch_xla"
