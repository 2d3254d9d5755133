"""Compiles every TPU preset at full size with the TPU's own compiler, and writes the table in docs/TPU.md.

    python benchmarks/tpu_check.py            # `make tpu-check`
    python benchmarks/tpu_check.py --only v6e1 --chip v6e

Needs no TPU. A graph of a large model takes minutes; results are kept in docs/tpu/compiled.jsonl by the graph's hash,
so an interrupted check continues where it stopped, and only graphs that have changed are compiled again. Exits with 1
if a preset does not fit the chip that it is made for.
"""

import gc
import json
import re
import sys
import time
from dataclasses import dataclass
from typing import Literal

from qat_lora.ahead.aot import CHIPS, KNOWN, Chip, Compiler
from qat_lora.errors import ROOT
from qat_lora.run import options as opt
from qat_lora.run.command_line import run_script
from qat_lora.run.console import say
from qat_lora.run.options import ScriptConfig
from qat_lora.run.scripts import load_script, read_options
from qat_lora.run.tpu import Phase, chips_of, compiled, record, step, table
from qat_lora.train.memory import peak_phase

PAGE = ROOT / "docs" / "TPU.md"
FIGURES = ROOT / "docs" / "tpu" / "presets.json"
PRESETS = {  # name: script, options, the chip that it is made for, the topology
    "recovery v6e1": ("train_recovery_lora", ["--config", "v6e1"], "v6e", "1x1"),
    "qat v6e4": ("train_qat", ["--config", "v6e4"], "v6e", "2x2"),
    "musclebob v5e1": ("train_musclebob_improved", ["--config", "v5e1"], "v5e", "1x1"),
    "legal v5e8": ("train_cot_sft", ["--config", "v5e8"], "v5e", "2x4"),
    "reservoir tpu": ("train_tinystories_reservoir", ["--config", "tpu"], "v5e", "1x1"),
    "athena cfg_pretrain_tpu": ("pretrain", ["--config", "cfg_pretrain_tpu"], "v3", "2x2"),
    "recovery v6e4": ("train_recovery_lora", ["--config", "v6e4"], "v6e", "2x2"),
    "recovery v6e8": ("train_recovery_lora", ["--config", "v6e8"], "v6e", "2x4"),
    "kd cache": (
        "build_kd_cache",
        ["--model", "Qwen/Qwen3-0.6B", "--length", "1024", "--top-k", "128", "--cache-dir", "caches/x"],
        "v6e",
        "1x1",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    only: str | None = opt.run(None, "compile only the presets whose names contain this text [all]")
    chip: Literal["all", *CHIPS] = opt.device("all", "compile for this chip only; all: v5e, v6e and the preset's own")
    jobs: int = opt.run(
        1, "graphs to compile at the same time; one of 28 layers takes 14 GB of the host's memory", at_least=1
    )


def main(cfg: Config) -> None:
    failed, used = [], set()
    for name, (script, words, own, topology) in PRESETS.items():
        if (cfg.only or "") not in name:
            continue
        module = load_script(script)
        for key in [cfg.chip] if cfg.chip != "all" else dict.fromkeys([own, "v5e", "v6e"]):
            chip = CHIPS[key]
            workers = chips_of(topology, chip)
            options = read_options(module, words, workers if workers > 1 else None)
            started = time.monotonic()
            backend = record(module.rehearse, options, workers)
            say(f"\n{name} on {key}:{topology}, recorded in {time.monotonic() - started:.0f} s")
            with Compiler(key, topology, cfg.jobs, KNOWN) as compiler:
                phases = compiled(backend, compiler)
                used |= {compiler.key(graph) for phase in phases for graph in phase.counts}
            say(table(phases, chip))
            _, parts = peak_phase(backend.estimate, backend)
            keep(name, key, topology, workers, phases, chip, sum(parts.values()))
            if key == own and any(phase.refused for phase in phases):
                failed.append(name)
            del backend
            gc.collect()
    write_page()
    if cfg.only is None and cfg.chip == "all":  # results of graphs that no preset has any more
        lines = [line for line in KNOWN.read_text(encoding="utf-8").splitlines() if json.loads(line)["key"] in used]
        KNOWN.write_text("\n".join(lines) + "\n")
    if failed:
        sys.exit(f"error: do not compile or do not fit: {', '.join(failed)}; the table gives the reason")


def keep(name: str, key: str, topology: str, workers: int, phases: list[Phase], chip: Chip, estimate: int) -> None:
    """Store a preset's figures for the page. estimate: a dry run's own, of the peak in bytes."""
    known = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    refused = next((str(phase.refused) for phase in phases if phase.refused), None)
    entry = {"preset": name, "chip": key, "topology": topology, "workers": workers, "refused": refused}
    entry["estimate"] = estimate
    if not refused:
        most, update = max(phases, key=lambda phase: phase.peak), step(phases)
        entry |= {"peak": most.peak, "in": most.name}
        if update:
            seconds = update.seconds(chip)
            entry |= {
                "ms": round(seconds * 1e3, 2), "tokens": update.tokens, "tokens_per_s": round(update.tokens / seconds),
                "tflop": round(update.total("flops") / 1e12, 3), "gb": round(update.total("moved") / 1e9, 2),
                "all_reduces": update.collectives["all-reduce"],
            }  # fmt: skip
    known[f"{name} {key}"] = entry
    FIGURES.parent.mkdir(parents=True, exist_ok=True)
    FIGURES.write_text(json.dumps(known, indent=1) + "\n")


def write_page() -> None:
    """Put the table into docs/TPU.md, between its marks."""
    rows = [
        "| preset | chips | peak HBM of a chip | dry run's estimate | highest in "
        "| update, ms | tokens/s | all-reduces |",
        "|---|---|---:|---:|---|---:|---:|---:|",
    ]
    known = json.loads(FIGURES.read_text(encoding="utf-8")) if FIGURES.exists() else {}
    for entry in sorted(known.values(), key=lambda entry: list(PRESETS).index(entry["preset"])):
        chip = CHIPS[entry["chip"]]
        where = f"{entry['workers']} × {entry['chip']}"
        if entry["refused"]:
            rows.append(f"| {entry['preset']} | {where} | does not fit: {entry['refused']} | | | | | |")
            continue
        peak = f"{entry['peak'] / 1e9:.2f} of {chip.usable / 1e9:.1f} GB"
        ms, rate = (f"{entry['ms']:,.1f}", f"{entry['tokens_per_s']:,}") if "ms" in entry else ("", "")
        ours = f"{entry['estimate'] / 1e9:.2f} GB ({entry['estimate'] / entry['peak'] - 1:+.0%})"
        cells = entry["preset"], where, peak, ours, entry["in"], ms, rate, str(entry.get("all_reduces", ""))
        rows.append(f"| {' | '.join(cells)} |")
    text = PAGE.read_text(encoding="utf-8")
    start, end = "<!-- made by make tpu-check -->\n", "<!-- end -->"
    PAGE.write_text(re.sub(f"{start}.*?{end}", start + "\n".join(rows) + "\n" + end, text, flags=re.DOTALL))


if __name__ == "__main__":
    run_script(main, Config, "tpu_check", __doc__)
