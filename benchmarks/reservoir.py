"""Is a reservoir worth having? Its speed against ReservoirPy, and its quality as a language model against baselines.

    PYTHONPATH=.venv/peers python benchmarks/reservoir.py --part speed
    python benchmarks/reservoir.py --part quality --dataset FILE --minutes 10

speed: 64 series × 5,000 steps through an echo-state reservoir of 500 units; ours (batched) and ReservoirPy's NumPy
(series by series, in its fastest mode here: dense or sparse matrix, fp32 or fp64, one or two workers) alternate on the
same matrices. Then the parallel scan of a diagonal reservoir against its own loop over time at T = 4,096, and the time
per token at several T.
quality: train_tinystories_reservoir.py --config PRESET with each --model, at equal numbers of trained parameters, for
about --minutes each (in whole epochs, as many as a trial of one epoch suggests); an interpolated Kneser–Ney n-gram of
the same tokens, with the order of 2 to 5 that is best on the held-out text; and an untrained reservoir with a ridge
readout. Bits per byte and perplexity over all held-out tokens go to table.md and curves.png in --output-dir. Finished
models are not trained again.
"""

import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
import torch.nn.functional as F
import yaml
from kneser_ney import KneserNey
from matplotlib import pyplot as plt
from ridge_readout import RidgeMoments

from qat_lora.errors import UserError
from qat_lora.experiments.stories.reservoir import DiagonalReservoir, EchoState, ReservoirSpec
from qat_lora.experiments.stories.scan import sequential_scan
from qat_lora.experiments.stories.text import Stories, load_stories
from qat_lora.hosts.revision import revision
from qat_lora.run.command_line import run_script
from qat_lora.run.options import ScriptConfig, option

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "train_tinystories_reservoir.py"
SERIES, STEPS, UNITS, INPUTS = 64, 5000, 500, 10
LEAK = 0.3


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    part: str = option("speed", "what to measure: speed or quality")
    dataset: str = option("embedded", "text for the quality part")
    preset: str = option("cpu", "preset for the quality part")
    minutes: float = option(10, "training time per model, in minutes")
    models: str = option("reservoir,transformer,mingru", "models to train")
    pairs: int = option(5, "timed pairs, after one that is not counted")
    output_dir: str = option("runs/reservoir_quality", "folder for the runs of the quality part")


def main(cfg: Config) -> None:
    if cfg.part not in ("speed", "quality"):
        raise UserError(f"--part {cfg.part!r} is not one of speed, quality")
    if cfg.pairs < 1 or not cfg.minutes > 0:
        raise UserError(f"--pairs {cfg.pairs} must be at least 1, and --minutes {cfg.minutes} above 0")
    print(f"commit {revision()}, {torch.get_num_threads()} threads, seed {cfg.seed}", flush=True)
    if not cfg.dry_run:
        speed(cfg) if cfg.part == "speed" else quality(cfg)


# -- speed -----------------------------------------------------------------------------------------------------------
def seconds(work: Callable) -> float:
    started = time.monotonic()
    work()
    return time.monotonic() - started


def in_turns(ours: Callable, theirs: Callable, pairs: int) -> str:
    """Time both alternately: median and range over pairs of their seconds over ours, and both medians, as text."""
    times = [(seconds(ours), seconds(theirs)) for _ in range(pairs + 1)][1:]
    ratios = sorted(b / a for a, b in times)
    a, b = (median(column) for column in zip(*times))
    return f"{median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f}), {a:.3f} and {b:.3f} s, {pairs} pairs"


@torch.no_grad()
def speed(cfg: Config) -> None:
    try:
        from reservoirpy.nodes import Reservoir
        from scipy.sparse import csr_array
    except ImportError as error:
        raise UserError(f"reservoirpy cannot be imported ({error}); make setup-peers installs it") from error

    spec = ReservoirSpec(UNITS, "esn", radius=0.9, density=0.1, leak=(LEAK, LEAK), seed=cfg.seed)
    cell = EchoState(spec, INPUTS)
    series = torch.randn(SERIES, STEPS, INPUTS, generator=torch.Generator().manual_seed(cfg.seed))

    def theirs(dtype, sparse: bool, workers: int, part: slice = slice(None)) -> np.ndarray:
        w, w_in = (matrix.double().numpy().astype(dtype) for matrix in (cell.w, cell.w_in))
        node = Reservoir(W=csr_array(w) if sparse else w, Win=w_in, bias=0.0, lr=LEAK, dtype=dtype)
        return node.run(series[:, part].double().numpy().astype(dtype), workers=workers)

    ways = [(t, sparse, workers) for t in (np.float64, np.float32) for sparse in (True, False) for workers in (1, 2)]
    some = slice(0, 250)
    best = min(ways, key=lambda way: min(seconds(lambda: theirs(*way, some)) for _ in range(2)))
    print(f"ReservoirPy is fastest with {best[0].__name__}, {'sparse' if best[1] else 'dense'} W, {best[2]} workers")
    double = cell.double()(series[:, some].double(), cell.begin(SERIES))[0]
    off = np.abs(double.numpy() - theirs(np.float64, True, 1, some)).max()
    cell.float()
    print(f"states in fp64: largest difference {off:.1e}")
    print(
        "ours / ReservoirPy, steps per second: "
        + in_turns(lambda: cell(series, cell.begin(SERIES)), lambda: theirs(*best), cfg.pairs)
    )

    for rows, units in ((1, 64), (1, 128), (1, 256), (4, 128), (16, 128)):
        reservoir = DiagonalReservoir(ReservoirSpec(units, leak=(0.05, 1.0), seed=cfg.seed), INPUTS)
        drive = torch.randn(units, 2, rows, 4096, generator=torch.Generator().manual_seed(cfg.seed)).permute(2, 3, 0, 1)
        print(
            f"parallel scan / loop, speed, {rows} × 4,096 steps, {units} units: " + scans(reservoir, drive, cfg.pairs),
            flush=True,
        )
    cell = DiagonalReservoir(ReservoirSpec(128, seed=cfg.seed), INPUTS)
    for length in (256, 1024, 4096, 16384):
        x = torch.randn(1, length, INPUTS)
        cost = median(seconds(partial(cell, x, cell.begin(1))) for _ in range(cfg.pairs + 2))
        print(f"diagonal reservoir of 128 units, T = {length}: {1e6 * cost / length:.2f} µs per token")


def scans(reservoir: DiagonalReservoir, drive: torch.Tensor, pairs: int) -> str:
    begin, scan = reservoir.begin(len(drive)), reservoir.scan
    plain = drive.contiguous()
    one, other = scan(drive, begin), sequential_scan(reservoir.decay, plain, begin)
    off = ((one - other).abs().max() / other.abs().max()).item()
    forward = in_turns(lambda: scan(drive, begin), lambda: sequential_scan(reservoir.decay, plain, begin), pairs)
    return f"{forward}, largest difference of states {off:.0e} of the largest state"


# -- quality ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Row:
    """A line of the table; `seconds` of training, and `tokens` seen during it."""

    name: str
    parameters: int
    seconds: float
    tokens: int
    bits: float
    ppl: float

    def __str__(self):
        return (
            f"| {self.name} | {self.parameters:,} | {self.seconds:.0f} | {self.tokens:,} | {self.bits:.4f} | "
            f"{self.ppl:.2f} |"
        )


def quality(cfg: Config) -> None:
    out, rows, curves = Path(cfg.output_dir), [], {}
    for kind in cfg.models.split(","):
        run = train(cfg, kind, out)
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        took = summary["seconds"]["train"]
        settings = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
        batch = settings.get("global_batch_size") or settings["batch_size"]  # the latter: runs of earlier versions
        length = settings.get("length") or settings["block_size"]
        tokens = lines[-1]["step"] * batch * length
        rows.append(
            Row(kind, summary["trained_parameters"], took, tokens, summary["bits_per_byte"], summary["heldout_ppl"])
        )
        curves[kind] = [
            (took * li["step"] / lines[-1]["step"], li["bits_per_byte"]) for li in lines if "bits_per_byte" in li
        ]
    stories = load_stories(
        *(settings[name] for name in ("dataset", "max_stories", "heldout_fraction", "tokenizer", "vocab_size"))
    )
    rows += [n_gram(stories), ridge(stories, cfg.seed)]
    head = "| | trained parameters | seconds | tokens seen | bits per byte | perplexity |\n|---|" + "---:|" * 5
    text = "\n".join([head, *map(str, rows)]) + "\n"
    (out / "table.md").write_text(text)
    print(text)
    draw(curves, rows, out / "curves.png")


def train(cfg: Config, kind: str, out: Path) -> Path:
    """Train a model for about --minutes; return its run directory."""

    def run(folder: str, epochs: int, *flags: str) -> Path:
        command = [sys.executable, str(SCRIPT), "--config", cfg.preset, "--dataset", cfg.dataset, "--model", kind,
                   "--epochs", str(epochs), "--seed", str(cfg.seed), "--device", cfg.device, "--precision",
                   cfg.precision, "--output-dir", str(out / folder), "--resume", "auto", *flags]  # fmt: skip
        if subprocess.run(command).returncode:
            raise UserError(f"{kind} could not be trained; its error is above")
        return out / folder

    trial = json.loads((run(f"{kind}-trial", 1, "--eval-every", "0") / "summary.json").read_text(encoding="utf-8"))
    return run(kind, max(1, round(60 * cfg.minutes / trial["seconds"]["train"])))


def n_gram(stories: Stories) -> Row:
    """The n-gram of the order that is best on the held-out text, an advantage over the other models."""
    best = None
    for order in (2, 3, 4, 5):
        started = time.monotonic()
        model = KneserNey(stories.train[:].tolist(), order, stories.vocab)
        took = time.monotonic() - started
        size = sum(len(level.counts) for level in model.levels)
        row = row_of(stories, f"Kneser–Ney {order}-gram (counts)", size, took, model.nll(stories.heldout[:].tolist()))
        best = min(best or row, row, key=lambda row: row.bits)
    return best


@torch.no_grad()
def ridge(stories: Stories, seed: int, width: int = 256, units: int = 512) -> Row:
    """A model without gradient training: random embeddings, one diagonal reservoir, a readout in closed form. A softmax
    turns its scores into probabilities. The temperature and α are chosen on the last twentieth of the training text."""
    started = time.monotonic()
    embedding = torch.randn(stories.vocab, width, generator=torch.Generator().manual_seed(seed))
    cell = DiagonalReservoir(ReservoirSpec(units, radius=0.99, leak=(0.05, 1.0), seed=seed), width)

    def features(stream: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """For each token but the last: its features (reservoir state, embedding, 1), and the next token."""
        state = cell.begin(1)
        for part, after in zip(stream[:-1].split(4096), stream[1:].split(4096)):
            found, state = cell(embedding[part][None], state)
            yield torch.cat([found[0], embedding[part], torch.ones(len(part), 1)], 1), after

    cut = len(stories.train) * 19 // 20
    moments = RidgeMoments(2 * units + width + 1, stories.vocab)
    for x, y in features(stories.train[:cut]):
        moments.add(x, y)
    chosen = list(features(stories.train[cut:]))
    choices = [
        (nll(chosen, weight.float(), sharpness), weight.float(), sharpness)
        for weight in moments.solve([1e-2 * cut, 1e-1 * cut, cut])
        for sharpness in (2, 4, 8, 16, 32)
    ]
    _, weight, sharpness = min(choices, key=lambda choice: choice[0])
    took = time.monotonic() - started
    end = torch.tensor([stories.end])
    total = nll(features(torch.cat([end, stories.heldout[:]])), weight, sharpness)
    return row_of(stories, "reservoir, ridge readout alone", weight.numel(), took, total)


def nll(parts: Iterable, weight: torch.Tensor, sharpness: float) -> float:
    return sum(F.cross_entropy(sharpness * a @ weight.T, b, reduction="sum").item() for a, b in parts)


def row_of(stories: Stories, name: str, size: int, took: float, total: float) -> Row:
    """A row from `total`, the NLL of the held-out text in nats."""
    bits, ppl = total / math.log(2) / stories.heldout_bytes, math.exp(total / len(stories.heldout))
    return Row(name, size, took, len(stories.train), bits, ppl)


def draw(curves: dict[str, list[tuple[float, float]]], rows: list[Row], path: Path) -> None:
    figure, axis = plt.subplots(figsize=(8, 5))
    for name, points in curves.items():
        axis.plot(*zip(*points[1:]), marker=".", label=name)  # without the untrained model
    counts = rows[len(curves)]  # the n-gram; the ridge readout would be far above
    axis.axhline(counts.bits, linestyle=":", color="0.2", label=counts.name)
    axis.set(xlabel="seconds of training", ylabel="held-out bits per byte")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    run_script(main, Config, "reservoir", __doc__)
