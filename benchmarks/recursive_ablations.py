"""What does each part of a recursive model contribute? The full model, without the moving average, with a one-step
gradient, and without recursion, on held-out 6×6 Sudoku.

    python benchmarks/recursive_ablations.py
    python benchmarks/recursive_ablations.py --seeds 0,1,2 --output-dir runs/more

Each seed draws its own few puzzles, with as few clues as possible (build_puzzle_data.py). pretrain.py trains every
variant on one thread, with the sizes of preset cpu and a constant learning rate. Finished runs are not repeated, and
interrupted ones resume. One line per variant gives, for each seed, the share of held-out puzzles that are exactly right
after all segments and, in brackets, where the halting head stops; curves.png shows the former over updates.
"""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from qat_lora.errors import UserError
from qat_lora.run.command_line import run_script
from qat_lora.run.options import ScriptConfig, option
from qat_lora.run.rundir import Run

ROOT = Path(__file__).resolve().parents[1]
VARIANTS = {
    "full": [],
    "no average": ["ema=false"],
    "one-step gradient": ["arch.one_step_gradient=true"],
    "no recursion": ["arch.H_cycles=1", "arch.L_cycles=1"],
}


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    seeds: str = option("0,1", "seeds of puzzles and training")
    puzzles: int = option(400, "puzzles to draw per seed")
    heldout_fraction: float = option(0.75, "share of the puzzles that is held out")
    steps: int = option(1200, "updates per run")
    output_dir: str = option("runs/ablations", "folder for the puzzles, the runs and the plot")


def main(cfg: Config) -> None:
    try:
        seeds = [int(seed) for seed in cfg.seeds.split(",")]
    except ValueError as error:
        raise UserError(f"--seeds {cfg.seeds} is not a list of whole numbers; use e.g. 0,1") from error
    folder = Path(cfg.output_dir)
    if cfg.dry_run:
        return print(f"{len(VARIANTS)} variants × seeds {cfg.seeds}, {cfg.steps} updates each, in {folder}")
    for seed in seeds:
        data = folder / f"data-{seed}"
        if not data.exists():
            call("scripts/build_puzzle_data.py", f"seed={seed}", "--kind", "sudoku6", "--least-blanks", "1",
                 f"count={cfg.puzzles}", f"heldout_fraction={cfg.heldout_fraction}", f"output_dir={data}")  # fmt: skip
        for name, words in VARIANTS.items():
            run = run_of(folder, name, seed)
            ended = run / "summary.json"
            if not ended.exists() or '"finished"' not in ended.read_text(encoding="utf-8"):
                call("pretrain.py", "--config", "cpu", f"seed={seed}", "device_type=cpu", "num_chips=1",
                     f"data_path={data}", f"steps={cfg.steps}", "lr_min_ratio=1", f"output_dir={run}", "resume=auto",
                     *words)  # fmt: skip
    for name in VARIANTS:
        ends = [measured(run_of(folder, name, seed))[-1] for seed in seeds]
        shown = [f"{end['heldout_exact_full']:.1%} ({end['heldout_exact']:.1%})" for end in ends]
        print(f"{name}, seeds {cfg.seeds}: {', '.join(shown)} at update {ends[0]['step']}")
    print(draw(folder, seeds))


def call(script: str, *words: str) -> None:
    done = subprocess.run([sys.executable, ROOT / script, *words], env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise UserError(f"{script} {' '.join(words)} ended with exit code {done.returncode}; its message is above")


def run_of(folder: Path, name: str, seed: int) -> Path:
    return folder / f"{name.replace(' ', '-')}-{seed}"


def measured(run: Path) -> list[dict]:
    return [line for line in Run(run, resumed=True, writes=False).metrics() if "heldout_exact_full" in line]


def draw(folder: Path, seeds: list[int]) -> Path:
    """Plot the curves: one colour per variant, the first seed solid, the others dashed."""
    figure, axis = plt.subplots(figsize=(8, 4.5))
    for number, name in enumerate(VARIANTS):
        for seed in seeds:
            points = [(line["step"], line["heldout_exact_full"]) for line in measured(run_of(folder, name, seed))]
            first = seed == seeds[0]
            axis.plot(*zip(*points), f"C{number}-" if first else f"C{number}--", label=name if first else None)
    axis.set(xlabel="update", ylabel="held-out puzzles exactly right", ylim=(0, 1.02))
    axis.grid(alpha=0.3)
    axis.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(folder / "curves.png", dpi=110)
    plt.close(figure)
    return folder / "curves.png"


if __name__ == "__main__":
    run_script(main, Config, "recursive_ablations", __doc__)
