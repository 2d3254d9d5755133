"""Draws docs/overview.png, the picture in the README: the pipeline, and how close its students come to the teacher.

    python benchmarks/overview.py

Reads the measurements in docs/qat_quality/results.jsonl, which benchmarks/qat_quality.py wrote.
"""

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib import ticker

DOCS = Path(__file__).resolve().parents[1] / "docs"
STEPS = (
    ("text", "your own, or a\nhub dataset"),
    ("KD cache", "teacher's predictions,\ncomputed once"),
    ("low-bit student", "QAT from the cache:\n2 or 4 bits per weight"),
    ("recovery LoRA", "a small adapter on\nthe frozen student"),
    ("export", "GGUF for llama.cpp,\nor Hugging Face"),
)
METHODS = (("rtn", "rounding"), ("gptq", "GPTQ"), ("torchao", "torchao QAT"), ("ours", "qat_lora"))
GRIDS = (("int2/g64", "2 bits (int2/g64)"), ("int4/g32", "4 bits (int4/g32)"))
PLAIN, OURS = "#9aa3b2", "#2f6fdd"


def main() -> None:
    rows = [
        json.loads(line) for line in (DOCS / "qat_quality" / "results.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    figure = plt.figure(figsize=(11, 5.2))
    grid = figure.add_gridspec(2, 2, height_ratios=(1, 2.1), hspace=0.55, wspace=0.3)
    draw_pipeline(figure.add_subplot(grid[0, :]))
    for place, (name, title) in enumerate(GRIDS):
        draw_students(figure.add_subplot(grid[1, place]), [row for row in rows if row["grid"] == name], title)
    figure.savefig(DOCS / "overview.png", dpi=110, bbox_inches="tight")


def draw_pipeline(axis) -> None:
    axis.set_xlim(0, len(STEPS))
    axis.set_ylim(0, 1)
    axis.axis("off")
    for at, (name, about) in enumerate(STEPS):
        box = {"boxstyle": "round,pad=0.35", "facecolor": "#eef3fd", "edgecolor": OURS}
        axis.text(at + 0.5, 0.75, name, ha="center", va="center", fontsize=10.5, weight="bold", bbox=box)
        axis.text(at + 0.5, 0.12, about, ha="center", va="center", fontsize=9.5, color="#444c5c")
        if at:
            axis.annotate("", (at + 0.1, 0.75), (at - 0.1, 0.75), arrowprops={"arrowstyle": "->", "color": OURS})


def draw_students(axis, rows: list[dict], title: str) -> None:
    """Mean KL to the teacher over the seeds of each method, at equal bits."""
    for place, (method, _) in enumerate(METHODS):
        mine = [row for row in rows if row["method"] == method]
        stage = "qat" if method == "ours" else mine[-1]["stage"]  # before the adapter: equal bits
        kls = [row["text"]["kl"] for row in mine if row["stage"] == stage]
        mean = sum(kls) / len(kls)
        axis.plot(mean, -place, "o", markersize=11, color=OURS if method == "ours" else PLAIN)
        axis.annotate(f"{mean:.3g}", (mean, -place), (10, 0), textcoords="offset points", va="center", fontsize=10)
    axis.set_yticks([-place for place in range(len(METHODS))], [name for _, name in METHODS])
    axis.set_xscale("log")
    low, high = axis.get_xlim()
    axis.set_xlim(low, high * 1.6)
    axis.set_ylim(-len(METHODS) + 0.4, 0.6)
    axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axis.minorticks_off()
    axis.grid(alpha=0.3)
    axis.tick_params(axis="x", labelsize=9)
    axis.set_title(title, fontsize=11)
    axis.set_xlabel("KL to the teacher, nats/token (log scale; lower is better)", fontsize=9)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


if __name__ == "__main__":
    main()
