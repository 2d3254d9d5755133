"""How much do several attempts with noise win back for a half-trained recursive model, on held-out 6×6 Sudoku?

    python benchmarks/recursive_attempts.py
    python benchmarks/recursive_attempts.py --seeds 0 --noises 0.2,0.5 --attempts 8 --output-dir runs/less

Each seed draws its own puzzles, with as few clues as possible, and trains one model on half of them for too few
updates (pretrain.py, one thread, sizes of preset cpu, constant learning rate). The first --choosing-rows held-out
puzzles choose the noise: the one with which the halting head picks the most right answers of 16 attempts. The other
held-out puzzles are measured with 1, 2, 4, … attempts. Finished runs and measurements are not repeated.
Every figure is printed for each seed; attempts.png shows those with the chosen noise.
"""

import functools
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qat_lora.backend import TorchBackend, open_backend
from qat_lora.errors import UserError
from qat_lora.experiments.athena.attempts import Accuracy, draw_attempts, measure_attempts
from qat_lora.experiments.athena.evaluation import load_run
from qat_lora.experiments.athena.model import RecursiveModel
from qat_lora.experiments.athena.rows import load
from qat_lora.experiments.athena.training import placed
from qat_lora.run.command_line import run_script
from qat_lora.run.files import write_atomically
from qat_lora.run.options import ScriptConfig, option

ROOT = Path(__file__).resolve().parents[1]
CHOOSING = 16  # attempts


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    seeds: str = option("0,1,2", "seeds of puzzles, training and noise")
    noises: str = option("0.3,1", "standard deviations of the noise")
    attempts: int = option(32, "attempts per puzzle", at_least=2, at_most=1000)
    puzzles: int = option(1000, "puzzles to draw per seed")
    steps: int = option(600, "updates per run")
    choosing_rows: int = option(64, "held-out puzzles on which the noise is chosen", at_least=1)
    measured_rows: int = option(128, "held-out puzzles that are measured", at_least=1)
    batch_size: int = option(64, "puzzles evaluated at a time", at_least=1)
    output_dir: str = option("runs/attempts", "folder for the puzzles, runs, measurements and the plot")


def main(cfg: Config) -> None:
    seeds, noises = numbers_in(cfg.seeds, "seeds", int), numbers_in(cfg.noises, "noises", float)
    folder = Path(cfg.output_dir)
    if cfg.dry_run:
        return print(f"seeds {cfg.seeds}, {cfg.steps} updates each, noise {cfg.noises}, in {folder}")
    backend = open_backend(cfg.device, cfg.precision)
    for seed in seeds:
        train(folder, seed, cfg)

    rows = (0, cfg.choosing_rows)
    tried = {n: [measured(folder, seed, rows, CHOOSING, n, cfg, backend) for seed in seeds] for n in noises}
    print(f"\n{CHOOSING} attempts, {cfg.choosing_rows} rows per seed: halting head, pass@{CHOOSING}")
    for noise, tables in tried.items():
        ends = [table[CHOOSING] for table in tables]
        print(f"noise {noise:g}: {percent(end.chosen for end in ends)}, {percent(end.any for end in ends)}")
    chosen = max(noises, key=lambda noise: np.mean([table[CHOOSING].chosen for table in tried[noise]]))

    rows = (cfg.choosing_rows, cfg.choosing_rows + cfg.measured_rows)
    for noise in noises:
        tables = [measured(folder, seed, rows, cfg.attempts, noise, cfg, backend) for seed in seeds]
        show(tables, f"noise {noise:g}{' (chosen)' * (noise == chosen)}, {cfg.measured_rows} other rows per seed")
        if noise == chosen:
            draw_attempts(tables, folder / "attempts.png")
    print(folder / "attempts.png")


def show(tables: list[dict[int, Accuracy]], title: str) -> None:
    """Print the accuracy of each seed with 1, 2, 4, … attempts, and how much of what one attempt misses is won back."""
    print(f"\n{title}\nattempts: halting head, majority vote, any right (pass@k)")
    for k in tables[0]:
        print(f"{k}: " + ", ".join(percent(getattr(table[k], name) for table in tables) for name in Accuracy._fields))
    for name in ("chosen", "any"):
        ends = [(getattr(table[1], name), getattr(list(table.values())[-1], name)) for table in tables]
        print(f"won back of what one attempt misses ({name}): {percent(won_back(*each) for each in ends)}")


def numbers_in(text: str, name: str, kind: type) -> list:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError as error:
        raise UserError(f"--{name} {text} is not a list of numbers; use e.g. 0,1") from error


def percent(shares) -> str:
    """A share of each seed."""
    return " / ".join(f"{share:.1%}" for share in shares)


def won_back(before: float, after: float) -> float:
    """The share of the rows wrong before that is right after, net of those that became wrong."""
    return (after - before) / (1 - before) if before < 1 else 0.0


def train(folder: Path, seed: int, cfg: Config) -> None:
    """A half-trained model: stopped after few updates, and not selected by its accuracy on the held-out puzzles."""
    data, run = folder / f"data-{seed}", folder / f"run-{seed}"
    if not data.exists():
        call("scripts/build_puzzle_data.py", f"seed={seed}", "--kind", "sudoku6", "--least-blanks", "1",
             f"count={cfg.puzzles}", "heldout_fraction=0.5", f"output_dir={data}")  # fmt: skip
    ended = run / "summary.json"
    if not ended.exists() or '"finished"' not in ended.read_text(encoding="utf-8"):
        call("pretrain.py", "--config", "cpu", f"seed={seed}", "device_type=cpu", "num_chips=1", f"data_path={data}",
             f"steps={cfg.steps}", "lr_min_ratio=1", "ema_decay=0.98", "eval_every=0",
             f"eval_rows={cfg.choosing_rows}", f"output_dir={run}", "resume=auto")  # fmt: skip


def call(script: str, *words: str) -> None:
    done = subprocess.run([sys.executable, ROOT / script, *words], env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise UserError(f"{script} {' '.join(words)} ended with exit code {done.returncode}; its message is above")


@functools.cache
def opened(run: Path, backend: TorchBackend) -> tuple[RecursiveModel, int]:
    """A run's compiled model on the device, and its segments."""
    model, _, segments = load_run(run)
    return placed(model, backend, checkpointing=False, compile="auto"), segments


def measured(
    folder: Path, seed: int, rows: tuple[int, int], count: int, noise: float, cfg: Config, backend: TorchBackend
) -> dict[int, Accuracy]:
    """Accuracy on the held-out rows from rows[0] up to rows[1], kept in a file."""
    file = folder / f"measured-{seed}-{noise:g}-{count}-{rows[0]}-{rows[1]}.json"
    if not file.exists():
        model, segments = opened(folder / f"run-{seed}", backend)
        part = load(str(folder / f"data-{seed}"))[1].take(np.arange(*rows))
        found = measure_attempts(model, part, segments, cfg.batch_size, count, noise, seed, backend)
        text = json.dumps({k: accuracy._asdict() for k, accuracy in found.items()})
        write_atomically(file, lambda part: part.write(text.encode()))
        print(f"{file.name}: {text}", flush=True)
    return {int(k): Accuracy(**each) for k, each in json.loads(file.read_text(encoding="utf-8")).items()}


if __name__ == "__main__":
    run_script(main, Config, "recursive_attempts", __doc__)
