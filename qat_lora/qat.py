"""End-to-end quantisation-aware training of a student from a KD cache."""

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from qat_lora.backend import TorchBackend
from qat_lora.data.batches import batches
from qat_lora.errors import UserError
from qat_lora.evaluate import kd_loss
from qat_lora.memory import (
    Parts,
    check_fits,
    least_training_memory,
    loading_memory,
    memory_line,
    sizes_of,
    training_memory,
)
from qat_lora.models.architecture import decoder_layers, part_of
from qat_lora.quant.linear import quantized_layers
from qat_lora.run.config import JobConfig, option
from qat_lora.run.schedule import cosine, set_learning_rates
from qat_lora.run.session import Every, Session


@dataclass(frozen=True, kw_only=True)
class TrainOptions(JobConfig):
    """The options of every script that trains from rows of tokens."""

    max_steps: int = option(300, "updates")
    # How the rows of an update are split changes figures by rounding only; `update_facts` records their number.
    batch_size: int = option(4, "rows in a micro-batch of each worker", identity=False)
    accumulation_steps: int = option(1, "micro-batches in an update", identity=False)
    num_chips: int | None = option(
        None, "TPU chips, GPUs or CPU processes of this host, each with its own --batch-size; 0: all; default: one",
        identity=False,
    )  # fmt: skip
    learning_rate: float = option(5e-4, "peak learning rate")
    warmup_steps: int = option(10, "updates of linear warm-up")
    clip_grad_norm: float = option(1.0, "largest global gradient norm; 0 clips nothing")
    gradient_checkpointing: bool = option(
        False, "recompute blocks in the backward pass: less memory, more time", identity=False
    )
    eval_every: int = option(100, "steps between held-out evaluations; 0: first and last", identity=False)
    eval_rows: int = option(64, "held-out rows of an evaluation", identity=False)
    save_every: int = option(100, "steps between checkpoints; 0: last", identity=False)
    log_every: int = option(10, "steps between lines of metrics.jsonl", identity=False)

    def plan(self) -> "Plan":
        return Plan(
            steps=self.max_steps, batch_size=self.batch_size, accumulation=self.accumulation_steps,
            learning_rate=self.learning_rate, warmup_steps=self.warmup_steps, clip_grad_norm=self.clip_grad_norm,
            seed=self.seed,
        )  # fmt: skip

    def every(self) -> Every:
        return Every(self.log_every, self.eval_every, self.save_every)

    def update_facts(self, workers: int) -> dict:
        """For the manifest: a run may be resumed with other workers or another split as long as this stays the same."""
        return {"rows_per_update": self.batch_size * self.accumulation_steps * workers}

    def check_rows(self, train: Dataset, heldout: Dataset, workers: int) -> None:
        """Raise UserError if the training rows do not fill a batch for each worker, or if no held-out row is
        measured."""
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

    def check_memory(self, model: nn.Module, train: Dataset, backend: TorchBackend, workers: int) -> None:
        """Raise UserError if training cannot fit this machine. Dry runs pass: they may plan for another machine."""
        if self.dry_run:
            return
        length = len(train[0]["tokens"])
        need = least_training_memory(model, self.batch_size, length, backend.bf16)
        what = f"training {sizes_of(model)} on --batch-size {self.batch_size} rows of {length} tokens"
        what += f" with {workers} workers" if workers > 1 else ""
        check_fits(backend, {"--batch-size, or take shorter rows or a smaller model": need}, what, workers)

    def describe(
        self, model: nn.Module, train: Dataset, backend: TorchBackend, workers: int, beside: Parts | None = None,
        more: dict[str, Parts] | None = None,
    ) -> list[str]:  # fmt: skip
        """Lines on batch, shares and estimated memory of a worker. beside: what else is held in training; more: further
        phases."""
        rows, length = self.update_facts(workers)["rows_per_update"], len(train[0]["tokens"])
        checkpointing = self.gradient_checkpointing
        training = training_memory(model, self.batch_size, length, backend.bf16, checkpointing, beside)
        phases = {"loading": loading_memory(model), "training": training} | (more or {})
        return [
            f"effective batch: batch_size {self.batch_size} × accumulation_steps {self.accumulation_steps} × num_chips "
            f"{workers} = {rows} rows or {rows * length} tokens",
            f"an epoch: {len(train)} rows in {len(train) / rows:.1f} updates, {len(train) // workers} for each worker",
            memory_line(phases, backend),
        ]


LARGEST = torch.finfo(torch.float32).max  # more is no fp32 number
MOST_UPDATES = 10**9  # of a stage: years
MOST_MICRO_BATCHES = 10_000  # of an update
MOST_RATE = 1e3  # largest learning rate or weight decay
LEAST_RATE = 1e-12  # of a student whose weights are all zero
RATE_SHARE = 3.1e-3  # of the root mean square of weights in 2 bits: their peak learning rate
MOST_WEIGHT = 1e6  # largest weight of a part of a loss, and largest alpha of an adapter
OPTIONS = {"steps": "--max-steps", "accumulation": "--accumulation-steps"}  # others are called as their fields


@dataclass(frozen=True)
class Plan:
    """How long and how fast to train. One step is one optimiser update of batch_size · accumulation rows. options: what
    messages call the fields, where a script has other options for them than train_qat."""

    steps: int
    batch_size: int
    accumulation: int
    learning_rate: float
    warmup_steps: int
    clip_grad_norm: float
    seed: int
    weight_decay: float = field(default=0.0, kw_only=True)  # decoupled
    options: dict[str, str] = field(default_factory=dict, kw_only=True, repr=False, compare=False)

    def __post_init__(self):
        if self.batch_size < 1:
            raise UserError(f"{self.option('batch_size')} {self.batch_size} must be at least 1")
        if not 0 <= self.steps <= MOST_UPDATES:
            raise UserError(f"{self.option('steps')}: {self.steps} updates are not from 0 to {MOST_UPDATES:,}")
        check_rate(self.option("learning_rate"), self.learning_rate)
        for name, least, most in (
            ("accumulation", 1, MOST_MICRO_BATCHES), ("warmup_steps", 0, LARGEST), ("clip_grad_norm", 0, LARGEST),
            ("weight_decay", 0, MOST_RATE),
        ):  # fmt: skip
            check_range(self.option(name), getattr(self, name), least, most)

    def option(self, name: str) -> str:
        """The option behind a field."""
        return self.options.get(name) or OPTIONS.get(name) or f"--{name.replace('_', '-')}"

    def learning_rate_factor(self, step: int) -> float:
        """The schedule's factor for update `step` (1-based): counted in updates, never in micro-batches."""
        return cosine(step - 1, self.steps, min(self.warmup_steps, self.steps // 2))


def check_range(option: str, value: float, least: float, most: float) -> None:
    """Raise UserError for a value that is not from `least` to `most`."""
    if not least <= value <= most:
        raise UserError(f"{option} {value} must be from {least} to {f'{most:,.0f}' if most < 1e12 else f'{most:.0e}'}")


def check_rate(option: str, value: float) -> None:
    """Raise UserError for what is no learning rate."""
    if not 0 < value <= MOST_RATE:
        raise UserError(f"{option} {value} must be above 0 and at most {MOST_RATE:,.0f}; use e.g. 1e-3")


SCOPES = ("all", "mlp", "attn", "weights")


@dataclass(frozen=True)
class QATPlan(Plan):
    """scale_learning_rate: of the quantisers' scales. scope: what learns, see `select_parameters`. ema: decay of the
    moving average that is measured and saved in the student's place; 0: the student itself."""

    scale_learning_rate: float = 0.0
    scope: str = "all"
    ema: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_rate(self.option("scale_learning_rate"), self.scale_learning_rate)
        if self.scope not in SCOPES:
            raise UserError(f"--scope {self.scope!r} is not one of {', '.join(SCOPES)}")
        if not 0 <= self.ema < 1:
            raise UserError(f"--ema {self.ema} must be from 0 (no average) to below 1, such as 0.98")


def select_parameters(student: nn.Module, scope: str) -> None:
    """Freeze what `scope` leaves out: "mlp" and "attn" train that part of the decoder blocks alone, "weights" all but
    the scales, "all" freezes nothing."""
    keep = {id(p) for p in student.parameters()}
    if scope in ("mlp", "attn"):
        keep = {
            id(p)
            for block in decoder_layers(student)
            for child, module in block.named_children()
            if any(p.ndim > 1 for p in module.parameters())  # not the block's own norms
            for name, p in module.named_parameters(child)
            if part_of(block, name) == scope
        }
    elif scope == "weights":
        keep -= {id(p) for layer in quantized_layers(student).values() for p in layer.quantizer.parameters()}
    for p in student.parameters():
        p.requires_grad_(p.requires_grad and id(p) in keep)
    if not any(p.requires_grad for p in student.parameters()):
        raise UserError(f"--scope {scope} leaves nothing of this model to train; use another scope")


def average_of(student: nn.Module) -> nn.Module:
    """A copy of a student for its moving average; what is frozen is shared, not copied."""
    frozen = [value for value in (*student.parameters(), *student.buffers()) if not value.requires_grad]
    return copy.deepcopy(student, {id(value): value for value in frozen})


@torch.no_grad()
def follow(average: nn.Module, student: nn.Module, decay: float) -> None:
    """One step of an exponential moving average: average ← decay·average + (1 − decay)·student, for what is trained."""
    for p, q in zip(average.parameters(), student.parameters()):
        if q.requires_grad:
            p.lerp_(q, 1 - decay)


def parameter_groups(student: nn.Module, learning_rate: float, scale_learning_rate: float) -> list[dict]:
    """Optimiser groups: latent weights and everything unquantised, and the quantisers' scales; none of them empty."""
    scales = {id(p) for layer in quantized_layers(student).values() for p in layer.quantizer.parameters()}
    trained = [p for p in student.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if id(p) not in scales], "lr": learning_rate},
        {"params": [p for p in trained if id(p) in scales], "lr": scale_learning_rate},
    ]
    return [group for group in groups if group["params"]]


def usual_rates(student: nn.Module) -> tuple[float, float]:
    """The peak learning rates of a student where none are given, end to end and layer by layer, to two digits.

    At 2 bits both are .31% of the root mean square of the quantised weights, since a latent weight learns by reaching
    the next level, and levels are as far apart as weights are large: those of SmolLM2 (.19), on which the shares were
    found, are five times as large as Gemma 3's (.034). For every two bits more the share is a sixth of that, and end to
    end a half of it at 3 bits and a quarter from 4 on (docs/benchmarks.md, "A second model"; 3 and 8 bits: unmeasured).
    Of several quantisers the coarsest counts.
    """
    layers = quantized_layers(student).values()
    squares = sum(float(torch.linalg.vector_norm(layer.weight.detach())) ** 2 for layer in layers)
    size = math.sqrt(squares / sum(layer.weight.numel() for layer in layers))
    bits = min(layer.quantizer.spec.bits for layer in layers)
    layerwise = RATE_SHARE * 6 ** (1 - bits / 2) * size
    rates = (float(f"{rate:.1e}") for rate in (layerwise / 2 ** min(bits - 2, 2), layerwise))
    return tuple(min(max(LEAST_RATE, rate), MOST_RATE) for rate in rates)  # NaN is refused elsewhere, by name


def restore(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy saved parameters into a model; raises UserError where names or shapes differ (another preset or model)."""
    there = {name: p for name, p in model.named_parameters() if name in tensors or p.requires_grad}
    for name in sorted(there.keys() ^ tensors.keys()):
        raise UserError(f"the checkpoint is of another model or preset: parameter {name} is on one side only")
    for name, parameter in there.items():
        if parameter.shape != tensors[name].shape:
            raise UserError(
                f"the checkpoint is of another preset: {name} is {list(tensors[name].shape)} there, "
                f"{list(parameter.shape)} here"
            )
        parameter.detach().copy_(tensors[name])


def resumable(
    model: nn.Module, optimizer: torch.optim.Optimizer, best: dict | None = None
) -> tuple[Callable, Callable]:
    """state() and load(…) of a Session's stage: what is trained of a model, its optimiser, and what `best` holds."""
    best = {} if best is None else best
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def state() -> tuple[dict, dict]:
        return trained, {"optimizer": optimizer.state_dict(), "best": best}

    def load(tensors: dict, trainer: dict) -> None:
        restore(model, tensors)
        optimizer.load_state_dict(trainer["optimizer"])
        best.update(trainer["best"])

    return state, load


def train_qat(
    student: nn.Module,
    train: Dataset,
    plan: QATPlan,
    session: Session,
    evaluate: Callable[[int, nn.Module], dict],
    stage: str = "qat",
) -> None:
    """Train what a placed student leaves trainable, and the plan's scope, against the cached teacher.

    train: KDCacheDataset. evaluate(step, model) gives held-out figures, and keeps the best state if it likes; model is
    the student, or its moving average.
    """
    backend = session.backend
    kept = {name: p for name, p in student.named_parameters() if p.requires_grad}  # of earlier stages too
    select_parameters(student, plan.scope)
    optimizer = backend.optimizer(parameter_groups(student, plan.learning_rate, plan.scale_learning_rate))
    shown = average_of(student) if plan.ema else student

    def state() -> tuple[dict, dict]:
        average = {name: p for name, p in shown.named_parameters() if name in kept} if plan.ema else {}
        return kept, {"optimizer": optimizer.state_dict(), "average": average}

    def load(tensors: dict, trainer: dict) -> None:
        restore(student, tensors)
        optimizer.load_state_dict(trainer["optimizer"])
        if plan.ema:
            restore(shown, trainer["average"])

    stream = None
    student.train()
    for step in session.steps(stage, plan.steps, state, load, lambda step: evaluate(step, shown)):
        stream = stream or training_stream(train, plan, step, backend)
        factor = plan.learning_rate_factor(step)
        set_learning_rates(optimizer, factor)
        session.record(**update(student, stream, kd_loss, optimizer, plan, backend), lr=plan.learning_rate * factor)
        if plan.ema:
            follow(shown, student, plan.ema)
            backend.step_boundary()  # on XLA a graph of its own, not a part of the next step's


def train_plain(
    model: nn.Module,
    train: Dataset,
    loss_of: Callable,
    plan: Plan,
    session: Session,
    evaluate: Callable[[int], dict],
    stage: str,
    best: dict | None = None,
) -> None:
    """Train what a placed model leaves trainable by loss_of(model, batch), see `update`.

    best: what evaluate keeps there, plain values and host tensors, goes through checkpoints.
    """
    backend = session.backend
    groups = parameter_groups(model, plan.learning_rate, plan.learning_rate)
    optimizer = backend.optimizer([group | {"weight_decay": plan.weight_decay} for group in groups])
    stream = None
    model.train()
    for step in session.steps(stage, plan.steps, *resumable(model, optimizer, best), evaluate):
        stream = stream or training_stream(train, plan, step, backend)
        factor = plan.learning_rate_factor(step)
        set_learning_rates(optimizer, factor)
        session.record(**update(model, stream, loss_of, optimizer, plan, backend), lr=plan.learning_rate * factor)


def training_stream(train: Dataset, plan: Plan, step: int, backend: TorchBackend) -> Iterator[dict]:
    """This worker's micro-batches from update `step` (1-based) on, on the device."""
    place = {"rank": backend.rank, "world_size": backend.world_size}
    return backend.prefetch(batches(train, plan.batch_size, plan.accumulation, plan.seed, step - 1, **place))


def update(model, stream, loss_of: Callable, optimizer, plan: Plan, backend: TorchBackend) -> dict:
    """One optimiser update over `accumulation` micro-batches; the figures to record, as device scalars.

    loss_of(model, batch) divides by the batch's `total`, so that k micro-batches of b rows, in one worker or in many,
    equal one of k·b; loss, kl and tokens are this worker's share.
    """
    loss = kl = tokens = 0
    for micro in range(plan.accumulation):
        batch = next(stream)
        with backend.autocast():
            part = loss_of(model, batch)
        backend.backward(part)
        loss = loss + part.detach()
        if "entropy" in batch:
            kl = kl + part.detach() - (batch["entropy"] * batch["mask"]).sum() / batch["total"]
        tokens = tokens + ((batch["segments"] > 0).sum() if "segments" in batch else batch["tokens"].numel())
        if micro + 1 < plan.accumulation:
            backend.step_boundary()  # on XLA one micro-batch is one graph, not all of them together
    norm = backend.update(optimizer, plan.clip_grad_norm)
    return {"loss": loss, **({"kl": kl} if "entropy" in batch else {}), "grad_norm": norm, "tokens": tokens}
