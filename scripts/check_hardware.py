# PYTHON_ARGCOMPLETE_OK
"""Does everything work on this machine's GPUs or TPU chips, and how fast? One call checks it, and writes a report.

    python scripts/check_hardware.py
    python scripts/check_hardware.py --minutes 15 --device cuda
    python scripts/check_hardware.py --list-wheels

Most important first: parity of every experiment with the CPU, host syncs within updates, resuming, all workers together
and one of them killed, speed at the shapes of the presets beside plain fine-tuning, and the quality of a 2-bit student.
On a CPU all of it runs at tiny size, in two to three minutes on two cores. The report names a check that fails, hangs
or loses the device, and the others still run; Ctrl-C leaves a report of what was done. The exit code is 1 if a check
fails.

The folder gets report.md, report.json, results.jsonl (a line as each check ends) and logs/. docs/hardware.md says what
each check proves. No network is needed; --list-wheels lists the packages to bring to a machine that has its own torch
and transformers.
"""

from dataclasses import dataclass

from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import ScriptConfig


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    minutes: float = opt.run(8.0, "time limit of all checks together", above=0, at_most=24 * 60)
    output_dir: str | None = opt.run(None, "folder for the report [runs/hardware/ and the time]")
    list_wheels: bool = opt.run(False, "list the packages to bring to a machine without a network, then stop")


if __name__ == "__main__":
    check_command_line(Config, "check_hardware", __doc__)  # before the imports that take seconds

import importlib.metadata
import re
import sys
from datetime import UTC, datetime
from pathlib import Path

from qat_lora.backend import resolve, tpu_chips
from qat_lora.errors import ROOT, UserError
from qat_lora.hardware.checks import CHECKS
from qat_lora.hardware.runner import Runner
from qat_lora.run.console import say

OWN = {"torch", "torch_xla", "transformers"}  # a machine's own versions are used
UNUSED = {"datasets", "fsspec", "gradio"}  # which no check needs


def main(cfg: Config) -> None:
    if cfg.precision != "auto" or cfg.seed:
        raise UserError("--precision and --seed do not apply to check_hardware, whose checks set their own; omit them")
    if cfg.list_wheels:
        return list_wheels()
    kind = resolve(cfg.device)
    device = "tpu" if kind == "xla" and tpu_chips() else kind
    size = "tiny" if kind == "cpu" or (kind == "xla" and not tpu_chips()) else "real"
    slower = 4 if device == "tpu" else 1  # each new shape is compiled
    limits = {name: (check.stage, slower * check.limit) for name, check in CHECKS.items() if size in check.sizes}
    if cfg.dry_run:
        return say(f"{device}, {size} size: {', '.join(limits)}")
    folder = Path(cfg.output_dir or ROOT / "runs" / "hardware" / f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}").absolute()
    if (folder / "results.jsonl").exists():
        raise UserError(f"--output-dir {folder} already holds a report; give another folder")
    say(f"{device}, {size} size, {len(limits)} checks in at most {cfg.minutes:g} minutes → {folder}")
    passed = Runner(folder, device, size, 60 * cfg.minutes, limits).run()
    say(f"report  {folder / 'report.md'}")
    if not passed:
        sys.exit("error: some checks failed; the report begins with them")


def list_wheels() -> None:
    """Print the packages that a machine with its own torch and transformers needs, with their sizes when installed."""
    total, names = 0.0, []
    for file in ("requirements.txt", "requirements-model.txt"):
        for line in (ROOT / file).read_text(encoding="utf-8").splitlines():
            if (match := re.match(r"([\w-]+)==([\w.]+)", line)) and match[1] not in OWN | UNUSED:
                size = installed_size(match[1])
                names.append(match[0])
                total += size
                say(f"{match[0]:28} {size:6.1f} MB" if size else f"{match[0]:28} not installed here")
    say(f"{'together':28} {total:6.1f} MB\n")
    say(f"python -m pip download --no-deps --only-binary=:all: --dest wheels {' '.join(names)}")
    say("python -m pip install --no-index --no-deps wheels/*.whl   # there; leave out what it has")


def installed_size(package: str) -> float:
    """MB of an installed package's files; 0 if it is not installed."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return 0.0
    return sum(file.size or 0 for file in files) / 1e6


if __name__ == "__main__":
    run_script(main, Config, "check_hardware", __doc__)
