"""The notebook of the legal fine-tune runs top to bottom on the CPU, and its commands for a TPU parse."""

import json
import shutil
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from qat_lora.backend import tpu_chips
from qat_lora.run.command_line import parse

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "notebooks" / "training-cot-sft-tpu-v5e.ipynb"
STORED = nbformat.read(PATH, as_version=nbformat.NO_CONVERT)
MINIATURE = pytest.mark.skipif(bool(tpu_chips()), reason="with a TPU the notebook trains a full-size model")


def source(id: str) -> str:
    return next(cell.source for cell in STORED.cells if cell.id == id)


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """(the executed notebook, its output folder)."""
    home, out = tmp_path_factory.mktemp("jupyter"), tmp_path_factory.mktemp("notebook")
    notebook = nbformat.from_dict(json.loads(json.dumps(STORED)))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
            patch.setenv(name, str(home))
        patch.setenv("QAT_LORA_NOTEBOOK_OUT", str(out))
        NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(PATH.parent)}}).execute()
    yield notebook, out
    shutil.rmtree(out)


def test_the_stored_notebook_is_small_valid_and_without_outputs():
    nbformat.validate(STORED)
    assert PATH.stat().st_size < 30_000 and "Untested on hardware: TPU; run on CPU" in source("title")
    for cell in STORED.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None, cell.id


def test_its_set_up_cell_equals_that_of_the_other_notebook():
    other = nbformat.read(ROOT / "notebooks" / "TPU_LoRA_KD_WikiText1024.ipynb", as_version=nbformat.NO_CONVERT)
    theirs = next(cell.source for cell in other.cells if cell.id == "set-up")
    assert source("set-up") == theirs.replace("build_kd_cache.py", "train_cot_sft.py")


@MINIATURE
def test_it_runs_and_shows_a_table_a_plot_and_an_answer(executed):
    notebook, out = executed
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    shown = {kind: data for cell in code for o in cell.outputs for kind, data in o.get("data", {}).items()}
    assert "| accuracy | " in shown["text/markdown"] and len(shown["image/png"]) > 10_000
    folder = out / "runs" / "notebook-law"
    assert json.loads((folder / "summary.json").read_text())["status"] == "finished"
    asked = next(cell for cell in code if cell.id == "ask")
    said = "".join(output.text for output in asked.outputs)
    assert "authorities" in said and f"{folder / 'adapter'} on cpu" in said


def test_on_a_tpu_it_uses_the_guides_settings(monkeypatch, load_script, tmp_path):
    """Parses every command that the notebook would run with a chip, without running it."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("QAT_LORA_NOTEBOOK_OUT", str(tmp_path))
    monkeypatch.setattr("qat_lora.backend.tpu_chips", lambda: ["v5e"] * 8)
    configs, names = {}, {}

    def run(script, **flags):
        argv = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        configs[script] = parse(load_script(script).Config, script, argv)

    exec(source("set-up"), names)
    names["run"] = run
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notebook-law.jsonl").write_text("{}\n")
    for id in ("settings", "doctor", "data", "train", "ask"):
        exec(source(id), names)
    training = configs["train_cot_sft"]
    assert (training.model, training.dataset, training.device) == ("Qwen/Qwen2.5-0.5B-Instruct", "rzeraat/law", "tpu")
    # except that the guide saves every 50 updates; with packed rows a run has fewer
    guide = (8, 4, 2, 1000, 3.0, 10, 2, 5, 32, 64.0, 0.05, 2e-4, 0.03, 0.01)
    assert guide == (
        training.num_chips, training.batch_size, training.accumulation_steps, training.length, training.epochs,
        training.save_every, training.keep, training.log_every, training.lora_r, training.lora_alpha,
        training.lora_dropout, training.learning_rate, training.warmup_ratio, training.weight_decay,
    )  # fmt: skip
    assert training.gradient_checkpointing and training.resume == "auto"
    asked = configs["run_legal_assistant"]
    assert asked.run == str(tmp_path / "runs" / "law-v5e8") and asked.max_new_tokens is None, "taken from the run"
