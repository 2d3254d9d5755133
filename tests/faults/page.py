"""Writes docs/reliability.md from the results of the trials."""

import os
import platform
from collections import Counter
from pathlib import Path

from qat_lora.backend.git import revision

HEAD = """# What a run survives

Made by `make test-faults`: {count} trials at commit {commit}, on {machine}.

Each trial does one kind of damage to a small run of one script, repeats the same command (with `--resume auto`), and
compares the result with that of an undisturbed run. "The same" means equal tensors, equal lines in metrics.jsonl and
equal texts, apart from times and memory.

## Guarantees

- **Killed at any moment** (kill -9, out of memory): the same command with `--resume auto` continues from the last
  checkpoint and gives the result of an uninterrupted run, bit for bit on the CPU and on a GPU.
- **SIGTERM** finishes the step, saves and exits with code 0; a second one changes nothing. Before training begins there
  is nothing to save, so the process ends at once with code 143.
- **A damaged or missing file**: a damaged checkpoint is replaced by the one before it, and the files that a run depends
  on are restored from the copies in its checkpoints. If neither is possible, the command changes nothing and ends with
  exit code 2 and one line that names the file: put the file back and resume.
- **A changed input** (model, cache, data, preset) is noticed when a run is resumed, and refused by name if it would
  change a result. When data is read for the first time, there is nothing to compare it with.
- **A full disk or a read-only folder**: exit code 2 and one line with the path. Existing files are untouched, and the
  command resumes once there is room. A plot that cannot be drawn only causes a warning.
- **Two processes in one folder**: the second is refused, and the first is not disturbed.
- **Pickles** may hold only tensors; all others are refused. Code in them never runs.
- **Readers** (export, report, plots, verdicts, completions) check a finished run's files against checksums.json, and
  best.pt and adapters against their own checksums.

A resumed run may change options that do not belong to its identity: the device, the number of workers, how the rows of
an update are split, how often to log, evaluate and save, and how many checkpoints to keep. Its manifest.json lists what
changed. Other intervals write other lines and may choose another best checkpoint, but train the same weights; another
device or number of workers changes figures by rounding. The precision must stay the same: `--precision auto` is bf16 on
one machine and fp32 on another.

## How to read the table

- *trials*: how often the fault was tried. The moments, bytes and sizes are random, with a seed from the trial's name.
- *same result*: exit code 0, and everything is equal.
- *refused*: exit code 2, and one line that names the file and what to do. All of these trials with a full or read-only
  disk, and a quarter of those with a damaged file, were then resumed without the fault and gave the same result.
- *lost*: exit code 0 and a different result. *unexpected*: anything else, such as a traceback. Both must be 0, or
  `make test-faults` fails and prints the trials.

Commands are forked from a process that has already imported everything, except for "two workers" and "its own
interpreter", which start as a user would start them. Full and read-only disks are small file systems in memory{disks}.

On one NVIDIA H100 (fp32, torch 2.11, transformers 5.17, commit be36990), kill -9 and SIGTERM were tried on everything
that trains in one process: all 126 trials gave the same result, bit for bit.

    python tests/faults/fault_table.py --device cuda --only "kill -9/|SIGTERM/" --jobs 8 \\
        --subject "^(teacher cache|QAT|recovery, KD|recovery, SFT|legal SFT|legal SFT, int4|GRPO|reservoir|puzzles)$"

"""
NO_DISKS = "; this machine cannot mount any, so they were left out"


def page(lines: list[dict]) -> str:
    disks = any(line["kind"] == "full disk" for line in lines)
    head = HEAD.format(commit=revision(), machine=machine(), count=f"{len(lines):,}", disks="" if disks else NO_DISKS)
    return head + table(lines) + "\n"


def machine() -> str:
    names = [line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
    return f"{os.cpu_count()} cores ({names[0] if names else platform.machine()}, {platform.system()})"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


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
