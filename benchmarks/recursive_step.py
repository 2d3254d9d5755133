"""How long does an update of a recursive model take, compared with the arithmetic of the published training?

    python benchmarks/recursive_step.py
    python benchmarks/recursive_step.py --precision bf16 --mixer attention
    python benchmarks/recursive_step.py --puzzle sudoku9 --hidden-size 512 --num-heads 8 --H-cycles 3 --L-cycles 6 \
        --puzzle-emb-len 16 --batch-size 8    # the published network
    python benchmarks/recursive_step.py --identifiers 876406 --hidden-size 64 --turns 15

Without a hub the published code is not available, so benchmarks/plain_trm.py has its arithmetic in plain PyTorch; the
tests check that our model equals it in fp64. Both sides have the same sizes, number of weights, rows and dtype, and do
a whole update: carry, segment, loss, gradients, AdamW, moving average. Ours is compiled as in pretrain.py, and also
clips gradients and updates the puzzle embeddings. The plain side fetches its metrics at every step, as published, and
runs twice: as written, and with the whole model in torch.compile, as the published training does on a GPU. The sides
alternate; a turn is one step of each, and the first two turns are not counted. Also measured: the peak memory of a
process with 1, 2, 4 and 8 H cycles, and how many graphs XLA compiles (on its CPU device) in ten updates with halts.

--identifiers N compares something else: our update with N puzzle embeddings and with 1,000.
"""

import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from statistics import median

import numpy as np
import torch
from plain_trm import PlainTraining, PlainTRM, Sizes

from qat_lora.ahead.rehearsal import Updates
from qat_lora.backend import TorchBackend, open_backend
from qat_lora.errors import UserError
from qat_lora.experiments.athena.model import IGNORE, RecursiveModel, RecursiveSpec
from qat_lora.experiments.athena.rows import PuzzleRows, draw
from qat_lora.experiments.athena.training import RecursivePlan, Trainer, segment_batches
from qat_lora.hosts.revision import revision
from qat_lora.run.command_line import run_script
from qat_lora.run.options import ScriptConfig, option
from qat_lora.run.scripts import load_script

WARM, SEGMENTS, FEW = 2, 16, 1000
MIXERS = {"mlp": True, "attention": False}


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    puzzle: str = option("sudoku6", "kind of puzzle")
    mixer: str = option("both", "what mixes positions: mlp, attention, or both one after another")
    batch_size: int = option(128, "rows per update")
    hidden_size: int = option(128, "width of the model")
    num_heads: int = option(4, "attention heads")
    L_layers: int = option(2, "number of blocks")
    H_cycles: int = option(2, "updates of the answer per segment", at_least=1)
    L_cycles: int = option(3, "updates of the reasoning state before each update of the answer", at_least=1)
    puzzle_emb_len: int = option(1, "positions of the puzzle's embedding", at_least=1)
    turns: int = option(9, "timed turns, after two that are not counted")
    identifiers: int | None = option(
        None, "compare an update with this many puzzle embeddings to one with 1,000 [compare with plain_trm.py]",
        at_least=1,
    )  # fmt: skip


def main(cfg: Config) -> None:
    if min(cfg.turns, cfg.batch_size) < 1:
        raise UserError(f"--turns {cfg.turns} and --batch-size {cfg.batch_size} must be at least 1")
    if cfg.mixer not in (*MIXERS, "both"):
        raise UserError(f"--mixer {cfg.mixer!r} is not one of {', '.join(MIXERS)}, both")
    backend = open_backend(cfg.device, cfg.precision)
    print(
        f"{cfg.batch_size} rows of {cfg.puzzle}, width {cfg.hidden_size}, H {cfg.H_cycles}, L {cfg.L_cycles}, "
        f"{cfg.turns} turns, {backend}, {torch.get_num_threads()} threads, seed {cfg.seed}, commit {revision()}",
        flush=True,
    )
    if cfg.dry_run:
        return
    for mixer in MIXERS if cfg.mixer == "both" else [cfg.mixer]:
        if cfg.identifiers:
            many, few = zip(*run_tables(cfg, backend, MIXERS[mixer]))
            print(f"{mixer}: {compared(f'{cfg.identifiers:,} embeddings', many, f'{FEW:,}', few)}", flush=True)
            continue
        ours, *others = zip(*run_turns(cfg, backend, MIXERS[mixer]))
        for name, theirs in zip(("plain", "plain compiled"), others):
            print(f"{mixer}: {compared('ours', ours, name, theirs)}", flush=True)
        peaks = [apart(peak, cfg, str(backend.kind), MIXERS[mixer], cycles) for cycles in (1, 2, 4, 8)]
        print(f"{mixer}: peak memory with 1, 2, 4, 8 H cycles: {', '.join(f'{mb:.0f}' for mb in peaks)} MB", flush=True)
        first, last = apart(compiles, cfg, "xla", MIXERS[mixer], cfg.H_cycles)
        print(f"{mixer}: graphs compiled by XLA: {first} after one update, {last} after ten", flush=True)


def compared(name: str, seconds: tuple[float, ...], other: str, others: tuple[float, ...]) -> str:
    """Both medians, and the median and range of the ratio within a turn."""
    ratios = sorted(one / another for one, another in zip(seconds, others))
    return (
        f"{name} {median(seconds):.3f} s, {other} {median(others):.3f} s; {name} / {other} {median(ratios):.2f} "
        f"({ratios[0]:.2f}–{ratios[-1]:.2f})"
    )


def sizes_of(cfg: Config, mlp_t: bool, rows) -> RecursiveSpec:
    return RecursiveSpec(
        rows.vocab, rows.length, cfg.hidden_size, cfg.num_heads, L_layers=cfg.L_layers, H_cycles=cfg.H_cycles,
        L_cycles=cfg.L_cycles, puzzle_emb_len=cfg.puzzle_emb_len, mlp_t=mlp_t, identifiers=rows.identifiers_count,
    )  # fmt: skip


def training(cfg: Config, backend: TorchBackend, mlp_t: bool, identifiers: int = 1) -> tuple[Trainer, PuzzleRows]:
    """Our trainer and its rows, each with a random identifier."""
    rows = draw(cfg.puzzle, 2 * cfg.batch_size, cfg.seed)
    numbers = np.random.default_rng(cfg.seed).integers(identifiers, size=len(rows))
    rows = replace(rows, identifiers=numbers, identifiers_count=identifiers)
    plan = RecursivePlan(
        steps=1000, batch_size=cfg.batch_size, learning_rate=1e-4, warmup_steps=10, clip_grad_norm=1.0, seed=cfg.seed,
        segments=SEGMENTS,
    )  # fmt: skip
    backend.seed(cfg.seed)
    model = backend.place(RecursiveModel(sizes_of(cfg, mlp_t, rows)))
    if backend.kind != "xla":  # which compiles an update as a whole
        if not backend.compiles("on"):
            raise UserError("this compares compiled updates; install what is missing first")
        model.stack = torch.compile(model.stack, dynamic=False)
    return Trainer(model, plan, backend), rows


def run_turns(cfg: Config, backend: TorchBackend, mlp_t: bool) -> list[tuple[float, float, float]]:
    """Seconds of each turn: ours, plain, plain compiled."""
    trainer, rows = training(cfg, backend, mlp_t)
    spec = trainer.model.spec
    sizes = Sizes(
        spec.vocab, spec.length, spec.hidden_size, spec.num_heads, spec.kv_heads, spec.L_layers, spec.H_cycles,
        spec.L_cycles, spec.inner(spec.hidden_size), spec.inner(spec.positions) if mlp_t else 0,
        spec.puzzle_emb_len,
    )  # fmt: skip
    others = [PlainTRM(sizes, torch.bfloat16 if backend.bf16 else torch.float32).to(backend.device) for _ in range(2)]
    count, theirs = (sum(p.numel() for p in model.parameters()) for model in (trainer.model, others[0]))
    if count != theirs:
        raise UserError(f"ours has {count} weights but plain_trm.py {theirs}; make them equal before comparing")
    others[1].forward = torch.compile(others[1].forward, dynamic=False)
    published = [PlainTraining(plain, cfg.batch_size, 1e-4, 0.9995, SEGMENTS, IGNORE) for plain in others]
    session, batches, times = Turns(backend, last=cfg.turns + WARM), segment_batches(rows, trainer.plan, 0), []

    def others_turn(number: int) -> None:
        batch = backend.to_device(next(batches))
        puzzle = torch.zeros(cfg.batch_size, spec.hidden_size, device=backend.device)
        steps = [partial(plain.step, batch["inputs"], batch["labels"], puzzle) for plain in published]
        times.append((session.seconds, *(timed(backend, step) for step in steps)))

    session.after = others_turn
    train(trainer, rows, session)
    return times[WARM:]


def run_tables(cfg: Config, backend: TorchBackend, mlp_t: bool) -> list[tuple[float, float]]:
    """Seconds of each turn: an update with `cfg.identifiers` embeddings, and one with few. Every other turn starts with
    the second."""
    sides, times = [training(cfg, backend, mlp_t, count) for count in (cfg.identifiers, FEW)], []
    for number in range(1, cfg.turns + WARM + 1):
        sessions = [Turns(backend, number, number) for _ in sides]
        for at in (0, 1) if number % 2 else (1, 0):
            train(*sides[at], sessions[at])
        times.append(tuple(session.seconds for session in sessions))
    return times[WARM:]


class Turns(Updates):
    """seconds: how long the last update took."""

    def steps(self, *stage) -> Iterator[int]:
        for step in super().steps(*stage):
            started = time.monotonic()
            yield step
            wait(self.backend, self.figures[-1]["loss"].value)
            self.seconds = time.monotonic() - started


def train(trainer: Trainer, rows: PuzzleRows, session: Updates) -> None:
    load_script("pretrain").train_segments(trainer, rows, session, None)


def timed(backend: TorchBackend, step) -> float:
    started = time.monotonic()
    wait(backend, step()["loss"])
    return time.monotonic() - started


def wait(backend: TorchBackend, loss) -> None:
    float(loss)  # waits for the device
    if backend.kind == "cuda":
        torch.cuda.synchronize()


def apart(work, *arguments):
    """work(*arguments) in its own process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def peak(cfg: Config, kind: str, mlp_t: bool, cycles: int) -> float:
    backend = open_backend(kind, cfg.precision)
    train(*training(replace(cfg, H_cycles=cycles), backend, mlp_t), Updates(backend, last=3))
    return backend.peak_memory_mb()


def compiles(cfg: Config, kind: str, mlp_t: bool, cycles: int) -> tuple[int, int]:
    os.environ.setdefault("PJRT_DEVICE", "CPU")
    backend = open_backend(kind, "fp32")
    trainer, rows = training(replace(cfg, batch_size=8), backend, mlp_t)
    torch.nn.init.zeros_(trainer.model.halt_bias)  # so that some rows halt and others go on
    torch.nn.init.normal_(trainer.model.halt_weight)
    backend.step_boundary()
    found = []
    train(trainer, rows, Updates(backend, last=10, after=lambda number: found.append(backend.counters()["compiles"])))
    return found[0], found[-1]


if __name__ == "__main__":
    run_script(main, Config, "recursive_step", __doc__)
