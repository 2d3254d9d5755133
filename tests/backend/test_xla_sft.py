"""Packed fine-tuning on torch_xla's CPU device: one shape, one graph per micro-batch, results equal to the CPU's."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.xla
PATH = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
KINDS = ("", " checkpointed")
RATES = ("format", "accuracy", "citation_precision", "citation_recall", "invented")


@pytest.fixture(scope="module")
def checks(sharp_model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("xla_sft")
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("sft_checks.py"), sharp_model_dir, folder],
        env=os.environ | {"PJRT_DEVICE": "CPU", "XLA_FLAGS": QUICK, "PYTHONPATH": PATH},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_losses_and_held_out_figures_equal_the_cpu(checks, kind):
    ours, theirs = checks[f"xla{kind}"]["lines"], checks[f"cpu{kind}"]["lines"]
    assert len(ours) == len(theirs) == 8 + 3
    for one, other in zip(ours, theirs):
        shared = [n for n in one if n == "loss" or n == "grad_norm" or n.endswith(("_nll", "_ppl")) or n in RATES]
        assert shared and [one[n] for n in shared] == pytest.approx([other[n] for n in shared], rel=1e-3)


def test_the_last_batches_are_partial(checks):
    """Neither training nor held-out rows fill their last batch."""
    assert checks["xla"]["rows"] % 8 and checks["xla"]["heldout"] % 4


@pytest.mark.parametrize("kind", [*KINDS, " dropout"])
def test_nothing_is_compiled_after_the_first_update(checks, kind):
    """Through partial batches, warm-up and decay, figures by section, answers, and saving."""
    compiles = [line["compiles"] for line in checks[f"xla{kind}"]["lines"] if "loss" in line]
    assert len(compiles) == 8 and compiles[0] > 0 and set(compiles) == {compiles[0]}
    assert checks[f"xla{kind}"]["fallbacks"] == 0


@pytest.mark.parametrize("kind", [*KINDS, " dropout"])
def test_a_micro_batch_is_one_graph(checks, kind):
    """Between two losses of an update; from the second to the next update's first, if nothing is evaluated, the
    optimiser's step is another."""
    given = checks[f"xla{kind}"]["graphs"]
    assert set(given[::2]) == {1} and min(given[1::2]) == 2


def test_adapters_trained_on_xla_are_saved_and_read_back(checks):
    assert all(found["gap"] <= 1e-4 for found in checks.values())
