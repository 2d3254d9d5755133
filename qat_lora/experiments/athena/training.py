"""Training a recursive model: deep supervision, one segment per update, with a carry of fixed shape."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from qat_lora.backend import TorchBackend
from qat_lora.errors import UserError
from qat_lora.experiments.athena.evaluation import answer, kept, measure
from qat_lora.experiments.athena.model import (
    IGNORE,
    Carry,
    RecursiveModel,
    fresh,
    halting,
    refill,
    rows_to_sum,
    sign_update,
)
from qat_lora.experiments.athena.published import TABLE
from qat_lora.experiments.athena.rows import PuzzleRows
from qat_lora.kernels.optimizer import new_optimizer
from qat_lora.run.console import say
from qat_lora.run.metrics import Ratio
from qat_lora.run.session import Session
from qat_lora.train.loop import Plan, Stage, StageState, restore, trained_parameters


@dataclass(frozen=True, kw_only=True)
class RecursivePlan(Plan):
    """How to train. batch_size: rows per update over all workers. segments: maximum per row. exploration: share of rows
    that may not halt before a random number of segments. identifier_*: for the puzzles' embeddings. ema: decay of the
    moving average of the weights, which is evaluated and saved; 0: use the model itself."""

    accumulation: int = 1
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    identifier_learning_rate: float = 1e-4
    identifier_weight_decay: float = 0.1
    ema: float = 0.9995
    segments: int = 16
    exploration: float = 0.1

    def share(self, workers: int) -> int:
        """Rows per update for each of `workers` workers."""
        if self.batch_size % workers:
            raise UserError(f"global_batch_size {self.batch_size} does not divide by {workers} workers; use a multiple")
        return self.batch_size // workers


def announce(backend: TorchBackend) -> None:
    """Log the device, in the words of the TPU Training Guide."""
    place = f"{backend.rank}/{backend.world_size}"
    for line in {
        "cpu": ["Using CPU (no GPU/TPU available)" if backend.world_size == 1 else f"Using CPU. Process {place}"],
        "cuda": [f"CUDA detected. Using GPU: {backend.name}", f"Multi-GPU training. Rank {place}"],
        "xla": [f"{'TPU detected' if backend.on_tpu else 'XLA on the CPU'}. Core {place}, Device: {backend.device}"],
    }[backend.kind][: 1 + (backend.world_size > 1)]:
        say(f"[Athena] {line}")


def placed(model: RecursiveModel, backend: TorchBackend, checkpointing: bool, compile: str) -> RecursiveModel:
    """The model on its device. compile: auto, on or off, where auto is on, since a small stack runs many times."""
    backend.place(model)
    if backend.is_main:
        say(f"[Athena] Model moved to device: {backend.device}")
    if checkpointing:
        model.checkpoint = backend.checkpoint
    if backend.compiles(compile, auto=True):
        model.stack = torch.compile(model.stack, dynamic=False)
    return model


def segment_batches(
    rows: PuzzleRows, plan: RecursivePlan, start: int, rank: int = 0, world_size: int = 1
) -> Iterator[dict]:
    """This worker's rows of the updates from number `start` (0-based) on, each under a random symmetry, and `least`
    [B], the minimum number of segments before a row may halt.

    The rows of an update depend only on seed and update, not on the number of workers; see PuzzleRows.chosen.
    """
    share = plan.share(world_size)
    for update, chosen in zip(range(start, plan.steps), rows.chosen(plan.seed, plan.batch_size, start)):
        random = np.random.default_rng([plan.seed, update])
        batch = rows.batch(np.array(chosen), random)
        explores = random.random(plan.batch_size) < plan.exploration
        least = explores * random.integers(min(2, plan.segments), plan.segments + 1, plan.batch_size)
        batch["least"] = torch.from_numpy(least)
        yield {name: values[rank * share : (rank + 1) * share] for name, values in batch.items()}


class Trainer(StageState):
    """A placed model in training, with the moving average of its weights (`shown`; the model itself without one) and
    the carry of this worker's rows.

    Every shape is fixed, and on XLA a whole update is one graph: refill, segment, loss, gradients, halting, their
    reduction and clipping, AdamW, SignSGD, moving average.
    """

    def __init__(self, model: RecursiveModel, plan: RecursivePlan, backend: TorchBackend):
        optimizer = new_optimizer(model, plan.learning_rate, backend, betas=plan.betas, weight_decay=plan.weight_decay)
        # the puzzles' embeddings have no average: a copy of the model shares them
        self.shown = copy.deepcopy(model, {id(model.identity): model.identity}) if plan.ema else model
        super().__init__(model, optimizer)
        self.plan, self.backend, self.carry = plan, backend, fresh(model, plan.share(backend.world_size))
        ranks = torch.arange(backend.world_size)
        self.mine = backend.to_device({"mine": ranks == backend.rank})["mine"]  # see `rows_to_sum`
        self.best_is_current = False  # whether the best state is that of this moment
        backend.step_boundary()

    # -- an update ---------------------------------------------------------------------------------------------------
    def refill(self, batch: dict[str, Tensor]) -> tuple[Carry, Tensor]:
        """The carry, with its halted rows replaced by rows of `segment_batches`, and the embeddings [B, D] of its rows'
        puzzles, which need a gradient."""
        self.carry = refill(self.carry, batch, self.model)
        self.picked = self.model.identity.index_select(0, self.carry.identifiers).requires_grad_()
        return self.carry, self.picked

    def advance(self, z_H: Tensor, z_L: Tensor, halt: Tensor, right: Tensor, least: Tensor) -> dict[str, Ratio]:
        """Carry the states on to the next segment, and decide which rows halt; the arguments are those of the segment
        just run. Returns the metrics of the rows that halted; a row without labels, which `load` leaves out, does not
        count as halted."""
        carry, segments = self.carry, self.carry.segments + 1
        halted = halting(halt.detach(), segments, carry.budgets, self.plan.segments, least)
        self.carry = replace(carry, z_H=z_H, z_L=z_L, segments=segments, halted=halted)
        ended = halted & (carry.labels != IGNORE).any(1)
        return {
            "exact": Ratio((right & ended).sum(), ended.sum()),
            "segments": Ratio((segments * ended).sum(), ended.sum()),
        }

    def summed(self) -> list[Tensor]:
        """After a backward pass, what SignSGD needs from all workers, see `rows_to_sum`."""
        self.rows = rows_to_sum(self.carry.identifiers, self.picked.grad, self.mine)
        return [self.rows]

    def in_step(self, factor: float) -> None:
        """The rest of an optimiser step, after `summed`: SignSGD on the puzzles' embeddings, with the learning rate
        times the schedule's `factor`, and the moving average."""
        model, plan, rows = self.model, self.plan, self.rows
        del self.rows  # otherwise they would outlive the step
        self.best_is_current = False
        sign_update(model.identity, rows, plan.identifier_learning_rate * factor, plan.identifier_weight_decay)
        if plan.ema:
            update_ema(self.shown, model, plan.ema)

    # -- measuring ---------------------------------------------------------------------------------------------------
    def evaluate(self, heldout: PuzzleRows, step: int) -> dict[str, float]:
        """Held-out figures of the moving average, see `measure`. Keeps the state with the most rows right in `best`;
        ties go to the lowest loss."""

        def merit(figures: dict[str, float]) -> tuple[float, float]:
            return figures["heldout_exact_full"], -figures["heldout_loss"]

        plan, backend, best = self.plan, self.backend, self.best
        figures = measure(self.shown, heldout, plan.segments, plan.batch_size, backend)
        # the best state is not comparable if it was measured before a resume with a different --eval-rows
        same = best and best["figures"].get("heldout_rows", len(heldout)) == len(heldout)
        if backend.is_main and not (same and merit(figures) <= merit(best["figures"])):
            best.pop("state", None)  # frees its memory before the new one takes some
            best.update(figures={"step": step, **figures}, state=kept(self.shown, backend))
            self.best_is_current = True
        return figures

    def example(self, heldout: PuzzleRows) -> tuple[Tensor, Tensor, Tensor, int]:
        """Input, label and answer [L] of the first row that is solved in a batch of held-out rows, else of the first
        row, and after how many segments it halted; on the host."""
        rows = torch.arange(self.plan.share(self.backend.world_size)).clamp(max=len(heldout) - 1)
        batch = heldout.batch(rows.numpy())  # the usual batch size, so that nothing is recompiled
        found, _ = answer(self.shown, self.backend.to_device(batch), self.plan.segments, self.backend)
        early, segments = self.backend.to_host([found.early, found.segments])
        at = int((early == batch["labels"]).all(1).int().argmax())
        return batch["inputs"][at], batch["labels"][at], early[at], int(segments[at])

    # -- checkpoints -------------------------------------------------------------------------------------------------
    def state(self) -> tuple[dict, dict]:
        """Those of a stage, with the puzzles' embeddings and the carries of all workers, so that a run can be resumed
        with a different number of workers."""
        carries = self.backend.group.gather(self.backend.to_host(vars(self.carry)))
        carry = {name: torch.cat([each[name] for each in carries]) for name in carries[0]}
        parameters, rest = super().state()
        # one tensor in two places is stored once
        identity = self.best["state"][TABLE] if self.best_is_current else self.model.identity
        rest |= {"identity": identity, "carry": carry}
        return parameters, rest | ({"average": trained_parameters(self.shown)} if self.plan.ema else {})

    def load(self, tensors: dict, trainer: dict) -> None:
        super().load(tensors, trainer)
        if self.plan.ema:
            restore(self.shown, trainer["average"])
        with torch.no_grad():
            self.model.identity.copy_(trainer["identity"])
        share = self.plan.share(self.backend.world_size)
        mine = slice(self.backend.rank * share, (self.backend.rank + 1) * share)
        self.carry = Carry(**self.backend.to_device({name: rows[mine] for name, rows in trainer["carry"].items()}))
        self.backend.step_boundary()


@torch.no_grad()
def update_ema(average: RecursiveModel, model: RecursiveModel, decay: float) -> None:
    """One step of an exponential moving average of the parameters: average ← decay·average + (1 − decay)·model."""
    for p, q in zip(average.parameters(), model.parameters()):
        p.lerp_(q, 1 - decay)


def athena_stage(
    trainer: Trainer, train: PuzzleRows, session: Session, evaluate: Callable[[int], dict[str, float]] | None
) -> Stage:
    """The stage that runs all updates of a trainer's plan."""
    plan, backend = trainer.plan, trainer.backend

    def stream(first: int) -> Iterator[dict]:
        return backend.prefetch(segment_batches(train, plan, first, backend.rank, backend.world_size))

    return Stage(
        "pretrain", session, plan, trainer.optimizer, stream, trainer, evaluate, trainer.in_step, summed=trainer.summed
    )


def describe(
    backend: TorchBackend, train: PuzzleRows, heldout: PuzzleRows, plan: RecursivePlan, model: RecursiveModel,
    workers: int,
) -> None:  # fmt: skip
    """Print what a run will train, on what, and for how long."""
    spec, weights = model.spec, sum(p.numel() for p in model.parameters())
    applied = spec.L_layers * spec.H_cycles * (spec.L_cycles + 1)
    say(f"{weights:,} weights on {backend}, {spec.L_layers} layers; a segment is {applied} layers deep")
    say(
        f"{len(train):,} rows of {train.length} tokens ({train.kind or 'unknown kind'}) to train on, "
        f"{len(heldout):,} held out, vocabulary {train.vocab}"
    )
    if groups := train.groups:
        puzzles, count = len(groups.starts) - 1, len(groups.firsts) - 1
        say(f"an epoch takes one puzzle of each of {count:,} groups ({puzzles:,} puzzles)")
    for name, rows in (("training", train), ("held-out", heldout)):
        if rows.unlabelled:
            say(f"{rows.unlabelled:,} {name} rows without a label are left out")
    say(
        f"{plan.steps} updates of {plan.batch_size} rows on {workers} worker{'s' * (workers > 1)}, learning rate "
        f"{plan.learning_rate:g}, at most {plan.segments} segments per row"
    )
