"""How large is the scaling overhead? An update in a job of several workers against the same update in a bare loop.

    python benchmarks/scaling.py
    python benchmarks/scaling.py --num-chips 4 --device cuda --steps 20

All workers run at the same time. Each alternates between two kinds of update on the same model and rows: in a bare
loop (forward, backward, clip, optimiser step, without communication) and in a job (the same, plus reducing gradients,
gathering metrics and agreeing on SIGTERM, as a Session does). The time of each side is that of the slowest worker. Also
printed: the bytes that an update sends through all-reduce, and the bytes of the trained parameters. Rows and targets
are random, so nothing is learned.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from one_update import update

from qat_lora.backend import TorchBackend
from qat_lora.backend.opening import launch
from qat_lora.errors import UserError
from qat_lora.hosts.revision import revision
from qat_lora.kd.training import kd_loss
from qat_lora.kernels.optimizer import new_optimizer
from qat_lora.lora.add import add_adapter
from qat_lora.models.loading import EMBEDDED, empty_model, load_config, load_model
from qat_lora.quant.init import initialise
from qat_lora.quant.linear import freeze
from qat_lora.quant.student import StudentSpec, quantize
from qat_lora.run.command_line import run_script
from qat_lora.run.metrics import Last, Share, Total
from qat_lora.run.options import ScriptConfig, option
from qat_lora.run.rundir import Run
from qat_lora.run.session import Every, Session
from qat_lora.train.loop import Plan

TARGETS = 20  # per position, as with K = 8 and 12 draws


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    model: str = option(EMBEDDED, "model to train")
    num_chips: int = option(2, "number of workers")
    batch_size: int = option(4, "rows per micro-batch")
    length: int = option(256, "tokens per row")
    accumulation_steps: int = option(4, "micro-batches per update in the second QAT line")
    rank: int = option(8, "rank of the recovery adapter")
    steps: int = option(7, "timed pairs, after one that is not counted")


def main(cfg: Config) -> None:
    for name in ("num_chips", "batch_size", "accumulation_steps", "rank", "steps"):
        if getattr(cfg, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(cfg, name)} must be at least 1")
    if cfg.length < 2:
        raise UserError(f"--length {cfg.length} must be at least 2")
    print(f"{cfg.model}, {cfg.batch_size}×{cfg.length} tokens, {cfg.num_chips} workers, commit {revision()}")
    if not cfg.dry_run:
        launch(measure, (cfg,), cfg.device, cfg.precision, cfg.num_chips, cfg.debug)


def measure(backend: TorchBackend, cfg: Config) -> None:
    if backend.is_main:
        print(f"{backend}, {torch.get_num_threads()} threads each, medians of {cfg.steps} pairs")
    for name, make, accumulation in (
        (f"recovery LoRA, r = {cfg.rank}", adapter, 1),
        ("QAT", student, 1),
        (f"QAT, {cfg.accumulation_steps} micro-batches", student, cfg.accumulation_steps),
    ):
        with TemporaryDirectory() as folder:
            line = compare(backend, cfg, make(backend, cfg), accumulation, Path(folder))
        if backend.is_main:
            print(f"{name}: {line}", flush=True)


def student(backend: TorchBackend, cfg: Config):
    """The model at 2 bits, with everything but the embedding trained."""
    model = quantize(load_model(cfg.model) if backend.is_main else empty_model(cfg.model), StudentSpec())
    if backend.is_main:
        initialise(model, search=False)
    return backend.place(model).train()


def adapter(backend: TorchBackend, cfg: Config):
    """The same model, frozen, with an adapter on all projections but k."""
    model = student(backend, cfg)
    freeze(model)
    projections = ("q", "v", "o", "gate", "up", "down")
    return backend.place(add_adapter(model.requires_grad_(False), cfg.rank, cfg.rank, projections, cfg.seed)).train()


def rows(cfg: Config, vocab: int, device) -> dict:
    """A micro-batch of random rows and targets."""
    random = torch.Generator().manual_seed(cfg.seed)
    shape = (cfg.batch_size, cfg.length)
    prob = torch.rand(*shape, TARGETS, generator=random).softmax(-1)
    batch = {
        "tokens": torch.randint(vocab, shape, generator=random),
        "index": torch.randint(vocab, (*shape, TARGETS), generator=random),
        "prob": prob,
        "mask": torch.ones(shape, dtype=torch.uint8),
        "entropy": -(prob * prob.log()).sum(-1),
        "total": torch.tensor(float(cfg.batch_size * cfg.length)),
    }
    return {key: value.to(device) for key, value in batch.items()}


def compare(backend: TorchBackend, cfg: Config, model, accumulation: int, folder: Path) -> str:
    """One line: the time of an update in the job over that in the bare loop, and the bytes reduced and trained."""
    plan = Plan(
        steps=cfg.steps + 2, batch_size=cfg.batch_size, accumulation=accumulation, learning_rate=1e-6, warmup_steps=0,
        clip_grad_norm=1.0, seed=cfg.seed,
    )  # fmt: skip
    optimizer = new_optimizer(model, 1e-6, backend)
    batch = rows(cfg, load_config(cfg.model).vocab_size, backend.device)
    stream = iter(lambda: batch, None)
    alone = TorchBackend(backend.kind, cfg.precision)
    session = Session(Run(folder, resumed=False, writes=False), backend, Every(log=1))
    steps = session.steps("scaling", plan.steps, lambda: ({}, {}), lambda *_: None)
    reduced, reduce = [], dist.all_reduce

    def counted(tensor, **options):
        reduced.append(tensor.nbytes)
        return reduce(tensor, **options)

    def bare() -> None:
        update(model, stream, kd_loss, optimizer, plan, alone)

    def in_the_job() -> None:
        found = update(model, stream, kd_loss, optimizer, plan, backend)
        tokens = Total(plan.accumulation * batch["tokens"].numel())
        session.record(loss=Share(found["loss"]), grad_norm=found["grad_norm"], tokens=tokens, lr=Last(1e-6))
        next(steps)

    next(steps)
    dist.all_reduce = counted
    times = []
    for turn in range(cfg.steps + 1):
        pair = [timed(function, backend) for function in ((bare, in_the_job) if turn % 2 else (in_the_job, bare))]
        times.append(pair if turn % 2 else pair[::-1])
    dist.all_reduce = reduce
    bytes_an_update = sum(reduced) // (cfg.steps + 1)
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    slowest = [[max(t) for t in zip(*sides)] for sides in zip(*backend.group.gather(times))][1:]
    ratios = sorted(job / one for one, job in slowest)
    seconds = [median(side) for side in zip(*slowest)]
    return (
        f"update in the job / bare {median(ratios):.3f} ({ratios[0]:.3f}–{ratios[-1]:.3f}; {seconds[1]:.2f} / "
        f"{seconds[0]:.2f} s); {bytes_an_update} bytes reduced per update, {trained} bytes trained"
    )


def timed(function, backend: TorchBackend) -> float:
    """Seconds that function() takes in this worker; all workers start together."""
    backend.group.gather(None)
    started = time.perf_counter()
    function()
    backend.fetch(torch.zeros((), device=backend.device))  # waits for an accelerator to finish
    return time.perf_counter() - started


if __name__ == "__main__":
    run_script(main, Config, "scaling", __doc__)
