"""Several workers on torch_xla's CPU devices, which are threads of one process (xla_workers.py), train as one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from patience import PATIENCE
from ports import free_port
from worker_training import CLOSE, STEPS, apart
from xla_results import QUICK

pytestmark = pytest.mark.xla


def devices(count: int, *arguments) -> subprocess.CompletedProcess:
    """Run xla_workers.py to its end. If torch_xla's threads abort or crash the process, start it again: the script
    cannot order everything they do, and CPU devices that share a process exist for tests only."""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, Path(__file__).with_name("xla_workers.py"), str(count), *map(str, arguments)],
            env=os.environ | {
                "PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(count), "XLA_THREAD_POOL_SIZE": "8", "XLA_FLAGS": QUICK,
                "MASTER_PORT": str(free_port()), "PYTHONPATH": str(Path(__file__).parents[1]),
            },
            capture_output=True, text=True, timeout=PATIENCE,
        )  # fmt: skip
        if done.returncode not in (128 + signal.SIGABRT, 128 + signal.SIGSEGV):
            break
    return done


def test_four_xla_devices_train_the_same_weights_as_one(sharp_model_dir, sharp_cache, tmp_path):
    for count in (1, 4):
        done = devices(count, "qat", sharp_model_dir, sharp_cache, tmp_path / str(count))
        assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(4):
        assert apart(tmp_path / "4" / f"worker{rank}.safetensors", tmp_path / "1" / "worker0.safetensors") <= CLOSE
        graphs = (tmp_path / "4" / f"graphs{rank}.txt").read_text().split("\n---\n")
        assert [graph.count(" all-reduce(") for graph in graphs] == [1] * STEPS
    lines = map(json.loads, (tmp_path / "4" / "metrics.jsonl").read_text().splitlines())
    compiles = [line["compiles"] for line in lines if "compiles" in line]
    assert len(set(compiles)) == 1, "all workers and steps run the graph of the first"


def test_an_xla_worker_that_fails_ends_the_job(tmp_path):
    done = devices(2, "failing", "-", "-", tmp_path)
    assert done.returncode == 2
    assert "error: not on this chip; take another" in done.stderr


def test_two_xla_devices_train_a_recursive_model_as_one(tmp_path):
    """Losses, held-out figures, weights, EMA, puzzle embeddings and halted rows are the same; one graph for all."""
    for count in (1, 2):
        (tmp_path / str(count)).mkdir()
        done = devices(count, "athena", "-", "-", tmp_path / str(count))
        assert done.returncode == 0, done.stderr[-3000:]
    names = ("1/found0.json", "2/found0.json", "2/found1.json")
    one, *two = (json.loads((tmp_path / name).read_text()) for name in names)
    whole = torch.load(tmp_path / "1" / "weights0.pt")
    for rank, found in enumerate(two):
        for name in ("loss", "grad_norm"):
            wanted = pytest.approx([line[name] for line in one["lines"]], rel=5e-6)  # fp32 sums in another order
            assert [line[name] for line in found["lines"]] == wanted
        assert found["measured"] == pytest.approx(one["measured"], rel=5e-6)
        assert len({line["compiles"] for line in found["lines"]}) == 1 and found["lines"][-1]["fallbacks"] == 0
        weights = torch.load(tmp_path / "2" / f"weights{rank}.pt")
        assert weights.keys() == whole.keys() and torch.equal(weights["halted"], whole["halted"])
        for name in weights.keys() - {"halted"}:  # weights reach 4, and fp32 sums are in another order
            torch.testing.assert_close(weights[name], whole[name], rtol=0, atol=10 * CLOSE)
    assert whole["identity"].abs().sum(1).nonzero()[:, 0].tolist() == [1, 3, 5] and 0 < whole["halted"].sum() < 8
