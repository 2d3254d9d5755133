"""Runs the checks within a time limit, and writes the report as results come."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from qat_lora.errors import ROOT
from qat_lora.hardware.report import Result, write_report
from qat_lora.run.console import say

STARTING, BETWEEN, ENDING = 120, 30, 5  # seconds to start a process, between two checks, and for the report


class Runner:
    """Runs the checks in `limits`, {name: (stage, most seconds)}, in order, while time is left. A check that fails in a
    way that may harm the others, ends its process or takes too long costs only itself.

    folder: of the report; device, size: see `place.Machine`; seconds: for everything.
    """

    def __init__(self, folder: Path, device: str, size: str, seconds: float, limits: dict[str, tuple[str, float]]):
        self.folder, self.device, self.size, self.seconds, self.limits = folder, device, size, seconds, limits
        self.deadline = time.monotonic() + seconds - ENDING
        self.results = {name: Result(name, stage) for name, (stage, _) in limits.items()}
        (folder / "logs").mkdir(parents=True, exist_ok=True)

    def run(self) -> bool:
        """Returns whether no check failed. Ctrl-C and SIGTERM end the running check, and raise KeyboardInterrupt once
        the report says what was done."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        left = f"no time was left of {self.seconds / 60:g} minutes"
        try:
            while (waiting := self._waiting()) and time.monotonic() < self.deadline:
                stage = self.limits[waiting[0]][0]  # a process each: scripts need the device that other checks hold
                self._run_some([name for name in waiting if self.limits[name][0] == stage])
        except KeyboardInterrupt:
            left = "stopped"
            raise
        finally:
            for name in self._waiting():
                self.results[name].result, self.results[name].why = "not run", left
            self._report()
        return all(result.result != "failed" for result in self.results.values())

    def _waiting(self) -> list[str]:
        return [name for name, result in self.results.items() if not result.result]

    def _report(self) -> None:
        write_report(self.folder, self.device, self.size, list(self.results.values()))

    def _run_some(self, names: list[str]) -> None:
        """Run checks in one process until it ends or one of them has taken too long."""
        file, log = self.folder / "results.jsonl", self.folder / "logs" / "checks.txt"
        place = file.stat().st_size if file.exists() else 0
        running, since, limit, is_open = names[0], time.monotonic(), float(STARTING), False

        def read() -> None:
            nonlocal place, running, since, limit, is_open
            found, place = _new_lines(file, place)
            for line in found:
                running, since, limit = line["check"], time.monotonic(), self.limits[line["check"]][1]
                is_open = "result" not in line
                if not is_open:
                    self.results[running].take(line)
                    say(str(self.results[running]))
                    self._report()
                    running, limit = next((name for name in names if not self.results[name].result), ""), BETWEEN

        def fail(why: str) -> None:
            result = self.results[running]
            result.result, result.why, result.seconds = "failed", why, time.monotonic() - since
            say(str(result))
            self._report()

        environment = os.environ | {"HF_HUB_OFFLINE": "1"}
        if self.size == "tiny":  # several threads would mostly wait for each other
            environment["OMP_NUM_THREADS"] = "1"
        until = time.time() + self.deadline - time.monotonic()
        words = [str(self.folder), self.device, self.size, str(until), *names]
        with open(log, "ab") as output:
            child = subprocess.Popen(
                [sys.executable, "-m", "qat_lora.hardware.checks", *words], cwd=ROOT, stdout=output, stderr=output,
                start_new_session=True, env=environment,
            )  # fmt: skip
            try:
                while child.poll() is None and time.monotonic() < self.deadline:
                    read()
                    if time.monotonic() - since > limit:
                        if is_open or limit == STARTING:  # otherwise it hangs between two checks
                            fail(f"took longer than {limit:.0f} s")
                        return
                    time.sleep(0.05)
            finally:
                code = child.poll()
                _end(child)
                read()
        if running and (code or (code == 0 and is_open)):
            fail(f"its process ended with exit code {code}: {_last_line(log)}")


def _end(child: subprocess.Popen) -> None:
    """End a process with everything that it started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _new_lines(file: Path, place: int) -> tuple[list[dict], int]:
    """Whole lines of a file from byte `place` on, and the next place."""
    if not file.exists():
        return [], place
    with open(file, "rb") as opened:
        opened.seek(place)
        text = opened.read()
    text = text[: text.rfind(b"\n") + 1]
    return [json.loads(line) for line in text.splitlines()], place + len(text)


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "it printed nothing"
