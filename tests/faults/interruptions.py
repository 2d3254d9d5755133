"""Trials with processes that are killed, told to stop, or started twice."""

import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from subjects import BY_NAME, PROGRAMS, RUN, SUBJECTS, WORKERS, Subject
from trials import Bench, Trial, Unexpected, check_refusal, finish, said

KILL, TERM, TWO = "kill -9", "SIGTERM", "a second process"
UNIFORM = 4  # trials at a random moment of the reference's whole duration

Moment = Callable[[Path], Callable[[], bool]]


# -- moments ---------------------------------------------------------------------------------------------------------
def after(seconds: float) -> Moment:
    def begin(folder: Path) -> Callable[[], bool]:
        ends = time.monotonic() + seconds
        return lambda: time.monotonic() >= ends

    return begin


def appears(pattern: str, times: int = 1, late: float = 0.0) -> Moment:
    """`late` seconds after a file or folder of the run that matches a pattern has appeared `times` times."""

    def begin(folder: Path) -> Callable[[], bool]:
        seen, there, due = 0, False, 0.0

        def come() -> bool:
            nonlocal seen, there, due
            if due:
                return time.monotonic() >= due
            now = next((folder / RUN).glob(pattern), None) is not None
            seen, there = seen + (now and not there), now
            if seen >= times:
                due = time.monotonic() + late
            return bool(due) and not late

        return come

    return begin


def moments(bench: Bench, subject: Subject, trial: Trial) -> list[Moment]:
    reference, dice = bench.reference(subject), trial.dice
    cache = subject.script == "build_kd_cache"
    part, begun = ("*.part", "shard-00000*") if cache else ("checkpoints/.part_*", "manifest.json")

    def anywhere() -> Moment:
        return after(dice.uniform(0.02, 1.0) * reference.seconds)

    return {
        "before the first checkpoint": [appears(begun, late=dice.uniform(0, 0.1))],
        "while saving": [appears(part, dice.randint(1, 4))],
        "after the last step": [appears(reference.last, late=dice.uniform(0, 0.15))],
        "twice": [anywhere(), anywhere()],
    }.get(trial.what, [anywhere()])


# -- trials ----------------------------------------------------------------------------------------------------------
def trials(bench: Bench) -> Iterator[Trial]:
    special = ("before the first checkpoint", "while saving", "after the last step", "twice")
    for subject in bench.chosen(SUBJECTS):
        for what in (*(f"anywhere {n}" for n in range(UNIFORM)), *special):
            yield Trial(KILL, subject.name, what, killed)
        for what in (*(f"anywhere {n}" for n in range(UNIFORM)), "while saving", "after the last step"):
            yield Trial(TERM, subject.name, what, stopped)
        for what in ("at the start", "in the middle"):
            yield Trial(TWO, subject.name, what, doubled)
    for subject in bench.chosen(WORKERS):
        for kind, how in ((KILL, killed), (TERM, stopped)):
            for number in range(2):
                yield Trial(kind, subject.name, f"anywhere {number}", how)
    for subject in bench.chosen(PROGRAMS):
        yield Trial(TERM, subject.name, "while saving", stopped)


def killed(bench: Bench, folder: Path, trial: Trial) -> str:
    subject = BY_NAME[trial.subject]
    bench.prepare(subject, folder)
    for moment in moments(bench, subject, trial):
        process = subject.start(folder)
        process.until(moment(folder))
        process.send(signal.SIGKILL)
        if (ended := process.wait()).code not in (0, 137):
            raise Unexpected(f"exit code {ended.code}: {said(ended)}")
        if subject in WORKERS:
            time.sleep(3)  # the workers notice that the process that started them is gone, and end
    return finish(bench, subject, folder)


def stopped(bench: Bench, folder: Path, trial: Trial) -> str:
    """Send SIGTERM twice: the exit code is 0, or 143 if training has not begun."""
    subject = BY_NAME[trial.subject]
    bench.prepare(subject, folder)
    (moment,) = moments(bench, subject, trial)
    process = subject.start(folder)
    process.until(moment(folder))
    process.send(signal.SIGTERM)
    time.sleep(0.05)
    process.send(signal.SIGTERM)
    ended = process.wait()
    metrics = folder / RUN / "metrics.jsonl"
    begun = metrics.exists() and metrics.stat().st_size > 0
    if ended.code and (ended.code != 143 or begun):
        raise Unexpected(f"exit code {ended.code}{' in training' if begun else ''}: {said(ended)}")
    return finish(bench, subject, folder)


def doubled(bench: Bench, folder: Path, trial: Trial) -> str:
    subject = BY_NAME[trial.subject]
    bench.prepare(subject, folder)
    first = subject.start(folder)
    begun = ".lock" if subject.script == "build_kd_cache" else "manifest.json"
    first.until(appears(begun if trial.what == "at the start" else f"{subject.late}*")(folder))
    first.send(signal.SIGSTOP)  # so that it is still running when the second one starts
    try:
        check_refusal(subject.start(folder, log="second").wait(), RUN)
    finally:
        first.send(signal.SIGCONT)
        ended = first.wait()
    if ended.code:
        raise Unexpected(f"the first process ended with exit code {ended.code}: {said(ended)}")
    return finish(bench, subject, folder)  # the run is already finished
