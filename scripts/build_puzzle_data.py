# PYTHON_ARGCOMPLETE_OK
"""Write a dataset for pretrain.py: generated puzzles, or prompt → response pairs from a text.

    python scripts/build_puzzle_data.py --kind sudoku6 --count 2000 --output-dir data/sudoku6
    python scripts/build_puzzle_data.py --kind maze9 --count 4000 --output-dir data/maze9
    python scripts/build_puzzle_data.py --corpus pairs.jsonl --length 128 --iterations 8 --output-dir data/pairs

pretrain.py trains a small network that reasons by recursion. Puzzles depend only on the seed. Each is proved to have
only one solution, and no held-out puzzle (test/) is a symmetry of one in train/. A row of --corpus has the columns
prompt, response and, optionally, iterations (the most segments for the row). Its tokens are bytes, and the loss is
computed on the response only. The files are laid out as in the Tiny Recursive Model's datasets; docs/athena.md
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
from qat_lora.experiments.athena.puzzles import as_text, check_request, side
from qat_lora.experiments.athena.rows import corpus, draw, row_memory, save, split
from qat_lora.run.files import check_new


def main(cfg: Config) -> None:
    folder = Path(cfg.output_dir)
    check_new(folder)
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


if __name__ == "__main__":
    run_script(main, Config, "build_puzzle_data", __doc__)
