"""Updates the figures in docs/reliability.md from the results of the trials; its text stays."""

import os
import platform
import re
from collections import Counter
from pathlib import Path

from qat_lora.hosts.revision import revision

MADE = "Made by `make test-faults`: "
DISKS = "Full and read-only disks are small file systems in memory"
NO_DISKS = "; this machine cannot mount any, so they were left out"


def page(text: str, lines: list[dict]) -> str:
    """The page `text` with the figures of these trials. Raises ValueError if a place for one of them is missing."""
    disks = any(line["kind"] == "full disk" for line in lines)
    for pattern, figures in (
        (f"^{MADE}.*$", f"{MADE}{len(lines):,} trials at commit {revision()}, on {machine()}."),
        (rf"{DISKS}(; [^.]*)?\.", f"{DISKS}{'' if disks else NO_DISKS}."),
        (r"^\| fault \|(.*\n)*", table(lines) + "\n"),
    ):
        text, found = re.subn(pattern, lambda _, figures=figures: figures, text, flags=re.M)
        if found != 1:
            raise ValueError(f"docs/reliability.md has {found} places for {figures[:40]!r}, not one; restore it")
    return text


def machine() -> str:
    cpu = Path("/proc/cpuinfo")
    names = re.findall(r"^model name\s*:(.*)", cpu.read_text() if cpu.exists() else "", re.M)
    return f"{os.cpu_count()} cores ({(names or [platform.machine()])[0].strip()}, {platform.system()})"


def table(lines: list[dict]) -> str:
    """One row per kind of fault and subject."""
    rows = ["| fault | tried on | trials | same result | refused | lost | unexpected |"]
    rows.append("|---|---|---:|---:|---:|---:|---:|")
    counts: dict[tuple[str, str], Counter] = {}
    for line in lines:
        how = line["how"].split(",")[0] if line["outcome"] == "ok" else line["outcome"]
        counts.setdefault((line["kind"], line["subject"]), Counter())[how] += 1
    counts["**all**", ""] = sum(counts.values(), Counter())
    for (kind, subject), found in counts.items():
        shown = [found[name] for name in ("same result", "refused", "lost", "unexpected")]
        rows.append(f"| {kind} | {subject} | {sum(found.values())} | {' | '.join(map(str, shown))} |")
    return "\n".join(rows)
