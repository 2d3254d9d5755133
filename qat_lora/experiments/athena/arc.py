"""ARC tasks: their grids as rows of tokens, reading them from local JSON files, and datasets made of them.

A row is a canvas of 30×30 cells, read line by line: 0 is padding, 1 the end marker, c + 2 the colour c. The grid stands
at the top left or, in training, anywhere; end markers fill the line below it and the column to its right. The encoding,
the numbers of the transforms and the names of the puzzles are those of the Tiny Recursive Model (arXiv 2510.04871).

A task is a dict as in its file, {"train": [{"input": grid, "output": grid}], "test": …}; a test may have no output.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from reprlib import repr as short

import numpy as np

from qat_lora.errors import UserError
from qat_lora.experiments.athena.writing import BLANK, new_dataset
from qat_lora.run.console import watched
from qat_lora.run.files import read_json

SIDE = 30
LENGTH = SIDE * SIDE
COLOURS = 10
END, FIRST = 1, 2  # tokens: the end marker, and colour 0
VOCAB = FIRST + COLOURS
# Transform t: TURNS[t] quarter turns to the left and, from 4 on, a mirror image of the result, left to right. So 4
# mirrors left to right, 5 upside down, 6 on the main diagonal and 7 on the other one.
TURNS = (0, 1, 2, 3, 0, 2, 3, 1)
UNDONE = (0, 3, 2, 1, 4, 5, 6, 7)  # the transform that undoes each
NAME = re.compile(r"(.+?)\|\|\|t([0-7])\|\|\|(\d{10})", re.DOTALL)
CHALLENGES, SOLUTIONS = "_challenges.json", "_solutions.json"
UNKNOWN = np.zeros((0, 0), np.uint8)  # an output that is not known; its row has no label
TRIES = 5  # attempts at an augmentation that is no duplicate, per augmentation wanted
Pairs = list[list[np.ndarray]]  # input and output grid of each pair


# -- grids -----------------------------------------------------------------------------------------------------------
def turned(grid: np.ndarray, transform: int) -> np.ndarray:
    """A grid [height, width] under one of the eight rotations and reflections."""
    grid = np.rot90(grid, TURNS[transform])
    return grid[:, ::-1] if transform >= 4 else grid


def key(grid: np.ndarray) -> tuple[tuple[int, int], bytes]:
    """What equal grids have in common: shape and bytes."""
    return grid.shape, grid.tobytes()


def undoing(name: str) -> tuple[str, Callable[[np.ndarray], np.ndarray]]:
    """The task that a puzzle is an augmentation of, and the function that undoes the augmentation of a grid. Raises
    UserError if the name is malformed."""
    if "|||" not in name:
        return name, lambda grid: grid
    found = NAME.fullmatch(name)
    if not found or len(set(found[3])) < COLOURS:
        raise UserError(f"{name!r} is not the name of a puzzle, such as ID|||t5|||0312456789; rebuild the folder")
    undone, back = UNDONE[int(found[2])], np.argsort([int(digit) for digit in found[3]]).astype(np.uint8)
    return found[1], lambda grid: turned(back[grid], undone)


def canvas(grid: np.ndarray, down: int = 0, right: int = 0) -> np.ndarray:
    """The row of tokens [900] (uint8) of a grid whose top left cell is at line `down` and column `right`."""
    (height, width), cells = grid.shape, np.zeros((SIDE, SIDE), np.uint8)
    below, beside = down + height, right + width
    cells[down:below, right:beside] = grid + FIRST
    cells[below : below + 1, right:beside] = END
    cells[down:below, beside : beside + 1] = END
    return cells.ravel()


def cropped(rows: np.ndarray) -> list[np.ndarray]:
    """The grids that rows of tokens [N, 900] show: of each, the largest rectangle from the top left corner that holds
    only colours; 0×0 if there is none. The lower one counts if two are equally large."""
    cells = np.asarray(rows).reshape(-1, SIDE, SIDE)
    coloured = (cells >= FIRST) & (cells < VOCAB)
    widths = np.minimum.accumulate(np.logical_and.accumulate(coloured, 2).sum(2), 1)  # down to each line
    areas = widths * np.arange(1, SIDE + 1)
    heights = np.where(areas.any(1), areas.argmax(1) + 1, 0)
    widths = np.where(heights > 0, widths[np.arange(len(cells)), heights - 1], 0)
    return [(grid[:height, :width] - FIRST).astype(np.uint8) for grid, height, width in zip(cells, heights, widths)]


# -- reading ---------------------------------------------------------------------------------------------------------
def read_tasks(sources: str, option: str, files: dict[str, Path]) -> dict[str, dict]:
    """The tasks of some sources, separated by commas: PREFIX of PREFIX_challenges.json, a JSON file, or a folder.

    option: --source, whose tests must have outputs, or --test-source. files: where each task was found; those read
    before must not come again, since the tests of one may be among the examples of the other. Raises UserError naming
    the file, task and grid that is bad.
    """
    tasks: dict[str, dict] = {}
    for source in map(str.strip, sources.split(",")):
        if not source:
            raise UserError(f"{option} {sources} has an empty name; give names separated by single commas")
        for file in _files(source, option):
            for name, task in _tasks(file, option == "--source"):
                if name in files:
                    raise UserError(f"task {name} is both in {files[name]} and in {file}; leave one of them out")
                tasks[name], files[name] = task, file
    return tasks


def _files(source: str, option: str) -> list[Path]:
    path, named = Path(source), Path(source + CHALLENGES)
    if named.is_file() or path.is_file():
        return [named if named.is_file() else path]
    subsets = sorted(path.glob(f"*{CHALLENGES}"))
    if len(subsets) > 1:
        names = ", ".join(str(file).removesuffix(CHALLENGES) for file in subsets)
        raise UserError(f"{option} {source} holds {len(subsets)} subsets; name those that you mean: {names}")
    files = subsets or sorted(path.glob("*.json"))
    if not files:
        wanted = f"no such file, no {named}, and no folder with train.csv or .json files"
        inside = "".join(f", e.g. {file.parent}" for file in sorted(path.glob("*/*.json"))[:1])
        raise UserError(f"{option} {source}: {wanted}; give one of these{inside}")
    return files


def _tasks(file: Path, solved: bool) -> Iterator[tuple[str, dict]]:
    """Names and tasks of a file, with their solutions. solved: each test must have an output."""
    content = read_json(file)
    if "train" in content and "test" in content:
        content = {file.stem: content}
    if not content:
        raise UserError(f"{file} holds no tasks; give a file of ARC tasks")
    other = file.with_name(file.name.replace(CHALLENGES, SOLUTIONS))
    solutions = read_json(other) if other != file and other.exists() else None
    for name, task in content.items():
        where = f"{file}: task {name}"
        if not isinstance(task, dict) or not name or "|||" in name:
            raise UserError(
                f'{where} must be an object with "train" and "test", and its name not empty and without |||; correct it'
            )
        train = _pairs(task.get("train"), f"{where}, train", solved=True)
        test = _pairs(task.get("test"), f"{where}, test", solved and solutions is None)
        if solutions is not None:
            outputs = solutions.get(name)
            if not isinstance(outputs, list) or len(outputs) != len(test):
                raise UserError(f"{other}: task {name} has {short(outputs)}, not {len(test)} solutions; correct it")
            for number, pair in enumerate(test):
                pair["output"] = _grid(outputs[number], f"{other}: task {name}, solution {number + 1}")
        yield name, {"train": train, "test": test}


def _pairs(pairs, where: str, solved: bool) -> list[dict]:
    if not isinstance(pairs, list) or not pairs:
        raise UserError(f"{where} is {short(pairs)}, not a list of pairs; add at least one")
    found = []
    for number, pair in enumerate(pairs, 1):
        place = f"{where} pair {number}"
        if not isinstance(pair, dict) or "input" not in pair:
            raise UserError(f'{place} is {short(pair)}, not an object with an "input"; correct it')
        found.append({"input": _grid(pair["input"], f"{place}, input")})
        if pair.get("output") is not None:
            found[-1]["output"] = _grid(pair["output"], f"{place}, output")
        elif solved:
            raise UserError(f"{place} has no output; only tests of --test-source may lack it: add it or *{SOLUTIONS}")
    return found


def _grid(lines, where: str) -> list[list[int]]:
    if not isinstance(lines, list) or not lines or not all(isinstance(line, list) and line for line in lines):
        raise UserError(f"{where} is {short(lines)}, not a list of rows of colours; correct it")
    height, width = len(lines), len(lines[0])
    if max(height, width) > SIDE:
        raise UserError(f"{where} is {height}×{width}; a grid has at most {SIDE}×{SIDE} cells: leave this task out")
    for number, line in enumerate(lines, 1):
        if len(line) != width:
            raise UserError(f"{where}: row {number} has {len(line)} cells, row 1 has {width}; make them equally long")
        for cell in line:
            if type(cell) is not int or not 0 <= cell < COLOURS:
                raise UserError(f"{where}: row {number} holds {short(cell)}; a colour is a number from 0 to 9")
    return lines


# -- writing ---------------------------------------------------------------------------------------------------------
def build_tasks(folder: Path, train: dict[str, dict], test: dict[str, dict], augmentations: int, seed: int) -> None:
    """Write tasks to a new folder. A task and its augmentations form a group, each a puzzle with its own identifier.

    train/ gets all pairs of the tasks in `train` and the demonstrations of those in `test`, test/ the tests of the
    latter, with the same identifiers. A test without a known output gets a row without labels. Identifiers depend on
    the order of the tasks only, not on which outputs are known.
    """
    names, tasks = [BLANK], train | test
    with new_dataset(folder, LENGTH, VOCAB, names) as (part, examples, tests):
        for number, (title, task) in enumerate(watched(tasks.items(), "writing tasks", len(tasks))):
            rng, learned, asked = np.random.default_rng([seed, number]), [], []
            for name, pairs in augmented(title, task, augmentations, rng):
                shown = len(task["train"]) if title in test else len(pairs)
                learned.append((len(names), *_rows(pairs[:shown], rng)))
                asked.append((len(names), *_rows(pairs[shown:])))
                names.append(name)
            examples.group(learned)
            if title in test:
                tests.group(asked)
        (part / "test_puzzles.json").write_text(json.dumps(test), encoding="utf-8")


def augmented(title: str, task: dict, count: int, rng: np.random.Generator) -> Iterator[tuple[str, Pairs]]:
    """Name and pairs of grids (demonstrations, then tests) of a task and of `count` augmentations: a random transform
    and a random permutation of the colours 1 to 9. One whose pairs are those of an earlier one is skipped, so a task
    with many symmetries or few colours may have fewer augmentations. An unknown output is a grid of 0×0 cells."""
    known = [(pair["input"], pair.get("output", UNKNOWN)) for pair in task["train"] + task["test"]]
    pairs = [[np.array(grid, np.uint8) for grid in pair] for pair in known]
    name, transform, colours, found = title, 0, np.arange(COLOURS, dtype=np.uint8), set()
    for _ in range(1 + TRIES * count):
        images = [[turned(colours[grid], transform) for grid in pair] for pair in pairs]
        content = tuple(sorted(tuple(map(key, pair)) for pair in images))
        if content not in found:
            found.add(content)
            yield name, images
        if len(found) > count:
            return
        transform, colours[1:] = int(rng.integers(8)), rng.permutation(colours[1:])
        name = f"{title}|||t{transform}|||{''.join(map(str, colours))}"


def _rows(pairs: Pairs, rng: np.random.Generator | None = None) -> np.ndarray:
    """Inputs and labels [2, pairs, 900]. With `rng`, input and output of a pair are shifted together by a random
    distance, except for one random pair."""
    rows = np.zeros((2, len(pairs), LENGTH), np.uint8)
    unmoved = rng.integers(len(pairs)) if rng else None
    for number, pair in enumerate(pairs):
        down = right = 0
        if rng and number != unmoved:
            down, right = (int(rng.integers(SIDE - size + 1)) for size in np.max([grid.shape for grid in pair], 0))
        rows[:, number] = [canvas(grid, down, right) for grid in pair]
    return rows
