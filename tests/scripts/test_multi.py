"""The scripts for several chips, started as a user would with two CPU processes: they give the run of one worker, even
if they are interrupted."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ports import free_port
from safetensors.torch import load_file

from qat_lora.backend import TorchBackend
from qat_lora.kd.dataset import KDCacheDataset
from qat_lora.kd.evaluation import heldout_figures
from qat_lora.quant.student import load_student

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(sys.executable)
CLOSE = 1e-5  # between weights after nine updates in fp32: Adam amplifies differences of 1e-8 to this
COMMON = "--device cpu --precision fp32 --log-every 1 --eval-rows 8 --save-every 2 --learning-rate 1e-4"
QAT = f"{COMMON} --mlp balanced2/g32 --attn lut4/r4 --init rtn --max-steps 5 --eval-every 3 --warmup-steps 2"
LONG = f"{COMMON} --mlp balanced2/g32 --attn lut4/r4 --init rtn --max-steps 100 --eval-every 0 --save-every 20"
TWO = ["--from-scratch", "--batch-size", 2, "--num-chips", 2]
RECOVERY = f"{COMMON} --max-steps 4 --eval-every 2 --recovery-r 2 --anchor-weight 0.1 --anchor-length 8"


def start(script: str, *flags, launcher: tuple = (), **env) -> subprocess.Popen:
    command = [PYTHON, *launcher, ROOT / "scripts" / f"{script}.py", *flags]
    return subprocess.Popen(
        list(map(str, command)),
        env=os.environ | {"OMP_NUM_THREADS": "1"} | env,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def end(process: subprocess.Popen, expect: int = 0) -> tuple[str, str]:
    try:
        out, err = process.communicate()
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail("the script hangs")
    assert process.returncode == expect, (out + err)[-3000:]
    return out, err


def run(script: str, *flags, expect: int = 0, **options) -> tuple[str, str]:
    return end(start(script, *flags, **options), expect)


def lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_same_run(one: Path, other: Path, relative: float = 0, weight: float = 0, tokens: int = 4 * 32) -> None:
    """Assert that logged figures and last weights of two finished runs agree, by default bit for bit."""
    ours, theirs = lines(one), lines(other)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for a, b in zip(ours, theirs):
        for key in ("loss", "kl", "grad_norm", "lr", "heldout_kl", "heldout_nll"):
            assert (key in a) == (key in b) and a.get(key, 0) == pytest.approx(b.get(key, 0), rel=relative)
        assert a.get("tokens", tokens) == b.get("tokens", tokens) == tokens, "counted over all workers"
    assert {json.loads((run / "summary.json").read_text())["status"] for run in (one, other)} == {"finished"}
    newest = {(run / "checkpoints" / "LATEST").read_text() for run in (one, other)}
    assert len(newest) == 1
    weights = [load_file(run / "checkpoints" / str(*newest) / "model.safetensors") for run in (one, other)]
    assert max((weights[0][name] - weights[1][name]).abs().max() for name in weights[0]) <= weight


@pytest.fixture(scope="module")
def qat(sharp_model_dir, sharp_cache):
    """Flags of a QAT run on the shared model and cache."""
    return ["--model", sharp_model_dir, "--cache-dir", sharp_cache]


@pytest.fixture(scope="module")
def whole(qat, tmp_path_factory):
    """A long run of two workers without interruption."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    run("train_v2_tpu_multi", *qat, *LONG.split(), *TWO, "--output-dir", folder)
    return folder


@pytest.fixture
def long(qat, tmp_path):
    """Flags of the same run."""
    return [*qat, *LONG.split(), *TWO, "--output-dir", tmp_path / "run", "--resume", "auto"]


def workers_of(process: subprocess.Popen) -> list[int]:
    """Process ids of the workers of `process`, in the order of ranks."""
    children = subprocess.run(["pgrep", "-P", str(process.pid), "-f", "spawn_main"], capture_output=True, text=True)
    return sorted(map(int, children.stdout.split()))


def wait_for_step(run: Path, step: int) -> None:
    for _ in range(600):
        if (run / "metrics.jsonl").exists() and any(line["step"] >= step for line in lines(run)):
            return
        time.sleep(0.1)
    pytest.fail(f"the run never reaches step {step}")


# -- the same run ----------------------------------------------------------------------------------------------------
def test_qat_with_two_workers_equals_one_worker(qat, tmp_path):
    layers = ["--layer-steps", 2, "--layer-rows", 8, "--ema", 0.5, "--scale-steps", 3]
    run("train_qat", *qat, *QAT.split(), *layers, "--batch-size", 4, "--output-dir", tmp_path / "one")
    out, _ = run(
        "train_v2_tpu_multi", "--from-scratch", *qat, *QAT.split(), *layers, "--batch-size", 2, "--num-chips", 2,
        "--output-dir", tmp_path / "two",
    )  # fmt: skip
    assert_same_run(tmp_path / "one", tmp_path / "two", relative=1e-5, weight=CLOSE)
    assert "batch_size 2 × accumulation_steps 1 × num_chips 2 = 4 rows or 128 tokens" in out
    assert out.count("run directory") == 1, "only worker 0 prints"
    saved = json.loads((tmp_path / "two" / "manifest.json").read_text())
    assert saved["rows_per_update"] == 4 and saved["layer_rows_per_update"] == 4


def test_gptq_with_two_workers_uses_the_rows_of_both(qat, tmp_path):
    """Results differ only by weights on the edge between two codes, because moments are summed over workers."""
    gptq = "--init gptq --layer-steps 1 --layer-learning-rate 1e-6 --layer-rows 16 --max-steps 0"
    flags = [*qat, *QAT.split(), *gptq.split()]
    run("train_qat", *flags, "--batch-size", 4, "--output-dir", tmp_path / "one")
    two = ["--from-scratch", "--batch-size", 2, "--num-chips", 2, "--output-dir", tmp_path / "two"]
    run("train_v2_tpu_multi", *flags, *two)
    run("train_qat", *flags, "--batch-size", 4, "--layer-rows", 4, "--output-dir", tmp_path / "fewer")
    one, two, fewer = (lines(tmp_path / name)[-1]["heldout_kl"] for name in ("one", "two", "fewer"))
    assert two == pytest.approx(one, rel=5e-3) and fewer != pytest.approx(one, rel=5e-3)


def test_recovery_under_torchrun_equals_one_worker(make_student, sharp_model_dir, sharp_cache, tmp_path):
    flags = ["--checkpoint", make_student(sharp_model_dir), "--kd-cache-dir", sharp_cache, *RECOVERY.split()]
    run("train_recovery_lora", *flags, "--batch-size", 4, "--output-dir", tmp_path / "one")
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", 2, "--master-port", free_port())
    rows = ["--batch-size", 1, "--accumulation-steps", 2, "--output-dir", tmp_path / "two"]
    run("train_recovery_lora_multi", *flags, *rows, launcher=torchrun)
    assert_same_run(tmp_path / "one", tmp_path / "two", relative=1e-5, weight=CLOSE)
    adapters = [load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("one", "two")]
    assert max((adapters[0][name] - adapters[1][name]).abs().max() for name in adapters[0]) <= CLOSE


def test_training_starts_from_a_student(qat, make_student, sharp_model_dir, tmp_path):
    """--v2-checkpoint: step 0 has that student's figures; with other quantisers, its weights are quantised again."""
    student = make_student(sharp_model_dir)
    flags = [*qat, *QAT.split(), "--v2-checkpoint", student, "--max-steps", 1]
    run("train_v2_tpu_multi", *flags, "--output-dir", tmp_path / "run")
    first = lines(tmp_path / "run")[0]
    heldout = KDCacheDataset(qat[3], "heldout")
    figures = heldout_figures(load_student(student)[0], heldout, TorchBackend("cpu", "fp32"), 4, 8)
    assert first["heldout_kl"] == pytest.approx(figures["heldout_kl"], rel=1e-6)
    run("train_v2_tpu_multi", *flags, "--mlp", "balanced8/g32", "--attn", "none", "--output-dir", tmp_path / "finer")
    finer = lines(tmp_path / "finer")[0]
    assert finer["heldout_kl"] == pytest.approx(first["heldout_kl"], rel=1e-2), "8 bits reproduce the student"


# -- interruptions ---------------------------------------------------------------------------------------------------
def test_a_killed_worker_ends_the_job_which_resumes_to_the_same_losses(long, whole, tmp_path):
    job = start("train_v2_tpu_multi", *long)
    wait_for_step(tmp_path / "run", 30)
    os.kill(workers_of(job)[1], signal.SIGKILL)
    _, err = end(job, expect=137)
    assert "was killed (SIGKILL)" in err and "--resume auto" in err
    assert not (tmp_path / "run" / "summary.json").exists()
    run("train_v2_tpu_multi", *long)
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.parametrize("target", ["worker 1", "the job"])
def test_sigterm_saves_in_all_workers_and_the_next_start_resumes(long, whole, qat, tmp_path, target):
    job = start("train_v2_tpu_multi", *long)
    wait_for_step(tmp_path / "run", 30)
    os.kill(workers_of(job)[1] if target == "worker 1" else job.pid, signal.SIGTERM)
    out, _ = end(job)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "preempted" and f"SIGTERM: saved step {summary['step']}" in out
    assert (tmp_path / "run" / "checkpoints" / "LATEST").read_text() == f"step_{summary['step']}"
    if target == "worker 1":
        run("train_v2_tpu_multi", *long)
        assert_same_run(tmp_path / "run", whole)
    else:  # one worker takes over, with four rows per update as before
        flags = [*qat, *LONG.split(), "--batch-size", 2, "--accumulation-steps", 2]
        run("train_qat", *flags, "--output-dir", tmp_path / "run", "--resume", "auto")
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "finished"
        losses = [[line["loss"] for line in lines(folder) if "loss" in line] for folder in (tmp_path / "run", whole)]
        saved = summary["step"]
        assert losses[0][:saved] == losses[1][:saved]
        assert losses[0][saved : saved + 10] == pytest.approx(losses[1][saved : saved + 10], rel=1e-5)
        assert losses[0] == pytest.approx(losses[1], rel=2e-2), "hundreds of updates amplify the rounding"


# -- errors ----------------------------------------------------------------------------------------------------------
def refused(script: str, *flags, **options) -> str:
    out, err = run(script, *flags, expect=2, **options)
    errors = [line for line in err.splitlines() if "error:" in line]
    assert len(errors) == 1 and "Traceback" not in err, err
    assert "run directory" not in out
    return errors[0]


def test_more_workers_than_cores_are_refused(qat):
    count = os.cpu_count() + 1
    said = refused("train_v2_tpu_multi", *qat, *QAT.split(), "--from-scratch", "--num-chips", count)
    assert said == f"error: --num-chips {count}: this machine has {count - 1} CPU cores; use 1 to {count - 1}"


def test_a_dry_run_may_plan_for_more_workers_than_this_machine_has(qat):
    out, _ = run("train_v2_tpu_multi", *qat, *QAT.split(), "--from-scratch", "--num-chips", 8, "--dry-run")
    assert "× num_chips 8 = 32 rows" in out and "5 for each worker" in out


@pytest.mark.parametrize("flags", [[], ["--from-scratch", "--v2-checkpoint", "best.pt"]], ids=["neither", "both"])
def test_exactly_one_starting_point_must_be_given(qat, flags):
    assert "give either --from-scratch" in refused("train_v2_tpu_multi", *qat, *QAT.split(), *flags)


def test_a_cache_smaller_than_a_batch_per_worker_is_refused(qat, tmp_path):
    said = refused(
        "train_v2_tpu_multi", *qat, *QAT.split(), "--from-scratch", "--batch-size", 21, "--num-chips", 2,
        "--output-dir", tmp_path / "run",
    )  # fmt: skip
    assert "40 training rows are fewer than --batch-size 21 for each of 2 workers" in said
    assert not (tmp_path / "run").exists()


def test_ranks_started_with_different_configs_are_refused(qat, tmp_path):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    flags = [*qat, *QAT.split(), "--from-scratch", "--batch-size", 2, "--output-dir", tmp_path / "run"]
    jobs = [
        start("train_v2_tpu_multi", *flags, "--seed", rank, RANK=str(rank), LOCAL_RANK=str(rank), **place)
        for rank in range(2)
    ]
    host = socket.gethostname()
    line = f"the workers differ: seed is 0 for worker 0 on {host}, 1 for worker 1 on {host}; give every worker the"
    for said in [end(job, expect=2)[1] for job in jobs]:  # each has its own standard error
        assert said.count("error:") == 1 and line in said
    assert not (tmp_path / "run").exists()


def test_resuming_with_another_number_of_rows_per_update_is_refused(long, tmp_path):
    run("train_v2_tpu_multi", *long, "--max-steps", 2)
    (tmp_path / "run" / "summary.json").unlink()
    said = refused("train_v2_tpu_multi", *long, "--max-steps", 2, "--accumulation-steps", 2)
    assert "rows_per_update (batch size × accumulation steps × workers) is 4 there (manifest.json), 8 here" in said
