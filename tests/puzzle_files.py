"""Small ARC tasks made on the spot, files of them in both published layouts, and a reader of the datasets built from
them."""

import itertools
import json
from pathlib import Path

import numpy as np

RULES = {
    "mirror": lambda grid: grid[:, ::-1],
    "flip": lambda grid: grid[::-1],
    "turn": lambda grid: np.rot90(grid),
    "across": lambda grid: grid.T,
    "recolour": lambda grid: np.where(grid > 0, grid % 9 + 1, 0),
    "double": lambda grid: np.hstack([grid, grid]),
}


def arc_task(name: str, seed: int = 0, tests: int = 1) -> dict:
    """A task with three demonstrations on grids of 3×3 to 5×5."""
    rng = np.random.default_rng([seed, *name.encode()])
    grids = [rng.integers(0, 10, rng.integers(3, 6, 2)) for _ in range(3 + tests)]
    pairs = [{"input": grid.tolist(), "output": RULES[name](grid).tolist()} for grid in grids]
    return {"train": pairs[:3], "test": pairs[3:]}


def arc_tasks(names=RULES, tests: int = 1) -> dict[str, dict]:
    return {name: arc_task(name, tests=tests) for name in names}


def write_subset(prefix: Path, tasks: dict[str, dict], solved: bool = True) -> str:
    """PREFIX_challenges.json and, if solved, PREFIX_solutions.json; returns the prefix."""
    prefix.parent.mkdir(exist_ok=True)
    asked = {
        name: {"train": task["train"], "test": [{"input": pair["input"]} for pair in task["test"]]}
        for name, task in tasks.items()
    }
    Path(f"{prefix}_challenges.json").write_text(json.dumps(asked))
    if solved:
        solutions = {name: [pair["output"] for pair in task["test"]] for name, task in tasks.items()}
        Path(f"{prefix}_solutions.json").write_text(json.dumps(solutions))
    return str(prefix)


def write_folder(folder: Path, tasks: dict[str, dict]) -> str:
    """One file per task."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, task in tasks.items():
        (folder / f"{name}.json").write_text(json.dumps(task))
    return str(folder)


def read_side(folder: Path) -> tuple[dict, list[list[tuple[int, list]]]]:
    """dataset.json and the groups, each a list of puzzles: identifier and rows."""
    arrays = {path.stem.removeprefix("all__"): np.load(path) for path in folder.glob("*.npy")}
    assert arrays["inputs"].dtype == arrays["labels"].dtype == np.uint8
    starts, firsts = arrays["puzzle_indices"], arrays["group_indices"]
    rows = list(zip(arrays["inputs"], arrays["labels"]))
    puzzles = [
        (int(number), rows[one:other]) for number, one, other in zip(arrays["puzzle_identifiers"], starts, starts[1:])
    ]
    return json.loads((folder / "dataset.json").read_text()), [
        puzzles[one:other] for one, other in itertools.pairwise(firsts)
    ]
