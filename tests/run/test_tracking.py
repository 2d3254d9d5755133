"""--report-to: every line reaches the tracker, and a failing tracker does no harm."""

import asyncio
import sys

import pytest
from toy_runs import config, opened

from qat_lora.errors import UserError

LINES = [(1, {"stage": "toy", "loss": 2.5}), (2, {"stage": "toy", "loss": 1.5, "tokens": 8})]


def logged(**options):
    """A run that has logged LINES."""
    run = opened(**options)
    for step, values in LINES:
        run.log(step, values)
    return run


@pytest.fixture
def wandb(monkeypatch):
    """A stand-in for the package, which needs an account: settings of every `init`, and lines sent."""

    class Wandb:
        inits, sent = [], []

        @classmethod
        def init(cls, **settings):
            cls.inits.append(settings)
            return cls

        @classmethod
        def log(cls, values, step):
            cls.sent.append({"step": step, **values})

    monkeypatch.setitem(sys.modules, "wandb", Wandb)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return Wandb


def test_tensorboard_gets_every_number(here):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = logged(report_to="tensorboard")
    events = accumulator.EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(1, 2.5), (2, 1.5)]
    assert [(e.step, e.value) for e in events.Scalars("tokens")] == [(2, 8.0)]


def test_wandb_gets_every_line(here, wandb):
    assert logged(report_to="wandb").metrics() == wandb.sent
    assert wandb.inits[0]["project"] == "qat_lora" and wandb.inits[0]["config"]["max_steps"] == 10


def test_a_resumed_run_continues_its_curves_and_another_run_gets_its_own(here, wandb):
    logged(report_to="wandb")
    logged(report_to="wandb", resume="auto")
    logged(report_to="wandb", output_dir="other")
    logged(output_dir="no tracker")
    first, resumed, other = (settings["id"] for settings in wandb.inits)
    assert first == resumed != other


@pytest.mark.parametrize("name", ["wandb", "tensorboard"])
def test_a_missing_package_is_reported_before_the_run(here, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf"--report-to {name}: .*pip install .*{name}, or leave the option out"):
        config(report_to=name)


@pytest.mark.parametrize("line", ["raise SystemExit(3)", "raise OSError(28, 'full')", "import nosuch"])
def test_a_package_that_fails_to_import_is_reported(here, tmp_path, monkeypatch, line):
    (tmp_path / "wandb.py").write_text(line)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=r"wandb cannot be imported \(\w+: .*\); pip install --force-reinstall wandb"):
        config(report_to="wandb")


@pytest.mark.parametrize("error", [OSError(28, "No space left"), SystemExit(3), asyncio.CancelledError()])
def test_a_tracker_that_does_not_start_is_one_warning_and_loses_no_line(here, wandb, monkeypatch, capsys, error):
    def fail(**settings):
        raise error

    monkeypatch.setattr(wandb, "init", fail)
    assert [line["loss"] for line in logged(report_to="wandb").metrics()] == [2.5, 1.5]
    assert capsys.readouterr().out.count("warning: ") == 1
