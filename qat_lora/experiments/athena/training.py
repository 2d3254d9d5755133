"""Training a recursive model: deep supervision, one segment per update, with a carry of fixed shape."""

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from qat_lora.backend import TorchBackend
from qat_lora.errors import UserError
from qat_lora.experiments.athena.model import (
    IGNORE,
    Carry,
    RecursiveModel,
    fresh,
    halting,
    refill,
    segment_loss,
    sign_sums,
    sign_update,
)
from qat_lora.experiments.athena.rows import PuzzleRows
from qat_lora.run.console import say
from qat_lora.run.metrics import Metric, Ratio, Share, Total, Value
from qat_lora.run.session import Session
from qat_lora.train.loop import Plan, Stage, restore, set_learning_rates, update_ema
from qat_lora.train.optimizer import new_optimizer

STAGE = "pretrain"


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


class Trainer:
    """A placed model in training, with the moving average of its weights and the carry of this worker's rows.

    Every shape is fixed, and on XLA a whole update is one graph: refill, segment, loss, gradients, their reduction and
    clipping, AdamW, SignSGD, moving average, halting.
    """

    def __init__(self, model: RecursiveModel, plan: RecursivePlan, backend: TorchBackend):
        self.model, self.plan, self.backend = model, plan, backend
        rate = {"lr": plan.learning_rate, "betas": plan.betas, "weight_decay": plan.weight_decay}
        self.optimizer = new_optimizer([{"params": list(model.parameters()), **rate}], backend)
        self.shown = copy.deepcopy(model) if plan.ema else model
        self.shown.identity = model.identity  # shared, since SignSGD updates only a batch's puzzles
        self.carry = fresh(model, plan.share(backend.world_size))
        self.best: dict = {}  # set by an evaluation: plain values and host tensors
        backend.step_boundary()

    def segment(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Metric | Ratio]]:
        """Run one segment of the rows in the carry, after replacing the halted ones by rows of `segment_batches`.
        Returns this worker's share of the loss, and the metrics of the update. A row without labels, which `load`
        leaves out, has no loss and does not count as halted."""
        model, plan, backend = self.model, self.plan, self.backend
        carry = refill(self.carry, batch, model)
        self.picked = model.identity.index_select(0, carry.identifiers).requires_grad_()
        with backend.autocast():
            z_H, z_L, logits, halt = model(carry.z_H, carry.z_L, carry.inputs, self.picked)
        loss, right = segment_loss(logits, halt, carry.labels)
        loss = loss.sum() / plan.batch_size
        segments = carry.segments + 1
        halted = halting(halt.detach(), segments, carry.budgets, plan.segments, batch["least"])
        self.carry = replace(carry, z_H=z_H, z_L=z_L, segments=segments, halted=halted)
        ended = halted & (carry.labels != IGNORE).any(1)
        return loss, {
            "loss": Share(loss.detach()),
            "exact": Ratio((right & ended).sum(), ended.sum()),
            "segments": Ratio((segments * ended).sum(), ended.sum()),
            "tokens": Total(batch["inputs"].numel()),
        }

    def summed(self) -> tuple[Tensor, Tensor]:
        """After `segment` and its backward pass, what SignSGD needs from all workers, see `sign_sums`."""
        self.sums = sign_sums(self.carry.identifiers, self.picked.grad.float(), len(self.model.identity))
        return self.sums

    def in_step(self, factor: float) -> None:
        """The rest of an optimiser step, after `summed`: SignSGD on the puzzles' embeddings, with the learning rate
        times the schedule's `factor`, and the moving average."""
        model, plan, sums = self.model, self.plan, self.sums
        del self.sums  # otherwise they would outlive the step
        sign_update(model.identity, *sums, plan.identifier_learning_rate * factor, plan.identifier_weight_decay)
        if plan.ema:
            update_ema(self.shown, model, plan.ema)

    def step(self, batch: dict[str, Tensor], number: int) -> dict[str, Metric | Ratio | Value]:
        """Do update `number` (1-based) outside a run, for checks and benchmarks; returns its metrics."""
        factor = self.plan.factor(number)
        set_learning_rates(self.optimizer, factor)
        loss, metrics = self.segment(batch)
        self.backend.backward(loss)
        within = partial(self.in_step, factor)
        clip, also = self.plan.clip_grad_norm, self.summed()
        return metrics | {"grad_norm": self.backend.update(self.optimizer, clip, within, also)}

    # -- checkpoints -------------------------------------------------------------------------------------------------
    def state(self) -> tuple[dict, dict]:
        """The parameters, and the rest: optimiser, moving average, puzzles' embeddings, and the carries of all workers,
        so that a run can be resumed with a different number of workers."""
        carries = self.backend.group.gather(self.backend.to_host(vars(self.carry)))
        return dict(self.model.named_parameters()), {
            "optimizer": self.optimizer.state_dict(),
            "average": dict(self.shown.named_parameters()) if self.plan.ema else {},
            "identity": self.model.identity,
            "carry": {name: torch.cat([each[name] for each in carries]) for name in carries[0]},
            "best": self.best,
        }

    def load(self, tensors: dict, trainer: dict) -> None:
        restore(self.model, tensors)
        self.optimizer.load_state_dict(trainer["optimizer"])
        if self.plan.ema:
            restore(self.shown, trainer["average"])
        with torch.no_grad():
            self.model.identity.copy_(trainer["identity"])
        if (rows := len(trainer["carry"]["halted"])) != self.plan.batch_size:
            raise UserError(
                f"the checkpoint is from a run with global_batch_size {rows}, not {self.plan.batch_size}; use {rows}"
            )
        share = self.plan.share(self.backend.world_size)
        mine = slice(self.backend.rank * share, (self.backend.rank + 1) * share)
        self.carry = Carry(**self.backend.to_device({name: kept[mine] for name, kept in trainer["carry"].items()}))
        self.best.update(trainer.get("best", {}))
        self.backend.step_boundary()


def athena_stage(
    trainer: Trainer, train: PuzzleRows, session: Session, evaluate: Callable[[int], dict[str, float]]
) -> Stage:
    """The stage that runs all updates of a trainer's plan."""
    plan, backend = trainer.plan, trainer.backend

    def stream(first: int) -> Iterator[dict]:
        return backend.prefetch(segment_batches(train, plan, first, backend.rank, backend.world_size))

    return Stage(
        STAGE, session, plan, trainer.optimizer, stream, trainer, evaluate, trainer.in_step, summed=trainer.summed
    )
