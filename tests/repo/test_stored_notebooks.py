"""The notebooks are stored without outputs, their first cell finds the checkout, and their commands for a TPU parse."""

import json
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from executed import DISTILLATION, LAW, ROOT, path, source, stored

from qat_lora.run.command_line import parse


@pytest.mark.parametrize("name", [DISTILLATION, LAW])
def test_a_stored_notebook_is_small_valid_and_without_outputs(name):
    notebook = stored(name)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor, notebook.metadata.kernelspec.name) == (4, 5, "python3")
    assert path(name).stat().st_size < 30_000 and "Untested on hardware: TPU; run on CPU" in source(name, "title")
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None, cell.id


def test_both_set_up_cells_are_equal():
    assert source(LAW, "set-up") == source(DISTILLATION, "set-up").replace("build_kd_cache.py", "train_cot_sft.py")


# -- the set-up cell, in this process --------------------------------------------------------------------------------
@pytest.fixture
def set_up(monkeypatch):
    """set_up(folder): the names that the set-up cell defines when it is run in that folder."""

    def run(folder: Path = ROOT) -> dict:
        monkeypatch.chdir(folder)
        names = {}
        exec(source(DISTILLATION, "set-up"), names)
        return names

    return run


def test_the_root_is_found_from_both_places_or_reported_as_missing(set_up, tmp_path):
    for start in (ROOT, ROOT / "notebooks"):
        set_up(start)
        assert Path.cwd() == ROOT
    with pytest.raises(FileNotFoundError, match="no checkout of the repository"):
        set_up(tmp_path)


def test_on_colab_it_installs_the_pinned_files(set_up, monkeypatch):
    monkeypatch.setitem(sys.modules, "google.colab", None)
    commands = []
    monkeypatch.setattr(subprocess, "run", lambda command, check: commands.append(command[1:]) if check else None)
    set_up()
    assert [command[:3] for command in commands] == [
        ["-m", "pip", word] for word in ("uninstall", "install", "install")
    ]
    assert "torchvision" in commands[0] and "requirements-tpu.txt" in commands[1]
    assert {"--no-deps", "requirements-model.txt", "-e", "."} <= set(commands[2])
    files = [word for command in commands for word in command if word.endswith(".txt")]
    assert files and all((ROOT / file).is_file() for file in files)


def test_a_failed_step_stops_the_notebook_and_shows_the_error(set_up, capsys):
    with pytest.raises(subprocess.CalledProcessError):
        set_up()["run"]("build_kd_cache", max_rows=0)
    said = capsys.readouterr().out
    assert "python scripts/build_kd_cache.py --max-rows 0" in said and "error: --max-rows 0 must be at least 1" in said


# -- on a TPU --------------------------------------------------------------------------------------------------------
@pytest.fixture
def on_tpu(set_up, monkeypatch, load_script, tmp_path):
    """on_tpu(name, chips, cells): the configs of the commands that these cells would run with those chips."""

    def configs_of(name: str, chips: list[str], cells: tuple[str, ...]) -> list:
        monkeypatch.setenv("QAT_LORA_NOTEBOOK_OUT", str(tmp_path))
        monkeypatch.setattr("qat_lora.backend.tpu_chips", lambda: chips)
        configs, names = [], set_up()

        def run(script, **flags):
            argv = [word for key, value in flags.items() for word in (f"--{key.replace('_', '-')}", str(value))]
            configs.append(parse(load_script(script).Config, script, argv))
            return [json.dumps({"ppl": 2.0, "bits_per_weight": 4.0, "mb": 1.0})]

        names["run"] = run
        for id in cells:
            exec(source(name, id), names)
        return configs

    return configs_of


def test_on_a_tpu_distillation_uses_the_guides_settings(on_tpu, tmp_path):
    for name in ("v2_q4", "v2_q4_recovery"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "summary.json").write_text(json.dumps({"best": {"heldout_kl": 0.5}}))
    cells = ("settings", "doctor", "cache", "qat", "recovery", "measure")
    doctor, cache, qat, recovery, teacher, student, adapted = configs = on_tpu(DISTILLATION, ["v6e"], cells)
    assert doctor.device == "tpu"
    for config in configs[1:]:
        assert (config.device, config.model) == ("tpu", "Qwen/Qwen3-0.6B")
    for config in (cache, teacher, student, adapted):
        assert (config.dataset, config.dataset_config, config.length) == ("wikitext", "wikitext-103-raw-v1", 1024)
    assert cache.top_k == 128
    assert cache.cache_dir == qat.cache_dir == recovery.cache_dir == f"{tmp_path}/caches/wikitext103_L1024_K128"
    assert (qat.mlp, qat.attn, qat.output_dir) == ("uniform4/r32", "uniform4/r32", f"{tmp_path}/runs/v2_q4")
    assert (recovery.lora_r, recovery.batch_size, recovery.accumulation_steps, recovery.max_steps) == (8, 4, 8, 1000)
    assert recovery.checkpoint == student.checkpoint == adapted.checkpoint == f"{tmp_path}/runs/v2_q4/best.pt"
    assert qat.resume == recovery.resume == "auto"
    assert adapted.adapter == f"{recovery.output_dir}/adapter" and student.adapter is None


def test_on_a_tpu_the_legal_fine_tune_uses_the_guides_settings(on_tpu, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "notebook-law.jsonl").write_text("{}\n")
    _, training, asked = on_tpu(LAW, ["v5e"] * 8, ("settings", "doctor", "data", "train", "ask"))
    guide = {  # except that the guide saves every 50 updates; with packed rows a run has fewer
        "model": "Qwen/Qwen2.5-0.5B-Instruct", "dataset": "rzeraat/law", "device": "tpu", "num_chips": 8,
        "batch_size": 4, "accumulation_steps": 2, "length": 1000, "epochs": 3.0, "save_every": 10, "keep": 2,
        "log_every": 5, "lora_r": 32, "lora_alpha": 64.0, "lora_dropout": 0.05, "learning_rate": 2e-4,
        "warmup_ratio": 0.03, "weight_decay": 0.01, "gradient_checkpointing": True, "resume": "auto",
    }  # fmt: skip
    assert {name: getattr(training, name) for name in guide} == guide
    assert asked.run == str(tmp_path / "runs" / "law-v5e8") and asked.max_new_tokens is None, "taken from the run"
