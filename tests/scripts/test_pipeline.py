"""The three scripts end to end on the tiny model, and resuming runs whose process was killed at any moment.

Every run is its own process, forked from a server that has already done the imports, so that real kills are cheap.
"""

import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from qat_lora.quant.student import read_student
from qat_lora.run.checkpoint import KEEP, read_checkpoint

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = ["pytest", "qat_lora.lora.recovery", "qat_lora.layer_qat", "qat_lora.run.plots", "qat_lora.train.memory"]
TINY = ["--batch-size", "4", "--device", "cpu", "--precision", "fp32"]
LAYER_STEPS, BLOCKS, STEPS, SCALE_STEPS = 3, 2, 10, 4
QAT = f"--layer-steps {LAYER_STEPS} --layer-rows 8 --max-steps {STEPS} --warmup-steps 2 --seed 1"
QAT += " --learning-rate 3e-3 --scale-learning-rate 1e-3"
QAT += f" --mlp lut2/r4 --layer-learning-rate 2e-3 --clip-grad-norm 0 --init gptq --ema 0.5 --scale-steps {SCALE_STEPS}"
QAT = [*QAT.split(), *["--log-every", "3", "--save-every", "4", "--eval-every", "5", "--eval-rows", "16"], *TINY]
RECOVERY = "--max-steps 8 --warmup-steps 2 --learning-rate 5e-3 --log-every 3 --save-every 3 --eval-every 4"
RECOVERY = [*RECOVERY.split(), *["--eval-rows", "8", "--recovery-r", "2"], *TINY]
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # compiles in half the time
PLACES = {  # where a process can be killed: attribute → module that looks it up
    "Session.record": "qat_lora.run.session",  # right after an update
    "save_file": "qat_lora.run.checkpoint",  # the checkpoint's folder exists and is empty
    "_sync": "qat_lora.run.checkpoint",  # written, not yet renamed
    "save_checkpoint": "qat_lora.run.session",
    "write_atomically": "qat_lora.quant.student",  # best.pt
    "Run.log": "qat_lora.run.rundir",
    "Run.finish": "qat_lora.run.rundir",
    "write_origin": "qat_lora.lora.adapter",
    "_targets": "qat_lora.kd.cache",  # a teacher pass
    "sha256": "qat_lora.kd.cache",  # a shard is written, but not yet in the manifest
}


def _deadly(place: str, call: int, sign: int, after: bool) -> None:
    """Make this process send itself the signal `sign` at the given call of a function."""
    owner = importlib.import_module(PLACES[place])
    *path, leaf = place.split(".")
    for name in path:
        owner = getattr(owner, name)
    function, calls = getattr(owner, leaf), 0

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call and not after:
            os.kill(os.getpid(), sign)
        result = function(*args, **kwargs)
        if calls == call and after:
            os.kill(os.getpid(), sign)
        return result

    setattr(owner, leaf, wrapper)


def play(script: str, argv: list[str], said: str, death: tuple | None) -> None:
    """In the child: run the script as `python scripts/<script>.py` would, with its output in the file `said`."""
    with open(said, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    sys.argv = [f"{script}.py", *argv]
    if death:
        _deadly(*death)
    runpy.run_path(str(ROOT / "scripts" / f"{script}.py"), run_name="__main__")


@pytest.fixture(scope="session")
def execute(tmp_path_factory):
    """execute(script, *flags, expect=exit code, death=(place, call, signal, after)): the output of the process."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTS)
    folder = tmp_path_factory.mktemp("said")

    def run(script: str, *flags, expect: int = 0, death: tuple | None = None) -> str:
        said = folder / f"{len(list(folder.iterdir()))}.txt"
        process = context.Process(target=play, args=(script, list(map(str, flags)), str(said), death))
        process.start()
        process.join(120)
        if process.is_alive():
            process.kill()
            pytest.fail(f"{script} hangs: {said.read_text()[-2000:]}")
        assert process.exitcode == expect, said.read_text()[-3000:]
        return said.read_text()

    return run


def kill(place: str, call: int, after: bool = False) -> tuple:
    return place, call, signal.SIGKILL, after


def figures(run: Path) -> list[dict]:
    """metrics.jsonl without the one figure that depends on time."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in lines]


def curve(run: Path, key: str, stage: str) -> list[float]:
    return [line[key] for line in figures(run) if key in line and line["stage"] == stage]


def assert_same_tensors(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def assert_same_student(one: Path, other: Path) -> None:
    a, b = read_student(one), read_student(other)
    assert_same_tensors(a.pop("tensors"), b.pop("tensors"))
    assert a == b


def assert_same_end(one: Path, other: Path) -> None:
    """Assert that two finished runs logged the same figures and have the same parameters."""
    assert figures(one) == figures(other)
    summaries = [json.loads((run / "summary.json").read_text()) for run in (one, other)]
    assert [s["status"] for s in summaries] == ["finished", "finished"]
    assert summaries[0]["best"] == summaries[1]["best"]
    names = [(run / "checkpoints" / "LATEST").read_text() for run in (one, other)]
    assert names[0] == names[1]
    a, b = (read_checkpoint(run / "checkpoints" / names[0]) for run in (one, other))
    assert_same_tensors(a[0], b[0])
    assert torch.equal(a[1]["rng"][0]["torch"], b[1]["rng"][0]["torch"])


def assert_complete(run: Path, steps: int) -> None:
    """Assert that the run directory is complete: each file exists and is readable."""
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["batch_size"] == 4 and config["device"] == "cpu"
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest.keys() >= {"experiment", "argv", "git", "dirty", "python", "packages", "seed", "device", "started"}
    assert manifest["experiment"] == Path(manifest["argv"][0]).stem
    assert manifest["packages"]["torch"] == torch.__version__.split("+")[0]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["status"] == "finished" and summary["bits_per_weight"] > 2
    assert summary["seconds"] and summary["peak_memory_mb"] > 0
    assert (run / "plots" / "metrics.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "checkpoints" / "LATEST").read_text() == f"step_{steps}"
    kept = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert len(kept) == KEEP + 2 and {"LATEST", "files", f"step_{steps}"} < set(kept)
    assert {path.name for path in (run / "checkpoints" / f"step_{steps}").iterdir()} == {
        "model.safetensors",
        "trainer.pt",
        "meta.json",
    }
    assert not [path for path in run.rglob("*") if "part" in path.name]
    logged = [line for line in figures(run) if "loss" in line]
    assert logged[-1]["step"] == steps and logged[-1].keys() >= {"step", "stage", "loss", "lr", "tokens", "grad_norm"}


# -- the pipeline ----------------------------------------------------------------------------------------------------
def build_flags(model, directory) -> list:
    size = ["--length", 32, "--max-rows", 200, "--heldout-fraction", 0.1, "--rows-per-shard", 32]
    return ["--model", model, "--cache-dir", directory, *size, *TINY]


@pytest.fixture(scope="session")
def pipeline(execute, sharp_model_dir, tmp_path_factory):
    """Folder of a complete, uninterrupted pipeline: cache/, qat/, recovery/."""
    folder = tmp_path_factory.mktemp("pipeline")
    execute("build_kd_cache", *build_flags(sharp_model_dir, folder / "cache"))
    model = ["--model", sharp_model_dir, "--cache-dir", folder / "cache"]
    execute("train_qat", *model, *QAT, "--output-dir", folder / "qat")
    student = ["--checkpoint", folder / "qat" / "best.pt", "--kd-cache-dir", folder / "cache"]
    execute("train_recovery_lora", *student, *RECOVERY, "--output-dir", folder / "recovery")
    return folder


@pytest.fixture
def train_qat(execute, pipeline, sharp_model_dir):
    """train_qat(run, *flags, …): the script on the pipeline's cache; resumes an existing run."""

    def train(run: Path, *flags, **how) -> str:
        cache = ["--model", sharp_model_dir, "--cache-dir", pipeline / "cache"]
        return execute("train_qat", *cache, *QAT, "--output-dir", run, "--resume", "auto", *flags, **how)

    return train


@pytest.fixture
def recover(execute, pipeline):
    def train(run: Path, *flags, **how) -> str:
        student = ["--checkpoint", pipeline / "qat" / "best.pt", "--output-dir", run, "--resume", "auto"]
        return execute("train_recovery_lora", *student, *RECOVERY, *flags, **how)

    return train


def test_qat_leaves_a_complete_run_and_a_better_student(pipeline):
    run = pipeline / "qat"
    assert_complete(run, LAYER_STEPS * BLOCKS + STEPS + SCALE_STEPS)
    kl = curve(run, "heldout_kl", "qat")
    assert len(kl) == 3 and kl[-1] < 0.99 * kl[0]  # by how much depends on how the CPU rounds sums
    scales = curve(run, "heldout_kl", "scales")
    assert scales[0] == kl[-1] and scales[-1] < kl[-1], "the stage starts from the best state before it"
    before, after = (read_student(run / name)["tensors"] for name in ("endtoend.pt", "best.pt"))
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed and all(".quantizer." in name for name in changed), "codes and norms stay"
    kl = [*kl, *scales]
    assert len(curve(run, "block", "layers")) == LAYER_STEPS * BLOCKS // 3
    assert read_student(run / "best.pt")["info"]["heldout_kl"] == min(kl)
    assert read_student(run / "layerwise.pt")["spec"] == read_student(run / "best.pt")["spec"]


def test_recovery_leaves_a_complete_run_and_a_peft_adapter(pipeline, sharp_model_dir):
    run = pipeline / "recovery"
    assert_complete(run, 8)
    kl = curve(run, "heldout_kl", "recovery")
    assert kl[-1] < kl[0]
    config = json.loads((run / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 2 and "k_proj" not in config["target_modules"]
    adapter = load_file(run / "adapter" / "adapter_model.safetensors")
    assert len(adapter) == BLOCKS * 6 * 2 and all("lora_" in name for name in adapter)
    assert any(value.abs().sum() > 0 for name, value in adapter.items() if "lora_B" in name)


@pytest.fixture(scope="session")
def chats(tmp_path_factory):
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    rows = [{"instruction": f"Count to {n}.", "output": " ".join(map(str, range(n)))} for n in range(1, 60)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("mode", ["sft", "recover"])
def test_recovery_trains_on_text_too(recover, chats, tmp_path, mode):
    text = ["--dataset", chats if mode == "sft" else "embedded", "--length", 32, "--max-rows", 40]
    recover(
        tmp_path / "run", "--mode", mode, *text, "--heldout-fraction", 0.2, "--anchor-weight", 0.1, "learning_rate=2e-2"
    )
    assert_complete(tmp_path / "run", 8)
    nll = curve(tmp_path / "run", "heldout_nll", "recovery")
    assert nll[-1] < nll[0]
    assert (tmp_path / "run" / "adapter" / "adapter_config.json").is_file()


def test_dry_run_writes_nothing(train_qat, tmp_path):
    said = train_qat(tmp_path / "run", "--dry-run")
    assert "batch_size 4 × accumulation_steps 1 × num_chips 1 = 4 rows or 128 tokens" in said
    assert not (tmp_path / "run").exists()


# -- killed at any moment, then --resume auto ------------------------------------------------------------------------
@pytest.mark.parametrize(
    "death",
    [
        kill("Session.record", 2),  # layer stage, before anything is saved
        kill("Session.record", 5),  # second block, after a save, in the middle of a log interval
        kill("_sync", 1),  # the first checkpoint is written, but not yet renamed
        kill("save_checkpoint", 2, after=True),  # between the stages
        kill("Session.record", 12),  # end to end, between two saves
        kill("save_file", 3),  # inside an end-to-end save
        kill("write_atomically", 3, after=True),  # best.pt is newer than the checkpoint
        kill("Run.log", 6, after=True),  # logged, not saved
        kill("write_atomically", 4),  # between end-to-end and scales: best.pt is about to be copied to endtoend.pt
        kill("Session.record", 18),  # the scales stage
        kill("save_checkpoint", 6),  # its last save
        kill("Run.finish", 1),  # trained to the end, no summary yet
    ],
    ids=lambda death: f"{death[0]}-{death[1]}",
)
def test_killed_qat_resumes_to_the_same_bits(train_qat, pipeline, tmp_path, death):
    run = tmp_path / "run"
    train_qat(run, death=death, expect=-signal.SIGKILL)
    assert not (run / "summary.json").exists()
    train_qat(run)
    assert_same_end(run, pipeline / "qat")
    for name in ("best.pt", "layerwise.pt", "endtoend.pt"):
        assert_same_student(run / name, pipeline / "qat" / name)
    assert not [path for path in run.rglob("*") if "part" in path.name]


def test_run_killed_repeatedly_resumes_to_the_same_bits(train_qat, pipeline, tmp_path):
    run = tmp_path / "run"
    for death in (kill("Session.record", 5), kill("Session.record", 1), kill("_sync", 2), kill("Session.record", 5)):
        train_qat(run, death=death, expect=-signal.SIGKILL)
    train_qat(run)
    assert_same_end(run, pipeline / "qat")
    assert len(json.loads((run / "manifest.json").read_text())["resumed"]) == 4


@pytest.mark.parametrize(
    "death", [kill("Session.record", 5), kill("write_origin", 1)], ids=lambda death: f"{death[0]}-{death[1]}"
)
def test_killed_recovery_resumes_to_the_same_bits(recover, pipeline, tmp_path, death):
    run, cache = tmp_path / "run", ["--kd-cache-dir", pipeline / "cache"]
    recover(run, *cache, death=death, expect=-signal.SIGKILL)
    recover(run, *cache)
    assert_same_end(run, pipeline / "recovery")
    files = [path / "adapter" / "adapter_model.safetensors" for path in (run, pipeline / "recovery")]
    assert_same_tensors(*map(load_file, files))


@pytest.mark.parametrize("stage, call", [("layers", 2), ("qat", 13)])
def test_sigterm_finishes_the_step_and_exits_0(train_qat, pipeline, tmp_path, stage, call):
    run = tmp_path / "run"
    said = train_qat(run, death=("Session.record", call, signal.SIGTERM, False))
    assert json.loads((run / "summary.json").read_text()) == {"status": "preempted", "step": call}
    assert (run / "checkpoints" / "LATEST").read_text() == f"step_{call}"
    assert f"SIGTERM: saved step {call}" in said
    train_qat(run)
    assert_same_end(run, pipeline / "qat")
    assert_same_student(run / "best.pt", pipeline / "qat" / "best.pt")


def test_sigterm_in_recovery(recover, pipeline, tmp_path):
    run, cache = tmp_path / "run", ["--kd-cache-dir", pipeline / "cache"]
    recover(run, *cache, death=("Session.record", 4, signal.SIGTERM, False))
    assert json.loads((run / "summary.json").read_text()) == {"status": "preempted", "step": 4}
    recover(run, *cache)
    assert_same_end(run, pipeline / "recovery")


@pytest.mark.parametrize("death", [kill("_targets", 7), kill("sha256", 2)], ids=["teacher", "shard"])
def test_killed_cache_build_resumes_to_the_same_bytes(execute, pipeline, sharp_model_dir, tmp_path, death):
    flags = build_flags(sharp_model_dir, tmp_path / "cache")
    execute("build_kd_cache", *flags, death=death, expect=-signal.SIGKILL)
    execute("build_kd_cache", *flags)

    def content(folder: Path) -> dict:
        files = [path for path in folder.iterdir() if path.name != "summary.json"]
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    assert content(tmp_path / "cache") == content(pipeline / "cache")


def test_a_damaged_checkpoint_falls_back_to_the_one_before(train_qat, pipeline, tmp_path):
    run = tmp_path / "run"
    train_qat(run, death=kill("Session.record", 15), expect=-signal.SIGKILL)
    newest = run / "checkpoints" / "step_14" / "model.safetensors"
    newest.write_bytes(newest.read_bytes()[:-7])
    said = train_qat(run)
    assert "step_14: model.safetensors is damaged" in said and "resuming at step 10" in said
    assert_same_end(run, pipeline / "qat")


# -- XLA -------------------------------------------------------------------------------------------------------------
@pytest.mark.xla
def test_train_qat_on_xla_compiles_nothing_after_its_first_step(pipeline, sharp_model_dir, tmp_path):
    flags = ["--model", sharp_model_dir, "--cache-dir", pipeline / "cache", "--output-dir", tmp_path / "run", *QAT]
    flags = [*flags, "--device", "xla", "--log-every", 1, "--accumulation-steps", 2]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts" / "train_qat.py", *map(str, flags)],
        env=os.environ | {"PJRT_DEVICE": "CPU", "XLA_FLAGS": QUICK},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    run = tmp_path / "run"
    for stage, steps in (("qat", STEPS), ("scales", SCALE_STEPS)):
        compiles = [line["compiles"] for line in figures(run) if line["stage"] == stage and "compiles" in line]
        assert compiles[0] > 0 and compiles[0] == compiles[-1] and len(compiles) == steps
    summary = json.loads((run / "summary.json").read_text())
    assert summary["compiles"] == compiles[-1] and summary["fallbacks"] == 0
    kl = curve(run, "heldout_kl", "qat")
    assert kl[-1] < kl[0]
    assert_same_student(run / "best.pt", run / "best.pt")  # readable in this process, which has not imported torch_xla
