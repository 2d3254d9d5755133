"""What the guides promise beside their commands: names to import, lines to see, refusals."""

import os
import subprocess
import sys

import pytest

from qat_lora.backend.detect import count_workers
from qat_lora.backend.eager import Phases
from qat_lora.errors import ROOT, UserError

IMPORTS = [
    "import qat_lora; [getattr(qat_lora, name) for name in qat_lora.__all__]",
    "from train_musclebob_improved import detect_device_type; detect_device_type()",
    "from qat_lora.layer_qat import is_xla_device, xla_mark_step; assert is_xla_device('xla:0')",
    "from test_tpu_support import main",
]


@pytest.mark.parametrize("code", IMPORTS)
def test_names_are_where_the_guides_put_them(code):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", ["train_musclebob_improved", "test_tpu_support"])
def test_scripts_run_from_the_root(script):
    done = subprocess.run([sys.executable, f"{script}.py", "--help"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.startswith(f"usage: python scripts/{script}.py"), done.stderr


def test_phases_of_an_update_are_told_one_by_one(capsys):
    phases = Phases(True)
    phases.start(1)
    phases.tell("Batch collated: torch.Size([4, 1024])")
    phases.begin("Forward pass")
    phases.begin("Backward pass")
    phases.end()
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "[Step 1] Starting...", "[Step 1] Batch collated: torch.Size([4, 1024])", "[Step 1] Forward pass starting...",
    ]  # fmt: skip
    assert lines[3:] == [
        "[Step 1] Forward pass done (0.0s)", "[Step 1] Backward pass starting...", "[Step 1] Backward pass done (0.0s)",
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["cpu", "xla"])
def test_several_of_torch_xlas_cpu_devices_are_refused(monkeypatch, kind):
    monkeypatch.setenv("CPU_NUM_DEVICES", "2")
    with pytest.raises(UserError, match=r"CPU_NUM_DEVICES=2: .* give --device cpu --num-chips 2"):
        count_workers(kind, 2)


def test_a_script_that_trains_nothing_runs_without_the_tpu_that_is_named(tmp_path):
    words = [sys.executable, "scripts/report_run.py", "--run", tmp_path / "none"]
    environment = {**os.environ, "PJRT_DEVICE": "TPU"}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and str(tmp_path / "none") in done.stderr and "TPU" not in done.stderr


def test_a_missing_tpu_is_named_before_anything_is_loaded():
    environment = {**os.environ, "PJRT_DEVICE": "TPU"}
    words = ["scripts/train_recovery_lora.py", "--checkpoint", "none.pt", "--model", "nobody/nothing"]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and done.stderr.startswith("error: device=tpu: no TPU chip") and not done.stdout
