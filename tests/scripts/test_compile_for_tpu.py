"""scripts/compile_for_tpu.py with the TPU's own compiler, and the command that a dry run prints."""

import json
import shlex
import subprocess
import sys
from dataclasses import make_dataclass
from types import SimpleNamespace

import pytest

from qat_lora.ahead import aot
from qat_lora.ahead.aot import CHIPS, too_large
from qat_lora.errors import ROOT, UserError

SMALL = ["--config", "tiny", "--puzzle", "maze9", "--global-batch-size", "8", "--hidden-size", "32"]


@pytest.fixture(scope="module")
def script(load_script):
    return load_script("compile_for_tpu")


def run(*words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.tpu
@pytest.mark.skipif(aot.libtpu_version() is None, reason="libtpu and jax come with requirements-dev.txt")
def test_the_command_asks_the_compiler_and_a_dry_run_names_it():
    done = run("scripts/compile_for_tpu.py", "pretrain", *SMALL, "--chip", "v5e", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    phases = {phase["phase"]: phase for phase in found["phases"]}
    assert found["chip"] == "v5e" and {"pretrain: evaluation", "pretrain: update", "answers"} <= phases.keys()
    update = phases["pretrain: update"]
    assert update["error"] is None and update["tokens"] == 8 * 81 and 0 < update["roofline_seconds"] < 1
    peak = max(phase["peak"] for phase in found["phases"]) / 1e9

    shown = run("scripts/compile_for_tpu.py", "pretrain", *SMALL, "--chip", "v5e").stdout
    assert f"peak, by the compiler: {peak:.2f} GB of 16.91 GB" in shown and "untested on hardware" in shown
    dry = run("scripts/pretrain.py", *SMALL, "--tpu", "--dry-run").stdout.splitlines()
    assert any("xla device, without its host (estimated" in line for line in dry)
    command = dry[-1].removeprefix("for the peak by the TPU's compiler: python ")
    assert run(*shlex.split(command), "--chip", "v5e").stdout == shown


def test_options_are_divided_between_the_command_and_the_script(script):
    words = "train_qat --chip v5e --config v6e4 batch_size=2 --json false --topology=2x2 --no-resume"
    own, others = script.split(words.split())
    assert own == ["--chip", "v5e", "--json", "false", "--topology=2x2"]
    assert others == ["train_qat", "--config", "v6e4", "batch_size=2", "--no-resume"]


@pytest.mark.parametrize("said", ["train_qta is not a script; give one of build_kd_cache", "doctor cannot be compiled"])
def test_an_unknown_script_is_named(script, monkeypatch, said):
    monkeypatch.setattr(script, "given", [said.split()[0]], raising=False)
    with pytest.raises(UserError, match=said):
        script.main(script.Config())


def test_a_number_of_chips_without_a_topology_is_refused(script):
    assert script.fitting(4, CHIPS["v6e"]) == "2x2" and script.fitting(8, CHIPS["v3"]) == "2x2"
    with pytest.raises(UserError, match="--num-chips 3: no topology has 3 workers; use 1, 4 or 8"):
        script.fitting(3, CHIPS["v6e"])


def test_the_largest_batch_that_fits_is_reported(script, monkeypatch):
    monkeypatch.setattr(script, "record", lambda rehearse, options, workers: options.batch_size)
    module, options = SimpleNamespace(rehearse=None), make_dataclass("Options", [("batch_size", int)])(16)
    for fits, said in ((5, "; --batch-size 5 is the largest that fits"), (0, "; not even --batch-size 1")):
        phases = lambda size, compiler, fits=fits: [SimpleNamespace(refused=size > fits)]  # noqa: E731
        monkeypatch.setattr(script, "compiled", phases)
        assert script.largest(module, options, 1, too_large(20e9, 16e9), None).startswith(said)
