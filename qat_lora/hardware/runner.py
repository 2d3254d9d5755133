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


def run_checks(folder: Path, device: str, size: str, seconds: float, limits: dict[str, tuple[str, float]]) -> bool:
    """Run the checks in `limits`, {name: (stage, most seconds)}, in order, while time is left; returns whether none
    failed. A check that fails in a way that may harm the others, ends its process or takes too long costs only itself.

    Ctrl-C and SIGTERM end the running check; the report then says what was done.
    """
    deadline, results = (
        time.monotonic() + seconds - ENDING,
        {name: Result(name, stage) for name, (stage, _) in limits.items()},
    )
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    stopped = False
    try:
        while waiting := [name for name, result in results.items() if not result.result]:
            if time.monotonic() > deadline:
                break
            stage = limits[waiting[0]][0]  # a process each: scripts need the device that the other checks hold
            names = [name for name in waiting if limits[name][0] == stage]
            _run_some(folder, device, size, names, results, limits, deadline)
    except KeyboardInterrupt:
        stopped = True
    for result in results.values():
        if not result.result:
            result.result, result.why = (
                "not run",
                "stopped" if stopped else f"no time was left of {seconds / 60:g} minutes",
            )
    write_report(folder, device, size, list(results.values()))
    if stopped:
        raise KeyboardInterrupt
    return all(result.result != "failed" for result in results.values())


def _run_some(folder, device, size, names, results: dict[str, Result], limits, deadline) -> None:
    """Run checks in one process until it ends or one of them has taken too long."""
    file, until = folder / "results.jsonl", time.time() + deadline - time.monotonic()
    place = file.stat().st_size if file.exists() else 0
    running, since, limit, is_open = names[0], time.monotonic(), float(STARTING), False

    def read() -> None:
        nonlocal place, running, since, limit, is_open
        found, place = _new_lines(file, place)
        for line in found:
            running, since, limit = line["check"], time.monotonic(), limits[line["check"]][1]
            is_open = "result" not in line
            if not is_open:
                limit = BETWEEN
                results[running].take(line)
                say(str(results[running]))
                write_report(folder, device, size, list(results.values()))
                running = next((name for name in names if not results[name].result), "")

    def fail(result: Result, why: str) -> None:
        result.result, result.why, result.seconds = "failed", why, time.monotonic() - since
        say(str(result))
        write_report(folder, device, size, list(results.values()))

    environment = os.environ | {"HF_HUB_OFFLINE": "1"}
    if size == "tiny":  # several threads would mostly wait for each other
        environment["OMP_NUM_THREADS"] = "1"
    with open(folder / "logs" / "checks.txt", "ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "qat_lora.hardware.checks", str(folder), device, size, str(until), *names],
            cwd=ROOT, stdout=log, stderr=log, start_new_session=True, env=environment,
        )  # fmt: skip
        try:
            while child.poll() is None and time.monotonic() < deadline:
                read()
                if time.monotonic() - since > limit:
                    if is_open or limit == STARTING:  # otherwise it hangs between two checks
                        fail(results[running], f"took longer than {limit:.0f} s")
                    return
                time.sleep(0.05)
        finally:
            code = child.poll()
            _end(child)
            read()
    if running and (code or (code == 0 and is_open)):
        fail(results[running], f"its process ended with exit code {code}: {_last_line(folder)}")


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


def _last_line(folder: Path) -> str:
    lines = (folder / "logs" / "checks.txt").read_text(errors="replace").strip().splitlines()
    return lines[-1][:200] if lines else "it printed nothing"
