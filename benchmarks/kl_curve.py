"""How does a student's KL to its teacher fall with the tokens that it is trained on, and with what they cost?

    python benchmarks/kl_curve.py --results runs/q48/results.jsonl,runs/q488/results.jsonl --output curve.png

Reads rows of qat_quality.py that differ in --steps, each trained with a schedule of its own length; --results takes
files separated by commas. Fits KL = floor + a·tokens^−b to the end-to-end rows of `ours` by least squares of log KL,
prints the law with its prediction for --tokens, and draws it beside the other methods that train on as many tokens, and
all methods at their core-seconds. Means over seeds.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.ticker import NullFormatter
from quality_bench import BATCH
from quality_report import by_name

from qat_lora.errors import UserError
from qat_lora.run.command_line import run_script
from qat_lora.run.files import write_atomically
from qat_lora.run.options import ScriptConfig, option

PER_UPDATE = BATCH * 256  # tokens
TRAINED = "ours: qat", "torchao: qat", "torchao-text: qat", "loftq: adapter"  # on all tokens of --steps


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    results: str = option("", "results.jsonl of runs of qat_quality.py")
    grid: str = option("int2/g64", "quantiser whose rows to use")
    tokens: float = option(1e8, "number of tokens to predict the KL for", above=0)
    output: str = option("curve.png", "picture to write")


@dataclass(frozen=True)
class Law:
    """KL = floor + a·tokens^−b, in nats/token."""

    floor: float
    a: float
    b: float

    def __call__(self, tokens):
        return self.floor + self.a * np.asarray(tokens, float) ** -self.b


def main(cfg: Config) -> None:
    if not cfg.results:
        raise UserError("--results is missing; give the results.jsonl of one or more runs of qat_quality.py")
    rows = [row for path in cfg.results.split(",") for row in read(path) if row["grid"] == cfg.grid]
    named = means(rows)
    ours = named.get("ours: qat", [])
    if len({tokens for tokens, _, _ in ours}) < 2:
        raise UserError(
            f"--results hold fewer than two --steps of `ours` on {cfg.grid}; run qat_quality.py with others"
        )
    law = fitted(np.array([tokens for tokens, _, _ in ours]), np.array([kl for _, _, kl in ours]))
    print(f"{cfg.grid}: KL = {law.floor:.3f} + {law.a:.3g} · tokens^-{law.b:.3f}, from {len(ours)} lengths")
    print(f"after {cfg.tokens:,.0f} tokens: {law(cfg.tokens):.3f}")
    draw(named, law, cfg)


def read(path: str) -> list[dict]:
    try:
        return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"--results {path} cannot be read ({error}); give results.jsonl of qat_quality.py") from error


def means(rows: list[dict]) -> dict[str, list[tuple[float, float | None, float]]]:
    """For each method and stage its (tokens, core-seconds, KL), means over seeds, by tokens."""
    found = {}
    for name, same in by_name(rows).items():
        for steps in sorted({row["steps"] for row in same}):
            mine = [row for row in same if row["steps"] == steps]
            cost, kl = _mean([row.get("core_seconds") for row in mine]), _mean([row["text"]["kl"] for row in mine])
            found.setdefault(name, []).append((steps * PER_UPDATE, cost, kl))
    return found


def _mean(values: list[float | None]) -> float | None:
    return None if None in values else sum(values) / len(values)


def fitted(tokens: np.ndarray, kl: np.ndarray) -> Law:
    """The law nearest to the points. Its floor is 0 unless there are at least four lengths."""
    best = None
    for floor in np.linspace(0, 0.99 * kl.min(), 200 if len(set(tokens)) >= 4 else 1):
        slope, level = np.polyfit(np.log(tokens), np.log(kl - floor), 1)
        law = Law(float(floor), float(np.exp(level)), float(-slope))
        error = np.square(np.log(law(tokens)) - np.log(kl)).sum()
        if best is None or error < best[0]:
            best = error, law
    return best[1]


def draw(named: dict[str, list], law: Law, cfg: Config) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    for number, (name, points) in enumerate(named.items()):
        style = {"marker": "o" if name == "ours: qat" else "x", "linestyle": "", "color": f"C{number}", "label": name}
        if name in TRAINED:
            left.plot(*zip(*((tokens, kl) for tokens, _, kl in points)), **style)
        if known := [(cost, kl) for _, cost, kl in points if cost]:
            right.plot(*zip(*known), **style)
    some = np.geomspace(min(p[0] for p in named["ours: qat"]), cfg.tokens, 50)
    left.plot(some, law(some), "-", color="gray", linewidth=1)
    left.set_xlabel("tokens trained on")
    right.set_xlabel("core-seconds")
    left.set_ylabel("KL to the teacher (nats/token)")
    for axis in (left, right):
        axis.set_xscale("log")
        axis.set_yscale("log")
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")
        axis.grid(alpha=0.3, which="both")
        axis.legend(fontsize=8, loc="lower left")
    figure.suptitle(cfg.grid)
    figure.tight_layout()
    write_atomically(Path(cfg.output), lambda file: figure.savefig(file, format="png", dpi=110))
    plt.close(figure)


if __name__ == "__main__":
    run_script(main, Config, "kl_curve", __doc__)
