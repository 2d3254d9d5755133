"""Table and plot of what qat_quality.py has measured."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib import ticker

from qat_lora.run.files import write_atomically


def write_report(rows: list[dict], folder: Path, about: str) -> None:
    """report.md and kl.png in `folder`: a table for each grid, a line for each method and stage, over its seeds.

    rows: as qat_quality.py's `measure` gives them. about: model, device and what to know of them.
    """
    names = ["text", "other"] if "other" in rows[0] else ["text"]
    head = ["", "bits", "PPL", "KL", *(["PPL, other", "KL, other"] if len(names) == 2 else [])]
    head += ["above the teacher (nats)", "s", "MB", "seeds"]
    lines = []
    for grid in dict.fromkeys(row["grid"] for row in rows):
        mine = of(rows, grid=grid)
        lines += ["", f"## {grid}, {mine[0]['steps']} updates", "", "| " + " | ".join(head) + " |"]
        lines += ["|---|" + "---:|" * (len(head) - 1)]
        for name, same in by_name(mine).items():
            figures = [spread([row[name][figure] for row in same]) for name in names for figure in ("ppl", "kl")]
            figures += [spread([row["text"]["gap"] for row in same])]
            figures += [spread([row[key] for row in same if row[key]], 0) for key in ("seconds", "peak_memory_mb")]
            lines.append("| " + " | ".join([name, f"{same[0]['bits']:.2f}", *figures, str(len(same))]) + " |")
    teacher = ", ".join(f"{rows[0][name]['teacher']:.1f} on the {name}" for name in names)
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    said = (
        f"{about} Teacher's PPL: {teacher}. Mean (smallest–largest) over seeds; KL is KL(teacher‖student) in nats a "
        f"token; s is the time to that row, loading included, the cache's left out; commits {commits}."
    )
    title = "# Students for the same tokens, grid and bits"
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
    """Mean (smallest–largest); "" of nothing."""

    def show(value: float) -> str:
        return f"{value:.1e}" if value >= 1e5 else f"{value:.1f}" if value >= 100 and digits else f"{value:.{digits}f}"

    if len(values) < 2:
        return "".join(map(show, values))
    return f"{show(sum(values) / len(values))} ({show(min(values))}–{show(max(values))})"


def plot(rows: list[dict], path: Path) -> None:
    """KL to the teacher of every row, a panel for each grid."""
    grids = list(dict.fromkeys(row["grid"] for row in rows))
    figure, axes = plt.subplots(len(grids), 1, figsize=(8, 3.2 * len(grids)), squeeze=False)
    for axis, grid in zip(axes.flat, grids):
        named = by_name(of(rows, grid=grid))
        for place, same in enumerate(named.values()):
            axis.scatter([row["text"]["kl"] for row in same], [-place] * len(same), color="C0")
        axis.set_yticks([-place for place in range(len(named))], named, fontsize=8)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
        axis.xaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
        axis.xaxis.set_minor_formatter(ticker.NullFormatter())
        axis.set_xlabel("KL to the teacher (nats)")
        axis.set_title(grid)
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
