"""scripts/smoke_test.py: five lines if all works; on a fault only the lines before it, its cause and exit code 1."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from forked import ROOT

from qat_lora.backend import TorchBackend
from qat_lora.errors import UserError
from qat_lora.experiments.athena.rows import load
from qat_lora.experiments.athena.training import Trainer
from qat_lora.run.command_line import parse

STEPS = ("CPU detected and initialized", "Data loading works", "Training loop runs", "Gradient sync works")
LINES = [f"✅ {step}" for step in (*STEPS, "Checkpointing works")]


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("smoke_test")


def smoke(script, *words) -> None:
    script.main(parse(script.Config, "smoke_test", ["--device", "cpu", "--precision", "fp32", *words]))


def test_the_command_of_the_guide_passes_with_two_workers():
    command = [sys.executable, ROOT / "scripts" / "smoke_test.py", "--run-training", "--train-epochs", "3"]
    done = subprocess.run([*command, "device_type=cpu"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [line for line in done.stdout.splitlines() if line.startswith("✅")] == LINES
    assert "[Athena] Using CPU. Process 0/2" in done.stdout and "14 updates" in done.stdout


def swapped(path):
    train, heldout = load(path)
    return replace(train, labels=train.labels[::-1]), heldout


def one_more(self, value):
    return value + 1 if torch.is_tensor(value) else value


FAULTS = (  # where (None: in the script), what, its replacement, and the cause that is named
    (TorchBackend, "to_host", one_more, "a product on cpu is wrong"),
    (None, "load", swapped, "the rows read back are not the rows written"),
    (TorchBackend, "update", lambda self, optimizer, clip, *rest: torch.zeros(()), "the weights have not changed"),
    (TorchBackend, "reduce", lambda self, given: [value.mul_(2) for value in given], "the reduced gradient is not the"),
    (Trainer, "load", lambda self, tensors, rest: None, "after loading"),
)


@pytest.mark.parametrize("passed", range(len(FAULTS)))
def test_on_a_fault_only_the_checks_before_it_are_reported_as_passed(script, monkeypatch, capsys, passed):
    owner, name, broken, said = FAULTS[passed]
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(owner or script, name, broken)
        smoke(script, "num_chips=1")
    printed = capsys.readouterr()
    assert ended.value.code == 1
    assert [line for line in printed.out.splitlines() if line.startswith("✅")] == LINES[:passed]
    assert "❌ " + LINES[passed][2:] in printed.err and said in printed.err


def test_a_missing_device_is_refused(script):
    with pytest.raises(UserError, match="device=cuda"):
        smoke(script, "device_type=cuda")
