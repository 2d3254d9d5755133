# PYTHON_ARGCOMPLETE_OK
"""Write a dataset for pretrain.py: generated puzzles, published Sudoku, mazes or ARC tasks, or prompt → response pairs.

    python scripts/build_puzzle_data.py --kind sudoku6 --count 2000 --output-dir data/sudoku6
    python scripts/build_puzzle_data.py --kind maze9 --count 4000 --output-dir data/maze9
    python scripts/build_puzzle_data.py --source maze-hard --augmentations 7 --output-dir data/mazes
    python scripts/build_puzzle_data.py --source arc/training --test-source arc/evaluation --output-dir data/arc
    python scripts/build_puzzle_data.py --corpus pairs.jsonl --length 128 --iterations 8 --output-dir data/pairs

pretrain.py trains a small network that reasons by recursion. Generated puzzles depend only on the seed. Each is proved
to have only one solution, and no held-out puzzle (test/) is a symmetry of one in train/. --source reads local files,
CSV tables of Sudoku or mazes or JSON files of ARC tasks; what they hold is recognised. A row of --corpus has the
columns prompt, response and, optionally, iterations (the most segments for the row). Its tokens are bytes, and the loss
is computed on the response only. The files are laid out as in the Tiny Recursive Model's datasets; docs/athena.md
describes them. --dry-run prints what would be written.
"""

from dataclasses import dataclass

from qat_lora.experiments.athena import ANY
from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import ScriptConfig


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    output_dir: str = opt.run("data/puzzles", "new folder to write the dataset to")
    puzzle: str = opt.data("sudoku6", "kind of puzzle: sudoku4, sudoku6, sudoku9 or mazeN, N odd", "--kind")
    count: int = opt.data(2000, "puzzles to draw", at_least=1)
    least_blanks: float = opt.data(
        0.4, "smallest share of a Sudoku's cells that are blank; 1 is as many as its solution allows"
    )
    most_blanks: float = opt.data(1.0, "largest share of a Sudoku's cells that are blank; more blanks are harder")
    heldout_fraction: float = opt.data(0.1, "share of the rows written to test/", **opt.HELDOUT)
    corpus: str | None = opt.data(
        None, "text pairs instead of puzzles: .jsonl, .parquet or a hub dataset with prompt and response"
    )
    source: str | None = opt.data(
        None,
        "local Sudoku or mazes: a CSV table, or a folder with train.csv and test.csv; or ARC tasks: a JSON file, a "
        "folder of them or PREFIX of PREFIX_challenges.json, several separated by commas",
    )
    test_source: str | None = opt.data(
        None, "with --source, what to test on: a CSV table [test.csv]; or ARC tasks, whose test pairs go to test/"
    )
    augmentations: int = opt.data(
        0, "with --source, augmented copies of each training row, or of each ARC task", at_least=0, at_most=10**6
    )
    subsample: int | None = opt.data(
        None, "with --source, use only this many random training rows, or tasks of --source [all]", at_least=1
    )
    length: int = opt.data(128, "bytes per row of --corpus; longer rows are left out")
    causal: bool = opt.data(
        False, "with --corpus, feed the response as input too, each position seeing only those before it"
    )
    iterations: int = opt.data(
        0,
        "with --corpus, most segments of rows that do not set their own; 0 leaves it to the run",
        at_least=0,
        below=ANY,
        fix="use 0 for the setting of the run",
    )


if __name__ == "__main__":
    check_command_line(Config, "build_puzzle_data", __doc__)  # before the imports that take seconds

from pathlib import Path

import numpy as np

from qat_lora.backend.machine import check_memory
from qat_lora.data.text import read_rows
from qat_lora.errors import UserError
from qat_lora.experiments.athena import arc, tables
from qat_lora.experiments.athena.puzzles import as_text, check_request, side
from qat_lora.experiments.athena.rows import corpus, draw, row_memory, save, split
from qat_lora.run.files import check_new


def main(cfg: Config) -> None:
    folder = Path(cfg.output_dir)
    check_new(folder)
    if cfg.source and cfg.corpus:
        raise UserError("--source and --corpus exclude each other; give one of them")
    if cfg.source:
        files = tables.files_of(cfg.source, cfg.test_source)
        return from_tables(cfg, folder, *files) if files else from_tasks(cfg, folder)
    if cfg.test_source or cfg.augmentations or cfg.subsample:
        raise UserError("--test-source, --augmentations and --subsample need --source; add it or leave them out")
    if cfg.corpus:
        rows, long = corpus(read_rows(cfg.corpus), cfg.corpus, cfg.length, cfg.causal, cfg.iterations)
        print(f"{len(rows):,} rows of {rows.length} bytes; {long:,} longer rows left out")
    else:
        blanks = cfg.least_blanks, cfg.most_blanks
        check_request(cfg.puzzle, cfg.count, blanks, "--count")
        check_memory(row_memory(side(cfg.puzzle) ** 2, cfg.count), f"--count {cfg.count}", "--count")
        if cfg.dry_run:
            return print(
                f"{cfg.count:,} {cfg.puzzle} would go to {folder}, {cfg.heldout_fraction:.0%} of them held out"
            )
        rows = draw(cfg.puzzle, cfg.count, cfg.seed, blanks)
        quartiles = " ".join(f"{value:.0f}" for value in np.quantile(rows.difficulty, np.linspace(0, 1, 5)))
        print(f"{len(rows):,} {cfg.puzzle}, quartiles of the difficulty: {quartiles}")
        print(f"{as_text(cfg.puzzle, rows.inputs[0])}\n\n{as_text(cfg.puzzle, rows.labels[0])}\n")
    train, heldout = split(rows, cfg.heldout_fraction, cfg.seed)
    if cfg.dry_run:
        return print(f"{len(train):,} training and {len(heldout):,} held-out rows would go to {folder}")
    save(folder, train, heldout)
    print(f"{len(train):,} rows in {folder}/train, {len(heldout):,} in {folder}/test")


def from_tables(cfg: Config, folder: Path, train_file: Path, test_file: Path) -> None:
    """Write published Sudoku or mazes."""
    name, train = tables.read_table(train_file)
    _, test = tables.read_table(test_file, name)
    if name.endswith("maze") and cfg.augmentations > tables.OTHERS:
        raise UserError(f"--augmentations {cfg.augmentations}: a maze has only {tables.OTHERS} other images; use fewer")
    print(f"{len(train):,} rows of {name} in {train_file}, {len(test):,} in {test_file}")
    if cfg.subsample is not None:  # without, the table is not copied
        train = train[sample(len(train), train_file, cfg.subsample, cfg.seed)]
    if cfg.dry_run:
        return plan(len(train) * (1 + cfg.augmentations), len(test), train.shape[2], folder)
    tables.build_tables(folder, name, train, test, cfg.augmentations, cfg.seed)


def from_tasks(cfg: Config, folder: Path) -> None:
    """Write ARC tasks."""
    files: dict[str, Path] = {}
    train = arc.read_tasks(cfg.source, "--source", files)
    if cfg.test_source is None:
        raise UserError("ARC tasks need --test-source, whose test pairs go to test/; name a source of evaluation tasks")
    test = arc.read_tasks(cfg.test_source, "--test-source", files)
    items = list(train.items())
    train = dict(items[number] for number in sample(len(items), cfg.source, cfg.subsample, cfg.seed))
    print(f"{len(train):,} tasks to train on from {cfg.source}, {len(test):,} to test on from {cfg.test_source}")
    if cfg.dry_run:
        copies, asked = 1 + cfg.augmentations, sum(len(task["test"]) for task in test.values())
        pairs = sum(len(task["train"]) + len(task["test"]) for task in (train | test).values())
        return plan((pairs - asked) * copies, asked * copies, arc.LENGTH, folder)
    arc.build_tasks(folder, train, test, cfg.augmentations, cfg.seed)


def sample(count: int, source: Path | str, subsample: int | None, seed: int) -> np.ndarray:
    """The numbers, in order, of the training puzzles to use; None: all."""
    if subsample is None:
        return np.arange(count)
    if subsample > count:
        raise UserError(f"--subsample {subsample} is more than the {count} in {source}; use at most {count}")
    return np.sort(np.random.default_rng(seed).choice(count, subsample, replace=False))


def plan(train: int, test: int, length: int, folder: Path) -> None:
    size = 2 * length * (train + test)  # bytes of inputs and labels
    print(f"at most {train:,} training and {test:,} test rows would go to {folder}, {size / 1e9:,.3f} GB")


if __name__ == "__main__":
    run_script(main, Config, "build_puzzle_data", __doc__)
