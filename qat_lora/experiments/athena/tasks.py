"""ARC tasks from local JSON files.

Two layouts are read: a subset in PREFIX_challenges.json, with its test outputs in PREFIX_solutions.json, and a folder
with one file per task.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qat_lora.errors import UserError
from qat_lora.experiments.athena.grids import COLOURS, SIDE
from qat_lora.run.files import read_json

CHALLENGES, SOLUTIONS = "_challenges.json", "_solutions.json"
Pair = tuple[np.ndarray, np.ndarray | None]  # input and output grid; None: not known


@dataclass(frozen=True)
class Task:
    """A task with its demonstrations (train) and its tests."""

    name: str
    train: list[Pair]
    test: list[Pair]
    where: str

    @property
    def solved(self) -> bool:
        """Whether the outputs of all tests are known."""
        return all(output is not None for _, output in self.test)

    def as_json(self) -> dict:
        """The task as in its file, with its known solutions."""
        return {"train": [_as_json(pair) for pair in self.train], "test": [_as_json(pair) for pair in self.test]}


def _as_json(pair: Pair) -> dict:
    return {name: grid.tolist() for name, grid in zip(("input", "output"), pair) if grid is not None}


def read_tasks(sources: str, option: str) -> list[Task]:
    """The tasks of some sources, separated by commas: PREFIX of PREFIX_challenges.json, a JSON file, or a folder.

    option: the one that names the sources, for messages. Raises UserError naming the file, task and grid that is bad.
    """
    if not all(source.strip() for source in sources.split(",")):
        raise UserError(f"{option} {sources} has an empty name; give names separated by single commas")
    tasks = [task for source in sources.split(",") for file in _files(source.strip(), option) for task in _tasks(file)]
    check_names(tasks)
    return tasks


def check_names(tasks: list[Task]) -> None:
    """Raise UserError if two tasks have the same name: the tests of one may then be among the examples of the other."""
    found: dict[str, Task] = {}
    for task in tasks:
        if (other := found.setdefault(task.name, task)) is not task:
            raise UserError(f"task {task.name} is both in {other.where} and in {task.where}; leave one of them out")


def check_solved(tasks: list[Task]) -> None:
    """Raise UserError if a task that is only trained on has a test without an output."""
    for task in (task for task in tasks if not task.solved):
        solutions = task.where.replace(CHALLENGES, SOLUTIONS)
        missing = "no output" if solutions == task.where else f"no output, and {solutions} does not exist"
        raise UserError(
            f"{task.where}: task {task.name} has a test with {missing}; add it, or give this source as --test-source"
        )


def _files(source: str, option: str) -> list[Path]:
    path = Path(source)
    if (named := path.with_name(path.name + CHALLENGES)).is_file():
        return [named]
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"{option} {source}: no such file or folder, and no {named}; check the path")
    subsets = sorted(path.glob(f"*{CHALLENGES}"))
    if len(subsets) > 1:
        names = ", ".join(str(file).removesuffix(CHALLENGES) for file in subsets)
        raise UserError(f"{option} {source} holds {len(subsets)} subsets; name those that you mean: {names}")
    files = subsets or sorted(path.glob("*.json"))
    if not files:
        inside = next(iter(sorted(path.glob("*/*.json"))), None)
        advice = f"give a folder in it, e.g. {inside.parent}" if inside else "give a folder with such files"
        raise UserError(f"{option} {source} holds neither train.csv nor .json files; {advice}")
    return files


def _tasks(file: Path) -> Iterator[Task]:
    """The tasks of a file, with their solutions."""
    content = read_json(file)
    if "train" in content and "test" in content:
        content = {file.stem: content}
    if not content:
        raise UserError(f"{file} holds no tasks; give a file of ARC tasks")
    other = file.with_name(file.name.replace(CHALLENGES, SOLUTIONS))
    solutions = read_json(other) if other != file and other.exists() else None
    for name, task in content.items():
        where = f"{file}: task {name}"
        if not name or "|||" in name:
            raise UserError(f"{where}: the name must not be empty or contain |||; rename the task")
        if not isinstance(task, dict):
            raise UserError(f'{where} is {_short(task)}, not an object with "train" and "test"; correct it')
        train, test = (_pairs(task, side, where) for side in ("train", "test"))
        for number, (_, output) in enumerate(train, 1):
            if output is None:
                raise UserError(f"{where}, train pair {number} has no output; add it")
        yield Task(name, train, test if solutions is None else _solved(test, solutions, name, other), str(file))


def _pairs(task: dict, side: str, where: str) -> list[Pair]:
    pairs, found = task.get(side), []
    if not isinstance(pairs, list) or not pairs:
        raise UserError(f"{where}: {side} is {_short(pairs)}, not a list of pairs; add at least one")
    for number, pair in enumerate(pairs, 1):
        place = f"{where}, {side} pair {number}"
        if not isinstance(pair, dict) or "input" not in pair:
            raise UserError(f'{place} is {_short(pair)}, not an object with an "input"; correct it')
        output = None if pair.get("output") is None else _grid(pair["output"], f"{place}, output")
        found.append((_grid(pair["input"], f"{place}, input"), output))
    return found


def _solved(test: list[Pair], solutions: dict, name: str, file: Path) -> list[Pair]:
    outputs = solutions.get(name)
    if not isinstance(outputs, list) or len(outputs) != len(test):
        there = "is not there" if outputs is None else f"has {_short(outputs)}"
        if isinstance(outputs, list):
            there = f"has {len(outputs)} solutions"
        raise UserError(f"{file}: task {name} {there}, but has {len(test)} tests; give one solution for each")
    grids = (_grid(output, f"{file}: task {name}, solution {number}") for number, output in enumerate(outputs, 1))
    return [(question, grid) for (question, _), grid in zip(test, grids)]


def _grid(lines, where: str) -> np.ndarray:
    if not isinstance(lines, list) or not lines or not all(isinstance(line, list) and line for line in lines):
        raise UserError(f"{where} is {_short(lines)}, not a list of rows of colours; correct it")
    for number, line in enumerate(lines, 1):
        if len(line) != len(lines[0]):
            raise UserError(
                f"{where}: row {number} has {len(line)} cells, row 1 has {len(lines[0])}; make all rows equally long"
            )
        odd = next((cell for cell in line if type(cell) is not int or not 0 <= cell < COLOURS), None)
        if odd is not None or None in line:
            raise UserError(f"{where}: row {number} holds {_short(odd)}; a colour is a number from 0 to {COLOURS - 1}")
    if max(len(lines), len(lines[0])) > SIDE:
        raise UserError(
            f"{where} is {len(lines)}×{len(lines[0])}; a grid has at most {SIDE}×{SIDE} cells: leave this task out"
        )
    return np.array(lines, np.uint8)


def _short(value) -> str:
    said = repr(value)
    return said if len(said) <= 40 else f"{said[:37]}..."
