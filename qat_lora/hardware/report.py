"""The report of a hardware check: report.md for people, report.json for programs."""

import functools
import json
import math
import platform
import shutil
import subprocess
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from qat_lora.errors import installed_version
from qat_lora.hosts.revision import revision
from qat_lora.run.files import write_atomically

PACKAGES = ("torch", "transformers", "peft", "datasets", "triton", "torch_xla", "libtpu", "numpy")
COLUMNS = ("ms", "tokens/s", "MFU", "peak GB", "dry run's estimate GB", "plain ms", "plain tokens/s", "step / plain",
           "time by kernel")  # fmt: skip


@dataclass
class Result:
    """One check. result: passed, failed, skipped or not run, and empty while it is open; why: the reason's first
    line."""

    check: str
    stage: str
    result: str = ""
    why: str = ""
    figures: dict[str, float | str] = field(default_factory=dict)
    seconds: float = 0.0

    def take(self, line: dict) -> None:
        self.result, self.why = line["result"], line["why"]
        self.figures, self.seconds = line["figures"], line["seconds"]

    @property
    def shown(self) -> str:
        """The reason or, without one, the figures."""
        return self.why or ", ".join(f"{name} {number(value)}" for name, value in self.figures.items())

    def __str__(self):
        return f"{self.result:8}{self.check:28}{self.seconds:6.1f} s   {self.shown}".rstrip()


def number(value: float | str) -> str:
    if isinstance(value, str) or not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"


@functools.cache
def facts(device: str, size: str) -> dict[str, str]:
    """The machine, its driver and the versions of the packages that matter."""
    found = {
        "device": device, "size": size, "commit": revision(), "time": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "machine": f"{platform.machine()}, {platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }  # fmt: skip
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
        with suppress(subprocess.TimeoutExpired):  # a lost GPU may never answer
            said = subprocess.run(query, capture_output=True, text=True, timeout=10).stdout
            found["GPUs"] = "; ".join(said.split("\n")).strip("; ")
    return found | {package: installed_version(package) or "not installed" for package in PACKAGES}


def write_report(folder: Path, device: str, size: str, results: list[Result]) -> None:
    """Write FOLDER/report.json and report.md."""
    about = facts(device, size)
    content = {"facts": about, "results": [asdict(result) for result in results]}
    write_atomically(folder / "report.json", lambda file: file.write(json.dumps(content, indent=1).encode()))
    write_atomically(folder / "report.md", lambda file: file.write(page(about, results).encode()))


def page(about: dict[str, str], results: list[Result]) -> str:
    """The report as Markdown: failures first, then every check, then the speeds as a table."""
    count = {kind: sum(result.result == kind for result in results) for kind in ("passed", "failed", "skipped")}
    rest = len(results) - sum(count.values())
    lines = [f"# Hardware check: {about['device']}, {about['size']} size", ""]
    lines += [f"{count['passed']} passed, {count['failed']} failed, {count['skipped']} skipped, {rest} not run.", ""]
    lines += [f"- {name}: {value}" for name, value in about.items()] + [""]
    if failed := [result for result in results if result.result == "failed"]:
        lines += ["## Failed", "", *(f"- **{result.check}**: {result.why}" for result in failed), ""]
    lines += ["## Checks", "", "| check | result | seconds | figures |", "|---|---|---:|---|"]
    for result in results:
        if result.stage == "speed" and result.result == "passed":
            continue
        lines.append(f"| {result.check} | {result.result or 'not run'} | {result.seconds:.1f} | {result.shown} |")
    if timed := [result for result in results if result.stage == "speed" and result.result == "passed"]:
        head = f"| experiment | phase | {' | '.join(COLUMNS)} |"
        lines += ["", "## Speed", "", head, f"|---|---|{'---:|' * len(COLUMNS)}"]
        for result in timed:
            cells = [number(result.figures[name]) if name in result.figures else "" for name in COLUMNS]
            lines.append(
                f"| {result.check.removeprefix('speed: ')} | {result.figures['phase']} | {' | '.join(cells)} |"
            )
    return "\n".join(lines) + "\n"
