# PYTHON_ARGCOMPLETE_OK
"""How much did each step recover? A report on a QAT run and on the recovery LoRA trained on its student.

    python scripts/report_recovery.py --qat-run runs/demo/NAME/qat --recovery-run runs/demo/NAME/recovery \\
        --cache-dir caches/demo --output runs/demo/NAME/report.md

Compares, on held-out rows of the cache: the teacher, plain rounding (round-to-nearest with absolute-maximum scales, no
training), the student after the layer-wise stage and after end-to-end QAT, and the student with its LoRA. For each it
measures PPL, the exact KL to the teacher, bits per weight and MB, and lets it continue --prompt. Writes a Markdown file
with these figures, the continuations and the plots of both runs. docs/qat-recovery.md is the runbook.
"""

from dataclasses import dataclass

from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import ScriptConfig


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    qat_run: str | None = opt.model(None, "run directory of train_qat.py")
    recovery_run: str | None = opt.model(None, "run directory of train_recovery_lora.py on that run's best.pt")
    model: str | None = opt.model(None, "the base model of both, if it has moved: a folder, .gguf file or hub name")
    cache_dir: str | None = opt.data(None, "KD cache of both runs, a folder or URL", "--kd-cache-dir")
    rows: int = opt.data(16, "held-out rows to measure", at_least=1)
    prompt: str = opt.data("The most important thing about a dictionary is", "text for every model to continue")
    batch_size: int = opt.run(4, "rows per forward pass", at_least=1)
    max_new_tokens: int = opt.run(32, "tokens per continuation", "--new-tokens", at_least=1)
    output: str | None = opt.run(None, "file to write [report.md beside the QAT run]")


if __name__ == "__main__":
    check_command_line(Config, "report_recovery", __doc__)  # before the imports that take seconds

import copy
import os
import platform
from pathlib import Path

import torch
from torch import nn

from qat_lora.backend import TorchBackend, open_backend
from qat_lora.data.packing import tokenizer_fingerprint
from qat_lora.errors import UserError
from qat_lora.kd.dataset import KDCacheDataset
from qat_lora.lora.adapter import adapter_values, load_adapter
from qat_lora.models.loading import load_model, load_tokenizer
from qat_lora.models.packaged import notes
from qat_lora.quant.init import initialise
from qat_lora.quant.linear import freeze
from qat_lora.quant.student import StudentSpec, bits_per_weight, load_student, megabytes, quantize, read_student
from qat_lora.rl.completion import check_device, complete
from qat_lora.run.buckets import BucketPath, path_of
from qat_lora.run.console import say
from qat_lora.run.files import check_files, read_json, sha256, write_atomically
from qat_lora.run.plots import plot_run
from qat_lora.run.rundir import Run
from qat_lora.train.evaluation import text_figures


def main(cfg: Config) -> None:
    for name in ("qat_run", "recovery_run", "cache_dir"):
        if not getattr(cfg, name):
            raise UserError(f"--{name.replace('_', '-')} is missing; give it")
    qat, recovery = Path(cfg.qat_run), Path(cfg.recovery_run)
    made = read_student(qat / "best.pt", cfg.model)
    tokenizer = load_tokenizer(made["model"])
    heldout = KDCacheDataset(cfg.cache_dir, "heldout", tokenizer=tokenizer_fingerprint(tokenizer))
    check_same_experiment(qat, recovery, cfg)
    check_device(cfg.device)
    if cfg.dry_run:
        return
    backend = open_backend(cfg.device, cfg.precision)
    backend.seed(cfg.seed)

    teacher = load_model(made["model"])
    last = range(max(0, len(heldout) - cfg.rows), len(heldout))  # training runs pick their best state on the first ones
    tokens = torch.stack([heldout[i]["tokens"] for i in last])
    seconds = stage_seconds(qat, recovery, path_of(cfg.cache_dir) / "summary.json")
    # BOS is context and not scored; if it is also the EOS, it ends a document and is scored.
    given = None if heldout.spec is None or heldout.spec.bos in (-1, heldout.spec.eos) else heldout.spec.bos
    rows, texts = [], []
    for name, model in models(teacher, made, qat, recovery):
        say(f"measuring {name}")
        rows.append([name, *measure(model, teacher, tokens, given, backend, cfg.batch_size), seconds.get(name, "")])
        texts.append((name, complete(model, tokenizer, cfg.prompt, max_new_tokens=cfg.max_new_tokens)))
        del model
    pictures = [plot_run(run) for run in (qat, recovery)]
    output = Path(cfg.output) if cfg.output else qat.parent / "report.md"
    facts = read_json(qat / "manifest.json") | {
        "measured on": str(backend),
        "shape": tokens.shape,
        "shared": max(0, max(map(chosen_on, (qat, recovery))) - last.start),
    }
    text = report(cfg, made, facts, rows, texts, pictures, output)
    write_atomically(output, lambda file: file.write(text.encode()))
    say(table(rows))
    say(f"report in {output}")


def chosen_on(run: Path) -> int:
    """The number of held-out rows, from the first on, on which a run picked its best state."""
    return max(line["heldout_rows"] for line in Run(run, resumed=False).metrics() if "heldout_rows" in line)


def check_same_experiment(qat: Path, recovery: Path, cfg: Config) -> None:
    """Raise UserError if adapter, student and cache do not belong together."""
    for run in (qat, recovery):
        check_files(run, "manifest.json", "config.yaml", "summary.json", "metrics.jsonl", "layerwise.pt")
    made, used = read_json(qat / "manifest.json"), read_json(recovery / "manifest.json")
    if used.get("student") != sha256(qat / "best.pt"):
        raise UserError(f"{recovery} was not trained on {qat}/best.pt; give the recovery run of that student")
    if made.get("cache") != KDCacheDataset(cfg.cache_dir, "train", preload=False).fingerprint:
        raise UserError(f"{qat} was not trained on the cache {cfg.cache_dir}; give the --cache-dir of that run")


def models(teacher: nn.Module, made: dict, qat: Path, recovery: Path):
    """Yield (name, frozen model) for each row of the table; the teacher's weights are copied, never changed."""
    yield "teacher", teacher
    nearest = quantize(copy.deepcopy(teacher), StudentSpec(**made["spec"]))
    initialise(nearest, search=False)
    freeze(nearest)
    yield "round-to-nearest", nearest
    if (qat / "layerwise.pt").exists():
        yield "layer-wise", load_student(qat / "layerwise.pt", base=copy.deepcopy(teacher))[0]
    student, _ = load_student(qat / "best.pt", base=copy.deepcopy(teacher))
    yield "QAT", student
    yield "+ LoRA", load_adapter(student, recovery / "adapter", qat / "best.pt")


def measure(
    model: nn.Module, teacher: nn.Module, tokens, given: int | None, backend: TorchBackend, batch_size: int
) -> list[str]:
    """PPL, KL, bits per weight and MB, as text."""
    backend.place(model)
    backend.place(teacher)
    scored = torch.full((len(tokens),), tokens.shape[1] - 1)
    figures = text_figures(model.eval(), tokens, scored, backend, batch_size, teacher, given)
    values = adapter_values(model)
    ppl = f"{figures['ppl']:.1f}" if figures["ppl"] < 1e5 else f"{figures['ppl']:.1e}"
    return [ppl, f"{figures['kl']:.3f}", f"{bits_per_weight(model, values):.2f}", f"{megabytes(model, values):.0f}"]


def stage_seconds(qat: Path, recovery: Path, cache: Path | BucketPath) -> dict[str, str]:
    """Seconds that each row's own stage took, from the summary.json of the runs and, if there is one, of the cache."""
    summaries = [read_json(run / "summary.json") for run in (qat, recovery)]
    for run, summary in zip((qat, recovery), summaries):
        if summary.get("status") != "finished":
            raise UserError(f"{run} is {summary.get('status')}, not finished; run its command again with --resume auto")
    stages = summaries[0]["seconds"] | summaries[1]["seconds"]
    names = {"layers": "layer-wise", "qat": "QAT", "recovery": "+ LoRA"}
    seconds = {names[stage]: f"{value:.0f}" for stage, value in stages.items()}
    return seconds | ({"teacher": f"{read_json(cache)['seconds']:.0f} (cache)"} if cache.exists() else {})


def table(rows: list[list[str]]) -> str:
    head = ["", "PPL", "KL to the teacher", "bits per weight", "MB", "seconds"]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def report(cfg, made: dict, facts: dict, rows, texts, pictures, output: Path) -> str:
    """The report as Markdown. facts: the QAT run's manifest and how the rows were measured."""
    spec = StudentSpec(**made["spec"])
    count, length = facts["shape"]
    shared = min(facts["shared"], count)
    chosen = f", {shared} of which are among these" if shared else ", none of which are among these"
    commit = facts["git"] + (" with changes" if facts["dirty"] else "")
    note = f"Note: {remark}.\n" if (remark := notes(made["model"])) else ""
    said = {name: " ".join(text.split()) or "(nothing)" for name, text in texts}
    samples = "\n".join(f"**{name}**:\n\n> {cfg.prompt} **…** {text}\n" for name, text in said.items())
    images = "\n".join(f"![{p.parents[1].name}]({os.path.relpath(p, output.parent)})" for p in pictures)
    return f"""# {made["model"]}, {spec}

{table(rows)}

PPL and the exact KL(teacher‖model), in nats/token, over the last {count} held-out rows of {length} tokens of
{cfg.cache_dir}; the runs picked their best state on the first held-out rows{chosen}.
Bits per weight count codes, scales and adapter at their stored size, divided by the quantised weights. MB is the whole
model, with 16 bits for each weight that is not quantised. Seconds are those of each row's own stage: training steps, or
the teacher's pass over the text.
{note}
Measured on {facts["measured on"]}, {platform.machine()}, commit {commit}, seed {facts["seed"]}.

## What each model writes

{samples}
## The two runs

{images}
"""


if __name__ == "__main__":
    run_script(main, Config, "report_recovery", __doc__)
