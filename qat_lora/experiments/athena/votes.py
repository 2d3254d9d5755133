"""The vote over the augmentations of ARC tasks, as in the Tiny Recursive Model (arXiv 2510.04871).

Every augmentation of a task answers each of its tests. Undoing the augmentation turns the answers into candidates for
the same grid, and equal ones are pooled.
"""

from collections.abc import Sequence

import numpy as np

from qat_lora.errors import UserError
from qat_lora.experiments.athena.arc import LENGTH, cropped, key, undoing
from qat_lora.run import remote as urls
from qat_lora.run.files import read_json

FILES = ("identifiers.json", "test_puzzles.json")


class Votes:
    """Collects answers batch by batch. names: of the puzzle identifiers, by number; tasks: those of test_puzzles.json,
    {name: {"test": [{"input": grid, "output": grid}]}}, where an output may be missing."""

    def __init__(self, names: Sequence[str], tasks: dict[str, dict]):
        self.names, self.tasks = names, tasks
        # halting probabilities of the augmentations that gave an answer, by (task, question) and answer
        self.found: dict[tuple, dict[tuple, list[float]]] = {}

    def add(
        self, identifiers: np.ndarray, inputs: np.ndarray, predictions: np.ndarray, probabilities: np.ndarray
    ) -> None:
        """Count the answers to some rows: identifiers [N], inputs and predictions [N, 900], halting probabilities [N].
        A row with identifier 0 is none of a task."""
        grids = zip(identifiers.tolist(), cropped(inputs), cropped(predictions), probabilities.tolist())
        for identifier, question, answer, probability in grids:
            if identifier:
                task, undo = undoing(self.names[identifier])
                candidates = self.found.setdefault((task, key(undo(question))), {})
                candidates.setdefault(key(undo(answer)), []).append(probability)

    def ranked(self, task: str, question: list[list[int]]) -> list[list[list[int]]]:
        """The candidates for a test of a task: those with the most votes first, then those with the highest mean
        halting probability, then the first to come."""
        found = self.found.get((task, key(np.array(question, np.uint8))), {})
        order = sorted(found, key=lambda answer: (-len(found[answer]), -np.mean(found[answer])))
        return [np.frombuffer(cells, np.uint8).reshape(shape).tolist() for shape, cells in order]

    def check(self, path: str, identifiers: np.ndarray, length: int) -> None:
        """Raise UserError if rows are not canvases of tasks, or have identifiers without a name."""
        if length != LENGTH or identifiers.max() >= len(self.names):
            raise UserError(
                f"{path}: rows have {length} tokens and identifiers up to {identifiers.max()}, but ARC tasks have "
                f"{LENGTH} tokens and {FILES[0]} has {len(self.names)} names; rebuild the folder"
            )

    def solved(self, ks: Sequence[int]) -> dict[int, float]:
        """pass@k for each k: the share of a task's tests whose output is among their first k candidates, averaged over
        the tasks. Tests without a known output are left out; empty if there is no other."""
        shares = []
        for name, task in self.tasks.items():
            known = [pair for pair in task["test"] if pair.get("output") is not None]
            answers = [(pair["output"], self.ranked(name, pair["input"])) for pair in known]
            if known:
                shares.append([np.mean([output in ranked[:k] for output, ranked in answers]) for k in ks])
        return dict(zip(ks, np.mean(shares, 0).tolist())) if shares else {}

    def submission(self) -> dict[str, list[dict]]:
        """The first two candidates of each test of each task, as in a submission to ARC Prize; if there are fewer, the
        first one again."""
        answers = {}
        for name, task in self.tasks.items():
            best = [self.ranked(name, pair["input"])[:2] or [[]] for pair in task["test"]]
            answers[name] = [{"attempt_1": two[0] or [[0]], "attempt_2": two[-1] or [[0]]} for two in best]
        return answers


def open_votes(path: str) -> Votes | None:
    """The vote over a folder or URL of ARC tasks; None if it holds other puzzles. Raises UserError if a file is damaged
    or does not match the other."""
    with urls.local_folder(path) as folder:
        if not (folder / FILES[1]).exists():
            return None
        names, tasks = read_json(folder / FILES[0], list), read_json(folder / FILES[1])
    for number, name in enumerate(names):
        if not isinstance(name, str):
            raise UserError(f"{path}/{FILES[0]} is damaged: name {number} is {name!r}, not text; rebuild the folder")
    known = {undoing(name)[0] for name in names[1:]}
    for name, task in tasks.items():
        if name not in known:
            raise UserError(f"{path}: task {name} of {FILES[1]} has no puzzle in {FILES[0]}; rebuild the folder")
        pairs = task.get("test") if isinstance(task, dict) else None
        if not isinstance(pairs, list) or not all(isinstance(pair, dict) and "input" in pair for pair in pairs):
            raise UserError(f"{path}/{FILES[1]} is damaged: task {name} has no list of tests; rebuild the folder")
    return Votes(names, tasks)
