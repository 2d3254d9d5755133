"""The recursive model on torch_xla's CPU device: one graph per update, whatever halts; results equal to the CPU's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.xla
PATH = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
KINDS = ("mlp", "attention", "one step", "checkpointed")


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("xla_athena")
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("athena_checks.py"), folder],
        env=os.environ | {"PJRT_DEVICE": "CPU", "XLA_FLAGS": QUICK, "PYTHONPATH": PATH},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_held_out_figures_equal_the_cpu(checks, kind):
    ours, theirs = checks[kind]["lines"]["xla"], checks[kind]["lines"]["cpu"]
    names = ("loss", "grad_norm", "exact", "segments", "heldout_loss", "heldout_cells", "heldout_segments")
    assert len(ours) == len(theirs) == 16  # twelve updates, four measurements
    for one, other in zip(ours, theirs):
        shared = [name for name in names if name in one]
        assert shared and [one[n] for n in shared] == pytest.approx([other[n] for n in shared], rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_halt_at_different_times_and_when_they_do_on_the_cpu(checks, kind):
    halts = checks[kind]["halts"]
    assert halts["xla"] == halts["cpu"]
    assert any(0 < sum(rows) < len(rows) for rows in halts["xla"]), "otherwise no update refills only some rows"


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_is_one_graph(checks, kind):
    assert set(checks[kind]["graphs"]) == {1}


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_compiled_after_the_first_update(checks, kind):
    """Through halts, warm-up and decay, evaluation, the switch to the EMA and back, and saving."""
    compiles = [line["compiles"] for line in checks[kind]["lines"]["xla"] if "loss" in line]
    assert len(compiles) == 12 and compiles[0] > 0 and set(compiles) == {compiles[0]}


def test_nothing_falls_back_to_the_host_and_the_counter_would_show_it(checks):
    assert [checks[kind]["fallbacks"] for kind in KINDS] == [0] * len(KINDS)
    assert checks["planted"] > 0
