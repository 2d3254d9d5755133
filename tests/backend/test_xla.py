"""Every experiment trains on torch_xla's CPU device, equals the CPU, and is compiled once. test_xla_deep.py checks
more."""

import sys

import pytest
import torch
import xla_results

from qat_lora.run.checkpoint import load_checkpoint

pytestmark = pytest.mark.xla
QAT, LEGAL, STORIES, ATHENA = "xla_qat.qat", "xla_legal.packed", "xla_stories.reservoirs", "xla_athena.attention"
LIMITS = {QAT: (1e-5, 0), LEGAL: (1e-3, 0), STORIES: (1e-3, 0), ATHENA: (1e-3, 1e-4)}  # relative and absolute


@pytest.fixture(scope="module")
def checks(on_xla):
    return on_xla("xla_process.mark_step", *LIMITS, "xla_athena.table", "xla_process.sigterm")


@pytest.mark.parametrize("found, limits", LIMITS.items(), indirect=["found"], ids=LIMITS)
def test_logged_figures_equal_the_cpu(found, limits):
    xla_results.assert_same_figures(found, *limits)


@pytest.mark.parametrize("found", LIMITS, indirect=True)
def test_nothing_is_compiled_after_the_first_updates_and_nothing_falls_back(found):
    xla_results.assert_compiled_once(found)


@pytest.mark.parametrize("found", [LEGAL], indirect=True, ids=[""])
def test_a_packed_micro_batch_is_one_graph_and_the_last_batches_are_partial(found):
    xla_results.assert_micro_batches_are_one_graph(found)
    rows, heldout = found["rows"]
    assert rows % 8 and heldout % 4


@pytest.mark.parametrize("found", [LEGAL], indirect=True, ids=[""])
def test_adapters_trained_on_xla_are_saved_and_read_back(found):
    assert max(found["gaps"]) <= 1e-4


@pytest.mark.parametrize("found", [ATHENA], indirect=True, ids=[""])
def test_rows_halt_when_they_do_on_the_cpu_and_an_update_is_one_graph(found):
    xla_results.assert_halts_as_on_the_cpu_and_updates_are_one_graph(found)


@pytest.mark.parametrize("found", [ATHENA], indirect=True, ids=[""])
def test_only_embeddings_of_puzzles_in_the_data_move_and_as_on_the_cpu(found):
    assert found["moved"] == [True, True] and found["table"] < 1e-3


@pytest.mark.parametrize("found", ["xla_athena.table"], indirect=True, ids=[""])
def test_an_update_reads_rows_of_the_table_and_writes_rows_in_place(found):
    assert found["operations"] == ["parameter", "gather", "scatter", "tuple"]


@pytest.mark.parametrize("found", [STORIES], indirect=True, ids=[""])
def test_a_longer_story_compiles_nothing_more(found):
    short, long = found["telling"]
    assert 0 < short < 8 and long <= 1


@pytest.mark.parametrize("found", ["xla_process.mark_step"], indirect=True, ids=[""])
def test_xla_mark_step_in_a_custom_loop_runs_what_was_recorded(found):
    assert found["executed"] == 1 and found["sum"] == 6


@pytest.mark.parametrize("found", ["xla_process.sigterm"], indirect=True, ids=[""])
def test_a_tpu_worker_receives_sigterm_in_the_main_thread_of_its_process(found):
    assert found["noticed"]


@pytest.mark.parametrize("found", [QAT], indirect=True, ids=[""])
def test_checkpoint_written_on_xla_loads_without_torch_xla(found, checks):
    tensors, trainer, meta = load_checkpoint(checks["folder"] / "qat-xla")
    assert "torch_xla" not in sys.modules
    assert meta["step"] == 5 and "model.norm.weight" in tensors
    states = trainer["stage"]["optimizer"]["state"].values()
    values = [v for state in states for v in state.values()] + list(tensors.values())
    assert values and all(type(value) is torch.Tensor and value.device.type == "cpu" for value in values)
    assert load_checkpoint(checks["folder"] / "qat-cpu")[0].keys() == tensors.keys()
