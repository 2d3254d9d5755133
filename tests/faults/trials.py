"""What all trials share: reference runs, interrupted runs to damage, and checks of how a command ended."""

import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import compare
import subjects
from server import Ended
from subjects import BY_NAME, FINISHED, OUT, RUN, Subject, succeed

# The fix that a refusal gives after saying what is wrong.
ADVICE = re.compile(
    r"; |: (give|use|put|copy|delete|check|choose)|\b(give|put|copy|delete|build|train|start|correct|convert)\b"
)


class Lost(Exception):
    """The command ended as if nothing were wrong, but with a different result."""


class Unexpected(Exception):
    """The command ended in a way that is not allowed."""


@dataclass(frozen=True)
class Trial:
    """One trial: run(bench, folder, trial) runs it in a folder that does not exist yet, and returns its outcome
    in words."""

    kind: str
    subject: str
    what: str
    run: Callable[["Bench", Path, "Trial"], str]

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.subject}/{self.what}"

    @property
    def dice(self) -> random.Random:
        """A generator for this trial alone, the same in every run."""
        return random.Random(self.name)


@dataclass(frozen=True)
class Reference:
    """An uninterrupted run: its result, how long it took, and how much space it needs."""

    result: dict[str, Any]
    seconds: float
    kilobytes: int  # at its peak
    last: str  # the last thing saved, below RUN: checkpoints/step_N, or a shard


class Bench:
    """The folders of all trials: inputs, reference runs, interrupted runs, and a folder for each trial. Folders from
    an earlier call are reused."""

    def __init__(self, base: Path, only: str | None = None):
        """only: a regular expression for the names of the subjects."""
        self.base, self.inputs, self.only = base, base / "inputs", only
        self.references: dict[str, Reference] = {}

    def chosen(self, tried_on: Iterable[Subject]) -> list[Subject]:
        return [subject for subject in tried_on if not self.only or re.fullmatch(self.only, subject.name)]

    def prepare(self, subject: Subject, folder: Path) -> Path:
        """Make a new folder with a copy of everything a subject reads; what it also writes goes into OUT."""
        folder.mkdir(parents=True)
        (folder / OUT).mkdir()
        for name in subject.inputs:
            self.input(name)
            source, within = self.inputs / name, f"{OUT}/{name}"
            target = folder / (within if within in subject.flags else name)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        return folder

    def input(self, name: str) -> None:
        """Make an input, and the inputs it depends on, if it does not exist yet."""

        def make(_: Path) -> None:
            for other in subjects.BEFORE.get(name, ()):
                self.input(other)
            if name in FINISHED:
                self.reference(BY_NAME[FINISHED[name]])
                shutil.rmtree(self.inputs / name, ignore_errors=True)
                made = self.base / "reference" / FINISHED[name] / RUN
                shutil.copytree(made, self.inputs / name, ignore=shutil.ignore_patterns("plots"))
            else:
                subjects.make_input(self.inputs, name)

        self.inputs.mkdir(parents=True, exist_ok=True)
        self._once(self.base / f"input {name}", make)

    def _once(self, folder: Path, make: Callable[[Path], None]) -> Path:
        made = folder.with_name(f"{folder.name}.made")
        if not made.exists():
            shutil.rmtree(folder, ignore_errors=True)
            make(folder)
            made.touch()
        return folder

    def reference(self, subject: Subject) -> Reference:
        """The uninterrupted run."""
        kept = self.base / "reference" / f"{subject.name}.pickle"

        def make(folder: Path) -> None:
            before = used(self.prepare(subject, folder) / OUT)
            process, room = subject.start(folder), before
            while process.alive():
                room = max(room, used(folder / OUT))
                time.sleep(0.005)
            ended = succeed(process.wait(), subject.name)
            found = in_child(lambda: subject.result(folder, ended))
            last = _last(folder / RUN) if subject.trains else ""
            kept.write_bytes(pickle.dumps(Reference(found, ended.seconds, room - before, last)))

        if subject.name not in self.references:
            self._once(kept.with_suffix(""), make)
            self.references[subject.name] = pickle.loads(kept.read_bytes())
        return self.references[subject.name]

    def interrupted(self, subject: Subject, after: str) -> Path:
        """A folder with a run that was killed once the file `after` appeared in its run directory."""

        def make(folder: Path) -> None:
            self.prepare(subject, folder)
            process = subject.start(folder)
            if not process.until(lambda: (folder / RUN / after).exists()):
                raise SystemExit(f"{subject.name} ended before {after}: {process.wait().err[-500:]}")
            process.send(signal.SIGKILL)
            process.wait()

        return self._once(self.base / "interrupted" / f"{subject.name} {after.replace('/', ' ')}", make)


def used(folder: Path) -> int:
    """kB that the files of a folder take on a disk with 4 kB blocks."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # just renamed
                total += -(-os.stat(os.path.join(place, name)).st_size // 4096) * 4
    return total


def in_child(function: Callable[[], Any]) -> Any:
    """The result of function(), computed in a forked child; raises the exception that function() raises."""
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe(duplex=False)

    def compute() -> None:
        try:
            there.send((function(), None))
        except Exception as error:
            there.send((None, error))

    child = fork.Process(target=compute)
    child.start()
    there.close()
    value, error = here.recv()
    child.join()
    if error:
        raise error
    return value


def _last(run: Path) -> str:
    steps = [int(path.name[5:]) for path in run.glob("checkpoints/step_*")]
    return f"checkpoints/step_{max(steps)}" if steps else max(path.name for path in run.glob("shard-*"))


# -- how it may end --------------------------------------------------------------------------------------------------
def finish(bench: Bench, subject: Subject, folder: Path) -> str:
    """Run the command again to its end, and compare its result with the reference."""
    ended = subject.start(folder).wait()
    if ended.code:
        raise Unexpected(f"exit code {ended.code} when resumed: {said(ended)}")
    check_same(bench, subject, folder, ended)
    return "same result"


def check_same(bench: Bench, subject: Subject, folder: Path, ended: Ended) -> None:
    found = compare.difference(subject.result(folder, ended), bench.reference(subject).result)
    if found:
        raise Lost(found)


def check_refusal(ended: Ended, *names: str) -> None:
    """Check for exit code 2 and one line that names one of `names` and the fix."""
    if ended.code != 2:
        raise Unexpected(f"exit code {ended.code}: {said(ended)}")
    lines = ended.err.strip().splitlines()
    if len(lines) != 1 or not lines[0].startswith("error: "):
        raise Unexpected(f"not one line: {said(ended)}")
    if "unexpected error" in lines[0] or "Traceback" in ended.err:
        raise Unexpected(said(ended))
    if names and not any(name in lines[0] for name in names):
        raise Unexpected(f"does not name {names[0]}: {said(ended)}")
    if not ADVICE.search(lines[0]):
        raise Unexpected(f"does not say what to do: {said(ended)}")


def said(ended: Ended) -> str:
    return ended.err.strip()[-500:] or "(nothing)"
