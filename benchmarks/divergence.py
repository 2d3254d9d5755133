"""Do two workers train a recursive model as one does? Compares the losses of one worker, of one worker with one weight
moved by a unit in the last place (ulp), and of two workers that share the same batches.

    python benchmarks/divergence.py
    python benchmarks/divergence.py --seeds 0 --lr 1e-4

If training is chaotic, a rounding difference grows until the losses differ visibly. Two workers add in a different
order, so they may diverge as much as the run with the moved weight, but no more. A mistake in how work is shared would
show at the first update, in fp64 too.
"""

import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from qat_lora.ahead.rehearsal import Updates
from qat_lora.backend import TorchBackend
from qat_lora.backend.opening import launch
from qat_lora.errors import UserError
from qat_lora.experiments.athena.model import RecursiveModel
from qat_lora.experiments.athena.training import Trainer
from qat_lora.run.command_line import parse, run_script
from qat_lora.run.options import ScriptConfig, option
from qat_lora.run.scripts import load_script

SHOWN = (1, 2, 5, 10, 20, 30, 40)


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    seeds: str = option("0,1,2", "seeds of puzzles, weights and batches")
    steps: int = option(40, "updates per run")
    lr: float = option(1e-3, "peak learning rate")


def main(cfg: Config) -> None:
    try:
        seeds = [int(seed) for seed in cfg.seeds.split(",")]
    except ValueError as error:
        raise UserError(f"--seeds {cfg.seeds} is not a list of whole numbers; use e.g. 0,1") from error
    if cfg.steps < 1:
        raise UserError(f"--steps {cfg.steps} must be at least 1")
    if cfg.dry_run:
        return print(f"pretrain's preset nano, {len(seeds)} seeds × 3 runs of {cfg.steps} updates, in fp32 and in fp64")
    shown = [step for step in SHOWN if step <= cfg.steps]
    print(f"nano, lr {cfg.lr:g}: relative difference of the loss from one worker's loss, median over seeds {cfg.seeds}")
    print("| precision | run | " + " | ".join(f"update {step}" for step in shown) + " | largest | mean loss, last 10 |")
    print("|---|---|" + "---|" * (len(shown) + 2))
    for double in (False, True):
        kinds = {"one worker": (1, False), "one worker, one weight moved": (1, True), "two workers": (2, False)}
        found = {
            name: [losses(cfg, seed, double, ulp, workers) for seed in seeds] for name, (workers, ulp) in kinds.items()
        }
        for name, runs in found.items():
            apart = [[abs(a - b) / abs(b) for a, b in zip(*pair)] for pair in zip(runs, found["one worker"])]
            columns = [statistics.median(each[step - 1] for each in apart) for step in shown]
            columns.append(statistics.median(map(max, apart)))
            mean = statistics.mean(sum(run[-10:]) / len(run[-10:]) for run in runs)
            cells = ["fp64" if double else "fp32", name, *(f"{value:.0e}" for value in columns), f"{mean:.4f}"]
            print("| " + " | ".join(cells) + " |", flush=True)


def losses(cfg: Config, seed: int, double: bool, ulp: bool, workers: int) -> list[float]:
    with tempfile.TemporaryDirectory() as folder:
        launch(train, (cfg, seed, double, ulp, Path(folder)), "cpu", "fp32", workers)
        return json.loads(Path(folder, "losses.json").read_text(encoding="utf-8"))


def train(backend: TorchBackend, cfg: Config, seed: int, double: bool, ulp: bool, folder: Path) -> None:
    torch.set_num_threads(1)
    words = ["--config", "nano", "--learning-rate", str(cfg.lr), "--seed", str(seed), "--max-steps", str(cfg.steps)]
    script = load_script("pretrain")
    options = script.checked(parse(script.Config, "pretrain", words))
    rows, _ = script.open_rows(options)
    backend.seed(seed)
    model = RecursiveModel(script.spec_of(options, rows))
    model = model.double() if double else model
    if ulp:
        with torch.no_grad():
            first = max(model.parameters(), key=lambda p: p.numel()).view(-1)[:1]
            first.copy_(torch.nextafter(first, first + 1))
    session = Updates(backend)
    script.train_segments(
        Trainer(backend.place(model), script.plan_of(options, cfg.steps), backend), rows, session, None
    )
    shares = backend.group.gather([figures["loss"].value.item() for figures in session.figures])
    if backend.is_main:
        (folder / "losses.json").write_text(json.dumps([sum(each) for each in zip(*shares)]))


if __name__ == "__main__":
    run_script(main, Config, "divergence", __doc__)
