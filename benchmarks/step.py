"""The headline ratios at common vocabulary sizes: cache building, QAT, recovery, SFT and GRPO.

    USE_TORCH_XLA=0 PYTHONPATH=.venv/peers python benchmarks/step.py
    python benchmarks/step.py --models qwen3-0.6b --parts qat,head --steps 9

The models have published widths and random weights (benchmarks/shapes.py), because speed does not depend on the values.
Trained models have as many layers as fit into memory, the teacher of `building` all of them. Each part runs in its own
process, where its two sides alternate: building, qat, recovery and head in benchmarks/qat_step.py, and, against TRL,
sft and grpo in benchmarks/sft_step.py and benchmarks/grpo_step.py. Parts with results of this commit in results.jsonl
of --output-dir are not measured again. Everything takes an hour on two cores, on which nothing else should run.
"""

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import shapes

from qat_lora.errors import UserError
from qat_lora.hosts.revision import revision
from qat_lora.run.command_line import run_script
from qat_lora.run.options import ScriptConfig, option

HERE = Path(__file__).resolve().parent
COMMANDS = {  # part → benchmark and its options
    "building": "qat_step --parts building",
    "qat": "qat_step --parts qat",
    "recovery": "qat_step --parts recovery",
    "head": "qat_step --parts head",
    "sft": "sft_step --memory-steps 0",
    "grpo": "grpo_step",
}
RATIO = re.compile(r"^(.+?): (\d+\.\d+) \((\d+\.\d+)–(\d+\.\d+)(?:; (.*))?\)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    models: str = option(",".join(shapes.CONFIGS), "names in benchmarks/shapes.py")
    parts: str = option(",".join(COMMANDS), "parts to measure, see above")
    steps: int = option(7, "timed pairs per ratio")
    output_dir: str = option("runs/bench_step", "folder for the models and the results")


def main(cfg: Config) -> None:
    models, parts = cfg.models.split(","), cfg.parts.split(",")
    for flag, given, known in (("--models", models, shapes.CONFIGS), ("--parts", parts, COMMANDS)):
        for name in given:
            if name not in known:
                raise UserError(f"{flag} {name!r} is not one of {', '.join(known)}")
    out, now = Path(cfg.output_dir), revision()
    print(f"commit {now}, {len(models)} models × {len(parts)} parts → {out}", flush=True)
    if cfg.dry_run:
        return
    out.mkdir(parents=True, exist_ok=True)
    results = out / "results.jsonl"
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()] if results.exists() else []
    for model in models:
        for part in parts:
            whole = part == "building" and model in shapes.FEWER
            folder = out / "models" / (f"{model}-whole" if whole else model)
            if not (folder / "tokenizer.json").exists():  # written last
                shapes.make_model(model, folder, whole)
            if not any((row["model"], row["part"], row["commit"]) == (model, part, now) for row in rows):
                rows += [{"model": model, "part": part, "commit": now, **row} for row in measured(cfg, part, folder)]
                results.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(table([row for row in rows if row["commit"] == now]))


def measured(cfg: Config, part: str, folder: Path) -> list[dict]:
    """Run a part; return the ratios that it prints."""
    script, *words = COMMANDS[part].split()
    command = [sys.executable, str(HERE / f"{script}.py"), *words, "--model", str(folder), "--steps", str(cfg.steps)]
    command += ["--device", cfg.device, "--precision", cfg.precision, "--seed", str(cfg.seed)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    print(done.stdout, flush=True)
    found = RATIO.findall(done.stdout)
    if done.returncode or not found:
        raise UserError(f"{part} printed no ratio for {folder.name}; see its output above")
    names = ("what", "median", "least", "most", "seconds")
    return [dict(zip(names, (what, float(mid), float(low), float(high), took))) for what, mid, low, high, took in found]


def table(rows: list[dict]) -> str:
    """A Markdown table with one row per ratio and one column per model."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    heads = [f"{name} ({shapes.CONFIGS[name][1]['vocab_size']:,})" for name in models]
    lines = ["| ratio | " + " | ".join(heads) + " |", "|---|" + "---:|" * len(models)]
    for what in dict.fromkeys(row["what"] for row in rows):
        cells = {row["model"]: row for row in rows if row["what"] == what}
        texts = [
            f"{cells[m]['median']:.2f} ({cells[m]['least']:.2f}–{cells[m]['most']:.2f})" if m in cells else ""
            for m in models
        ]
        lines.append(f"| {what} | " + " | ".join(texts) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    run_script(main, Config, "step", __doc__)
