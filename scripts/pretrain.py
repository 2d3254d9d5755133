# PYTHON_ARGCOMPLETE_OK
"""Can a network of a few hundred thousand weights reason by refining its answer again and again? (Athena v2)

    python pretrain.py
    python pretrain.py device_type=cpu --config cpu
    python pretrain.py device_type=tpu global_batch_size=1024
    python scripts/pretrain.py --config nano --resume auto
    python scripts/pretrain.py --config cfg_pretrain_tpu arch.use_gradient_checkpointing=true

A tiny recursive model (arXiv 2510.04871) learns Sudoku, mazes or prompt → response rows: two blocks are applied dozens
of times to a latent answer, with a loss after every segment and a head that decides when to halt. An update runs one
segment of a batch in which halted rows are replaced; shapes are fixed, so that XLA compiles one graph. Training uses
all chips or GPUs of this host, or those that torchrun assigns. The default preset is cfg_pretrain.

metrics.jsonl: loss (stablemax cross-entropy plus half the halting head's loss), exact and segments of the rows that
halted, grad_norm, lr, tokens_per_s. The held-out figures (exact, cells, loss, segments) are measured with the moving
average of the weights: when the head halts and, with the suffix _full, after all segments.
The run directory also gets best.pt, solved.png (a puzzle with the model's answer) and the curves.
docs/athena.md is the runbook. Untested on hardware: TPU, CUDA; make check-hardware tests them.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from qat_lora.experiments.athena import LARGE
from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import JobConfig
from qat_lora.train.options import LoopOptions

NAME = "pretrain"


@dataclass(frozen=True, kw_only=True)
class Config(LoopOptions, JobConfig):
    SECTIONS: ClassVar = {
        "arch": (
            "hidden_size", "num_heads", "num_kv_heads", "L_layers", "H_cycles", "L_cycles", "expansion", "mlp_t",
            "puzzle_emb_len", "puzzle_emb_ndim", "one_step_gradient", "use_gradient_checkpointing",
        )
    }  # fmt: skip
    DEFAULT_CONFIG: ClassVar = "cfg_pretrain"

    hidden_size: int = opt.model(512, "model width (arch.hidden_size)", at_least=1, at_most=LARGE)
    num_heads: int = opt.model(8, "attention heads", at_least=1, at_most=LARGE)
    num_kv_heads: int | None = opt.model(
        None, "key and value heads, for grouped-query attention [--num-heads]", at_least=1
    )
    L_layers: int = opt.model(2, "blocks in the network, which is applied again and again", at_least=1, at_most=LARGE)
    H_cycles: int = opt.model(
        3, "updates of the answer per segment; only the last has a gradient", at_least=1, at_most=10_000
    )
    L_cycles: int = opt.model(
        6, "updates of the reasoning state before each update of the answer", at_least=1, at_most=10_000
    )
    expansion: float = opt.model(
        4.0, "hidden size of the gated MLPs, in multiples of the width", above=0, at_most=64, fix="use e.g. 4"
    )
    mlp_t: bool = opt.model(False, "mix positions with an MLP instead of attention")
    puzzle_emb_len: int = opt.model(
        1, "positions before the tokens that hold the puzzle's embedding", at_least=1, at_most=LARGE
    )
    puzzle_emb_ndim: int | None = opt.model(None, "width of the puzzles' embeddings [--hidden-size]", at_least=1)
    one_step_gradient: bool = opt.model(False, "backpropagate through the last two updates only")
    start: str | None = opt.model(
        None, "start from the best model of this run, or from this published checkpoint, of the same sizes",
        identity="start",
    )  # fmt: skip
    data_path: str | None = opt.data(
        None,
        "dataset: a folder or URL written by build_puzzle_data.py or by TRM [none: puzzles are generated]",
        identity="data",
    )
    puzzle: str = opt.data("sudoku6", "kind of puzzle to generate: sudoku4, sudoku6, sudoku9 or mazeN, N odd")
    puzzles: int = opt.data(2000, "puzzles to generate", at_least=2)
    heldout_fraction: float = opt.data(0.1, "share of the generated puzzles held out for evaluation", **opt.HELDOUT)
    global_batch_size: int = opt.training(768, "rows per update over all workers", at_least=1)
    epochs: int = opt.training(1000, "passes over the training rows", at_least=1, at_most=opt.MOST_UPDATES)
    max_steps: int | None = opt.training(
        None, "number of updates; 0 trains for --epochs passes [0]", "--steps", **opt.UPDATES
    )
    learning_rate: float = opt.training(8e-5, "peak learning rate", "--lr", **opt.RATE)
    warmup_steps: int = opt.training(
        2000, "updates of linear warm-up, at most half of all updates", "--lr-warmup", at_least=0
    )
    lr_min_ratio: float = opt.training(0.1, "final learning rate, as a share of the peak", **opt.SHARE)
    beta1: float = opt.training(0.9, "decay of AdamW's first moment", at_least=0, below=1)
    beta2: float = opt.training(0.95, "decay of AdamW's second moment", at_least=0, below=1)
    weight_decay: float = opt.training(0.1, "decoupled weight decay", **opt.DECAY)
    puzzle_emb_lr: float = opt.training(1e-4, "learning rate of the puzzle embeddings (SignSGD)", **opt.DECAY)
    puzzle_emb_weight_decay: float = opt.training(0.1, "decoupled weight decay of the puzzle embeddings", **opt.DECAY)
    clip_grad_norm: float = opt.training(
        1.0,
        "clip the global gradient norm to this; 0 does not clip",
        "--grad-clip-norm",
        at_least=0,
        at_most=opt.LARGEST,
    )
    ema: bool = opt.training(True, "evaluate and save the moving average (EMA) of the weights")
    ema_decay: float = opt.training(0.9995, "decay of the moving average (EMA) of the weights", at_least=0, below=1)
    halt_max_segments: int = opt.training(
        16, "most segments per row in training, and segments per row in evaluation", at_least=1, at_most=10_000
    )
    halt_exploration: float = opt.training(
        0.1, "share of the rows that may not halt before a random segment, for exploration", **opt.SHARE
    )
    gradient_checkpointing: bool = opt.training(
        False,
        "recompute every update in the backward pass: less memory, more time",
        "--use-gradient-checkpointing",
        identity=False,
    )
    eval_rows: int = opt.run(1024, "held-out rows per evaluation; 0 is all", at_least=0)
    eval_every: int = opt.run(
        500, "updates between evaluations; 0 evaluates only before and after training", "--eval-interval", at_least=0
    )
    save_every: int = opt.run(500, "updates between checkpoints; 0 saves only the last", "--save-interval", at_least=0)
    log_every: int = opt.run(20, "updates between lines of metrics.jsonl", "--log-interval", at_least=0)
    checkpoint_path: str | None = opt.run(None, "folder or URL to copy checkpoints to; --resume auto finds them there")
    num_chips: int | None = opt.with_default(JobConfig, "num_chips", 0)
    forward_dtype: Literal["bfloat16", "float32"] | None = opt.device(
        None, "the same as --precision bf16 or fp32", identity=True
    )
    compile: Literal["auto", "on", "off"] = opt.device(
        "auto", "run the blocks through torch.compile, which takes some seconds at the start; auto: not on XLA"
    )


if __name__ == "__main__":
    check_command_line(Config, NAME, __doc__)  # before the imports that take seconds

import dataclasses
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from qat_lora.backend import TorchBackend, open_planned, planned_workers
from qat_lora.backend.machine import check_memory
from qat_lora.backend.opening import launch
from qat_lora.errors import UserError
from qat_lora.experiments.athena.evaluation import starting_model
from qat_lora.experiments.athena.model import RecursiveModel, RecursiveSpec, memory_of, recursive_memory, segment_loss
from qat_lora.experiments.athena.published import load_state
from qat_lora.experiments.athena.puzzles import draw_answer, side
from qat_lora.experiments.athena.rows import PuzzleRows, draw, load, planned_rows, row_memory, split
from qat_lora.experiments.athena.training import RecursivePlan, Trainer, announce, athena_stage, describe, placed
from qat_lora.run.console import attempt, command, say, summarise
from qat_lora.run.files import sha256, write_atomically
from qat_lora.run.metrics import Share, Total
from qat_lora.run.remote import bring_back, check_unused, copy_out
from qat_lora.run.report import write_report
from qat_lora.run.resuming import check_same, prepare
from qat_lora.run.rundir import Run, open_run
from qat_lora.run.session import Session
from qat_lora.train.memory import Parts, check_fits, memory_line
from qat_lora.train.options import checked_updates

PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}


# -- the experiment --------------------------------------------------------------------------------------------------
def main(cfg: Config) -> None:
    cfg = checked(cfg)
    if cfg.dry_run:
        return work(open_planned(cfg.device, cfg.precision), cfg)
    launch(work, (cfg,), cfg.device, cfg.precision, cfg.num_chips, cfg.debug, cfg.timeouts)


def work(backend: TorchBackend, cfg: Config) -> None:
    """The experiment, as each worker runs it."""
    prepare(NAME, cfg, backend.group)
    if backend.is_main:
        announce(backend)
    workers = planned_workers(backend.kind, cfg.num_chips) if cfg.dry_run else backend.world_size
    plan_of(cfg, 1).share(workers)
    if not cfg.data_path:  # all puzzles have the same size: check one before drawing the rest
        check_sizes(cfg, spec_of(cfg, draw(cfg.puzzle, 1, cfg.seed)), backend, workers)
    train, held = open_rows(cfg)
    heldout = held.spread(cfg.eval_rows) if cfg.eval_rows else held
    updates = train.updates(cfg.epochs, cfg.global_batch_size)
    plan = plan_of(cfg, cfg.max_steps or checked_updates(updates, "--epochs", cfg.epochs))
    spec = spec_of(cfg, train)
    need = check_sizes(cfg, spec, backend, workers)
    backend.seed(cfg.seed)
    model = starting_model(cfg.start, spec, backend.is_main) if cfg.start else RecursiveModel(spec)
    if backend.is_main:
        describe(backend, train, heldout, plan, model, workers)
        say(f"memory of a worker: at least {need / 1e9:,.2f} GB")
        if backend.static_shapes:
            say(memory_line(memory_of(*sizes_of(cfg, spec, backend, workers)), backend))
    if cfg.dry_run:
        return

    facts = {"data": train.fingerprint, "heldout_data": held.fingerprint}
    if cfg.start:
        start = Path(cfg.start)
        facts["start"] = sha256(start if start.is_file() else start / "best.pt")
    run = open_or_restore(cfg, facts, backend)
    saved = (lambda path: copy_out(run.path, path, cfg.checkpoint_path)) if cfg.checkpoint_path else None
    session = Session(run, backend, cfg.every(), ("loss", "exact"), saved=saved)
    trainer = Trainer(placed(model, backend, cfg.gradient_checkpointing, cfg.compile), plan, backend)
    train_segments(trainer, train, session, partial(trainer.evaluate, heldout))
    finish(run, trainer, heldout, session.cost())


def train_segments(trainer: Trainer, train: PuzzleRows, session: Session, evaluate: Callable | None) -> None:
    """Deep supervision: an update runs one segment of the rows in the carry, after replacing those that halted."""
    model, plan, backend = trainer.model, trainer.plan, trainer.backend
    model.train()
    for update in athena_stage(trainer, train, session, evaluate):  # resumes, evaluates and saves in between
        for batch in update:  # new rows, on the device
            carry, picked = trainer.refill(batch)  # they replace the rows that have halted
            with backend.autocast():
                z_H, z_L, logits, halt = model(carry.z_H, carry.z_L, carry.inputs, picked)  # one segment
            losses, right = segment_loss(logits, halt, carry.labels)  # of each row
            loss = losses.sum() / plan.batch_size  # this worker's share: batch_size counts the rows of all workers
            backend.backward(loss)
            metrics = trainer.advance(z_H, z_L, halt, right, batch["least"])
            update.add(loss=Share(loss), **metrics, tokens=Total(carry.inputs.numel()))
            del carry, logits  # on XLA, a tensor that is still in use after the step becomes an output of its graph
        norm = update.step()  # reduces over workers, clips, steps (also SignSGD on embeddings), updates the EMA
        update.record(grad_norm=norm)


def checked(cfg: Config) -> Config:
    """The config with its aliases resolved. Raises UserError for errors that can be found without the data."""
    if cfg.forward_dtype is not None:
        if cfg.precision not in ("auto", PRECISIONS[cfg.forward_dtype]):
            raise UserError(f"--forward-dtype {cfg.forward_dtype} and --precision {cfg.precision} differ; give one")
        cfg = dataclasses.replace(cfg, precision=PRECISIONS[cfg.forward_dtype], forward_dtype=None)
    if cfg.max_steps == 0:  # --steps 0 means --epochs
        cfg = dataclasses.replace(cfg, max_steps=None)
    if cfg.checkpoint_path and not cfg.output_dir:
        raise UserError(
            "--checkpoint-path needs --output-dir, the run directory to which a copy is restored; give both"
        )
    if cfg.checkpoint_path and Path(cfg.checkpoint_path).resolve().is_relative_to(Path(cfg.output_dir).resolve()):
        raise UserError(f"--checkpoint-path {cfg.checkpoint_path} lies in the run directory itself; give another")
    if not cfg.data_path:
        check_memory(row_memory(side(cfg.puzzle) ** 2, cfg.puzzles), f"--puzzles {cfg.puzzles}", "--puzzles")
    return cfg


def plan_of(cfg: Config, steps: int) -> RecursivePlan:
    return RecursivePlan(
        steps=steps, batch_size=cfg.global_batch_size, learning_rate=cfg.learning_rate, warmup_steps=cfg.warmup_steps,
        floor=cfg.lr_min_ratio, betas=(cfg.beta1, cfg.beta2), weight_decay=cfg.weight_decay,
        clip_grad_norm=cfg.clip_grad_norm, identifier_learning_rate=cfg.puzzle_emb_lr,
        identifier_weight_decay=cfg.puzzle_emb_weight_decay, ema=cfg.ema_decay if cfg.ema else 0.0,
        segments=cfg.halt_max_segments, exploration=cfg.halt_exploration, seed=cfg.seed,
    )  # fmt: skip


def spec_of(cfg: Config, rows: PuzzleRows) -> RecursiveSpec:
    names = {field.name for field in dataclasses.fields(RecursiveSpec)} & set(vars(cfg))
    sizes = {name: getattr(cfg, name) for name in names}
    return RecursiveSpec(rows.vocab, rows.length, causal=rows.causal, identifiers=rows.identifiers_count, **sizes)


# -- the steps -------------------------------------------------------------------------------------------------------
def open_rows(cfg: Config) -> tuple[PuzzleRows, PuzzleRows]:
    """Training and held-out rows."""
    if cfg.data_path:
        return load(cfg.data_path)
    return split(draw(cfg.puzzle, cfg.puzzles, cfg.seed, flag="--puzzles"), cfg.heldout_fraction, cfg.seed)


def check_sizes(cfg: Config, spec: RecursiveSpec, backend: TorchBackend, workers: int) -> int:
    """A lower bound on the bytes that a worker needs. Raises UserError if the model does not fit in this machine's
    memory, or its training in the device's; a dry run, which may plan for another machine, skips the second check."""
    parts = recursive_memory(*sizes_of(cfg, spec, backend, workers))
    check_memory(4 * spec.parameters, f"a model of {spec.parameters:,} weights", next(iter(parts)))
    if not cfg.dry_run:
        rows = f"{cfg.global_batch_size // workers} rows of {spec.length} tokens per worker"
        check_fits(backend, parts, f"training {spec.parameters:,} weights on {rows}", workers)
    return sum(parts.values())


def sizes_of(cfg: Config, spec: RecursiveSpec, backend: TorchBackend, workers: int) -> tuple:
    """The arguments of `recursive_memory` and `memory_of`."""
    return spec, cfg.global_batch_size // workers, cfg.ema, backend.bf16, cfg.gradient_checkpointing


def open_or_restore(cfg: Config, facts: dict, backend: TorchBackend) -> Run:
    """The run directory, restored from --checkpoint-path if it is missing."""
    if cfg.checkpoint_path and cfg.resume == "off":
        backend.group.on_main(lambda: check_unused(cfg.checkpoint_path))
    elif cfg.checkpoint_path:
        same = partial(check_same, config=cfg, facts=facts)
        backend.group.on_main(lambda: bring_back(cfg.checkpoint_path, Path(cfg.output_dir), same))
    return open_run(NAME, cfg, facts | backend.facts, backend.group)


def finish(run: Run, trainer: Trainer, heldout: PuzzleRows, cost: dict) -> None:
    """Write best.pt, a picture of a puzzle with the best state's answer, summary.json and the curves. Worker 0 has the
    best state and sends it to the others; all of them compute answers."""
    model, plan, backend, best = trainer.shown, trainer.plan, trainer.backend, trainer.best
    if backend.is_main:
        load_state(model, best["state"], "the best state")
    backend.broadcast([*model.parameters(), *model.buffers()])
    example = trainer.example(heldout)
    if not backend.is_main:
        return
    made = {"spec": dataclasses.asdict(model.spec), "kind": heldout.kind, **best}
    write_atomically(run.path / "best.pt", lambda file: torch.save(made, file))
    picture = run.path / "solved.png"
    if heldout.kind:
        attempt("drawing a solution", draw_answer, heldout.kind, *example, picture)
    figures = best["figures"]
    result = {**figures, "weights": sum(p.numel() for p in model.parameters()), **cost}
    page = attempt("writing the report", write_report, run.path, result)
    run.finish("finished", **result)
    before = next(line for line in run.metrics() if "heldout_exact" in line)
    summarise(
        {"model": run.path / "best.pt", "picture of a solution": picture if picture.exists() else None, "report": page},
        [
            f"{figures['heldout_exact_full']:.1%} of the held-out rows are right after {plan.segments} segments; "
            f"before training {before['heldout_exact_full']:.1%}",
            f"{figures['heldout_exact']:.1%} are when the model halts by itself, on average after "
            f"{figures['heldout_segments']:.1f} segments",
        ],
        command("solve_puzzles", run=run.path),
        command("build_puzzle_data", kind="sudoku9", count=11000, output_dir="data/sudoku9"),
    )


def rehearse(cfg: Config, backend: TorchBackend) -> dict[str, Parts]:
    """Record the graphs of every phase, for compile_for_tpu.py, and estimate their memory. Only shapes matter: all
    rows are the same one."""
    row = planned_rows(cfg.data_path, cfg.puzzle)
    plan = plan_of(cfg, 1000)  # the number of updates is in no graph
    session = backend.rehearsal(plan.batch_size * row.length)
    model = placed(RecursiveModel(spec_of(cfg, row)), backend, cfg.gradient_checkpointing, cfg.compile)
    trainer = Trainer(model, plan, backend)
    heldout = row.take(np.zeros(2 * plan.batch_size, int))  # two batches, since only the first sets the sums to zero
    train_segments(trainer, row, session, partial(trainer.evaluate, heldout))
    with backend.phase("answers"):
        trainer.example(heldout)
    return memory_of(*sizes_of(cfg, trainer.model.spec, backend, backend.world_size))


if __name__ == "__main__":
    run_script(main, Config, NAME, __doc__)
