# PYTHON_ARGCOMPLETE_OK
"""Does this machine have what training needs? Checks devices, package versions, hugepages, disk and packaged models.

    python scripts/doctor.py
    python scripts/doctor.py --device tpu

Prints one line per finding: `ok`; `--` if something optional is missing or something recommended is not set; `BAD` if
--device needs something that is missing, with the command that fixes it. The exit code is 1 if anything is BAD, else 0.
"""

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BROKEN = "BAD  python: {}   fix: make setup, or pip install -r requirements.txt and pip install -e ."
try:
    from qat_lora.run.command_line import check_command_line, run_script
    from qat_lora.run.options import ScriptConfig
except ImportError as error:  # the doctor must work where nothing else does
    sys.exit(BROKEN.format(error))


@dataclass(frozen=True)
class Config(ScriptConfig):
    pass


if __name__ == "__main__":
    check_command_line(Config, "doctor", __doc__)  # before the imports that take seconds

try:
    import torch
    from packaging.requirements import Requirement

    from qat_lora.backend import resolve, tpu_chips
    from qat_lora.backend.devices import cpu_has_bf16
    from qat_lora.errors import ROOT, UserError, installed_version
    from qat_lora.models.packaged import EMBEDDED, PACKAGED, packaged_file
except ImportError as error:
    sys.exit(BROKEN.format(error))

HUGEPAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
CHECKPOINT_GB = 10  # the fp32 weights and two moments of Qwen3-0.6B take 7 GB


@dataclass(frozen=True)
class Finding:
    """state: "ok", "--" (optional, missing) or "BAD" (needed, missing); fix: the command that fixes it."""

    state: str
    text: str
    fix: str = ""

    def __str__(self):
        return f"{self.state:3}  {self.text}" + (f"   fix: {self.fix}" if self.fix else "")


def main(cfg: Config) -> None:
    chips = tpu_chips()
    wants_xla = cfg.device in ("tpu", "xla") or (cfg.device == "auto" and bool(chips))
    findings = [
        *machine(),
        *packages(ROOT / "requirements.txt", optional=set() if wants_xla else {"torch_xla"}),
        *packages(ROOT / "requirements-model.txt", optional=set()),
        *torch_pair(wants_xla),
        *accelerators(chips, cfg.device),
        hugepages(HUGEPAGES, bool(chips)),
        disk(Path.cwd()),
        *map(packaged_model, PACKAGED),
        device(cfg.device),
    ]
    for finding in findings:
        print(finding)
    if any(finding.state == "BAD" for finding in findings):
        sys.exit(1)


def machine() -> Iterator[Finding]:
    yield Finding("ok", f"python {platform.python_version()}")
    yield Finding("ok", f"{platform.system()} {platform.release()} {platform.machine()}")
    yield Finding("ok", f"{len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()} cores")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    yield Finding("ok", f"{memory:.0f} GB of memory")
    yield (
        Finding("ok", "CPU supports bf16") if cpu_has_bf16() else Finding("--", "CPU without bf16: training uses fp32")
    )


def packages(requirements: Path, optional: set[str]) -> Iterator[Finding]:
    """Compare a requirements file's pins with what is installed. A version that differs from its pin is only noted."""
    for line in requirements.read_text(encoding="utf-8").splitlines():
        line = line.split("#")[0].strip()
        if not line or line.startswith("-"):
            continue
        pin = Requirement(line)
        if pin.marker and not pin.marker.evaluate():
            yield Finding("--", f"{pin.name}: not available for this platform")
            continue
        found = installed_version(pin.name)
        fix = f"pip install {'--no-deps ' if 'model' in requirements.name else ''}-r {requirements.name}"
        if found is None:
            yield Finding("--" if pin.name in optional else "BAD", f"{pin.name}: not installed", fix)
        elif not pin.specifier.contains(found, prereleases=True):
            yield Finding("--", f"{pin.name} {found}, tested with {pin.specifier}", fix)
        else:
            yield Finding("ok", f"{pin.name} {found}")


def torch_pair(wants_xla: bool) -> Iterator[Finding]:
    """torch_xla is built against one minor version of torch and does not load with another."""
    ours, xla = installed_version("torch"), installed_version("torch_xla")
    if ours is None or xla is None:
        return
    if ours.split(".")[:2] == xla.split(".")[:2]:
        yield Finding("ok", f"torch {ours} and torch_xla {xla} match")
    else:
        state = "BAD" if wants_xla else "--"
        yield Finding(state, f"torch {ours} and torch_xla {xla} do not match", "pip install -r requirements.txt")


def accelerators(chips: list[str], requested: str) -> Iterator[Finding]:
    pjrt = os.environ.get("PJRT_DEVICE")
    if chips:
        yield Finding("ok", f"{len(chips)} TPU chips: {', '.join(chips)}")
        needed = requested in ("auto", "tpu", "xla")
        if installed_version("libtpu") is None:
            yield Finding("BAD" if needed else "--", "libtpu: not installed", "pip install -r requirements-tpu.txt")
    else:
        yield Finding("--", "no TPU chip on the PCI bus")
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    yield Finding("ok", f"{len(gpus)} CUDA devices: {', '.join(gpus)}") if gpus else Finding("--", "no CUDA device")
    yield Finding("ok", f"PJRT_DEVICE={pjrt}") if pjrt else Finding("--", "PJRT_DEVICE is not set")


def hugepages(switch: Path, has_tpu: bool) -> Finding:
    """Recommended, never required: with hugepages the TPU runtime starts and moves data faster."""
    if not switch.is_file():
        return Finding("--", f"transparent hugepages: no {switch} here")
    text = switch.read_text(encoding="utf-8")
    state = text.partition("[")[2].partition("]")[0] or text.strip()
    if state == "always":
        return Finding("ok", "transparent hugepages: always")
    why = "slows down the TPU runtime" if has_tpu else "matters only on TPU v5e and newer"
    return Finding("--", f"transparent hugepages: {state} ({why})", "sudo ./enable_hugepages.sh" if has_tpu else "")


def disk(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free / 1e9
    if free >= CHECKPOINT_GB:
        return Finding("ok", f"{free:.0f} GB free in {folder}")
    text = (
        f"{free:.1f} GB free in {folder}: less than the {CHECKPOINT_GB} GB that checkpoints of the default models take"
    )
    return Finding("--", text, "free some space, or train with --output-dir on another disk")


def packaged_model(name: str) -> Finding:
    try:
        file = packaged_file(name)
    except UserError as error:
        return Finding("BAD" if name == EMBEDDED else "--", *str(error).rsplit("; ", 1))
    return Finding("ok", f"{name}: {file} ({file.stat().st_size / 1e6:.0f} MB)")


def device(requested: str) -> Finding:
    try:
        return Finding("ok", f"--device {requested} selects {resolve(requested)}")
    except UserError as error:
        return Finding("BAD", *str(error).rsplit("; ", 1))


if __name__ == "__main__":
    run_script(main, Config, "doctor", __doc__)
