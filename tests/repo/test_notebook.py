"""The distillation notebook runs top to bottom on a machine without a TPU."""

import json
import math

import pytest
from executed import DISTILLATION, MINIATURE, executed, outputs

pytestmark = MINIATURE


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """(the executed notebook, its output folder)."""
    with executed(DISTILLATION, tmp_path_factory.mktemp("notebook")) as done:
        yield done


def test_the_table_has_three_models_with_different_figures(done):
    (table,) = outputs(done[0], "text/markdown")
    rows = {}
    for line in table.splitlines()[2:5]:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name] = [float(cell) for cell in cells]
    assert list(rows) == ["teacher", "student", "student and adapter"]
    perplexity, kl, bits, size = (list(column) for column in zip(*rows.values()))
    assert all(1 < value < math.inf for value in perplexity) and len(set(perplexity)) == 3
    assert kl[0] == 0 and all(0 < value < 1 for value in kl[1:])
    assert bits[0] == 16 and 4 < bits[1] < bits[2] < 16 and size[1] < size[2] < size[0]


def test_the_runs_are_finished_and_in_the_output_folder(done):
    shards = (done[1] / "caches" / "notebook").glob("*.safetensors")
    assert {path.name for path in shards} == {"heldout-00000.safetensors", "shard-00000.safetensors"}
    runs = done[1] / "runs" / "notebook"
    for name in ("qat", "recovery"):
        assert json.loads((runs / name / "summary.json").read_text())["status"] == "finished"
    saved = {path.name for path in (runs / "recovery" / "adapter").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= saved


def test_the_plots_of_both_runs_are_shown(done):
    first, second = outputs(done[0], "image/png")
    assert first != second and min(len(first), len(second)) > 10_000
