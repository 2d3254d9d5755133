"""Table and plot of the results of qat_quality.py."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib import ticker

from qat_lora.run.files import write_atomically


def write_report(rows: list[dict], folder: Path, about: str) -> None:
    """Write report.md and kl.png to `folder`: one table per grid, one line per method and stage, over its seeds.

    rows: as `Bench.measure` returns them. about: a sentence on the model and the device.
    """
    names = ["text", "other"] if "other" in rows[0] else ["text"]
    head = ["", "bits", "PPL", "KL", *(["PPL, other", "KL, other"] if len(names) == 2 else [])]
    head += ["above the teacher (nats)", "s", "core-s", "MB", "seeds"]
    lines = []
    for grid in dict.fromkeys(row["grid"] for row in rows):
        mine = of(rows, grid=grid)
        lines += ["", f"## {grid}, {mine[0]['steps']} updates", "", "| " + " | ".join(head) + " |"]
        lines += ["|---|" + "---:|" * (len(head) - 1)]
        for name, same in by_name(mine).items():
            figures = [spread([row[name][figure] for row in same]) for name in names for figure in ("ppl", "kl")]
            figures += [spread([row["text"]["gap"] for row in same])]
            costs = ("seconds", "core_seconds", "peak_memory_mb")
            figures += [spread([row[key] for row in same if row.get(key)], 0) for key in costs]
            lines.append("| " + " | ".join([name, f"{same[0]['bits']:.2f}", *figures, str(len(same))]) + " |")
    teacher = ", ".join(f"{rows[0][name]['teacher']:.1f} on the {name}" for name in names)
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    said = (
        f"{about} Teacher's PPL: {teacher}. Mean (smallest–largest) over seeds. KL is KL(teacher‖student) in "
        f"nats/token; s and core-s are what was spent up to that row, with loading but without the cache. "
        f"Commits: {commits}."
    )
    title = "# Student quality for the same tokens, grid and bits"
    text = "\n".join([title, "", said, *lines, "", "![KL](kl.png)", ""])
    write_atomically(folder / "report.md", lambda file: file.write(text.encode()))
    plot(rows, folder / "kl.png")


def of(rows: list[dict], **wanted) -> list[dict]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def by_name(rows: list[dict]) -> dict[str, list[dict]]:
    """The rows of one grid by method and stage, farthest from the teacher first."""
    found: dict[str, list[dict]] = {}
    for row in rows:
        name = row["method"] if row["stage"] == row["method"] else f"{row['method']}: {row['stage']}"
        found.setdefault(name, []).append(row)
    return dict(sorted(found.items(), key=lambda item: -sum(row["text"]["kl"] for row in item[1]) / len(item[1])))


def spread(values: list[float], digits: int = 3) -> str:
    """Mean (smallest–largest) of the values; "" if there are none."""

    def show(value: float) -> str:
        return f"{value:.1e}" if value >= 1e5 else f"{value:.1f}" if value >= 100 and digits else f"{value:.{digits}f}"

    if len(values) < 2:
        return "".join(map(show, values))
    return f"{show(sum(values) / len(values))} ({show(min(values))}–{show(max(values))})"


def plot(rows: list[dict], path: Path) -> None:
    """Plot the KL to the teacher of every row, one panel per grid, all on one scale."""
    named = {grid: by_name(of(rows, grid=grid)) for grid in dict.fromkeys(row["grid"] for row in rows)}
    heights = [1 + len(names) for names in named.values()]
    size, ratios = (8, 0.3 * sum(heights) + 1), {"height_ratios": heights}
    figure, axes = plt.subplots(len(named), 1, figsize=size, squeeze=False, sharex=True, gridspec_kw=ratios)
    for axis, (grid, names) in zip(axes.flat, named.items()):
        for place, same in enumerate(names.values()):
            axis.scatter([row["text"]["kl"] for row in same], [-place] * len(same), color="C0")
        axis.set_yticks([-place for place in range(len(names))], names, fontsize=8)
        axis.set_ylim(0.6 - len(names), 0.6)
        axis.set_title(grid, fontsize=10)
        axis.grid(alpha=0.3)
    kls = [row["text"]["kl"] for row in rows]
    axis.set_xscale("log")
    wide = max(kls) > 3 * min(kls)
    axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)) if wide else ticker.MaxNLocator(6))
    axis.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    axis.xaxis.set_minor_formatter(ticker.NullFormatter())
    axis.set_xlabel("KL to the teacher (nats)")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
