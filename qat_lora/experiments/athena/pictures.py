"""A puzzle and the answer to it, as a picture."""

from pathlib import Path

from qat_lora.experiments.athena.puzzles import BLANK, BOXES, MAZE, WALL, side
from qat_lora.run.plots import pyplot


def draw_answer(kind: str, question, label, found, segments: int, path: Path) -> None:
    """A question and the answer to it, side by side: given cells black, right ones green, wrong ones on red."""
    n, maze = side(kind), kind.startswith("maze")
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(8, 4.3))
    for axis, tokens, title in zip(
        axes, (question, found), ("question", f"answer after {segments} segment{'s' * (segments > 1)}")
    ):
        axis.set(xlim=(0, n), ylim=(n, 0), xticks=[], yticks=[], aspect="equal", title=title)
        for place, (token, given, wanted) in enumerate(zip(tokens.tolist(), question.tolist(), label.tolist())):
            row, column = divmod(place, n)
            colour = "black" if token == given else "tab:green"
            if axis is axes[1] and token != wanted:
                axis.add_patch(plt.Rectangle((column, row), 1, 1, color="tab:red", alpha=0.4, zorder=2))
            if maze and token == WALL:
                axis.add_patch(plt.Rectangle((column, row), 1, 1, color="0.25"))
            elif maze or token > BLANK:
                text = MAZE[token] if maze else str(token - BLANK)
                axis.text(column + 0.5, row + 0.55, text, color=colour, ha="center", va="center", fontsize=120 / n)
        if not maze:
            high, wide = BOXES[kind]
            for line in range(n + 1):
                axis.axhline(line, color="black", linewidth=2.5 if line % high == 0 else 0.5)
                axis.axvline(line, color="black", linewidth=2.5 if line % wide == 0 else 0.5)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
