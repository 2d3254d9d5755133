"""Between the steps: the order of logging, evaluation and saving, and what an interruption leaves behind."""

import json
import math
import os
import signal
from asyncio import CancelledError

import pytest
import torch

from qat_lora.backend import TorchBackend
from qat_lora.errors import UserError
from qat_lora.hosts.group import SIGTERM
from qat_lora.run.metrics import Last, Ratio, Total
from qat_lora.run.rundir import Run
from qat_lora.run.session import Every, Session

DEFAULT = Every()


class Toy:
    """A "training" whose state is a running sum and a random walk; its loss at step n of all stages is n."""

    def __init__(self, path, every, resumed=False, losses=None):
        self.run, self.backend = Run(path, resumed), TorchBackend("cpu", "fp32")
        self.session, self.weight = Session(self.run, self.backend, every), torch.zeros(1)
        self.steps_seen, self.events, self.losses, self.hooks = [], [], losses or {}, {}
        self.also = lambda number: {}

    def stage(self, name: str, total: int, evaluate=None) -> "Toy":
        def state():
            self.events.append("save")
            return {"w": self.weight}, {"name": name}

        def load(tensors, trainer):
            assert trainer == {"name": name}
            self.weight.copy_(tensors["w"])

        for step in self.session.steps(name, total, state, load, evaluate):
            number = self.session.offset + step
            self.steps_seen.append((name, step))
            self.events.append(step)
            self.weight += torch.rand(1)
            if number in self.hooks:
                self.hooks[number]()
            loss = torch.tensor(self.losses.get(number, float(number)))
            self.session.record(
                loss=loss, walk=self.weight.clone(), tokens=Total(10), lr=Last(1.0 / number), **self.also(number)
            )
        return self

    def lines(self) -> list[dict]:
        return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in self.run.metrics()]

    def saved(self) -> list[str]:
        return sorted(path.name for path in (self.run.path / "checkpoints").glob("step_*"))


@pytest.fixture
def toy(tmp_path):
    def make(every=DEFAULT, folder="run", **options) -> Toy:
        torch.manual_seed(0)
        (tmp_path / folder).mkdir(exist_ok=True)
        return Toy(tmp_path / folder, every, **options)

    return make


# -- order and figures -----------------------------------------------------------------------------------------------
def test_the_order_of_logging_evaluation_and_saving(toy):
    """Evaluate before the first step; then update → log → evaluate → save, so that a checkpoint covers its step."""
    made = toy(Every(log=2, evaluate=2, save=2))
    made.run.log = lambda step, values, *note: made.events.append("log" if "loss" in values else "figures")

    def evaluate(step):
        made.events.append(f"evaluate {step}")
        return {"score": float(step)}

    made.stage("qat", 3, evaluate)
    assert made.events == [
        "evaluate 0", "figures", 1, 2, "log", "evaluate 2", "figures", "save", 3, "log", "evaluate 3",
        "figures", "save",
    ]  # fmt: skip


def test_an_interval_of_0_means_only_at_the_end(toy):
    made = toy(Every(log=0, evaluate=0, save=0)).stage("qat", 5, lambda step: {"score": 0.5})
    assert [line["step"] for line in made.lines()] == [0, 5, 5]
    assert made.saved() == ["step_5"]


def test_a_line_averages_its_interval(toy):
    made = toy(Every(log=4)).stage("qat", 6)
    first, second = made.lines()
    assert first["step"] == 4 and first["loss"] == pytest.approx((1 + 2 + 3 + 4) / 4)
    assert first["tokens"] == 40 and first["lr"] == 1 / 4 and first["stage"] == "qat"
    assert second["step"] == 6 and second["loss"] == pytest.approx(5.5) and second["tokens"] == 20
    assert all(line["tokens_per_s"] > 0 for line in made.run.metrics())


def test_a_ratio_is_the_total_sum_over_the_total_count(toy):
    """Steps with a count of 0 do not matter, and a line without any count has no such figure."""
    made = toy(Every(log=2))
    has = {1: (3.0, 4.0), 2: (0.0, 0.0), 3: (0.0, 0.0), 4: (0.0, 0.0), 5: (1.0, 1.0), 6: (1.0, 3.0)}
    made.also = lambda number: {"exact": Ratio(*map(torch.tensor, has[number]))}
    found = made.stage("qat", 6).lines()
    assert [line.get("exact") for line in found] == [0.75, None, 0.5]
    assert not any("." in name for line in found for name in line)


def test_a_ratio_is_over_all_workers(toy, monkeypatch):
    made = toy(Every(log=1))
    made.also = lambda number: {"exact": Ratio(torch.tensor(1.0), torch.tensor(2.0))}

    def gather(value):  # with another worker that has 5 of 6
        return [value, [line | {"exact.sum": 5.0, "exact.count": 6.0} for line in value] if value else value]

    monkeypatch.setattr(made.session.backend.group, "gather", gather)
    made.hooks = {2: die}
    with pytest.raises(Death):
        made.stage("qat", 2)
    assert made.lines()[0]["exact"] == 6 / 8


def test_figures_are_fetched_only_when_something_is_due(toy):
    made, fetches = toy(Every(log=4)), []
    fetch = made.backend.fetch
    made.backend.fetch = lambda *tensors: fetches.append(len(tensors)) or fetch(*tensors)
    made.stage("qat", 8)
    assert fetches == [8, 8]  # two figures of four steps, in one transfer


@pytest.mark.parametrize(
    "scores, value, rows",
    [
        ([(0.9, 8), (0.4, 8), (0.7, 8)], 0.4, 8),
        ([(0.1, 4), (0.4, 8), (0.5, 8)], 0.4, 8),  # a value on other rows replaces the kept one
        ([(0.1, 8), (0.7, 4), (0.4, 8)], 0.4, 8),  # so the state of 0.1 is no longer in the file
        ([(0.1, 4), (0.4, None), (0.05, None)], 0.05, 4),  # lines of earlier versions do not record the number of rows
    ],
)
def test_best_is_the_lowest_value_and_that_of_the_kept_file(toy, scores, value, rows):
    lines = iter({"score": score} | ({"heldout_rows": count} if count else {}) for score, count in scores)
    made = toy(Every(evaluate=2)).stage("qat", 4, lambda step: next(lines))
    best = made.session.best("score")
    assert (best.value, best.rows) == (value, rows) and made.session.best("other").value == math.inf
    assert not best.take({"score": value, "heldout_rows": rows})
    assert best.take({"score": 0.9, "heldout_rows": rows}, there=False) and best.value == 0.9


# -- stages ----------------------------------------------------------------------------------------------------------
def test_steps_are_counted_through_all_stages(toy):
    made = toy(Every(log=2)).stage("layers", 4).stage("none", 0).stage("qat", 3)
    assert made.steps_seen == [("layers", s) for s in (1, 2, 3, 4)] + [("qat", s) for s in (1, 2, 3)]
    logged = [(line["stage"], line["step"]) for line in made.lines()]
    assert logged == [("layers", 2), ("layers", 4), ("qat", 6), ("qat", 7)]
    assert made.session.cost()["seconds"].keys() == {"layers", "qat"}


def test_a_stage_without_steps_is_evaluated_but_not_saved(toy):
    made = toy().stage("none", 0, lambda step: {"score": 1.0})
    assert made.lines() == [{"step": 0, "stage": "none", "score": 1.0}] and made.saved() == []


class Death(BaseException):
    """Stands for kill -9: none of our code handles it."""


def die():
    raise Death


@pytest.mark.parametrize("at", [1, 3, 4, 5, 8, 9, 10, 12])
def test_a_resumed_run_logs_the_lines_of_a_run_that_never_stopped(toy, at):
    """Killed before its first checkpoint, in step 4, it starts again; later it skips what it has finished."""
    every = Every(log=3, evaluate=4, save=4)

    def play(folder, resumed=False, deadly=0):
        made = toy(every, folder, resumed=resumed)
        made.hooks = {deadly: die}
        return made.stage("layers", 5).stage("qat", 7, lambda step: {"score": made.weight.item()})

    whole = play("whole")
    with pytest.raises(Death):
        play("run", deadly=at)
    again = play("run", resumed=True)
    assert again.lines() == whole.lines() and torch.equal(again.weight, whole.weight)


def test_missing_or_damaged_metrics_are_restored(toy):
    every = Every(log=1, save=2)
    toy(every).stage("qat", 4)
    lines = toy(every, resumed=True).lines()
    metrics = toy(every, resumed=True).run.metrics_path
    for damage in (metrics.unlink, lambda: metrics.write_text("{"), lambda: metrics.write_text(" " * 999)):
        damage()
        assert toy(every, resumed=True).lines() == lines


@pytest.mark.parametrize("error", [ConnectionResetError("bucket away"), CancelledError("bucket away")])
def test_a_failing_copy_is_one_warning_and_is_tried_again(toy, capsys, error):
    made, copied = toy(Every(log=0, save=1)), []

    def saved(folder):
        if folder.name in ("step_2", "step_3", "step_5"):
            raise error
        copied.append(folder.name)

    made.session.saved = saved
    made.stage("qat", 6)
    assert copied == ["step_1", "step_4", "step_6"] and made.saved() == ["step_5", "step_6"]
    assert capsys.readouterr().out.count("was not copied (bucket away)") == 2  # one warning for steps 2 and 3


# -- figures that are not finite -------------------------------------------------------------------------------------
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_last_checkpoint(toy, bad):
    made = toy(Every(log=4, save=2), losses={7: bad})
    with pytest.raises(UserError, match=r"step 7: .*not finite.*checkpoint is kept.*--learning-rate"):
        made.stage("layers", 4).stage("qat", 6)
    assert made.saved() == ["step_4", "step_6"] and [line["step"] for line in made.lines()] == [4]
    assert made.steps_seen[-1] == ("qat", 4)  # when the figures were next fetched
    assert json.loads((made.run.path / "summary.json").read_text()) == {"status": "failed", "step": 7}


@pytest.mark.parametrize("step", [0, 2])
def test_a_bad_evaluation_stops_the_run_before_it_saves(toy, step):
    """An update after a finite loss can still break the weights; they must not replace good ones."""
    made = toy(Every(log=2, evaluate=2, save=1))
    with pytest.raises(UserError, match=f"step {step}: .*not finite"):
        made.stage("qat", 4, lambda at: {"score": math.nan if at == step else 1.0})
    assert made.saved() == (["step_1"] if step else [])


# -- SIGTERM ---------------------------------------------------------------------------------------------------------
def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("at", [1, 5])
def test_sigterm_finishes_the_step_saves_and_exits_0(toy, at, capsys):
    made = toy(Every(log=3, save=4))
    made.hooks = {at: terminate}
    with pytest.raises(SystemExit) as stop:
        made.stage("qat", 9)
    assert stop.value.code == 0
    assert made.steps_seen[-1] == ("qat", at) and f"step_{at}" in made.saved()
    assert json.loads((made.run.path / "summary.json").read_text()) == {"status": "preempted", "step": at}
    assert "--resume auto" in capsys.readouterr().out
    terminate()  # schedulers send it twice

    whole, again = toy(Every(log=3, save=4), "whole").stage("qat", 9), toy(Every(log=3, save=4), resumed=True)
    again.stage("qat", 9)
    assert again.lines() == whole.lines() and torch.equal(again.weight, whole.weight)


def test_sigterm_during_the_first_evaluation(toy):
    made = toy()
    with pytest.raises(SystemExit):
        made.stage("qat", 9, lambda step: terminate() or {"score": 1.0})
    assert made.steps_seen == [("qat", 1)] and made.saved() == ["step_1"]


def test_sigterm_after_the_last_step_does_not_end_the_program(toy):
    """Plots and summaries still have to be written."""
    toy().stage("qat", 1)
    terminate()
    assert SIGTERM.is_set()
