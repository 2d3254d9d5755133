"""A run directory records the options, inputs, log and results of a run."""

import asyncio
import dataclasses
import json
import sys
from pathlib import Path

import pytest
from toy_runs import Config, config, opened, refusal

from qat_lora.errors import UserError
from qat_lora.run.console import attempt
from qat_lora.run.files import check_files
from qat_lora.run.resuming import read_config
from qat_lora.run.rundir import Run, open_run

pytestmark = pytest.mark.usefixtures("here")


# -- a new run -------------------------------------------------------------------------------------------------------
def test_files_of_a_new_run(here, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["toy.py", "--max-steps", "3"])
    cfg = config(max_steps=3, seed=4)
    run = open_run("toy", cfg, {"device": "cpu", "cache": "f00"})
    assert not run.resumed and read_config(run.path) == dataclasses.asdict(cfg)
    manifest = json.loads((here / "run" / "manifest.json").read_text())
    assert manifest["experiment"] == "toy" and manifest["argv"] == ["toy.py", "--max-steps", "3"]
    assert (manifest["git"], manifest["dirty"], manifest["seed"]) == ("abc1234", False, 4)
    assert (manifest["device"], manifest["cache"]) == ("cpu", "f00")
    assert manifest["packages"].keys() >= {"torch", "torch_xla", "transformers", "peft"}
    assert not (run.path / "summary.json").exists()


def test_the_default_path_has_time_preset_seed_and_commit(here, clock):
    run = open_run("toy", Config(config="presets/q2.yaml", seed=3), {})
    assert str(run.path) == "runs/toy/20260101T000000Z-q2-s3-abc1234"
    assert open_run("toy", Config(), {}).path.name.endswith("-default-s0-abc1234")


def test_finish_writes_the_summary():
    run = opened()
    run.finish("finished", best={"loss": 0.5})
    assert json.loads((run.path / "summary.json").read_text()) == {"status": "finished", "best": {"loss": 0.5}}


def test_a_directory_that_cannot_be_created_is_named(here):
    (here / "file").write_text("")
    assert "file/run could not be written" in refusal(resume="off", output_dir="file/run")


# -- metrics ---------------------------------------------------------------------------------------------------------
def test_metrics_are_one_object_per_line_and_printed(here, capsys):
    run = Run(here, resumed=False)
    assert run.metrics() == []
    run.log(1, {"loss": 0.5})
    run.log(2, {"loss": 0.123456, "stage": "qat", "tokens": 128})
    assert run.metrics() == [{"step": 1, "loss": 0.5}, {"step": 2, "loss": 0.123456, "stage": "qat", "tokens": 128}]
    assert capsys.readouterr().out == "step 1  loss 0.5\nstep 2  loss 0.1235  stage qat  tokens 128\n"


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), SystemExit(3), asyncio.CancelledError()])
def test_a_failing_tracker_is_one_warning_and_the_run_continues(here, capsys, error):
    run, sent = Run(here, resumed=False), []

    def mirror(step, values):
        if step > 1:
            raise error
        sent.append(step)

    run.mirror = mirror
    for step in (1, 2, 3):
        run.log(step, {"loss": 0.5})
    assert sent == [1] and [line["step"] for line in run.metrics()] == [1, 2, 3]
    said = capsys.readouterr().out
    assert said.count("warning") == 1 and "metrics.jsonl" in said


def test_an_attempt_that_fails_is_a_warning(capsys):
    assert attempt("plotting", max, 1, 2) == 2 and not capsys.readouterr().out
    assert attempt("plotting", int, "x") is None
    assert "warning: plotting failed (invalid literal" in capsys.readouterr().out

    def stops(error):
        raise error

    assert attempt("plotting", stops, asyncio.CancelledError()) is None
    assert capsys.readouterr().out == "warning: plotting failed (CancelledError); the run continues without it\n"
    with pytest.raises(KeyboardInterrupt):
        attempt("plotting", stops, KeyboardInterrupt())


# -- the files of a finished run -------------------------------------------------------------------------------------
@pytest.fixture
def finished_run():
    run = opened()
    run.log(1, {"loss": 0.5})
    (run.path / "model").mkdir()
    (run.path / "model" / "weights").write_bytes(b"abc")
    run.finish("finished", loss=0.5)
    return run.path


READ = ("summary.json", "metrics.jsonl", "config.yaml", "manifest.json", "model")


@pytest.mark.parametrize("file", ["summary.json", "metrics.jsonl", "config.yaml", "manifest.json", "model/weights"])
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-1])])
def test_readers_notice_a_changed_file_of_a_finished_run(finished_run, file, damage):
    check_files(finished_run, *READ)
    path = finished_run / file
    damage(path)
    check_files(finished_run, *(name for name in READ if name != file.split("/")[0]))  # the changed file is not read
    with pytest.raises(UserError, match=rf"{file} (is missing|has changed since the run wrote it).*restore it"):
        check_files(finished_run, *READ)


def test_files_of_a_run_without_checksums_are_not_checked(finished_run):
    (finished_run / "checksums.json").unlink()
    (finished_run / "metrics.jsonl").write_text("")
    check_files(finished_run, *READ)
    unfinished = opened(output_dir="other")
    unfinished.finish("preempted")
    assert not (unfinished.path / "checksums.json").exists()
