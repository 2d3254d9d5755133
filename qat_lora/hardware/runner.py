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

STARTING, ENDING = 120, 5  # seconds that a process may take to start, and those kept for the report


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
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    stopped = False
    try:
        while waiting := [name for name, result in results.items() if not result.result]:
            if time.monotonic() > deadline:
                break
            _run_some(folder, device, size, waiting, results, limits, deadline)
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
                results[running].take(line)
                say(str(results[running]))
                write_report(folder, device, size, list(results.values()))
                running = next((name for name in names if not results[name].result), "")

    with open(folder / "logs" / "checks.txt", "ab") as log:
        child = subprocess.Popen(
            [sys.executable, "-m", "qat_lora.hardware.checks", str(folder), device, size, str(until), *names],
            cwd=ROOT, stdout=log, stderr=log, start_new_session=True, env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )  # fmt: skip
        try:
            while child.poll() is None and time.monotonic() < deadline:
                read()
                if running and time.monotonic() - since > limit:
                    return _fail(results[running], f"took longer than {limit:.0f} s")
                time.sleep(0.05)
        finally:
            code = child.poll()
            _end(child)
            read()
    if running and (code or (code == 0 and is_open)):
        _fail(results[running], f"its process ended with exit code {code}: {_last_line(folder)}")


def _fail(result: Result, why: str) -> None:
    result.result, result.why = "failed", why
    say(str(result))


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
