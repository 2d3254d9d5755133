# PYTHON_ARGCOMPLETE_OK
"""How much of the lost quality can a small adapter recover? Trains a LoRA on a frozen low-bit student.

    python scripts/train_recovery_lora.py --checkpoint runs/v2_q4/best.pt --cache-dir caches/text_L256
    python scripts/train_recovery_lora.py --tpu --model Qwen/Qwen3-0.6B --checkpoint runs/v2_q4/best.pt \\
        --kd-cache-dir caches/wikitext103_L1024_K128 --recovery-r 8 --batch-size 4 --accumulation-steps 8
    PJRT_DEVICE=TPU python scripts/train_recovery_lora.py --v2-checkpoint runs/v2_q4/best.pt --mode recover

The student is the best.pt of train_qat.py. --mode kd learns from the KD cache of build_kd_cache.py, sft from chat rows
(loss on completions only), recover from plain text. --anchor-cache adds a KL to the teacher on other text.
metrics.jsonl: loss (cross-entropy against the target), kl (mode kd: loss minus the teacher's entropy), anchor_kl,
grad_norm, lr, tokens, tokens_per_s; held-out figures at every evaluation.
adapter/ holds the adapter with the best held-out figure, in PEFT's own format. docs/qat-recovery.md is the runbook.
Untested on hardware: TPU, CUDA; make check-hardware tests them.
"""

from dataclasses import dataclass
from typing import Literal

from qat_lora.data.options import TextOptions
from qat_lora.kd.options import AnchorOptions
from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import JobConfig
from qat_lora.train.options import TrainOptions

NAME = "train_recovery_lora"


@dataclass(frozen=True, kw_only=True)
class Config(TextOptions, AnchorOptions, TrainOptions, JobConfig):
    checkpoint: str | None = opt.model(
        None, "student: the best.pt of train_qat.py", "--v2-checkpoint", identity="student"
    )
    model: str | None = opt.model(
        None, "the student's base model, if it has moved: a folder, .gguf file or hub name", identity="base"
    )
    lora_r: int = opt.model(8, "rank of the LoRA adapter", "--recovery-r", at_least=1)
    lora_alpha: float | None = opt.model(
        None, "LoRA alpha [the rank]", "--recovery-alpha", above=0, at_most=opt.MOST_WEIGHT
    )
    targets: str = opt.model(
        "auto",
        "layers that get an adapter: auto (all but k_proj), all, attn, mlp, experts, or names separated by commas",
    )
    mlp_only: bool = opt.model(False, "adapt only the MLP layers, whatever --targets is")
    adapter_init: Literal["zero", "error"] = opt.model(
        "zero", "initialisation: zero, or error (the best low-rank approximation of the quantisation error)"
    )
    adapter: str | None = opt.model(
        None, "start from this adapter of the student, of the same rank, alpha and targets", identity="start"
    )
    mode: Literal["kd", "sft", "recover"] = opt.data(
        "kd", "objective: kd (from a cache), sft (chat rows, loss on completions only) or recover (plain text)"
    )
    cache_dir: str | None = opt.data(None, "KD cache for --mode kd, a folder or URL", "--kd-cache-dir", identity="data")
    heldout_fraction: float = opt.data(
        0.1, "share of the text held out for evaluation (modes sft and recover)", **opt.HELDOUT
    )
    max_steps: int = opt.with_default(TrainOptions, "max_steps", 200)


if __name__ == "__main__":
    check_command_line(Config, NAME, __doc__)  # before the imports that take seconds

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from qat_lora.backend import TorchBackend, open_planned, planned_workers
from qat_lora.backend.opening import launch
from qat_lora.backend.sharding import takes_part
from qat_lora.data.batches import SameRows, first_batches
from qat_lora.data.packing import TextDataset, split_heldout
from qat_lora.data.templates import template_facts
from qat_lora.errors import UserError
from qat_lora.kd.dataset import open_splits, planned_rows
from qat_lora.kd.training import heldout_figures, target_entropy
from qat_lora.lora.adapter import adapter_values, read_adapter, save_adapter, take_values, weight_file
from qat_lora.lora.add import add_adapter, fit_to_error
from qat_lora.lora.recovery import MODES, fitting_memory
from qat_lora.lora.targets import coverage, left_out
from qat_lora.models.compiling import placed, set_up_blocks
from qat_lora.models.loading import adapter_notes, check_length, load_model, model_fingerprint
from qat_lora.models.packaged import EMBEDDED
from qat_lora.models.source import planned_name
from qat_lora.quant.student import StudentSpec, bits_per_weight, empty_student, load_student, read_student
from qat_lora.run.console import command, compared, say
from qat_lora.run.files import sha256
from qat_lora.run.metrics import Share, Total
from qat_lora.run.report import finish
from qat_lora.run.resuming import begun, prepare
from qat_lora.run.rundir import open_run
from qat_lora.run.session import Session
from qat_lora.train.evaluation import heldout_nll
from qat_lora.train.loop import Plan, plain_stage, tokens_of
from qat_lora.train.memory import Parts

CALIBRATION_ROWS = 32
MEASURES = {"kd": heldout_figures, "sft": heldout_nll, "recover": heldout_nll}


# -- the experiment --------------------------------------------------------------------------------------------------
def main(cfg: Config) -> None:
    check(cfg)
    if not cfg.dry_run:
        return launch(work, (cfg,), cfg.device, cfg.precision, cfg.num_chips, cfg.debug, cfg.timeouts)
    backend = open_planned(cfg.device, cfg.precision)
    made, workers = read_made(cfg), planned_workers(backend.kind, cfg.num_chips)
    tokenizer = cfg.tokenizer(made["model"], begun(NAME, cfg))
    train, _ = open_rows(cfg, made["model"], tokenizer, workers)
    cfg.anchor(made["model"], tokenizer, cfg.batch_size * workers)
    describe(cfg, made, train, backend, workers)


def work(backend: TorchBackend, cfg: Config) -> None:
    """The experiment, as each worker runs it."""
    cfg = prepare(NAME, cfg, backend.group)
    made = backend.group.on_main(lambda: read_made(cfg))
    tokenizer = cfg.tokenizer(made["model"], begun(NAME, cfg, backend.group))
    with backend.group.main_first():
        train, heldout = open_rows(cfg, made["model"], tokenizer, backend.world_size)
        anchor = cfg.anchor(made["model"], tokenizer, cfg.batch_size * backend.world_size)
    shared = describe(cfg, made, train, backend, backend.world_size)
    # the other workers get their values from worker 0
    student = load_student(cfg.checkpoint, cfg.model)[0] if backend.is_main else empty_student(made)
    model = adapted(cfg, student)
    if backend.is_main and cfg.adapter:
        take_values(model, cfg.adapter, cfg.checkpoint)

    facts = backend.facts | {"student": backend.group.on_main(lambda: sha256(Path(cfg.checkpoint)))}
    facts |= {"data": train.fingerprint} | template_facts(tokenizer, cfg.chat_template)
    if cfg.adapter:
        facts["start"] = backend.group.on_main(lambda: sha256(weight_file(Path(cfg.adapter).expanduser())))
    facts["base"] = backend.group.on_main(lambda: model_fingerprint(made["model"]))
    facts |= {"anchor": anchor.rows.fingerprint} if anchor else {}
    run = open_run(NAME, cfg, facts | cfg.update_facts(backend.world_size), backend.group)
    backend.seed(cfg.seed)
    session = Session(run, backend, cfg.every(), files=("adapter",), anchor=anchor)
    if backend.is_main and cfg.adapter_init == "error" and not session.resumed:
        rows = first_batches(train, CALIBRATION_ROWS, cfg.batch_size, cfg.seed)
        fit_to_error(model, load_model(made["model"]), rows, cfg.precision)
    placed(model, backend, shared)
    set_up_blocks(model, backend, cfg.gradient_checkpointing, cfg.compile)
    best, kept = session.best("heldout_kl" if cfg.mode == "kd" else "heldout_nll"), run.path / "adapter"

    def evaluate(step: int) -> dict:
        """Held-out figures; adapter/ keeps the adapter with the lowest KL or loss."""
        figures = MEASURES[cfg.mode](model, heldout, backend, cfg.batch_size, cfg.eval_rows)
        taken = backend.group.on_main(lambda: best.take(figures, kept.exists()))
        if taken and takes_part(model, backend):
            save_adapter(model, kept, facts["student"])
        return figures

    recover(model, train, cfg.mode, cfg.plan(), session, evaluate)
    bits, cost = bits_per_weight(student, adapter_values(model)), session.cost()
    if backend.is_main:
        before = "with the adapter it started from" if cfg.adapter else "without the adapter"
        figure, (first, _) = "KL to the teacher" if cfg.mode == "kd" else "loss", run.first_and_best(best.figure)
        finish(
            run, {"best": {best.figure: best.value}, "bits_per_weight": bits, **cost}, {"adapter": kept},
            [f"held-out {figure} {compared(best.value, first, before)}"],
            command("run_inference", model=cfg.model, checkpoint=cfg.checkpoint, adapter=kept, prompt="Hello"),
        )  # fmt: skip


def recover(model: nn.Module, train: Dataset, mode: str, plan: Plan, session: Session, evaluate: Callable) -> None:
    """Train the adapter alone; the student is frozen, but gradients pass through it."""
    backend, loss_of = session.backend, MODES[mode]
    model.train()
    for update in plain_stage("recovery", model, train, plan, session, evaluate):  # resumes, evaluates, saves
        for batch in update:  # its micro-batches, on the device
            with backend.autocast():
                loss = loss_of(model, batch)
            backend.backward(loss)
            update.add(loss=Share(loss), tokens=Total(tokens_of(batch)))
            if mode == "kd":
                update.add(kl=Share(loss - target_entropy(batch)))
        if session.anchor:
            session.anchor.add_to(update, model)
        norm = update.step()  # reduces over workers, clips, steps
        update.record(grad_norm=norm)


# -- the steps -------------------------------------------------------------------------------------------------------
def check(cfg: Config) -> None:
    if cfg.adapter:
        read_adapter(Path(cfg.adapter).expanduser())
    if cfg.adapter and cfg.adapter_init != "zero":
        raise UserError("--adapter and --adapter-init error both set the initial values; give one")
    if not cfg.checkpoint:
        raise UserError("--checkpoint is missing; give the best.pt of train_qat.py")
    if cfg.mode == "kd" and not cfg.cache_dir:
        raise UserError(
            "--mode kd needs --cache-dir; build a cache with "
            + command("build_kd_cache", dataset="TEXT", cache_dir="FOLDER")
        )


def read_made(cfg: Config) -> dict:
    """The base model and the quantisers of the student, from its file."""
    content = read_student(cfg.checkpoint, cfg.model)
    return {key: content[key] for key in ("model", "spec")}


def adapted(cfg: Config, student: nn.Module) -> nn.Module:
    """The student with a new adapter."""
    alpha = cfg.lora_r if cfg.lora_alpha is None else cfg.lora_alpha
    targets = ("mlp",) if cfg.mlp_only else tuple(target.strip() for target in cfg.targets.split(","))
    return add_adapter(student, cfg.lora_r, alpha, targets, cfg.seed)


def open_rows(cfg: Config, model_name: str, tokenizer, workers: int) -> tuple[Dataset, Dataset]:
    """Training and held-out rows for --mode."""
    if cfg.mode == "kd":
        train, heldout = open_splits(cfg.cache_dir, model_name, tokenizer)
    else:
        check_length(model_name, cfg.length)
        rows = cfg.rows(tokenizer)
        if cfg.mode == "sft" and bool(rows.mask.all()):
            raise UserError(f"--mode sft: {cfg.dataset} has no chat rows, so no completions; use --mode recover")
        parts = split_heldout(rows, cfg.heldout_fraction)
        if not len(parts[1]):
            raise UserError(f"--heldout-fraction {cfg.heldout_fraction} leaves no row to evaluate on; use e.g. 0.1")
        train, heldout = (TextDataset(part, completions_only=cfg.mode == "sft") for part in parts)
    cfg.check_rows(train, heldout, workers)
    return train, heldout


def describe(cfg: Config, made: dict, train: Dataset, backend: TorchBackend, workers: int) -> bool:
    """Print the plan of the run, and check that it fits in memory. Returns whether the workers share the model out."""
    from qat_lora.export.gguf import export_formats  # brings nine modules that nothing else here needs

    model = adapted(cfg, empty_student(made))
    values = adapter_values(model)
    say(f"{made['model']} as {StudentSpec(**made['spec'])} on {backend}")
    bits = bits_per_weight(model, values)
    say(f"adapter: {coverage(model)}, {values} values, {bits:.2f} bits per weight including it")
    for line in (*left_out(model, "; --targets auto,experts adapts them too"), *adapter_notes(made["model"])):
        say(line)
    say(f"{cfg.max_steps} updates in mode {cfg.mode} on {len(train)} rows")
    say(export_formats(made["model"]))
    return cfg.describe(model, train, backend, workers, phases(cfg, model, backend))


def phases(cfg: Config, model: nn.Module, backend: TorchBackend) -> dict[str, Parts]:
    """The memory of the anchor's rows in training, and of fitting the adapter to the quantisation error."""
    found = {"fitting the adapter": fitting_memory(model)} if cfg.adapter_init == "error" else {}
    return found | ({"anchor": cfg.memory(model, cfg.anchor_length(), backend)["training"]} if cfg.anchor_cache else {})


def rehearse(cfg: Config, backend: TorchBackend) -> dict[str, Parts]:
    """Record the graphs of every phase, for compile_for_tpu.py, and estimate their memory. Only shapes matter: the
    student has no values, all rows are the same, and a checkpoint that does not exist yet is taken to hold every layer
    in 4 bits."""
    count = cfg.update_facts(backend.world_size)["rows_per_update"]
    if cfg.mode == "kd":
        rows = planned_rows(cfg.cache_dir, count)
    else:
        ones = torch.ones(cfg.length, dtype=torch.uint8)
        rows = SameRows(count, tokens=torch.zeros(cfg.length, dtype=torch.long), mask=ones)
    made = {"model": cfg.model or EMBEDDED, "spec": {"mlp": "uniform4/r32", "attn": "uniform4/r32", "head": "none"}}
    made = read_made(cfg) if Path(cfg.checkpoint or "").is_file() else made
    model = backend.place(adapted(cfg, empty_student(made | {"model": planned_name(made["model"])})))
    set_up_blocks(model, backend, cfg.gradient_checkpointing, cfg.compile)

    def evaluate(step: int) -> dict:
        return MEASURES[cfg.mode](model, rows, backend, cfg.batch_size, cfg.batch_size)

    length = len(rows[0]["tokens"])
    session = backend.rehearsal(count * length, cfg.planned_anchor(count))
    recover(model, rows, cfg.mode, cfg.plan(), session, evaluate)
    return cfg.memory(model, length, backend, phases(cfg, model, backend))


if __name__ == "__main__":
    run_script(main, Config, NAME, __doc__)
