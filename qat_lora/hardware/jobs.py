"""The checks that run whole scripts: resuming, several workers, a killed worker, the quality of a student."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from qat_lora.backend import resolve
from qat_lora.backend.detect import count_workers
from qat_lora.errors import ROOT, UserError
from qat_lora.hardware.place import Failed, Figures, Machine, Skipped, apart
from qat_lora.models.packaged import EMBEDDED, packaged_file

STEPS, ROWS = 100, 8  # updates, and rows of each, of a run that is stopped, killed or shared by workers
SAME = 1e-3  # largest relative difference of its losses


def check_resume(place: Machine) -> Figures:
    """A run that SIGTERM stops, and that is resumed, has the losses of an uninterrupted one."""
    wanted = uninterrupted(place)
    words = run_words(place, "resumed", 1)
    stop(place, words, "resumed", lambda job: job.send_signal(signal.SIGTERM), codes=(0,))
    finish(place, words, "resumed")
    return compared(place, "resumed", wanted)


def check_workers(place: Machine) -> Figures:
    """All workers together have the losses of one."""
    counts, wanted, found = several(place), uninterrupted(place), {}
    for count in counts:
        finish(place, run_words(place, f"workers-{count}", count), "workers")
        found |= {"workers": count} | compared(place, f"workers-{count}", wanted)
    return found


def check_shards(place: Machine) -> Figures:
    """Workers that share a language model out have the losses of one that holds all of it."""
    if place.device in ("tpu", "xla"):
        raise Skipped("torch_xla cannot share a model out")
    counts, cache, found = several(place), place.folder / "shards_cache", {}
    at = ["--model", str(place.model), "--device", place.device, "--precision", "fp32", "--cache-dir", str(cache)]
    finish(place, [str(ROOT / "scripts" / "build_kd_cache.py"), *at, "--length", "32", "--max-rows", "64"], "shards")
    grids = ["--mlp", "int8/g16", "--attn", "int8/g16"]
    steps = ["--eval-every", "0", "--log-every", "1", "--max-steps", "10"]
    for count in (1, *counts):
        split = ["--shard", "on" if count > 1 else "off", "--num-chips", str(count), "--batch-size", str(ROWS // count)]
        folder = place.folder / "runs" / f"shards-{count}"
        words = [*at, *grids, *steps, *split, "--output-dir", str(folder)]
        finish(place, [str(ROOT / "scripts" / "train_qat.py"), *words], "shards")
        if count > 1:
            wanted = losses(place.folder / "runs" / "shards-1")
            found |= {"workers": count} | compared(place, folder.name, wanted)
    return found


def check_killed(place: Machine) -> Figures:
    """If a worker is killed, the others end with an error that names it, and the run can be resumed."""
    count, wanted = several(place)[-1], uninterrupted(place)
    words = run_words(place, "killed", count)

    def kill(job: subprocess.Popen) -> None:
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text(encoding="utf-8").split()
        spawned = [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]
        if not spawned:
            raise Failed("no worker was left to kill")
        os.kill(spawned[-1], signal.SIGKILL)

    seconds, said = stop(place, words, "killed", kill, codes=tuple(range(1, 256)))
    if "was killed" not in said:
        raise Failed(f"one of {count} workers was killed, and the error does not name it: {said[-200:]}")
    finish(place, words, "killed")
    return {"workers": count, "seconds until the others ended": seconds} | compared(place, "killed", wanted)


def check_smoke(place: Machine) -> Figures:
    """smoke_test.py on all chips: each worker has its own rows, and reduced gradients are sums."""
    words = [str(ROOT / "scripts" / "smoke_test.py"), "--device", place.device]
    finish(place, words, "smoke")
    return {}


def several(place: Machine) -> list[int]:
    """Numbers of workers to try: two, and all that share eight rows equally."""
    count = 2 if place.device == "cpu" else count_workers(resolve(place.device), 0)
    if count < 2:
        raise Skipped("this machine has one device")
    return sorted({2, max(n for n in (2, 4, 8) if n <= count)})


def run_words(place: Machine, name: str, workers: int) -> list[str]:
    """The command of a short run of the reservoir, with the same rows per update for any number of workers. Its loss is
    smooth: with a low-bit student, rounding would hide a small fault."""
    sizes = "--embedding 32 --blocks 1 --reservoirs diagonal:16 --length 32 --tokenizer chars --dropout 0"
    steps = f"--batch-size {ROWS} --max-steps {STEPS} --learning-rate 1e-2 --eval-every 0 --save-every 50 --log-every 1"
    return [
        str(ROOT / "scripts" / "train_tinystories_reservoir.py"), *sizes.split(), *steps.split(), "--num-chips",
        str(workers), "--precision", "fp32", "--device", place.device, "--resume", "auto", "--output-dir",
        str(place.folder / "runs" / name),
    ]  # fmt: skip


def uninterrupted(place: Machine) -> list[float]:
    folder = place.folder / "runs" / "whole"
    if not (folder / "summary.json").exists():
        finish(place, run_words(place, "whole", 1), "whole")
    return losses(folder)


def losses(folder: Path) -> list[float]:
    """The training losses of a run, by update; of an update made twice, the later one."""
    found = {line["step"]: line["loss"] for line in lines(folder) if "loss" in line}
    return [found[step] for step in sorted(found)]


def lines(folder: Path) -> list[dict]:
    """The whole lines of a run's metrics."""
    file = folder / "metrics.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines(True) if file.exists() else []
    return [json.loads(line) for line in lines if line[-1] == "\n"]


def compared(place: Machine, name: str, wanted: list[float]) -> Figures:
    found = losses(place.folder / "runs" / name)
    if len(found) != len(wanted):
        raise Failed(f"the run has {len(found)} updates, an uninterrupted one {len(wanted)}")
    for step, (a, b) in enumerate(zip(found, wanted), 1):
        if not apart(a, b) <= SAME:
            raise Failed(f"the loss of update {step} is {a:.6g}, in an uninterrupted run of one worker {b:.6g}")
    return {"largest relative difference": max(map(apart, found, wanted)), "updates": len(found)}


def started(place: Machine, words: list[str], name: str) -> subprocess.Popen:
    log = open(place.folder / "logs" / f"{name}.txt", "a+", encoding="utf-8")  # noqa: SIM115 (the process writes it)
    return subprocess.Popen([sys.executable, *words], stdout=log, stderr=log, cwd=ROOT)


def finish(place: Machine, words: list[str], name: str) -> None:
    """Run a command to its end. Raises Failed with its last line if it fails."""
    job = started(place, words, name)
    try:
        code = job.wait()
    finally:
        job.kill()
    if code:
        raise Failed(f"{Path(words[0]).name} ended with exit code {code}: {last_line(place, name)}")


def stop(place: Machine, words: list[str], name: str, how: Callable, codes: tuple) -> tuple[float, str]:
    """Start a run, call how(job) after ten updates; returns (seconds until it ended, what it printed)."""
    job, folder = started(place, words, name), place.folder / "runs" / name
    try:
        while job.poll() is None and len(losses(folder)) < 10:
            time.sleep(0.05)
        if job.poll() is not None:
            raise Failed(f"the run ended before it could be stopped: {last_line(place, name)}")
        how(job)
        since = time.monotonic()
        code = job.wait(60)
    except subprocess.TimeoutExpired:
        raise Failed("the run did not end within 60 s") from None
    finally:
        job.kill()
    if code not in codes:
        raise Failed(f"the stopped run ended with exit code {code}: {last_line(place, name)}")
    if len(losses(folder)) >= STEPS:
        raise Failed("the run had ended before it was stopped")
    return time.monotonic() - since, (place.folder / "logs" / f"{name}.txt").read_text(encoding="utf-8")


def last_line(place: Machine, name: str) -> str:
    printed = (place.folder / "logs" / f"{name}.txt").read_text(encoding="utf-8").strip().splitlines()
    errors = [line for line in printed if "rror" in line]
    return (errors or printed or ["it printed nothing"])[-1][:300]


def check_quality(place: Machine) -> Figures:
    """How far quantisation-aware training at 2 bits brings a student in the time that is left: a short run tells how
    long an update takes, and a second one fills the time. At tiny size there is only the short one."""
    model = place.model if place.size == "tiny" else Path(EMBEDDED)
    if place.size == "real":
        try:
            packaged_file(EMBEDDED)
        except UserError as error:
            raise Skipped(f"{error}; --list-wheels lists the packages to bring") from error
    steps, length, rows = (60, "32", "64") if place.size == "tiny" else (100, "256", "2000")
    at, cache = ["--model", str(model), "--device", place.device], place.folder / "quality_cache"
    built = ["--length", length, "--max-rows", rows, "--cache-dir", str(cache)]
    finish(place, [str(ROOT / "scripts" / "build_kd_cache.py"), *at, *built], "quality")
    found = distilled(place, at, cache, steps)
    each = found["seconds"] / steps
    more = int(0.8 * (place.until - time.time()) / each) - steps if place.size == "real" else 0
    return distilled(place, at, cache, more) if more > steps else found


def distilled(place: Machine, at: list[str], cache: Path, steps: int) -> Figures:
    """A run of quantisation-aware training: KL to the teacher before and after it."""
    folder, since = place.folder / "runs" / f"quality-{steps}", time.monotonic()
    words = ["--cache-dir", str(cache), "--max-steps", str(steps), "--output-dir", str(folder)]
    finish(place, [str(ROOT / "scripts" / "train_qat.py"), *at, *words], "quality")
    kl = [line["heldout_kl"] for line in lines(folder) if "heldout_kl" in line]
    if not kl[-1] < kl[0]:
        raise Failed(f"the KL divergence to the teacher went from {kl[0]:.4f} to {kl[-1]:.4f}")
    return {"KL at the start": kl[0], "KL at the end": kl[-1], "updates": steps, "seconds": time.monotonic() - since}
