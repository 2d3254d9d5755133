# PYTHON_ARGCOMPLETE_OK
"""Does pretraining work on this machine? Checks device, data loading, training loop, gradient sync and checkpointing.

    python scripts/smoke_test.py
    python scripts/smoke_test.py --run-training --train-epochs 5
    python scripts/smoke_test.py --run-training --train-epochs 5 device_type=tpu

Trains a small version of pretrain.py's network on generated puzzles: for two updates, or with --run-training for
--train-epochs passes. Runs five checks and prints a line for each that passes. The exit code is 1 if a check fails and
2 if the device is missing. Uses all chips or GPUs of this host; on a CPU two processes if it has two cores, so that
there are gradients to reduce. Untested on hardware: TPU, CUDA; make check-hardware tests them.
"""

from dataclasses import dataclass

from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import ScriptConfig


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    num_chips: int | None = opt.device(
        None, "TPU chips, GPUs or CPU processes [every chip or GPU, or two processes]", at_least=0
    )
    run_training: bool = opt.run(False, "train for --train-epochs passes over 144 puzzles instead of two updates")
    train_epochs: int = opt.run(5, "passes over the puzzles with --run-training", at_least=1)


if __name__ == "__main__":
    check_command_line(Config, "smoke_test", __doc__)  # before the imports that take seconds

import copy
import math
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch

from qat_lora.ahead.rehearsal import Updates
from qat_lora.backend import TorchBackend, resolve
from qat_lora.backend.detect import parallel_num_chips
from qat_lora.backend.opening import launch
from qat_lora.errors import first_line
from qat_lora.experiments.athena.evaluation import measure
from qat_lora.experiments.athena.model import RecursiveModel, RecursiveSpec
from qat_lora.experiments.athena.puzzles import solve
from qat_lora.experiments.athena.rows import PuzzleRows, draw, load, save, split
from qat_lora.experiments.athena.training import RecursivePlan, Trainer, announce, segment_batches
from qat_lora.run.checkpoint import load_checkpoint, save_checkpoint
from qat_lora.run.console import say
from qat_lora.run.scripts import load_script

BATCH, PUZZLES, WIDTH = 32, 160, 32
NAMES = {"cpu": "CPU", "cuda": "CUDA", "xla": "XLA"}


class Failed(Exception):
    """A check failed."""


def main(cfg: Config) -> None:
    kind = resolve(cfg.device)
    chips = parallel_num_chips(kind) if cfg.num_chips is None else cfg.num_chips
    if cfg.dry_run:
        return say(f"smoke test on {kind}: device, data loading, training loop, gradient sync, checkpointing")
    launch(work, (cfg,), cfg.device, cfg.precision, chips, cfg.debug)


def work(backend: TorchBackend, cfg: Config) -> None:
    """Run the five checks in each worker; a check passes only if it passes in all of them."""
    epochs = cfg.train_epochs if cfg.run_training else 0
    name = "TPU" if backend.on_tpu else NAMES[backend.kind]
    checked(backend, f"{name} detected and initialized", lambda: check_device(backend))
    train, heldout = checked(backend, "Data loading works", lambda: check_data(cfg.seed))
    trainer = checked(backend, "Training loop runs", lambda: check_training(backend, cfg, train, heldout, epochs))
    checked(backend, "Gradient sync works", lambda: check_sync(backend, trainer, train))
    checked(backend, "Checkpointing works", lambda: check_checkpoint(backend, trainer, train))


def checked(backend: TorchBackend, line: str, check):
    """Run check(), print the line and return the result. If it fails in any worker, print why and exit all workers."""
    result = cause = None
    try:
        result = check()
    except Failed as error:
        cause = first_line(error)
    causes = backend.group.gather(cause)
    if any(causes):
        if backend.is_main:
            worker, said = next((number, text) for number, text in enumerate(causes) if text)
            print(f"❌ {line}: failed on worker {worker}: {said}", file=sys.stderr, flush=True)
        raise SystemExit(1)
    if backend.is_main:
        say(f"✅ {line}")
    return result


def need(condition: bool, otherwise: str) -> None:
    if not condition:
        raise Failed(otherwise)


# -- the checks ------------------------------------------------------------------------------------------------------
def check_device(backend: TorchBackend) -> None:
    """A matrix product on the device equals that on the host."""
    if backend.is_main:
        announce(backend)
    a = torch.arange(64.0).view(8, 8) / 64
    there = backend.to_device({"a": a})["a"]
    product = backend.to_host(there @ there)
    need(torch.allclose(product, a @ a, rtol=1e-2), f"a product on {backend.device} is wrong")


def check_data(seed: int) -> tuple[PuzzleRows, PuzzleRows]:
    """Puzzles that are written to disk and read back are unchanged, and each label is the only solution."""
    rows = draw("sudoku4", PUZZLES, seed)
    with tempfile.TemporaryDirectory() as folder:
        wanted = split(rows, 0.1, seed)
        save(Path(folder) / "data", *wanted)
        found = load(f"{folder}/data")
    need(
        [r.fingerprint for r in found] == [r.fingerprint for r in wanted], "the rows read back are not the rows written"
    )
    for question, label in zip(found[0].inputs[:8], found[0].labels[:8]):
        answers, _ = solve(question)
        need(len(answers) == 1 and (answers[0] == label).all(), "a puzzle's label is not its only solution")
    return found


def check_training(backend: TorchBackend, cfg: Config, train: PuzzleRows, heldout: PuzzleRows, epochs: int) -> Trainer:
    """Updates change the weights, losses are finite and, after ten or more, lower; held-out figures are shares."""
    spec = RecursiveSpec(train.vocab, train.length, WIDTH, num_heads=2, H_cycles=2, L_cycles=2, mlp_t=True)
    steps = -(-epochs * len(train) // BATCH) or 2
    plan = RecursivePlan(
        steps=steps, batch_size=BATCH, learning_rate=2e-3, warmup_steps=2, clip_grad_norm=1.0, seed=cfg.seed,
        segments=4, ema=0.9,
    )  # fmt: skip
    backend.seed(cfg.seed)
    model = backend.place(RecursiveModel(spec))
    trainer = Trainer(model, plan, backend)
    before = backend.to_host(model.head).clone()
    losses = losses_of(trainer, train, Updates(backend))
    need(len(losses) == steps, f"only {len(losses)} of {steps} updates were made")
    need(all(map(math.isfinite, losses)), f"the losses are {losses}")
    need(not torch.equal(before, backend.to_host(model.head)), "the weights have not changed")
    half = len(losses) // 2
    need(steps < 10 or sum(losses[half:]) < sum(losses[:half]), f"the loss has not fallen: {losses}")
    found = measure(trainer.shown, heldout, plan.segments, BATCH, backend)
    need(0 <= found["heldout_cells"] <= 1, f"held-out figures are {found}")
    if backend.is_main:
        say(
            f"   {steps} updates: loss {losses[0]:.3f} → {losses[-1]:.3f}, "
            f"{found['heldout_cells']:.1%} of the held-out cells right"
        )
    return trainer


def losses_of(trainer: Trainer, train: PuzzleRows, session: Updates) -> list[float]:
    """The losses of a session's updates, made by pretrain.py's own loop."""
    load_script("pretrain").train_segments(trainer, train, session, None)
    shares = session.backend.group.gather(session.backend.fetch(*[each["loss"].value for each in session.figures]))
    return [sum(each) for each in zip(*shares)]


def check_sync(backend: TorchBackend, trainer: Trainer, train: PuzzleRows) -> None:
    """The reduced gradient is the sum of the workers' gradients, and all workers end with the same weights."""
    plan, model = trainer.plan, trainer.model
    batch = backend.to_device(next(segment_batches(train, plan, 0, backend.rank, backend.world_size)))
    states = [model.H_init.expand(len(batch["inputs"]), model.spec.positions, -1) for _ in range(2)]
    picked = model.identity.index_select(0, batch["identifiers"])
    logits = model(*states, batch["inputs"], picked)[2]
    gradient = torch.autograd.grad(logits.square().mean(), model.head)[0]
    own = backend.to_host(gradient).clone()
    backend.reduce([gradient])
    backend.step_boundary()
    everyone = backend.group.gather(own)
    need(
        torch.allclose(backend.to_host(gradient), sum(everyone), rtol=1e-3, atol=1e-6),
        "the reduced gradient is not the sum of the workers' gradients",
    )
    need(backend.world_size == 1 or not torch.equal(everyone[0], everyone[1]), "the workers have the same rows")
    weights = backend.group.gather({name: backend.to_host(p).clone() for name, p in model.named_parameters()})
    for name, first in weights[0].items():
        need(all(torch.equal(first, other[name]) for other in weights), f"the workers' {name} differ")


def check_checkpoint(backend: TorchBackend, trainer: Trainer, train: PuzzleRows) -> None:
    """Training that resumes from a checkpoint continues like uninterrupted training."""
    trainer.plan = plan = replace(trainer.plan, steps=trainer.plan.steps + 1)
    with tempfile.TemporaryDirectory() as own:
        folder = Path(backend.group.gather(own)[0])  # worker 0's
        tensors, rest = (copy.deepcopy(backend.to_host(part)) for part in trainer.state())
        if backend.is_main:
            save_checkpoint(folder, plan.steps - 1, tensors, rest, {})
        backend.group.gather(None)  # wait until it is written
        tensors, rest, _ = load_checkpoint(folder, backend.group)
        backend.group.gather(None)  # wait until everyone has read it
    again = Trainer(backend.place(RecursiveModel(trainer.model.spec)), plan, backend)
    again.load(tensors, rest)
    ended = [losses_of(each, train, Updates(backend, plan.steps))[0] for each in (trainer, again)]
    need(abs(ended[0] - ended[1]) < 1e-4, f"the next loss is {ended[1]} after loading, {ended[0]} without")


if __name__ == "__main__":
    run_script(main, Config, "smoke_test", __doc__)
