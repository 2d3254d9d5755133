"""The options that training scripts share, and the plan made from them.

Methods import what they need, so that --help does not wait for torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from qat_lora.errors import UserError
from qat_lora.run import options as opt
from qat_lora.run.options import RunConfig

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset

    from qat_lora.backend import TorchBackend
    from qat_lora.run.session import Every
    from qat_lora.train.loop import Plan
    from qat_lora.train.memory import Parts


@dataclass(frozen=True, kw_only=True)
class LoopOptions(RunConfig):
    """Options of every training loop."""

    learning_rate: float = opt.training(5e-4, "peak learning rate", **opt.RATE)
    clip_grad_norm: float = opt.training(
        1.0, "clip the global gradient norm to this; 0 does not clip", at_least=0, at_most=opt.LARGEST
    )
    eval_every: int = opt.run(
        100, "updates between evaluations; 0 evaluates only before and after training", at_least=0
    )
    save_every: int = opt.run(100, "updates between checkpoints; 0 saves only the last", at_least=0)
    log_every: int = opt.run(10, "updates between lines of metrics.jsonl; 0 logs only the last", at_least=0)

    def every(self) -> Every:
        from qat_lora.run.session import Every

        return Every(self.log_every, self.eval_every, self.save_every)


def checked_updates(steps: int, option: str, epochs: float) -> int:
    """Return the number of updates that an option's epochs amount to; raises UserError if training would never end."""
    if steps > opt.MOST_UPDATES:
        raise UserError(f"{option} {epochs} makes {steps:,} updates, more than {opt.MOST_UPDATES:,}; lower it")
    return steps


@dataclass(frozen=True, kw_only=True)
class BatchOptions(LoopOptions):
    """How updates are split into micro-batches on each worker; the split changes results only by rounding."""

    batch_size: int = opt.training(4, "rows per micro-batch on each worker", identity=False, at_least=1)
    accumulation_steps: int = opt.training(
        1, "micro-batches per update", identity=False, at_least=1, at_most=opt.MOST_MICRO_BATCHES
    )
    gradient_checkpointing: bool = opt.training(
        False, "recompute each block in the backward pass: less memory, more time", identity=False
    )
    shard: Literal["auto", "on", "off"] = opt.device(
        "auto",
        "each worker holds a part of every weight, gradient and moment; auto: if a whole model does not fit",
        identity=False,
    )
    compile: Literal["auto", "on", "off"] = opt.device(
        "auto", "run the decoder blocks through torch.compile, which takes time at the start; auto does so on CUDA only"
    )

    def update_facts(self, workers: int) -> dict:
        """For the manifest: a run may be resumed with another number of workers or another split if this stays the
        same."""
        return {"rows_per_update": self.batch_size * self.accumulation_steps * workers}

    def shares(self, model: nn.Module, length: int, backend: TorchBackend, workers: int) -> tuple[bool, int]:
        """Whether the workers share the model out, and the least memory in bytes that each then needs with rows of
        `length` tokens. Raises UserError where that is impossible."""
        from qat_lora.train.language_memory import least_training_memory
        from qat_lora.train.memory import shares_out

        need = partial(least_training_memory, model, self.batch_size, length, backend.bf16)
        shared = shares_out(
            self.shard, backend, workers, need, ", and take --gradient-checkpointing or a lower --batch-size"
        )
        return shared, need(workers if shared else 1)


@dataclass(frozen=True, kw_only=True)
class TrainOptions(BatchOptions):
    """Training on rows of tokens for a number of updates."""

    max_steps: int = opt.training(300, "number of updates", **opt.UPDATES)
    warmup_steps: int = opt.training(10, "updates of linear warm-up", at_least=0)
    eval_rows: int = opt.run(64, "held-out rows per evaluation", at_least=1)

    def plan(self) -> Plan:
        from qat_lora.train.loop import Plan

        return Plan(
            steps=self.max_steps, batch_size=self.batch_size, accumulation=self.accumulation_steps,
            learning_rate=self.learning_rate, warmup_steps=self.warmup_steps, clip_grad_norm=self.clip_grad_norm,
            seed=self.seed,
        )  # fmt: skip

    def check_rows(self, train: Dataset, heldout: Dataset, workers: int) -> None:
        """Raise UserError if the training rows do not fill a batch for each worker, or if no held-out row would be
        evaluated."""
        if len(train) < self.batch_size * workers:
            raise UserError(
                f"{len(train)} training rows are fewer than --batch-size {self.batch_size} for each of {workers} "
                "workers; add text, or lower one of them"
            )
        if min(len(heldout), self.eval_rows) < 1:
            raise UserError(
                f"{len(heldout)} held-out rows and --eval-rows {self.eval_rows} leave nothing to measure; hold out "
                "more text, or evaluate more rows"
            )

    def memory(
        self, model: nn.Module, length: int, backend: TorchBackend, more: dict[str, Parts] | None = None,
        workers: int = 1,
    ) -> dict[str, Parts]:  # fmt: skip
        """A worker's estimated memory in each phase, with rows of `length` tokens. more: other phases; workers: how
        many share the model out."""
        from qat_lora.train.language_memory import loading_memory, training_memory

        sizes = self.batch_size, length, backend.bf16, self.gradient_checkpointing
        training = training_memory(model, *sizes, compiled=backend.static_shapes, workers=workers)
        return {"loading": loading_memory(model), "training": training} | (more or {})

    def describe(
        self, model: nn.Module, train: Dataset, backend: TorchBackend, workers: int,
        more: dict[str, Parts] | None = None,
    ) -> bool:  # fmt: skip
        """Print the effective batch, the epoch and a worker's estimated memory, see `memory`. Returns whether the model
        is shared out over the workers, see `shares`. Raises UserError if training cannot fit on this machine, except in
        a dry run, which may plan for another machine."""
        from qat_lora.run.console import say
        from qat_lora.train.language_memory import sizes_of
        from qat_lora.train.memory import check_fits, memory_line

        rows, length = self.update_facts(workers)["rows_per_update"], len(train[0]["tokens"])
        shared, need = self.shares(model, length, backend, workers)
        if not self.dry_run:
            what = f"training {sizes_of(model)} on --batch-size {self.batch_size} rows of {length} tokens"
            what += f" with {workers} workers" if workers > 1 else ""
            check_fits(backend, {"--batch-size, or take shorter rows or a smaller model": need}, what, workers)
        say(
            f"effective batch: batch_size {self.batch_size} × accumulation_steps {self.accumulation_steps} × num_chips "
            f"{workers} = {rows} rows or {rows * length} tokens"
        )
        say(f"an epoch: {len(train)} rows in {len(train) / rows:.1f} updates, {len(train) // workers} for each worker")
        say(memory_line(self.memory(model, length, backend, more, workers if shared else 1), backend))
        if not shared and self.shard == "auto" and workers > 1 and backend.can_share and backend.memory() is None:
            say("with --shard on: " + memory_line(self.memory(model, length, backend, more, workers), backend))
        return shared
