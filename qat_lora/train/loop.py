"""The training loop of every experiment: a stage of a run, its updates, and their micro-batches.

stage = Stage("qat", session, plan, optimizer, row_stream(rows, plan, backend), StageState(model, optimizer), evaluate)
for update in stage:                                    # resumes, evaluates, saves and stops in between
    for batch in update:                                # micro-batches, on the device
        with backend.autocast():
            loss = …                                    # forward and loss
        backend.backward(loss)
        update.add(loss=Share(loss), tokens=Total(tokens_of(batch)))
    norm = update.step()                                # reduce over workers, clip, step
    update.record(grad_norm=norm)
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from qat_lora.backend import TorchBackend
from qat_lora.backend.sharding import as_shards, load_shards, shards_of
from qat_lora.data.batches import batches
from qat_lora.errors import UserError
from qat_lora.kernels.optimizer import new_optimizer
from qat_lora.quant.rates import rate_shares
from qat_lora.run.metrics import Last, Metric, Ratio, Value
from qat_lora.run.options import COUNT, DECAY, RATE, SHARE, UPDATES, check_range
from qat_lora.run.session import Session

BOUNDS = {
    "steps": UPDATES, "batch_size": COUNT, "accumulation": COUNT, "learning_rate": RATE, "warmup_steps": UPDATES,
    "clip_grad_norm": {"at_least": 0}, "weight_decay": DECAY, "floor": SHARE,
}  # allowed values of a Plan  # fmt: skip
Stream = Callable[[int], Iterator[dict]]  # stream(n): the micro-batches from update n (0-based) on


@dataclass(frozen=True)
class Plan:
    """How long and how fast to train. An update is one optimiser step on batch_size · accumulation rows per worker.

    weight_decay: decoupled. floor: final learning rate as a share of the peak.
    """

    steps: int
    batch_size: int
    accumulation: int
    learning_rate: float
    warmup_steps: int
    clip_grad_norm: float
    seed: int
    weight_decay: float = field(default=0.0, kw_only=True)
    floor: float = field(default=0.0, kw_only=True)

    def __post_init__(self):
        for name, bounds in BOUNDS.items():
            check_range(name, getattr(self, name), **bounds)

    def factor(self, step: int, steps: int | None = None) -> float:
        """The schedule's factor for the peak learning rates in update `step` (1-based; not a micro-batch). steps: the
        length of the schedule [all updates]."""
        steps = self.steps if steps is None else steps
        warmup = min(self.warmup_steps, steps // 2)
        factor = cosine(step - 1, steps, warmup)
        return factor if step <= warmup else self.floor + (1 - self.floor) * factor


class Stage:
    """One stage of a run; iterate over it to get its updates.

    stream: see `row_stream`. trained: the content of checkpoints. evaluate(step) → held-out figures, see Session.steps.
    in_step(factor): extra work in an optimiser step, in the same graph on XLA; factor: see Plan.factor. summed() →
    tensors for `in_step` that are summed over workers together with the gradients.
    """

    def __init__(
        self, name: str, session: Session, plan: Plan, optimizer: torch.optim.Optimizer, stream: Stream,
        trained: "StageState", evaluate: Callable[[int], dict] | None = None,
        in_step: Callable[[float], None] | None = None, summed: Callable[[], Iterable[Tensor]] = tuple,
    ):  # fmt: skip
        self.name, self.session, self.backend, self.plan = name, session, session.backend, plan
        self.optimizer, self.stream, self.trained, self.evaluate = optimizer, stream, trained, evaluate
        self.in_step, self.summed = in_step, summed

    def __iter__(self) -> Iterator["Update"]:
        """Set the learning rates of each update, then yield it."""
        found, trained = None, self.trained
        for step in self.session.steps(self.name, self.plan.steps, trained.state, trained.load, self.evaluate):
            found = found or self.stream(step - 1)
            factor = self.plan.factor(*self.session.period(step, self.plan.steps))
            set_learning_rates(self.optimizer, factor)
            yield Update(self, step, factor, found)


class Update:
    """One update of a stage; iterate over it to get its micro-batches. On XLA, all micro-batches run one graph and the
    optimiser's step runs another, however many micro-batches there are; a single one shares the step's graph."""

    def __init__(self, stage: Stage, number: int, factor: float, stream: Iterator[dict]):
        self.stage, self.number, self.factor, self.stream = stage, number, factor, stream
        self.added: dict[str, list[Metric | Ratio]] = {}
        self.metrics: dict[str, Metric | Ratio | Value] = {}

    def __iter__(self) -> Iterator[dict]:
        micros, phases = self.stage.plan.accumulation, self.stage.backend.phases
        phases.start(self.number)
        for _ in range(micros):
            batch = next(self.stream)
            phases.tell(f"Batch collated: {next(iter(batch.values())).shape}")
            phases.begin("Forward pass")
            yield batch
            if micros > 1:
                self.stage.backend.step_boundary()

    def add(self, **metrics: Metric | Ratio) -> None:
        """Add the metrics of a micro-batch to those of the earlier ones. On XLA, the sums are part of the optimiser
        step's graph, so that all micro-batches have the same one."""
        for name, metric in metrics.items():
            self.added.setdefault(name, []).append(metric.detached())

    def step(self) -> Tensor:
        """Reduce the gradients over workers, clip them and take the optimiser step, with `in_step`. Returns the
        gradient norm before clipping, a device scalar."""
        self._sum()
        stage = self.stage
        in_step = partial(stage.in_step, self.factor) if stage.in_step else None
        stage.backend.phases.begin("Optimizer step")
        norm = stage.backend.update(stage.optimizer, stage.plan.clip_grad_norm, in_step, stage.summed())
        stage.backend.phases.end()
        return norm

    def record(self, **metrics: Metric | Ratio | Value) -> None:
        """Pass the metrics of the whole update and the learning rate to the session."""
        self._sum()
        rate = Last(self.stage.plan.learning_rate * self.factor)
        self.stage.session.record(**self.metrics, **metrics, lr=rate)

    def _sum(self) -> None:
        """Sum the metrics of the micro-batches, in order."""
        for name, (first, *others) in self.added.items():
            self.metrics[name] = sum(others, first)
        self.added = {}


class StageState:
    """The content of a stage's checkpoints: the trained parameters of a placed model, its optimiser, and `best`, plain
    values and host tensors that an evaluation keeps."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, best: dict | None = None):
        self.model, self.optimizer = model, optimizer
        self.best = {} if best is None else best

    def state(self) -> tuple[dict, dict]:
        """(trained parameters, the rest) for Session.steps."""
        return trained_state(self.model, self.optimizer, {"best": self.best})

    def load(self, tensors: dict | Path, trainer: dict) -> None:
        load_trained(self.model, self.optimizer, tensors, trainer)
        self.best.update(trainer["best"])


def trained_state(model: nn.Module, optimizer: torch.optim.Optimizer, rest: dict) -> tuple[dict, dict]:
    """(trained parameters, the optimiser's state and the rest) of a placed model; if it is shared out, the optimiser's
    tensors are beside the parameters, see `save_shards`."""
    as_shards(model)
    tensors, state = trained_parameters(model), optimizer.state_dict()
    if shards_of(model):
        tensors = {"model": tensors, "state": state.pop("state")}
    return tensors, {"optimizer": state} | rest


def load_trained(model: nn.Module, optimizer: torch.optim.Optimizer, tensors: dict | Path, rest: dict) -> None:
    """Restore what `trained_state` gave: its tensors, or the folder of shards with them."""
    state, shared = rest["optimizer"], bool(shards_of(model))
    if shared != isinstance(tensors, Path):
        how = "--shard off" if shared else "--shard on and several workers"
        raise UserError(f"the checkpoint was saved with {how}; resume with that")
    if shared:
        there, _ = trained_state(model, optimizer, {})
        load_shards(there, tensors)
        state = state | {"state": there["state"]}
    else:
        restore(model, tensors)
    optimizer.load_state_dict(state)


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that require gradients, by name."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def restore(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy saved parameters into a model; raises UserError if names or shapes differ (another model or preset)."""
    there = {name: p for name, p in model.named_parameters() if name in tensors or p.requires_grad}
    for name in sorted(there.keys() ^ tensors.keys()):
        raise UserError(f"the checkpoint is from another model or preset: only one side has parameter {name}")
    for name, parameter in there.items():
        if parameter.shape != tensors[name].shape:
            raise UserError(
                f"the checkpoint is from another preset: {name} is {list(tensors[name].shape)} there, "
                f"{list(parameter.shape)} here"
            )
        parameter.detach().copy_(tensors[name])


def row_stream(rows: Dataset, plan: Plan, backend: TorchBackend) -> Stream:
    """This worker's micro-batches of a dataset, on the device; see data.batches."""
    place = {"rank": backend.rank, "world_size": backend.world_size}
    return lambda first: backend.prefetch(batches(rows, plan.batch_size, plan.accumulation, plan.seed, first, **place))


def plain_stage(
    name: str, model: nn.Module, rows: Dataset, plan: Plan, session: Session, evaluate: Callable[[int], dict],
    best: dict | None = None,
) -> Stage:  # fmt: skip
    """A stage that trains the trainable parameters of a placed model on a dataset. best: see `StageState`."""
    optimizer = new_optimizer(
        model, plan.learning_rate, session.backend, rate_shares(model), weight_decay=plan.weight_decay
    )
    stream = row_stream(rows, plan, session.backend)
    return Stage(name, session, plan, optimizer, stream, StageState(model, optimizer, best), evaluate)


def tokens_of(batch: dict[str, Tensor]) -> int | Tensor:
    """The number of tokens in a batch, not counting the padding of packed rows."""
    return (batch["segments"] > 0).sum() if "segments" in batch else batch["tokens"].numel()


def cosine(step: int, total: int, warmup: int = 0) -> float:
    """The factor for the peak learning rate in update `step` (0-based) of `total`: linear warm-up, then half a cosine
    towards 0. It never reaches 0, because on XLA a learning rate of exactly 0 would compile another graph."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return max(1e-6, 0.5 * (1 + math.cos(math.pi * progress)))


def set_learning_rates(optimizer, factor: float) -> None:
    """Set every group's lr to `factor` times its peak (`initial_lr`, stored at the first call)."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
