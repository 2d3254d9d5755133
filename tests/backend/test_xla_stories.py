"""Reservoir models on torch_xla's CPU device: graph size independent of the text, equal to the CPU, compiled once."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from memory_capacity import INPUTS, MOST, memory_capacity

pytestmark = pytest.mark.xla
PATH = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
KINDS = ("reservoir", "mingru", "transformer")


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("xla_stories")
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("story_checks.py"), folder],
        env=os.environ | {"PJRT_DEVICE": "CPU", "XLA_FLAGS": QUICK, "PYTHONPATH": PATH},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text()) | {"folder": folder}


@pytest.mark.parametrize("kind", ["esn", "diagonal"])
def test_graph_does_not_grow_with_the_text_and_states_equal_the_cpu(checks, kind):
    found = checks[f"states of {kind}"]
    short, within_256, longer, within_4096 = found["instructions"]
    assert 50 < short == within_256 and longer == within_4096
    assert longer == short if kind == "esn" else longer < 2 * short, "sixteen times the length takes one more level"
    assert max(found["states"]) < 1e-5 and max(found["gradients"]) < 1e-5


def test_a_reservoir_on_the_device_has_the_requested_properties(checks):
    drawn = checks["drawn"]
    assert drawn["radius"] == pytest.approx(0.9, rel=1e-4) and drawn["density"] == pytest.approx(0.3, abs=0.08)
    assert drawn["leak"] == pytest.approx([0.1, 0.9])


def test_on_the_device_initial_states_converge_and_memory_is_at_most_the_number_of_units(checks):
    first, last = checks["drawn"]["apart"]
    assert first > 0.1 and last < 1e-3 * first
    assert 6 < memory_capacity(torch.load(checks["folder"] / "memory.pt"), INPUTS, 60) <= MOST


@pytest.mark.parametrize("kind", KINDS)
def test_losses_equal_the_cpu(checks, kind):
    ours, theirs = checks[kind]["lines"]["xla"], checks[kind]["lines"]["cpu"]
    names = ("loss", "grad_norm", "heldout_nll", "bits_per_byte")
    assert len(ours) == len(theirs) == 14
    for one, other in zip(ours, theirs):
        shared = [name for name in names if name in one]
        assert shared and [one[n] for n in shared] == pytest.approx([other[n] for n in shared], rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_compiled_after_the_second_update(checks, kind):
    compiles = [line["compiles"] for line in checks[kind]["lines"]["xla"] if "loss" in line]
    assert len(compiles) == 10 and compiles[0] > 0 and set(compiles[1:]) == {compiles[1]}


def test_nothing_falls_back_to_the_host(checks):
    assert [checks[kind]["fallbacks"] for kind in KINDS] == [0, 0, 0]


@pytest.mark.parametrize("kind", ["reservoir", "mingru"])
def test_a_longer_story_compiles_nothing_more(checks, kind):
    short, long = checks[kind]["telling"]
    assert 0 < short < 8 and long <= 1
