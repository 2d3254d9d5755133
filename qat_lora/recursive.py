"""Training and measuring a recursive model: deep supervision, one segment an update, over a carry of fixed shape."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from qat_lora.backend import TorchBackend
from qat_lora.data.puzzle_rows import PuzzleRows
from qat_lora.errors import UserError
from qat_lora.models.recursive import (
    IGNORE,
    Carry,
    RecursiveModel,
    fresh,
    halting,
    refill,
    segment_loss,
    sign_sums,
    sign_update,
    stablemax_loss,
)
from qat_lora.qat import MOST_RATE, Plan, check_range, follow, restore
from qat_lora.run.schedule import set_learning_rates
from qat_lora.run.session import Session

STAGE = "pretrain"
MOST_SEGMENTS = 10_000


@dataclass(frozen=True, kw_only=True)
class RecursivePlan(Plan):
    """How to train. batch_size: rows of an update, of all workers. segments: the most that a row gets. exploration:
    share of rows that may not halt before a random number of segments. identifier_*: of the puzzles' embeddings. ema:
    decay of the moving average that is measured and kept; 0: the model itself."""

    accumulation: int = 1
    lr_min_ratio: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    identifier_learning_rate: float = 1e-4
    identifier_weight_decay: float = 0.1
    ema: float = 0.9995
    segments: int = 16
    exploration: float = 0.1

    def __post_init__(self):
        super().__post_init__()
        if not 1 <= self.segments <= MOST_SEGMENTS:
            raise UserError(f"--halt-max-segments {self.segments} must be at least 1, at most {MOST_SEGMENTS:,}")
        for name in ("identifier_learning_rate", "identifier_weight_decay"):
            check_range(self.option(name), getattr(self, name), 0, MOST_RATE)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise UserError(f"--beta1 {self.betas[0]} and --beta2 {self.betas[1]} must be from 0 to below 1")
        for flag, value in (
            ("ema-decay", self.ema), ("lr-min-ratio", self.lr_min_ratio), ("halt-exploration", self.exploration),
        ):  # fmt: skip
            if not 0 <= value <= 1 or (value == 1 and flag == "ema-decay"):
                raise UserError(f"--{flag} {value} must be from 0 to {'below ' if flag == 'ema-decay' else ''}1")

    def share(self, workers: int) -> int:
        """Rows of an update that each of so many workers has."""
        if self.batch_size % workers:
            raise UserError(f"global_batch_size {self.batch_size} does not divide by {workers} workers; use a multiple")
        return self.batch_size // workers

    def learning_rate_factor(self, step: int) -> float:
        """Linear warm-up, then a half cosine to lr_min_ratio."""
        factor = super().learning_rate_factor(step)
        warming = step <= min(self.warmup_steps, self.steps // 2)
        return factor if warming else self.lr_min_ratio + (1 - self.lr_min_ratio) * factor


def segment_batches(
    rows: PuzzleRows, plan: RecursivePlan, start: int, rank: int = 0, world_size: int = 1
) -> Iterator[dict]:
    """This worker's rows of the updates from number `start` (0-based) on, each in a random symmetry, and `least` [B],
    the segments that a row has at least before it may halt.

    A function of seed and update only, whatever the number of workers; see PuzzleRows.chosen.
    """
    share = plan.share(world_size)
    for update, chosen in zip(range(start, plan.steps), rows.chosen(plan.seed, plan.batch_size, start)):
        random = np.random.default_rng([plan.seed, update])
        batch = rows.batch(np.array(chosen), random)
        explores = random.random(plan.batch_size) < plan.exploration
        least = explores * random.integers(min(2, plan.segments), plan.segments + 1, plan.batch_size)
        batch["least"] = torch.from_numpy(least)
        yield {name: values[rank * share : (rank + 1) * share] for name, values in batch.items()}


class Trainer:
    """A placed model in training, with the moving average of its weights and the carry of this worker's rows.

    Every shape is fixed, and all of an update is one graph on XLA: refill, segment, loss, gradients, their reduction
    and clipping, AdamW, SignSGD, average, halting.
    """

    def __init__(self, model: RecursiveModel, plan: RecursivePlan, backend: TorchBackend):
        self.model, self.plan, self.backend = model, plan, backend
        rate = {"lr": plan.learning_rate, "betas": plan.betas, "weight_decay": plan.weight_decay}
        self.optimizer = backend.optimizer([{"params": list(model.parameters()), **rate}])
        self.shown = copy.deepcopy(model) if plan.ema else model
        self.shown.identity = model.identity  # one table: its optimiser moves only what a batch had
        self.carry = fresh(model, plan.share(backend.world_size))
        backend.step_boundary()

    def step(self, batch: dict[str, Tensor], number: int) -> dict[str, Tensor | float]:
        """Update `number` (1-based) on rows of `segment_batches`; returns its figures as device scalars, this worker's
        share: the loss and, over the rows that halted, (sum, count) of right answers (exact) and of segments. A row
        without a label, which `load` leaves out, has no loss and does not count as halted."""
        model, plan, backend = self.model, self.plan, self.backend
        factor = plan.learning_rate_factor(number)
        set_learning_rates(self.optimizer, factor)
        carry = refill(self.carry, batch, model)
        picked = model.identity.index_select(0, carry.identifiers).requires_grad_()
        with backend.autocast():
            z_H, z_L, logits, halt = model(carry.z_H, carry.z_L, carry.inputs, picked)
        loss, right = segment_loss(logits, halt, carry.labels)
        loss = loss.sum() / plan.batch_size
        backend.backward(loss)
        segments = carry.segments + 1
        halted = halting(halt.detach(), segments, carry.budgets, plan.segments, batch["least"])
        ended = halted & (carry.labels != IGNORE).any(1)
        figures = {
            "loss": loss.detach(),
            "exact": ((right & ended).sum(), ended.sum()),
            "segments": ((segments * ended).sum(), ended.sum()),
        }
        self.carry = replace(carry, z_H=z_H, z_L=z_L, segments=segments, halted=halted)
        sums = sign_sums(carry.identifiers, picked.grad.float(), len(model.identity))

        def after() -> None:
            backend.reduce(list(sums))
            sign_update(model.identity, *sums, plan.identifier_learning_rate * factor, plan.identifier_weight_decay)
            if plan.ema:
                follow(self.shown, model, plan.ema)

        figures["grad_norm"] = backend.update(self.optimizer, plan.clip_grad_norm, after)
        return figures | {"lr": plan.learning_rate * factor, "tokens": batch["inputs"].numel()}

    # -- checkpoints -------------------------------------------------------------------------------------------------
    def state(self) -> tuple[dict, dict]:
        """The parameters, and the rest: optimiser, average, puzzles' embeddings, and the carries of all workers, so
        that a run may be resumed with another number of them."""
        carries = self.backend.group.gather(self.backend.to_host(vars(self.carry)))
        return dict(self.model.named_parameters()), {
            "optimizer": self.optimizer.state_dict(),
            "average": dict(self.shown.named_parameters()) if self.plan.ema else {},
            "identity": self.model.identity,
            "carry": {name: torch.cat([each[name] for each in carries]) for name in carries[0]},
        }

    def load(self, tensors: dict, trainer: dict) -> None:
        restore(self.model, tensors)
        self.optimizer.load_state_dict(trainer["optimizer"])
        if self.plan.ema:
            restore(self.shown, trainer["average"])
        with torch.no_grad():
            self.model.identity.copy_(trainer["identity"])
        if (rows := len(trainer["carry"]["halted"])) != self.plan.batch_size:
            raise UserError(f"the checkpoint is of a run with global_batch_size {rows}, not {self.plan.batch_size}")
        share = self.plan.share(self.backend.world_size)
        mine = slice(self.backend.rank * share, (self.backend.rank + 1) * share)
        self.carry = Carry(**self.backend.to_device({name: kept[mine] for name, kept in trainer["carry"].items()}))
        self.backend.step_boundary()


def train_recursive(
    trainer: Trainer, train: PuzzleRows, session: Session, evaluate: Callable[[int], dict], best: dict
) -> None:
    """All updates of a plan. evaluate(step) gives held-out figures, and keeps in `best`, plain values and host tensors,
    what is to go through checkpoints."""
    plan, backend = trainer.plan, trainer.backend

    def state() -> tuple[dict, dict]:
        tensors, rest = trainer.state()
        return tensors, rest | {"best": best}

    def load(tensors: dict, rest: dict) -> None:
        trainer.load(tensors, rest)
        best.update(rest["best"])

    stream = None
    trainer.model.train()
    for step in session.steps(STAGE, plan.steps, state, load, evaluate):
        stream = stream or backend.prefetch(segment_batches(train, plan, step - 1, backend.rank, backend.world_size))
        session.record(**trainer.step(next(stream), step))


# -- measuring -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Answers:
    """What a model answers to rows: tokens [N, L] at a row's first halt and after all segments, and segments until that
    halt [N]."""

    early: Tensor
    full: Tensor
    segments: Tensor


@torch.no_grad()
def answer(
    model: RecursiveModel, batch: dict[str, Tensor], segments: int, backend: TorchBackend
) -> tuple[Answers, Tensor]:
    """Answers to one batch on the device, and the stablemax loss [B, L] of the last segment: every row goes through all
    `segments`, and what it had at its halt is kept aside by a mask, so that both come from one pass."""
    rows = refill(fresh(model, len(batch["inputs"])), batch, model)
    z_H, z_L, picked = rows.z_H, rows.z_L, model.identity.index_select(0, batch["identifiers"])
    early, used, done = torch.zeros_like(batch["inputs"]), rows.segments, torch.zeros_like(rows.halted)
    backend.step_boundary()
    for _ in range(segments):
        with backend.autocast():
            z_H, z_L, logits, halt = model(z_H, z_L, batch["inputs"], picked)
        full = logits.argmax(-1)
        early = torch.where(done[:, None], early, full)
        used = used + (~done).long()
        done = done | halting(halt, used, batch["budgets"], segments)
        backend.step_boundary()
    return Answers(early, full, used), stablemax_loss(logits, batch["labels"])


@torch.no_grad()
def measure(
    model: RecursiveModel, rows: PuzzleRows, segments: int, batch_size: int, backend: TorchBackend
) -> dict[str, float]:
    """heldout_exact and heldout_cells: share of rows and of labelled cells that are right where the halting head stops,
    heldout_exact_full and _cells_full after all segments; heldout_loss, a cell's after all segments; heldout_segments,
    the mean that halting takes.

    Each worker measures its share of batches of one size, the last filled up. Rows without a label count in no figure;
    heldout_rows is the number of the others.
    """
    sums = torch.zeros(8, device=backend.device)
    share = batch_size // backend.world_size
    for first in range(0, len(rows), batch_size):  # equally many for every worker
        at = first + backend.rank * share + np.arange(share)
        batch = rows.batch(np.minimum(at, len(rows) - 1))
        batch["labels"][torch.from_numpy(at >= len(rows))] = IGNORE
        batch = backend.to_device(batch)
        found, loss = answer(model, batch, segments, backend)
        labelled = batch["labels"] != IGNORE
        counts = labelled.any(1)
        tallies = [counts.sum(), labelled.sum(), loss.sum(), (found.segments * counts).sum()]
        for tokens in (found.early, found.full):
            right = (tokens == batch["labels"]) & labelled
            tallies += [((right | ~labelled).all(1) & counts).sum(), right.sum()]
        sums = sums + torch.stack([tally.float() for tally in tallies])
        backend.step_boundary()
    totals = [sum(column) for column in zip(*backend.group.gather(backend.to_host(sums).tolist()))]
    count, cells, loss, used, early, early_cells, full, full_cells = totals
    return {
        "heldout_exact": early / count, "heldout_cells": early_cells / cells,
        "heldout_exact_full": full / count, "heldout_cells_full": full_cells / cells,
        "heldout_loss": loss / cells, "heldout_segments": used / count, "heldout_rows": int(count),
    }  # fmt: skip


def kept(model: RecursiveModel, backend: TorchBackend) -> dict[str, Tensor]:
    """The whole state of a model as copies on the host."""
    return {name: tensor.clone() for name, tensor in backend.to_host(model.state_dict()).items()}
