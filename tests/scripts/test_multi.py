"""The scripts for several chips, with two CPU processes: they give the run of one worker, even if they are
interrupted."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from forked import ROOT
from patience import PATIENCE
from records import apart, curve, lines, newest, summary

from qat_lora.backend import TorchBackend
from qat_lora.kd.dataset import KDCacheDataset
from qat_lora.kd.training import heldout_figures
from qat_lora.quant.student import load_student

CLOSE = 1e-4  # between figures: the sums of one and of two workers are rounded differently, and Adam amplifies that
COMMON = "--device cpu --precision fp32 --log-every 1 --eval-rows 8 --save-every 2 --learning-rate 1e-4"
QAT = f"{COMMON} --mlp balanced2/g32 --attn lut4/r4 --init rtn --max-steps 5 --eval-every 3 --warmup-steps 2".split()
LONG = f"{COMMON} --mlp balanced2/g32 --attn lut4/r4 --init rtn --max-steps 100 --eval-every 0 --save-every 20".split()
TWO = ["--from-scratch", "--batch-size", 2]
RECOVERY = f"{COMMON} --max-steps 4 --eval-every 2 --recovery-r 2".split()


def assert_same_run(one: Path, other: Path, relative: float = 0, weight: float = 0, tokens: int = 4 * 32) -> None:
    """Assert that logged figures and last weights (on average) of two finished runs agree, by default bit for bit."""
    ours, theirs = lines(one), lines(other)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for a, b in zip(ours, theirs):
        for key in ("loss", "kl", "anchor_kl", "grad_norm", "lr", "heldout_kl", "heldout_nll"):
            assert (key in a) == (key in b) and a.get(key, 0) == pytest.approx(b.get(key, 0), rel=relative)
        assert a.get("tokens", tokens) == b.get("tokens", tokens) == tokens, "counted over all workers"
    assert {summary(run)["status"] for run in (one, other)} == {"finished"}
    assert newest(one).name == newest(other).name
    assert apart(*(newest(run) / "model.safetensors" for run in (one, other))) <= weight


@pytest.fixture(scope="module")
def qat(sharp_model_dir, sharp_cache):
    """Flags of a QAT run on the shared model and cache."""
    return ["--model", sharp_model_dir, "--cache-dir", sharp_cache]


# -- the same run ----------------------------------------------------------------------------------------------------
def test_qat_with_two_workers_equals_one_worker(run, forks, qat, tmp_path):
    flags = [*qat, *QAT, "--layer-steps", 2, "--layer-rows", 8]
    run("train_qat", *flags, "--batch-size", 4, "--output-dir", tmp_path / "one")
    first, second = forks.pair("train_v2_tpu_multi", *flags, *TWO, "--output-dir", tmp_path / "two")
    assert_same_run(tmp_path / "one", tmp_path / "two", relative=CLOSE, weight=1e-6)
    assert "batch_size 2 × accumulation_steps 1 × num_chips 2 = 4 rows or 128 tokens" in first
    assert "run directory" in first and "run directory" not in second, "only worker 0 prints"
    saved = json.loads((tmp_path / "two" / "manifest.json").read_text())
    assert saved["rows_per_update"] == 4 and saved["layer_rows_per_update"] == 4


def test_gptq_with_two_workers_uses_the_rows_of_both(run, forks, qat, tmp_path):
    """Results differ only by weights on the edge between two codes, because moments are summed over workers."""
    gptq = "--init gptq --layer-steps 1 --layer-learning-rate 1e-6 --layer-rows 16 --max-steps 0"
    flags = [*qat, *QAT, *gptq.split()]
    run("train_qat", *flags, "--batch-size", 4, "--output-dir", tmp_path / "one")
    forks.pair("train_v2_tpu_multi", *flags, *TWO, "--output-dir", tmp_path / "two")
    run("train_qat", *flags, "--batch-size", 4, "--layer-rows", 8, "--output-dir", tmp_path / "fewer")
    one, two, fewer = (lines(tmp_path / name)[-1]["heldout_kl"] for name in ("one", "two", "fewer"))
    assert abs(two - one) < abs(fewer - one) / 3


def test_recovery_with_two_workers_equals_one_worker(run, forks, make_student, sharp_model_dir, sharp_cache, tmp_path):
    flags = [
        "--checkpoint",
        make_student(sharp_model_dir),
        "--kd-cache-dir",
        sharp_cache,
        "--anchor-cache",
        sharp_cache,
        *RECOVERY,
    ]
    run("train_recovery_lora", *flags, "--batch-size", 4, "--output-dir", tmp_path / "one")
    rows = ["--batch-size", 1, "--accumulation-steps", 2, "--output-dir", tmp_path / "two"]
    forks.pair("train_recovery_lora_multi", *flags, *rows)
    assert_same_run(tmp_path / "one", tmp_path / "two", relative=CLOSE, weight=1e-6)
    assert apart(*(tmp_path / name / "adapter" / "adapter_model.safetensors" for name in ("one", "two"))) <= 1e-6


def test_training_starts_from_a_student(forks, qat, make_student, sharp_model_dir, tmp_path):
    """--v2-checkpoint: step 0 has that student's figures; with other quantisers, its weights are quantised again."""
    student = make_student(sharp_model_dir)
    flags = [*qat, *QAT, "--v2-checkpoint", student, "--max-steps", 1]
    forks.execute("train_v2_tpu_multi", *flags, "--output-dir", tmp_path / "run")
    first = lines(tmp_path / "run")[0]
    heldout = KDCacheDataset(qat[3], "heldout")
    figures = heldout_figures(load_student(student)[0], heldout, TorchBackend("cpu", "fp32"), 4, 8)
    assert first["heldout_kl"] == pytest.approx(figures["heldout_kl"], rel=1e-6)
    finer = ["--mlp", "balanced8/g32", "--attn", "none", "--output-dir", tmp_path / "finer"]
    forks.execute("train_v2_tpu_multi", *flags, *finer)
    finer = lines(tmp_path / "finer")[0]
    assert finer["heldout_kl"] == pytest.approx(first["heldout_kl"], rel=1e-2), "8 bits reproduce the student"


# -- interruptions ---------------------------------------------------------------------------------------------------
class Job:
    """A long run of two workers, started as a user would."""

    def __init__(self, folder: Path, flags: list):
        self.folder = folder
        self.resumed = lines(folder)[-1]["step"]
        script = ROOT / "scripts" / "train_v2_tpu_multi.py"
        command = [sys.executable, script, *flags, "--num-chips", 2, "--output-dir", folder, "--resume", "auto"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        env = os.environ | {"OMP_NUM_THREADS": "1"}  # as in `forked`: the runs are compared bit for bit
        self.process = subprocess.Popen(list(map(str, command)), text=True, env=env, **pipes)

    def signal(self, number: int, target: str, expect: int) -> tuple[str, str]:
        """Send a signal to "the job" or "worker 1" after five new updates; returns the two outputs of the job."""
        deadline = time.monotonic() + PATIENCE
        while lines(self.folder)[-1]["step"] < self.resumed + 5:
            assert self.process.poll() is None and time.monotonic() < deadline, self.process.communicate()
            time.sleep(0.02)
        children = psutil.Process(self.process.pid).children()
        workers = sorted(child.pid for child in children if "spawn_main" in " ".join(child.cmdline()))
        os.kill(workers[1] if target == "worker 1" else self.process.pid, number)
        out, err = self.process.communicate(timeout=PATIENCE)
        assert self.process.returncode == expect, (out + err)[-3000:]
        return out, err


@pytest.mark.deep
def test_interrupted_jobs_resume_to_the_run_of_one_that_was_not(run, forks, qat, tmp_path):
    flags, folder = [*qat, *LONG, *TWO], tmp_path / "run"
    forks.pair("train_v2_tpu_multi", *flags, "--output-dir", tmp_path / "whole")

    def preempted_at(said: str) -> int:
        """The step that all workers saved, although one of them got the signal."""
        saved = summary(folder)["step"]
        assert summary(folder)["status"] == "preempted" and f"SIGTERM: saved step {saved}" in said
        assert newest(folder).name == f"step_{saved}"
        return saved

    resumed = ["--output-dir", folder, "--resume", "auto"]
    death = "run.session.Session.record", 25, signal.SIGTERM, False
    assert preempted_at(forks.pair("train_v2_tpu_multi", *flags, *resumed, death=death)[0]) == 25
    (folder / "summary.json").unlink()
    _, err = Job(folder, flags).signal(signal.SIGKILL, "worker 1", expect=137)
    assert "was killed (SIGKILL)" in err and "--resume auto" in err
    assert not (folder / "summary.json").exists()
    saved = preempted_at(Job(folder, flags).signal(signal.SIGTERM, "the job", expect=0)[0])
    alone = shutil.copytree(folder, tmp_path / "alone")
    forks.pair("train_v2_tpu_multi", *flags, *resumed)
    assert_same_run(folder, tmp_path / "whole")

    # one worker takes over, with four rows per update as before
    run("train_qat", *flags, "--accumulation-steps", 2, "--output-dir", alone, "--resume", "auto")
    assert summary(alone)["status"] == "finished"
    ours, theirs = curve(alone, "loss"), curve(tmp_path / "whole", "loss")
    assert ours[:saved] == theirs[:saved] and len(ours) == len(theirs)
    assert ours[saved : saved + 10] == pytest.approx(theirs[saved : saved + 10], rel=CLOSE)

    (folder / "summary.json").unlink()
    for said in forks.pair("train_v2_tpu_multi", *flags, *resumed, "--accumulation-steps", 2, expect=(2, 1)):
        assert "rows_per_update (batch size × accumulation steps × workers) is 4 there (manifest.json), 8 here" in said


# -- errors ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def refused(forks, qat, tmp_path):
    """refused(*flags): the error line of the script; also checks that no run is left."""

    def refuse(*flags) -> str:
        folder = ["--output-dir", tmp_path / "run"]
        out = forks.execute("train_v2_tpu_multi", *qat, *QAT, *folder, *flags, expect=2)
        errors = [line for line in out.splitlines() if "error:" in line]
        assert len(errors) == 1 and "Traceback" not in out and not (tmp_path / "run").exists(), out
        return errors[0]

    return refuse


def test_bad_input_is_refused(refused):
    count = os.cpu_count() + 1
    said = refused("--from-scratch", "--num-chips", count)
    assert said == f"error: --num-chips {count}: this machine has {count - 1} CPU cores; use 1 to {count - 1}"
    for flags in ([], ["--from-scratch", "--v2-checkpoint", "best.pt"]):
        assert "give either --from-scratch" in refused(*flags)
    said = refused("--from-scratch", "--batch-size", 21, "--num-chips", 2, "--dry-run")
    assert "40 training rows are fewer than --batch-size 21 for each of 2 workers" in said


def test_a_dry_run_may_plan_for_more_workers_than_this_machine_has(forks, qat):
    out = forks.execute("train_v2_tpu_multi", *qat, *QAT, "--from-scratch", "--num-chips", 8, "--dry-run")
    assert "× num_chips 8 = 32 rows" in out and "5 for each worker" in out


def test_ranks_started_with_different_configs_are_refused(forks, qat, tmp_path):
    flags = [*qat, *QAT, *TWO, "--output-dir", tmp_path / "run"]
    said = forks.pair("train_v2_tpu_multi", *flags, expect=(2, 2), second=("--seed", 1))
    host = socket.gethostname()
    line = f"the workers differ: seed is 0 for worker 0 on {host}, 1 for worker 1 on {host}; give every worker the"
    for own in said:  # each has its own terminal
        assert own.count("error:") == 1 and line in own
    assert not (tmp_path / "run").exists()
