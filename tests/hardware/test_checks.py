"""The checks of a machine's devices pass on the CPU, and find each fault that is planted."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from patience import PATIENCE

from qat_lora.backend import TorchBackend
from qat_lora.errors import ROOT
from qat_lora.hardware import checks, jobs
from qat_lora.hardware.checks import Failed, Machine
from qat_lora.hardware.experiments import SCRIPTS
from qat_lora.hardware.kernels import check_kernels
from qat_lora.hardware.place import Skipped
from qat_lora.hardware.runner import Runner
from qat_lora.kernels import fake_quant, native, optimizer
from qat_lora.train import losses


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Machine:
    folder = tmp_path_factory.mktemp("hardware")
    (folder / "logs").mkdir()
    return Machine(folder, "cpu", "tiny")


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_experiment_equals_itself_and_never_waits(place, name):
    assert checks.check_parity(name, place)["largest relative difference"] == 0
    assert checks.check_syncs(name, place)["on"] == "meta"


def test_the_losses_equal_those_of_plain_transformers(place):
    assert checks.check_losses(place)["largest relative difference"] < 1e-5


def times(forward, factor: float):
    return staticmethod(lambda *args: factor * forward(*args))


def test_a_wrong_loss_is_named(place, monkeypatch):
    monkeypatch.setattr(losses._SparseLoss, "forward", times(losses._SparseLoss.forward, 1.001))
    with pytest.raises(Failed, match=r"the loss of cached distillation is \d"):
        checks.check_losses(place)


def test_a_wrong_gradient_is_named(place, monkeypatch):
    monkeypatch.setattr(TorchBackend, "backward", lambda self, loss: (1.01 * loss).backward())
    with pytest.raises(Failed, match="the gradient of cached distillation differs"):
        checks.check_losses(place)


def test_wrong_kernels_are_named(place, monkeypatch):
    if native.library() is None:
        pytest.skip("no C compiler with OpenMP")
    assert check_kernels(place)["largest relative difference"] < 1e-2
    right = fake_quant._quantised_in_c
    monkeypatch.setattr(fake_quant, "_quantised_in_c", lambda *given: right(*given) * 1.02)
    with pytest.raises(Failed, match=r"2 bits: tensor 0 of the kernels differs from torch's by [12].*e-02"):
        check_kernels(place)
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(Skipped, match="no C compiler"):
        check_kernels(place)


@pytest.mark.parametrize("flags", [["--precision", "fp32"], ["--seed", "3"]])
def test_options_without_a_meaning_are_refused(refusal, flags):
    assert "do not apply to check_hardware" in refusal("check_hardware", *flags)


def test_a_loss_that_is_wrong_on_the_device_alone_is_named(place, monkeypatch):
    tried, right = checks.tried, losses._SparseLoss.forward

    def once(*args, **how):  # the device's run is the first
        with monkeypatch.context() as planted:
            planted.setattr(losses._SparseLoss, "forward", times(right, 1.01))
            monkeypatch.setattr(checks, "tried", tried)
            return tried(*args, **how)

    monkeypatch.setattr(checks, "tried", once)
    with pytest.raises(Failed, match=r"update .*: (loss|kl) is \d.*, on the CPU \d"):
        checks.check_parity("recovery", place)


@pytest.mark.parametrize(
    "sync, said",
    [
        (lambda move, *rest: (move[0].sum().item(), move)[1], "reads a value of the device on the host (item)"),
        (lambda move, *rest: (torch.tensor(1.0, device=move[0].device), move)[1], "copies values of the host to"),
        (lambda move, *rest: (torch.ones(2).to(move[0].device), move)[1], "copies values of the host to"),
        (lambda move, *rest: (move[0][move[0] > 0], move)[1], "reads a value of the device on the host"),
    ],
)
def test_a_synchronisation_in_a_step_is_named(place, monkeypatch, sync, said):
    monkeypatch.setattr(optimizer, "plain_step", lambda p, *rest: sync([p], *rest))
    with pytest.raises(Failed, match=r"test_checks.py:\d+") as error:
        checks.check_syncs("recovery", place)
    assert said in str(error.value)


def plant(monkeypatch, folder, code: str) -> None:
    """Run code at the start of every Python process that is started from now on."""
    (folder / "sitecustomize.py").write_text(textwrap.dedent(code))
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")


def test_a_worker_that_does_not_reduce_is_found(place, monkeypatch, tmp_path):
    monkeypatch.setattr(jobs, "STEPS", 20)
    jobs.uninterrupted(place)
    code = """
        from qat_lora.backend.eager import TorchBackend
        reduce = TorchBackend._reduce
        def own(self, tensors):
            kept = [tensor.clone() for tensor in tensors]
            reduce(self, tensors)
            if self.rank == 1 and sum(t.numel() for t in tensors) > 1000:  # gradients
                for tensor, before in zip(tensors, kept):
                    tensor.copy_(before)
        TorchBackend._reduce = own
    """
    plant(monkeypatch, tmp_path, code)
    with pytest.raises(Failed, match=r"the loss of update \d+ is"):
        jobs.check_workers(place)
    with pytest.raises(Failed, match="Gradient sync works: failed on worker"):
        jobs.check_smoke(place)


FAKES = """
    import os, time
    from qat_lora.hardware import checks
    from qat_lora.hardware.checks import Check, Failed, Skipped
    def fine(place): return {"tokens/s": 5.0}
    def fails(place): raise RuntimeError("CUDA out of memory\\nTried to allocate")
    def dies(place): os._exit(7)
    def hangs(place): time.sleep(3600)
    def lacks(place): raise Skipped("this machine has one device")
    checks.CHECKS = {f.__name__: Check("parity", f, 2) for f in (fine, fails, dies, hangs, lacks)}
    checks.CHECKS["last"] = Check("parity", fine, 2)
"""
LIMITS = {name: ("parity", PATIENCE) for name in ("fine", "fails", "dies", "hangs", "lacks", "last")}


def test_a_check_that_fails_costs_only_itself(monkeypatch, tmp_path):
    plant(monkeypatch, tmp_path, FAKES)
    folder = tmp_path / "report"
    assert not Runner(folder, "cuda", "tiny", PATIENCE, LIMITS | {"hangs": ("parity", 2.0)}).run()
    found = {one["check"]: one for one in json.loads((folder / "report.json").read_text())["results"]}
    assert [found[name]["result"] for name in LIMITS] == ["passed", "failed", "failed", "failed", "skipped", "passed"]
    assert found["fails"]["why"] == "CUDA out of memory"
    assert found["dies"]["why"].startswith("its process ended with exit code 7")
    assert found["hangs"]["why"] == "took longer than 2 s"
    page = (folder / "report.md").read_text()
    assert "2 passed, 3 failed, 1 skipped, 0 not run." in page and "- **dies**: its process ended" in page


def test_ctrl_c_leaves_a_report(monkeypatch, tmp_path):
    plant(monkeypatch, tmp_path, FAKES)
    code = (  # a shell's background jobs ignore SIGINT
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from pathlib import Path; from qat_lora.hardware.runner import Runner; "
        f"Runner(Path({str(tmp_path / 'report')!r}), 'cpu', 'tiny', {PATIENCE}, "
        f"dict.fromkeys(('fine', 'hangs', 'last'), ('parity', {PATIENCE}))).run()"
    )
    job = subprocess.Popen([sys.executable, "-c", code], start_new_session=True, stderr=subprocess.DEVNULL)
    file = tmp_path / "report" / "results.jsonl"
    while job.poll() is None and not (file.exists() and '"hangs"' in file.read_text()):
        time.sleep(0.1)
    job.send_signal(signal.SIGINT)
    assert job.wait(PATIENCE) != 0
    results = json.loads((tmp_path / "report" / "report.json").read_text())["results"]
    assert [one["result"] for one in results] == ["passed", "not run", "not run"]


def test_what_no_time_is_left_for_is_said(monkeypatch, tmp_path):
    plant(monkeypatch, tmp_path, FAKES)
    assert Runner(tmp_path / "report", "cpu", "tiny", 1, {"fine": ("parity", 2.0)}).run()
    assert "no time was left of 0.0166667 minutes" in (tmp_path / "report" / "report.md").read_text()
