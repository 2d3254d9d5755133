"""The progress of long jobs, and the summary at the end of a run."""

import shlex
import sys
from types import SimpleNamespace

import pytest

from qat_lora.run import console
from qat_lora.run.console import command, compared, summarise, time_left, watched


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch):
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: 0.0))


def test_time_left():
    assert time_left(1, 11, 3) == "30 s left" and time_left(10, 10, 3) == "0 s left"
    assert time_left(1, 2, 130) == "2 min 10 s left" and time_left(1, 3, 3600) == "2 h 0 min left"
    assert time_left(0, 4, 1) == "4 s left"


def test_without_a_terminal_progress_is_plain_lines_on_stderr(monkeypatch, capsys):
    monkeypatch.setattr(console, "PAUSE", 0.0)
    assert list(watched("abc", "letters", 3)) == ["a", "b", "c"]
    list(watched([4, 2, 4], "rows", 10, size=int))  # an item may count for several rows
    said = capsys.readouterr()
    wanted = [f"{what}, 0 s left" for what in ("letters: 1 of 3", "letters: 2 of 3", "rows: 4 of 10", "rows: 6 of 10")]
    assert said.err.splitlines() == wanted and not said.out


def test_short_jobs_and_other_workers_print_nothing(monkeypatch, capsys):
    list(watched(range(5), "numbers", 5))
    monkeypatch.setattr(console, "PAUSE", 0.0)
    list(watched(range(5), "numbers", 5, shown=False))
    assert capsys.readouterr() == ("", "")


def test_on_a_terminal_progress_is_a_bar_with_the_time_left(monkeypatch, capsys):
    monkeypatch.setattr(console, "PAUSE", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    list(watched("abc", "letters", 3))
    said = capsys.readouterr().err
    assert "letters:" in said and "0/3 [00:00<" in said and "left" not in said


def test_the_summary_has_what_was_made_its_quality_and_the_next_command(capsys):
    summarise({"model": "runs/x/best.pt", "report": None}, ["KL 0.5; before training 2.0"], "make report")
    made, quality = "made     model: runs/x/best.pt", "quality  KL 0.5; before training 2.0"
    assert capsys.readouterr().out.splitlines() == ["", made, quality, "next     make report"]


def test_a_command_can_be_pasted_into_a_shell(tmp_path):
    line = command("test_musclebob", "--interactive", run=tmp_path / "my run's", model=None, max_steps=3)
    words = shlex.split(line)
    assert words == ["python", "scripts/test_musclebob.py", "--interactive", "--run", f"{tmp_path}/my run's",
                     "--max-steps", "3"]  # fmt: skip


def test_a_figure_is_shown_beside_its_baseline():
    assert compared(0.70219, 1.8891, "at first") == "0.7022 nats/token; at first 1.8891"
    assert compared(0.5, 0.5, "at first") == "0.5000 nats/token; at first 0.5000: no gain"
    assert compared(-1e-6, 0.0, "at first") == "0.0000 nats/token; at first 0.0000: no gain"
