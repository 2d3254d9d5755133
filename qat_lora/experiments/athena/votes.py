"""The vote over the augmentations of ARC tasks, as in the Tiny Recursive Model (arXiv 2510.04871).

Every augmentation of a task answers each of its tests. Undoing the augmentation turns the answers into candidates for
the same grid, and equal ones are pooled.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qat_lora.errors import UserError, first_line
from qat_lora.experiments.athena.grids import LENGTH, cropped, undoing
from qat_lora.run import remote as urls
from qat_lora.run.files import read_json

FILES = ("identifiers.json", "test_puzzles.json")


@dataclass
class Candidate:
    """An answer, as shape and bytes, with the number of augmentations that gave it and the sum of their halting
    probabilities."""

    key: tuple[tuple[int, int], bytes]
    count: int = 0
    total: float = 0.0

    @property
    def grid(self) -> np.ndarray:
        shape, cells = self.key
        return np.frombuffer(cells, np.uint8).reshape(shape)


class Votes:
    """Collects answers batch by batch. names: of the puzzle identifiers, by number; tasks: those of test_puzzles.json,
    {name: {"test": [{"input": grid, "output": grid}]}}, where an output may be missing."""

    def __init__(self, names: Sequence[str], tasks: dict[str, dict]):
        self.names, self.tasks = names, tasks
        self.found: dict[tuple[str, tuple], dict[tuple, Candidate]] = {}

    def add(
        self, identifiers: np.ndarray, inputs: np.ndarray, predictions: np.ndarray, probabilities: np.ndarray
    ) -> None:
        """Count the answers to some rows: identifiers [N], inputs and predictions [N, 900], halting probabilities [N].
        A row with identifier 0 is none of a task."""
        grids = zip(identifiers.tolist(), cropped(inputs), cropped(predictions), probabilities.tolist())
        for identifier, question, answer, probability in grids:
            if identifier:
                task, undo = undoing(self.names[identifier])
                candidates = self.found.setdefault((task, _key(undo(question))), {})
                key = _key(undo(answer))
                found = candidates.setdefault(key, Candidate(key))
                found.count, found.total = found.count + 1, found.total + probability

    def ranked(self, task: str, question: np.ndarray) -> list[Candidate]:
        """The candidates for a test of a task: those with the most votes first, then those with the highest mean
        halting probability, then the first to come."""
        found = self.found.get((task, _key(question)), {}).values()
        return sorted(found, key=lambda each: (-each.count, -each.total / each.count))

    def check(self, path: str, identifiers: np.ndarray, length: int) -> None:
        """Raise UserError if rows are not canvases of tasks, or have identifiers without a name."""
        if length != LENGTH:
            raise UserError(f"{path}: rows have {length} tokens, but those of ARC tasks {LENGTH}; rebuild the folder")
        if int(identifiers.max()) >= len(self.names):
            raise UserError(
                f"{path}: {FILES[0]} has {len(self.names)} names, but rows have identifiers up to "
                f"{identifiers.max()}; rebuild the folder"
            )

    @property
    def most(self) -> int:
        """The largest number of candidates for a test."""
        return max(map(len, self.found.values()), default=0)

    def solved(self, ks: Sequence[int]) -> dict[int, float]:
        """pass@k for each k: the share of a task's tests whose output is among their first k candidates, averaged over
        the tasks. Tests without a known output are left out; empty if there is no other."""
        shares = []
        for name, task in self.tasks.items():
            known = [pair for pair in task["test"] if pair.get("output") is not None]
            ranked = [[each.key for each in self.ranked(name, _grid(pair["input"]))] for pair in known]
            wanted = [_key(_grid(pair["output"])) for pair in known]
            if known:
                shares.append([sum(key in keys[:k] for key, keys in zip(wanted, ranked)) / len(known) for k in ks])
        return dict(zip(ks, np.mean(shares, 0).tolist())) if shares else {}

    def submission(self, attempts: int = 2) -> dict[str, list[dict]]:
        """The first candidates of each test of each task, as in a submission to ARC Prize; if there are fewer, the
        first one again."""
        answers = {}
        for name, task in self.tasks.items():
            answers[name] = []
            for pair in task["test"]:
                grids = [each.grid.tolist() or [[0]] for each in self.ranked(name, _grid(pair["input"]))]
                first = grids[0] if grids else [[0]]
                chosen = (grids + [first] * attempts)[:attempts]
                answers[name].append({f"attempt_{number}": grid for number, grid in enumerate(chosen, 1)})
        return answers


def open_votes(path: str) -> Votes | None:
    """The vote over a folder or URL of ARC tasks; None if it holds other puzzles. Raises UserError if a file is damaged
    or does not match the other."""
    with urls.local_folder(path) as folder:
        if not (folder / FILES[1]).exists():
            return None
        names, tasks = _names(folder / FILES[0]), read_json(folder / FILES[1])
    known = {undoing(name)[0] for name in names[1:]}
    for name, task in tasks.items():
        if name not in known:
            raise UserError(f"{path}: task {name} of {FILES[1]} has no puzzle in {FILES[0]}; rebuild the folder")
        pairs = task.get("test") if isinstance(task, dict) else None
        if not isinstance(pairs, list) or not all(isinstance(pair, dict) and "input" in pair for pair in pairs):
            raise UserError(f"{path}/{FILES[1]} is damaged: task {name} has no list of tests; rebuild the folder")
    return Votes(names, tasks)


def _names(file: Path) -> list[str]:
    try:
        names = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read ({first_line(error)}); rebuild the folder") from error
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f"{file} is damaged (not a list of names); rebuild the folder")
    return names


def _grid(lines: list[list[int]]) -> np.ndarray:
    return np.array(lines, np.uint8)


def _key(grid: np.ndarray) -> tuple:
    return grid.shape, grid.tobytes()
