"""Pretraining a recursive reasoning model: options and steps of pretrain.py and of its smoke test."""

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from qat_lora.backend import TorchBackend, launch, open_backend, planned_workers
from qat_lora.data.puzzle_rows import PuzzleRows, draw, load, row_memory, split
from qat_lora.data.puzzles import BLANK, BOXES, MAZE, WALL, side
from qat_lora.errors import UserError
from qat_lora.experiments.remote import bring_back, check_unused, copy_out
from qat_lora.machine import check_memory
from qat_lora.memory import check_fits, recursive_memory, weight_options
from qat_lora.models.recursive import RecursiveModel, RecursiveSpec
from qat_lora.recursive import RecursivePlan, Trainer, answer, kept, measure, train_recursive
from qat_lora.run.config import JobConfig, option
from qat_lora.run.files import write_atomically
from qat_lora.run.plots import plot_run, pyplot
from qat_lora.run.rundir import attempt, check_same, open_run, prepare, say
from qat_lora.run.session import Every, Session

NAME = "pretrain"
PRECISIONS = {"float32": "fp32", "bfloat16": "bf16"}
ARCH = (
    "hidden_size", "num_heads", "num_kv_heads", "L_layers", "H_cycles", "L_cycles", "expansion", "mlp_t",
    "one_step_gradient", "use_gradient_checkpointing",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Config(JobConfig):
    SECTIONS: ClassVar = {"arch": ARCH}
    DEFAULT_CONFIG: ClassVar = "cfg_pretrain"

    num_chips: int | None = option(
        0, "TPU chips, GPUs or CPU processes of this host; 0: every chip or GPU there is", identity=False
    )
    forward_dtype: str | None = option(None, "bfloat16 or float32, the same as --precision bf16 or fp32")
    data_path: str | None = option(
        None, "folder or URL that build_puzzle_data.py or TRM wrote; default: puzzles are drawn", identity="data"
    )
    checkpoint_path: str | None = option(
        None, "folder or URL that checkpoints are copied to; --resume auto finds them", identity=False
    )
    puzzle: str = option("sudoku6", "without --data-path: sudoku4, sudoku6, sudoku9 or mazeN")
    puzzles: int = option(2000, "without --data-path: puzzles to draw")
    heldout_fraction: float = option(0.1, "without --data-path: share of the puzzles that is held out")
    compile: bool = option(
        True,
        "fuse the blocks by torch.compile if there is a C++ compiler; takes some seconds at the start",
        identity=False,
    )
    eval_rows: int = option(1024, "held-out rows to measure on; 0: all", identity=False)
    global_batch_size: int = option(768, "rows in an update, over all workers")
    epochs: int = option(1000, "passes over the training rows")
    steps: int = option(0, "updates, in place of --epochs; 0: use --epochs")
    eval_interval: int = option(
        500, "updates between evaluations; 0: only first and last", "--eval-every", identity=False
    )
    save_interval: int = option(500, "updates between checkpoints; 0: only the last", "--save-every", identity=False)
    log_interval: int = option(20, "updates between lines of metrics.jsonl", "--log-every", identity=False)
    lr: float = option(8e-5, "peak learning rate", "--learning-rate")
    lr_warmup: int = option(2000, "updates of linear warm-up, at most half of all")
    lr_min_ratio: float = option(0.1, "share of the learning rate at the end of the half cosine")
    beta1: float = option(0.9, "decay of the optimiser's first moment")
    beta2: float = option(0.95, "decay of its second")
    weight_decay: float = option(0.1, "decoupled")
    puzzle_emb_lr: float = option(1e-4, "learning rate of the puzzles' embeddings (SignSGD)")
    puzzle_emb_weight_decay: float = option(0.1, "decoupled, of the puzzles' embeddings")
    grad_clip_norm: float = option(1.0, "largest global gradient norm; 0 clips nothing")
    ema: bool = option(True, "measure and keep a moving average of the weights")
    ema_decay: float = option(0.9995, "decay of the moving average (EMA) of the weights")
    halt_max_segments: int = option(16, "segments that a row gets at most, and all get when measured")
    halt_exploration: float = option(0.1, "share of rows that may not halt before a random segment")
    hidden_size: int = option(512, "arch: width")
    num_heads: int = option(8, "arch: attention heads")
    num_kv_heads: int | None = option(None, "arch: heads of keys and values (GQA); default: all")
    L_layers: int = option(2, "arch: blocks of the stack")
    H_cycles: int = option(3, "arch: updates of the answer in a segment; only the last has a gradient")
    L_cycles: int = option(6, "arch: updates of the reasoning state before each of those")
    expansion: float = option(4.0, "arch: of the gated MLPs")
    mlp_t: bool = option(False, "arch: mix tokens by an MLP over positions, not by attention")
    one_step_gradient: bool = option(False, "arch: gradient through the last two updates alone")
    use_gradient_checkpointing: bool = option(
        False, "arch: recompute every update in the backward pass", identity=False
    )


def main(cfg: Config) -> None:
    cfg = checked(cfg)
    if cfg.dry_run:
        return work(open_backend(cfg.device, cfg.precision), cfg)
    launch(work, (cfg,), cfg.device, cfg.precision, cfg.num_chips, cfg.debug, cfg.timeouts)


def work(backend: TorchBackend, cfg: Config) -> None:
    """The experiment, in each of its workers."""
    prepare(NAME, cfg, backend.group)
    if backend.is_main:
        announce(backend)
    workers = planned_workers(backend.kind, cfg.num_chips) if cfg.dry_run else backend.world_size
    plan_of(cfg, 1).share(workers)
    if not cfg.data_path:  # one puzzle has the sizes of all: refuse before drawing them
        check_sizes(cfg, spec_of(cfg, draw(cfg.puzzle, 1, cfg.seed)), backend, workers)
    train, held = open_rows(cfg)
    heldout = held.first(cfg.eval_rows) if cfg.eval_rows else held
    plan = plan_of(cfg, cfg.steps or train.updates(cfg.epochs, cfg.global_batch_size))
    spec = spec_of(cfg, train)
    need = check_sizes(cfg, spec, backend, workers)
    backend.seed(cfg.seed)
    model = RecursiveModel(spec)
    if backend.is_main:
        describe(backend, train, heldout, plan, model, workers)
        say(f"memory of a worker: at least {need / 1e9:,.2f} GB")
    if cfg.dry_run:
        return

    facts = {"data": train.fingerprint, "heldout_data": held.fingerprint}
    if cfg.checkpoint_path and cfg.resume == "off":
        backend.group.on_main(lambda: check_unused(cfg.checkpoint_path))
    elif cfg.checkpoint_path:
        same = functools.partial(check_same, config=cfg, facts=facts)
        backend.group.on_main(lambda: bring_back(cfg.checkpoint_path, Path(cfg.output_dir), same))
    run = open_run(NAME, cfg, facts | backend.facts, backend.group)
    every = Every(cfg.log_interval, cfg.eval_interval, cfg.save_interval)
    saved = (lambda path: copy_out(run.path, path, cfg.checkpoint_path)) if cfg.checkpoint_path else None
    session = Session(run, backend, every, ("loss", "exact"), saved=saved)
    backend.place(model)
    if backend.is_main:
        say(f"[Athena] Model moved to device: {backend.device}")
    if cfg.use_gradient_checkpointing:
        model.checkpoint = backend.checkpoint
    if cfg.compile:
        fuse(backend, model)
    trainer = Trainer(model, plan, backend)
    best: dict = {}  # figures and state of the most held-out rows right; checkpoints carry it

    def evaluate(step: int) -> dict[str, float]:
        figures = measure(trainer.shown, heldout, plan.segments, plan.batch_size, backend)
        # a state measured on other rows, before a resume with another --eval-rows, is not comparable
        same = best and best["figures"].get("heldout_rows", len(heldout)) == len(heldout)
        if backend.is_main and not (same and merit(figures) <= merit(best["figures"])):
            best.update(figures={"step": step, **figures}, state=kept(trainer.shown, backend))
        return figures

    train_recursive(trainer, train, session, evaluate, best)
    finish(run, trainer.shown, heldout, plan, backend, best, session.cost())


def fuse(backend: TorchBackend, model: RecursiveModel) -> None:
    """Have the model's stack compiled, or say why it is not."""
    if (lacking := backend.compiler_lacks()) is None:
        model.stack = backend.compiled(model.stack)
    elif backend.is_main:
        say(f"[Athena] Not compiled, so slower: this machine lacks {lacking}")


def merit(figures: dict[str, float]) -> tuple[float, float]:
    """Which of two states is better: by the rows right after all segments, then by the loss."""
    return figures["heldout_exact_full"], -figures["heldout_loss"]


# -- what is asked for -----------------------------------------------------------------------------------------------
def checked(cfg: Config) -> Config:
    """The config with its other names resolved. Raises UserError for what no data is needed to refuse."""
    if cfg.forward_dtype is not None:
        if cfg.forward_dtype not in PRECISIONS:
            raise UserError(f"--forward-dtype {cfg.forward_dtype!r} is not one of {', '.join(PRECISIONS)}")
        if cfg.precision not in ("auto", PRECISIONS[cfg.forward_dtype]):
            raise UserError(f"--forward-dtype {cfg.forward_dtype} and --precision {cfg.precision} differ; give one")
        cfg = dataclasses.replace(cfg, precision=PRECISIONS[cfg.forward_dtype], forward_dtype=None)
    for name, least in (
        ("epochs", 1), ("steps", 0), ("puzzles", 2), ("eval_rows", 0), ("global_batch_size", 1), ("lr_warmup", 0),
        ("grad_clip_norm", 0), ("puzzle_emb_lr", 0), ("puzzle_emb_weight_decay", 0), ("eval_interval", 0),
        ("save_interval", 0), ("log_interval", 0),
    ):  # fmt: skip
        if getattr(cfg, name) < least:
            raise UserError(f"--{name.replace('_', '-')} {getattr(cfg, name)} must be at least {least}")
    if not 0 < cfg.heldout_fraction < 1:
        raise UserError(f"--heldout-fraction {cfg.heldout_fraction} is not between 0 and 1; use e.g. 0.1")
    if cfg.checkpoint_path and not cfg.output_dir:
        raise UserError("--checkpoint-path needs --output-dir, the run directory that a copy is brought back to")
    if cfg.checkpoint_path and Path(cfg.checkpoint_path).resolve().is_relative_to(Path(cfg.output_dir).resolve()):
        raise UserError(f"--checkpoint-path {cfg.checkpoint_path} lies in the run directory itself; give another")
    if not cfg.data_path:
        check_memory(row_memory(side(cfg.puzzle) ** 2, cfg.puzzles), f"--puzzles {cfg.puzzles}", "--puzzles")
    Every(cfg.log_interval, cfg.eval_interval, cfg.save_interval)
    plan_of(cfg, cfg.steps)
    return cfg


def open_rows(cfg: Config) -> tuple[PuzzleRows, PuzzleRows]:
    """Training and held-out rows."""
    if cfg.data_path:
        return load(cfg.data_path)
    return split(draw(cfg.puzzle, cfg.puzzles, cfg.seed, flag="--puzzles"), cfg.heldout_fraction, cfg.seed)


def check_sizes(cfg: Config, spec: RecursiveSpec, backend: TorchBackend, workers: int) -> int:
    """Least bytes that a worker needs. Raises UserError if the model cannot be built in this machine's memory, or if it
    cannot be trained in that of its device; a dry run, which may plan for another machine, skips the second check."""
    rows = cfg.global_batch_size // workers
    check_memory(4 * spec.parameters, f"a model of {spec.parameters:,} weights", weight_options(spec))
    parts = recursive_memory(spec, rows, cfg.ema, backend.bf16, cfg.use_gradient_checkpointing)
    if not cfg.dry_run:
        what = f"training {spec.parameters:,} weights on {rows} rows of {spec.length} tokens a worker"
        check_fits(backend, parts, what, workers)
    return sum(parts.values())


OPTIONS = {
    "batch_size": "--global-batch-size", "learning_rate": "--lr", "warmup_steps": "--lr-warmup",
    "clip_grad_norm": "--grad-clip-norm", "identifier_learning_rate": "--puzzle-emb-lr",
    "identifier_weight_decay": "--puzzle-emb-weight-decay",
}  # fmt: skip


def plan_of(cfg: Config, steps: int) -> RecursivePlan:
    return RecursivePlan(
        steps=steps, batch_size=cfg.global_batch_size, learning_rate=cfg.lr, warmup_steps=cfg.lr_warmup,
        lr_min_ratio=cfg.lr_min_ratio, betas=(cfg.beta1, cfg.beta2), weight_decay=cfg.weight_decay,
        clip_grad_norm=cfg.grad_clip_norm,
        identifier_learning_rate=cfg.puzzle_emb_lr, identifier_weight_decay=cfg.puzzle_emb_weight_decay,
        ema=cfg.ema_decay if cfg.ema else 0.0, segments=cfg.halt_max_segments, exploration=cfg.halt_exploration,
        seed=cfg.seed, options=OPTIONS | {"steps": "--steps" if cfg.steps else f"--epochs {cfg.epochs}"},
    )  # fmt: skip


def spec_of(cfg: Config, rows: PuzzleRows) -> RecursiveSpec:
    names = {field.name for field in dataclasses.fields(RecursiveSpec)} & set(vars(cfg))
    return RecursiveSpec(
        vocab=rows.vocab, length=rows.length, causal=rows.causal, identifiers=rows.identifiers_count,
        **{name: getattr(cfg, name) for name in names},
    )  # fmt: skip


def announce(backend: TorchBackend) -> None:
    """The device, in the guide's words."""
    place = f"{backend.rank}/{backend.world_size}"
    if backend.kind == "xla":
        what = "TPU detected" if backend.on_tpu else "XLA on the CPU"
        say(f"[Athena] {what}. Core {place}, Device: {backend.device}")
    elif backend.kind == "cuda":
        say(f"[Athena] CUDA detected. Using GPU: {torch.cuda.get_device_name(backend.device)}")
        if backend.world_size > 1:
            say(f"[Athena] Multi-GPU training. Rank {place}")
    else:
        say("[Athena] Using CPU (no GPU/TPU available)" if backend.world_size == 1 else
            f"[Athena] Using CPU. Process {place}")  # fmt: skip


def describe(
    backend: TorchBackend,
    train: PuzzleRows,
    heldout: PuzzleRows,
    plan: RecursivePlan,
    model: RecursiveModel,
    workers: int,
) -> None:
    spec, weights = model.spec, sum(p.numel() for p in model.parameters())
    applied = spec.L_layers * spec.H_cycles * (spec.L_cycles + 1)
    say(f"{weights:,} weights on {backend}, {spec.L_layers} layers that a segment applies {applied} deep")
    say(f"{len(train):,} rows of {train.length} tokens ({train.kind or 'unknown kind'}) to train on, "
        f"{len(heldout):,} held out, vocabulary {train.vocab}")  # fmt: skip
    if groups := train.groups:
        count = len(groups.starts) - 1
        say(f"an epoch takes one puzzle of each of {len(groups.firsts) - 1:,} groups ({count:,} puzzles)")
    for name, rows in (("training", train), ("held-out", heldout)):
        if rows.unlabelled:
            say(f"{rows.unlabelled:,} {name} rows without a label are left out")
    say(f"{plan.steps} updates of {plan.batch_size} rows on {workers} workers, learning rate {plan.learning_rate:g}, "
        f"at most {plan.segments} segments a row")  # fmt: skip


# -- what comes out --------------------------------------------------------------------------------------------------
def finish(run, model: RecursiveModel, heldout: PuzzleRows, plan: RecursivePlan, backend: TorchBackend, best: dict,
           cost: dict) -> None:  # fmt: skip
    """best.pt, the picture of a puzzle that the best state was asked, summary.json and the curves. `best` is the first
    worker's; all of them answer."""
    if backend.is_main:
        model.load_state_dict(best["state"])
    backend.broadcast([*model.parameters(), *model.buffers()])
    rows = torch.arange(plan.share(backend.world_size)).clamp(max=len(heldout) - 1)
    batch = heldout.batch(rows.numpy())  # as many as a batch has, so that nothing is compiled anew
    found, _ = answer(model, backend.to_device(batch), plan.segments, backend)
    early, segments = backend.to_host([found.early, found.segments])
    if not backend.is_main:
        return
    made = {"spec": dataclasses.asdict(model.spec), "kind": heldout.kind, **best}
    write_atomically(run.path / "best.pt", lambda file: torch.save(made, file))
    picture = run.path / "solved.png"
    if heldout.kind:
        at = int((early == batch["labels"]).all(1).int().argmax())  # the first that is right, or the first
        drawn = batch["inputs"][at], batch["labels"][at], early[at], int(segments[at]), picture
        attempt("drawing a solution", draw_answer, heldout.kind, *drawn)
    figures, curves = best["figures"], attempt("plotting", plot_run, run.path)
    run.finish("finished", **figures, weights=sum(p.numel() for p in model.parameters()), **cost)
    say(
        f"best at step {figures['step']}: {figures['heldout_exact_full']:.1%} of the held-out rows exactly right after "
        f"{plan.segments} segments, {figures['heldout_exact']:.1%} after {figures['heldout_segments']:.1f} on average "
        "where it halts by itself" + "".join(f"\n{path}" for path in (curves, picture) if path and path.exists())
    )


def draw_answer(kind: str, question, label, found, segments: int, path: Path) -> None:
    """A question and the answer to it, side by side: given cells black, right ones green, wrong ones on red."""
    n, maze = side(kind), kind.startswith("maze")
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(8, 4.3))
    for axis, tokens, title in zip(
        axes, (question, found), ("question", f"answer after {segments} segment{'s' * (segments > 1)}")
    ):
        axis.set(xlim=(0, n), ylim=(n, 0), xticks=[], yticks=[], aspect="equal", title=title)
        for place, (token, given, wanted) in enumerate(zip(tokens.tolist(), question.tolist(), label.tolist())):
            row, column = divmod(place, n)
            colour = "black" if token == given else "tab:green"
            if axis is axes[1] and token != wanted:
                axis.add_patch(plt.Rectangle((column, row), 1, 1, color="tab:red", alpha=0.4, zorder=2))
            if maze and token == WALL:
                axis.add_patch(plt.Rectangle((column, row), 1, 1, color="0.25"))
            elif maze or token > BLANK:
                text = MAZE[token] if maze else str(token - BLANK)
                axis.text(column + 0.5, row + 0.55, text, color=colour, ha="center", va="center", fontsize=120 / n)
        if not maze:
            high, wide = BOXES[kind]
            for line in range(n + 1):
                axis.axhline(line, color="black", linewidth=2.5 if line % high == 0 else 0.5)
                axis.axvline(line, color="black", linewidth=2.5 if line % wide == 0 else 0.5)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
