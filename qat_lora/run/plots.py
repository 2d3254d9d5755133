"""Plots of a run, drawn from its metrics.jsonl."""

import os
from pathlib import Path
from types import ModuleType

from qat_lora.errors import UserError, load_package
from qat_lora.run.files import check_files, writing
from qat_lora.run.rundir import Run

PANELS = (
    ("loss", "training loss"),
    ("kl", "training KL to the teacher (nats)"),
    ("heldout_kl", "held-out KL to the teacher (nats)"),
    ("heldout_ppl", "held-out perplexity"),
    ("heldout_exact", "held-out rows exactly right where the halting head stops"),
    ("heldout_exact_full", "held-out rows exactly right after all segments"),
    ("heldout_segments", "segments until the halting head stops"),
    ("grad_norm", "gradient norm before clipping"),
    ("lr", "learning rate"),
    ("tokens_per_s", "tokens per second"),
)

COUNTERS = ("step", "tokens", "compiles", "fallbacks", "heldout_rows", "block")  # not drawn


def pyplot() -> ModuleType:
    """matplotlib.pyplot, set up to draw to files. Call it only when drawing, not on import, so that a broken
    matplotlib does not stop a run. Raises UserError if it cannot be imported."""
    os.environ["MPLBACKEND"] = "Agg"  # an invalid one fails the import
    plt = load_package("matplotlib.pyplot", "plots")
    plt.switch_backend("Agg")
    return plt


def _panels(lines: list[dict]) -> list[tuple[str, str]]:
    """(key, title) of each plot: PANELS, then every other figure that changes."""
    logged = dict.fromkeys(key for line in lines for key, value in line.items() if isinstance(value, int | float))
    titles = dict(PANELS)
    others = [key for key in logged if key not in (*titles, *COUNTERS) and not key.endswith(("_low", "_high"))]
    changing = [key for key in others if len({line[key] for line in lines if key in line}) > 1]
    return [(key, title) for key, title in PANELS if key in logged] + [(key, key) for key in changing]


def plot_run(path: Path) -> Path:
    """Plot every logged figure of a run against the step into plots/metrics.png, with a colour for each stage.

    Raises UserError if the run has logged nothing or its metrics.jsonl is damaged.
    """
    check_files(path, "metrics.jsonl")
    run = Run(path, resumed=False)
    lines = run.metrics()
    panels = _panels(lines)
    if not panels:
        raise UserError(f"{run.metrics_path} holds no figures yet; train for a step first")
    rows, plt = -(-len(panels) // 2), pyplot()
    figure, axes = plt.subplots(rows, 2, figsize=(11, 2.8 * rows), squeeze=False)
    stages = list(dict.fromkeys(line.get("stage") for line in lines))
    for axis, (key, title) in zip(axes.flat, panels):
        values = [line[key] for line in lines if key in line]
        for number, stage in enumerate(stages):
            points = [(line["step"], line[key]) for line in lines if line.get("stage") == stage and key in line]
            if points:
                axis.plot(
                    *zip(*points),
                    color=f"C{number}",
                    marker="o" if len(points) < 25 else None,
                    markersize=3,
                    label=stage,
                )
        if key != "lr" and 0 < 10 * min(values) < max(values):
            axis.set_yscale("log")
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    figure.suptitle(path.name, fontsize=10)
    figure.tight_layout()
    target = path / "plots" / "metrics.png"
    with writing(target):
        target.parent.mkdir(exist_ok=True)
        figure.savefig(target, dpi=110)
    plt.close(figure)
    return target
