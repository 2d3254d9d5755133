"""Training on a 200 MB text: peak memory does not grow with it, and runs resume after kill -9 (make test-faults).

Run with -s to see the figures.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import PATIENCE

from qat_lora.data.text import END

pytestmark = pytest.mark.faults
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "train_tinystories_reservoir.py"
LIMIT = 1e9  # bytes; torch and transformers take about 770 MB of it
ALL = ["--max-stories", "100000000", "--device", "cpu", "--precision", "fp32"]
# Prints its peak resident set size when it ends.
PEAK = """import runpy, sys
sys.argv = sys.argv[1:]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
finally:
    print(*[line.strip() for line in open("/proc/self/status") if line.startswith("VmHWM")], flush=True)"""
TALE = "{} found a kite and showed it to the old owl. They were glad. Then the rain came, and it was time to go home."
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "USE_TORCH_XLA": "0"}


def big_text(path: Path, megabytes: float, separator: str) -> Path:
    """Write a file of about that size, in which every story has its own number."""
    draw, size, number = random.Random(0), 0, 0
    with open(path, "w") as file:
        while size < megabytes * 1e6:
            number += 1
            lines = [TALE.format(draw.choice(["Tom", "Lily", "A small dog"])) for _ in range(draw.randint(4, 14))]
            size += file.write("\n\n".join([f"Story {number}.", *lines]) + separator)
    return path


def start(folder: Path, *flags) -> subprocess.Popen:
    command = list(map(str, [sys.executable, "-c", PEAK, SCRIPT, *flags]))
    with open(folder / "log", "a") as log:
        return subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdout=log, stderr=subprocess.STDOUT)


def peak(folder: Path) -> float:
    """Bytes of the largest resident set of the last run that ended by itself."""
    return 1024 * int((folder / "log").read_text().split("VmHWM:")[-1].split()[0])


@pytest.mark.parametrize("separator, tokenizer", [(f"\n{END}\n", "bpe"), ("\n", "chars")], ids=["stories", "one text"])
def test_peak_memory_is_flat(tmp_path, separator, tokenizer):
    figures = {}
    for megabytes in (2, 20, 200):
        text = big_text(tmp_path / "text.txt", megabytes, separator)
        process = start(tmp_path, "--dataset", text, "--tokenizer", tokenizer, *ALL, "--dry-run")
        assert process.wait() == 0, (tmp_path / "log").read_text()[-2000:]
        figures[megabytes] = peak(tmp_path)
        print(f"\n{tokenizer}, {megabytes} MB: peak {figures[megabytes] / 1e6:.0f} MB", end="")
    assert figures[200] < LIMIT and figures[200] - figures[2] < 0.2e9
    assert not (tmp_path / "caches").exists()


def wait_for(process: subprocess.Popen, there) -> None:
    ends = time.monotonic() + PATIENCE
    while not there():
        assert process.poll() is None and time.monotonic() < ends
        time.sleep(0.05)


def kill_once(process: subprocess.Popen, there) -> None:
    wait_for(process, there)
    process.kill()
    process.wait()


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_training_on_200_mb_resumes_after_kill_9(tmp_path):
    text = big_text(tmp_path / "text.txt", 200, f"\n{END}\n")
    small = "--tokenizer chars --heldout-fraction 0.00002 --epochs 1 --batch-size 64 --block-size 64 --embedding 16 "
    small += "--hidden 16 --reservoirs diagonal:8 --eval-every 0 --log-every 1 --save-every 20 --resume auto"
    run, cache = tmp_path / "run", tmp_path / "caches" / "stories"
    flags = ["--dataset", text, *ALL, *small.split(), "--output-dir", run]

    process = start(tmp_path, *flags)  # killed while it tokenises
    kill_once(process, lambda: any(file.stat().st_size > 10**7 for file in cache.glob(".*.part/train.bin")))
    assert not run.exists() and not [path for path in cache.iterdir() if path.name[0] != "."]

    process = start(tmp_path, *flags)  # killed while it trains
    kill_once(process, lambda: (run / "checkpoints" / "step_40").exists() and max(losses(run)) >= 55)
    before = losses(run)
    (made,) = [path for path in cache.iterdir() if path.name[0] != "."]
    written = made.stat().st_mtime_ns

    process = start(tmp_path, *flags)
    wait_for(process, lambda: "resuming at step" in (tmp_path / "log").read_text() and max(losses(run)) >= 80)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 0
    said = (tmp_path / "log").read_text()
    print(f"\ntraining: {peak(tmp_path) / 1e6:.0f} MB", end="")
    assert peak(tmp_path) < LIMIT
    assert said.count("tokenising") == 2 and made.stat().st_mtime_ns == written, "tokenised once after the kill"
    after = losses(run)
    assert {step: after[step] for step in before} == before and max(after) > max(before)
