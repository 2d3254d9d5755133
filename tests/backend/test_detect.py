"""The choice of a device: chips are counted on the PCI bus, and no runtime is initialised to find out."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest
import torch

from qat_lora.backend import detect, is_xla_device, open_backend, tpu_chips
from qat_lora.errors import UserError

GVNIC, V6E = ("0x1ae0", "0x0042"), ("0x1ae0", "0x006f")  # Google's network card, in every cloud VM; a TPU chip


@pytest.fixture
def pci(tmp_path, monkeypatch):
    """pci((vendor, device), …) puts cards on the PCI bus, which starts empty. PJRT_DEVICE and CUDA are absent."""
    look = detect.tpu_chips
    monkeypatch.setattr(detect, "tpu_chips", lambda: look(tmp_path))
    monkeypatch.setenv("PJRT_DEVICE", "")  # so that monkeypatch undoes what resolve() sets
    monkeypatch.delenv("PJRT_DEVICE")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)

    def plug(*cards):
        for number, card in enumerate(cards):
            slot = tmp_path / f"0000:00:{number:02x}.0"
            slot.mkdir()
            for file, value in zip(("vendor", "device"), card):
                (slot / file).write_text(value + "\n")
        return tmp_path

    return plug


@pytest.fixture
def without_xla(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch_xla" else find(name))


# -- chips -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device, kind", detect.TPU_PCI_DEVICES.items())
def test_each_kind_of_chip_is_known(pci, device, kind):
    pci(("0x1ae0", device))
    assert detect.tpu_chips() == [kind]


def test_chips_are_counted_and_other_cards_are_not(pci):
    pci(GVNIC, V6E, ("0x8086", "0x006f"), ("0x10de", "0x2330"), V6E, GVNIC)
    assert detect.tpu_chips() == ["v6e", "v6e"]


def test_an_unreadable_bus_has_no_chips(pci, tmp_path):
    slot = pci() / "0000:00:09.0"
    slot.mkdir()
    assert detect.tpu_chips() == []
    (slot / "vendor").mkdir()
    assert detect.tpu_chips() == []
    assert tpu_chips(tmp_path / "no bus") == []


# -- resolve ---------------------------------------------------------------------------------------------------------
@pytest.mark.xla
@pytest.mark.parametrize(
    "requested, cards, gpus, before, device, after",  # before, after: PJRT_DEVICE
    [
        ("auto", [GVNIC], 0, None, "cpu", None),
        ("auto", [], 1, None, "cuda", None),
        ("auto", [V6E], 1, None, "xla", "TPU"),
        ("auto", [V6E], 0, "TPU", "xla", "TPU"),
        ("auto", [], 0, "CPU", "cpu", "CPU"),
        ("cpu", [V6E], 1, "TPU", "cpu", "TPU"),  # a flag wins over the environment
        ("cuda", [V6E], 1, None, "cuda", None),
        ("tpu", [V6E], 0, "tpu", "xla", "TPU"),
        ("xla", [], 0, None, "xla", "CPU"),  # torch_xla's CPU device
        ("xla", [V6E], 0, None, "xla", "TPU"),
        ("xla", [V6E], 0, "CPU", "xla", "CPU"),
    ],
)
def test_the_device_follows_flag_environment_and_chips(pci, monkeypatch, requested, cards, gpus, before, device, after):
    pci(*cards)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    if before:
        monkeypatch.setenv("PJRT_DEVICE", before)
    assert detect.resolve(requested) == device and os.environ.get("PJRT_DEVICE") == after


@pytest.mark.parametrize(
    "requested, pjrt, said",
    [
        ("tpu", None, r"device=tpu: no TPU chip on the PCI bus \(vendor 0x1ae0\).*--device auto"),
        ("auto", "tpu", "no TPU chip"),
        ("cuda", None, "device=cuda: .*sees no CUDA.*--device cpu"),
        ("gpu", None, "device='gpu' is not one of auto, cpu, cuda, tpu, xla"),
    ],
)
def test_an_absent_or_unknown_device_is_refused(pci, monkeypatch, requested, pjrt, said):
    pci(GVNIC)
    if pjrt:
        monkeypatch.setenv("PJRT_DEVICE", pjrt)
    with pytest.raises(UserError, match=said):
        detect.resolve(requested)


@pytest.mark.parametrize("requested, cards", [("xla", []), ("tpu", [V6E]), ("auto", [V6E])])
def test_a_missing_torch_xla_is_named(pci, without_xla, requested, cards):
    pci(*cards)
    with pytest.raises(UserError, match=r"torch_xla is not installed; pip install -r requirements-tpu.txt"):
        detect.resolve(requested)


def test_cpu_and_auto_need_no_torch_xla(pci, without_xla):
    assert detect.resolve("auto") == detect.resolve("cpu") == "cpu"


def test_unknown_precision_is_refused():
    with pytest.raises(UserError, match=r"precision='fp16' is not one of auto, fp32, bf16"):
        open_backend("cpu", "fp16")


def test_is_xla_device():
    assert is_xla_device("xla:0") and is_xla_device(torch.device("xla", 1))
    assert not is_xla_device("cpu") and not is_xla_device(torch.device("cpu"))


# -- a fresh interpreter ---------------------------------------------------------------------------------------------
FRESH = """
import json, os, sys
import qat_lora
import torch, transformers, peft
from transformers import LlamaForCausalLM, AutoModelForCausalLM
from qat_lora import KDCacheDataset, is_xla_device, kd_soft_ce, load_model, open_backend, xla_mark_step
import qat_lora.lora.recovery, qat_lora.layer_qat, qat_lora.run.plots
backend = open_backend("auto")
xla_mark_step()
print(json.dumps([
    [name for name in sys.modules if name.split(".")[0] == "torch_xla"],
    os.environ.get("PJRT_DEVICE"), torch.cuda.is_initialized(), torch.nn.utils.clip_grad_norm_.__module__,
]))
if not torch.cuda.device_count() and not os.path.exists("/dev/accel0"):
    assert backend.device.type == "cpu"
"""


def test_importing_everything_does_not_import_torch_xla_or_initialise_a_device():
    env = {key: value for key, value in os.environ.items() if key not in ("PJRT_DEVICE", "USE_TORCH_XLA")}
    done = subprocess.run([sys.executable, "-c", FRESH], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[], None, False, "torch.nn.utils.clip_grad"]
