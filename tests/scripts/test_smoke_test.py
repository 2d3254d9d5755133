"""scripts/smoke_test.py: five lines if all works; on a fault only the lines before it, its cause and exit code 1."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qat_lora.backend import TorchBackend
from qat_lora.errors import UserError
from qat_lora.experiments.athena.training import Trainer
from qat_lora.run.command_line import parse

ROOT = Path(__file__).resolve().parents[2]
LINES = [
    "✅ CPU detected and initialized",
    "✅ Data loading works",
    "✅ Training loop runs",
    "✅ Gradient sync works",
    "✅ Checkpointing works",
]


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("smoke_test")


def smoke(script, *words) -> None:
    script.main(parse(script.Config, "smoke_test", ["--device", "cpu", "--precision", "fp32", *words]))


def test_the_command_of_the_guide_passes_with_two_workers():
    command = [sys.executable, ROOT / "scripts" / "smoke_test.py", "--run-training", "--train-epochs", "5"]
    done = subprocess.run([*command, "device_type=cpu"], env=os.environ | {"OMP_NUM_THREADS": "1"},
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("✅")] == LINES
    assert "[Athena] Using CPU. Process 0/2" in done.stdout and "23 updates" in done.stdout


def broken_device(script, patch) -> None:
    patch.setattr(TorchBackend, "to_host", lambda self, value: value + 1 if torch.is_tensor(value) else value)


def broken_data(script, patch) -> None:
    def load(path):
        train, heldout = real(path)
        return replace(train, labels=train.labels[::-1]), heldout

    real = script.load
    patch.setattr(script, "load", load)


def broken_training(script, patch) -> None:
    patch.setattr(TorchBackend, "update", lambda self, optimizer, clip, *rest: torch.zeros(()))


def broken_sync(script, patch) -> None:
    patch.setattr(TorchBackend, "reduce", lambda self, gradients: [gradient.mul_(2) for gradient in gradients])


def broken_checkpoint(script, patch) -> None:
    patch.setattr(Trainer, "load", lambda self, tensors, rest: None)


@pytest.mark.parametrize(
    "fault, passed, said",
    [
        (broken_device, 0, "a product on cpu is wrong"),
        (broken_data, 1, "the rows read back are not the rows written"),
        (broken_training, 2, "the weights have not changed"),
        (broken_sync, 3, "the reduced gradient is not the sum"),
        (broken_checkpoint, 4, "after loading"),
    ],
)
def test_on_a_fault_only_the_checks_before_it_are_reported_as_passed(script, monkeypatch, capsys, fault, passed, said):
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        fault(script, patch)
        smoke(script, "num_chips=1")
    printed = capsys.readouterr()
    assert ended.value.code == 1
    assert [line for line in printed.out.splitlines() if line.startswith("✅")] == LINES[:passed]
    assert "❌ " + LINES[passed][2:] in printed.err and said in printed.err


@pytest.mark.parametrize(
    "words, said", [(["--train-epochs", "0"], "--train-epochs 0"), (["device_type=cuda"], "device=cuda")]
)
def test_bad_input_is_refused(script, words, said):
    with pytest.raises(UserError, match=said):
        smoke(script, *words)
