"""docs/reliability.md from how the trials went."""

import os
import platform
from collections import Counter
from pathlib import Path

from qat_lora.backend.git import revision

HEAD = """# What survives what

Made by `make test-faults`: {count} trials at commit {commit}, on {machine}.

Each trial does one kind of damage to a small run of one script, gives the same command again (`--resume auto`), and
compares the result with that of a run that nothing happened to. "The same" means equal tensors, equal lines in
metrics.jsonl and equal texts, apart from times and memory.

## What is promised

- **Killed at any moment** (kill -9, out of memory): the same command with `--resume auto` continues from the
  last checkpoint and gives the result of a run that was never stopped, bit for bit on the CPU and on a GPU.
- **SIGTERM** finishes the step, saves, and exits with code 0; a second one changes nothing. Before training has begun
  there is nothing to save, and the process ends as SIGTERM ends any (143).
- **A damaged or missing file**: a checkpoint is replaced by the one before it, and files that a run relies on come back
  from the copies that its checkpoints keep. Where neither is possible, the command ends with exit code 2 and one line
  that names the file, and has changed nothing: put the file back and resume.
- **An input that has changed** (model, cache, data, preset) is noticed when a run is resumed, and refused by name if it
  would change a result. When data is read for the first time, there is nothing to compare it with.
- **A full disk or a read-only folder**: exit code 2 and one line with the path; what was there before is untouched, and
  with room the command resumes. A picture that cannot be drawn is a warning.
- **Two processes in one folder**: the second is refused, the first is not disturbed.
- **Pickles** hold tensors or are refused. Code in them is never run.
- **Readers** (export, report, plots, verdicts, completions) check a finished run's files against checksums.json,
  best.pt and adapters against their own checksums.

A resumed run may differ in options that are no part of a run's identity: the device and the number of workers, how an
update's rows are split, the intervals of logging, evaluating and saving, how many checkpoints are kept. Its
manifest.json lists what changed. Other intervals give other lines and may choose another best checkpoint, but train the
same weights; another device or number of workers changes figures by rounding. The precision in use has to stay:
`--precision auto` is bf16 on one machine and fp32 on another.

## How to read the table

- *trials*: how often the fault was tried. Moments, bytes and sizes are drawn from a seed of the trial's name.
- *same result*: it ended with exit code 0 and everything equal.
- *refused*: exit code 2 and one line that names the file and what to do. Of these, every trial with a full or read-only
  disk and a quarter of those with a damaged file were then resumed with the fault undone, and gave the same result.
- *lost*: exit code 0 and another result. *unexpected*: anything else, such as a traceback. Both have to be 0:
  otherwise `make test-faults` fails and prints the trials.

Commands are forked from a process that has imported everything, except for "two workers" and "its own interpreter",
which are started as a user would. Full and read-only disks are small file systems in memory{disks}.

On one NVIDIA H100 (fp32, torch 2.11, transformers 5.17, commit be36990) kill -9 and SIGTERM were tried on everything
that trains in one process: all of 126 trials gave the same result, bit for bit.

    python tests/faults/fault_table.py --device cuda --only "kill -9/|SIGTERM/" --jobs 8 \\
        --subject "^(teacher cache|QAT|recovery, KD|recovery, SFT|legal SFT|legal SFT, int4|GRPO|reservoir|puzzles)$"

"""
NO_DISKS = "; this machine lets none be mounted, so they were left out"


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
    """A row for each kind of fault and what it was tried on."""
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
