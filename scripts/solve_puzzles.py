# PYTHON_ARGCOMPLETE_OK
"""How does Athena solve a puzzle? Shows its answer after every step, or evaluates it on a folder of puzzles.

    python scripts/solve_puzzles.py --run runs/athena --puzzles puzzles.txt
    python scripts/solve_puzzles.py --run runs/athena --evaluate data/sudoku6
    python scripts/solve_puzzles.py --run runs/athena --evaluate data/sudoku6 --attempts 16 --picture attempts.png
    python scripts/solve_puzzles.py --run runs/arc --evaluate data/arc --answers submission.json

The model is the best.pt of a finished run of pretrain.py, without --run that of the newest one, or a checkpoint of the
published code, a file beside its all_config.yaml. Without --puzzles, puzzles are read from standard input. A puzzle is
a grid of lines, or all of it in one line: in a Sudoku . or 0 is a blank; a maze has walls #, floors (. or a space), S
and G. Each step is one segment (a step of deep supervision); the answer where the model halts is compared with the
right one. --evaluate measures the test/ side of a folder of build_puzzle_data.py, or of one in the format of the Tiny
Recursive Model, as the run itself does. For ARC tasks it also prints pass@1, 2, 5 and 10: all augmentations of a
task vote for the answers to its tests.

--attempts K answers each puzzle K times, always with all segments: attempt 1 is the plain model, and each later one
adds noise to the latent state before every segment. The answer is the attempt that the halting head finds most likely
to be right. With --evaluate, a table (and --picture) compares it with a majority vote and with pass@k.
docs/athena.md is the runbook. Runs on CPU and CUDA.
"""

from dataclasses import dataclass

from qat_lora.experiments.athena import NOISE
from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import ScriptConfig


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    run: str | None = opt.model(None, "run directory of pretrain.py, or a published checkpoint [the newest run]")
    puzzles: str | None = opt.data(None, "text file with puzzles [standard input]")
    evaluate: str | None = opt.data(None, "evaluate on the test/ side of this folder instead of solving puzzles")
    answers: str | None = opt.run(None, "with --evaluate on ARC tasks, write the two best answers to this JSON file")
    segments: int | None = opt.run(None, "most segments per puzzle [as in the run]", at_least=1, at_most=1000)
    attempts: int = opt.run(
        1, "attempts per puzzle, all but the first with noise; the halting head picks one", at_least=1, at_most=1000
    )
    noise: float = opt.run(
        NOISE,
        "standard deviation of the noise that sets attempts apart; the latent state has RMS 1",
        at_least=0,
        at_most=10,
        fix="use e.g. 1",
    )
    picture: str | None = opt.run(None, "PNG file for the accuracy over --attempts; needs --evaluate")
    batch_size: int = opt.run(64, "puzzles evaluated at a time", at_least=1)


if __name__ == "__main__":
    check_command_line(Config, "solve_puzzles", __doc__)  # before the imports that take seconds

import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qat_lora.backend import TorchBackend, open_backend
from qat_lora.errors import UserError
from qat_lora.experiments.athena.attempts import Accuracy, draw_attempts, measure_attempts, run_attempts
from qat_lora.experiments.athena.evaluation import load_run, measure, steps
from qat_lora.experiments.athena.model import RecursiveModel, RecursiveSpec
from qat_lora.experiments.athena.puzzles import as_text, read_puzzles, side, verdict
from qat_lora.experiments.athena.rows import PuzzleRows, load
from qat_lora.experiments.athena.votes import Votes, open_votes
from qat_lora.rl.completion import check_device
from qat_lora.run.console import say
from qat_lora.run.files import write_json
from qat_lora.run.rundir import newest_run


def main(cfg: Config) -> None:
    check_device(cfg.device)
    if cfg.puzzles is not None and cfg.evaluate is not None:
        raise UserError("--puzzles and --evaluate exclude each other; give one of them")
    if cfg.attempts > 1 and cfg.noise == 0:
        raise UserError(
            f"--noise 0 makes all {cfg.attempts} attempts the same; use e.g. --noise {NOISE:g} or --attempts 1"
        )
    if cfg.picture is not None and (cfg.evaluate is None or cfg.attempts == 1):
        raise UserError("--picture shows accuracy over attempts; add --evaluate FOLDER and --attempts of at least 2")
    run = Path(cfg.run) if cfg.run else newest_run(Path("runs/pretrain"))
    backend = open_backend(cfg.device, cfg.precision)
    votes = None if cfg.evaluate is None else open_votes(cfg.evaluate)
    if cfg.answers and votes is None:
        raise UserError(f"--answers {cfg.answers} needs --evaluate FOLDER with ARC tasks; leave it out")
    rows = None if cfg.evaluate is None else load(cfg.evaluate, unlabelled=votes is not None)[1]
    model, kind, segments = load_run(run, None if rows is None else rows.length)
    segments = cfg.segments or segments
    if cfg.evaluate is None and kind is None:
        raise UserError(f"{run} was trained on other rows than Sudoku or mazes; only --evaluate FOLDER works for it")
    if rows is not None:
        check_rows(cfg.evaluate, rows, model.spec, kind, votes)
    questions = [] if rows is not None else read_puzzles(kind, lines_of(cfg.puzzles, kind))
    if cfg.puzzles is not None:
        questions = list(questions)  # all of the file is checked before the first puzzle is solved
    tries = f"{cfg.attempts} attempts of" if cfg.attempts > 1 else "at most"
    say(f"{run} on {backend}: {kind or 'rows of another kind'}, {tries} {segments} segments")
    if cfg.dry_run:
        return
    backend.place(model)
    if rows is not None:
        return evaluate(model, rows, segments, votes, backend, cfg)
    for question in questions:
        if cfg.attempts > 1:
            solve_often(model, kind, question, segments, backend, cfg)
        else:
            solve(model, kind, question, segments, backend)


def lines_of(path: str | None, kind: str) -> Iterable[str]:
    """The lines of a file or of standard input."""
    if path is None:
        if sys.stdin is None:
            raise UserError("standard input is closed; give a file with --puzzles")
        if sys.stdin.isatty():
            say(f"type a {kind} in {side(kind)} lines; end with Ctrl-D")
        return sys.stdin
    try:
        return Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(f"--puzzles {path} cannot be read ({reason}); give a text file with puzzles") from error


def solve(model: RecursiveModel, kind: str, question: np.ndarray, segments: int, backend: TorchBackend) -> None:
    """Print a puzzle, the answer after each segment until the model halts, and whether the last one is right."""
    print(f"{as_text(kind, question)}\n")
    found, number = question, 0
    for step in steps(model, batch_of(question, backend), segments, backend):
        if backend.fetch(step.halted.all())[0]:
            break
        before, found, number = found, backend.to_host(step.logits.argmax(-1))[0].numpy(), number + 1
        changed = int((found != before).sum())
        print(f"segment {number}: {changed} cells changed" + (f"\n{as_text(kind, found)}\n" if changed else "\n"))
    print(f"after {number} segment{'s' * (number > 1)}: {verdict(kind, question, found)}\n", flush=True)


def solve_often(
    model: RecursiveModel, kind: str, question: np.ndarray, segments: int, backend: TorchBackend, cfg: Config
) -> None:
    """Print a puzzle, the answer of the attempt that the halting head chooses, and how many attempts agree with it."""
    print(f"{as_text(kind, question)}\n")
    count = cfg.attempts
    found = run_attempts(model, batch_of(question, backend), segments, count, cfg.noise, cfg.seed, backend)
    chosen = int(found.chosen(count))
    answer, agree = found.tokens[chosen, 0].numpy(), int(found.votes(count)[chosen])
    print(f"attempt {chosen + 1} of {count}, halting probability {found.halt[chosen, 0].sigmoid():.3f}")
    print(f"{as_text(kind, answer)}\n")
    print(f"given by {agree} of {count} attempts: {verdict(kind, question, answer)}\n", flush=True)


def batch_of(question: np.ndarray, backend: TorchBackend) -> dict[str, Tensor]:
    """A batch of one puzzle, on the device."""
    row, none = torch.from_numpy(question)[None], torch.zeros(1, dtype=torch.long)
    return backend.to_device({"inputs": row, "labels": row, "identifiers": none, "budgets": none})


def check_rows(path: str, rows: PuzzleRows, spec: RecursiveSpec, kind: str | None, votes: Votes | None) -> None:
    """Raise UserError if a model of this spec and kind has no answers to the rows of a folder, or they do not match its
    votes. Rows in the published format have no kind."""
    if votes:
        votes.check(path, rows.identifiers, rows.length)
    for name, there, wanted in (
        ("tokens per row", rows.length, spec.length), ("vocabulary", rows.vocab, spec.vocab),
        ("causal", rows.causal, spec.causal), ("kind", rows.kind or kind, kind or rows.kind),
    ):  # fmt: skip
        if there != wanted:
            raise UserError(
                f"--evaluate {path}: {name} is {there} there and {wanted} in the run; give puzzles like the run's"
            )
    if int(rows.identifiers.max()) >= spec.identifiers:
        raise UserError(
            f"--evaluate {path} has {rows.identifiers_count} puzzle identifiers, the run {spec.identifiers}; give a "
            "folder of the run's puzzles"
        )


def collector(votes: Votes, rows: PuzzleRows, backend: TorchBackend) -> Callable[[np.ndarray, Tensor, Tensor], None]:
    """A function for `measure` that counts the answers after all segments as votes."""

    def see(at: np.ndarray, tokens: Tensor, confidence: Tensor) -> None:
        there = at < len(rows)
        answers, chances = (each.numpy()[there] for each in backend.to_host([tokens, confidence]))
        votes.add(rows.identifiers[at[there]], rows.inputs[at[there]], answers, chances)

    return see


def show_votes(votes: Votes, path: str | None) -> None:
    said = ", ".join(f"pass@{k} {share:.1%}" for k, share in votes.solved([1, 2, 5, 10]).items())
    say(f"vote   {said or 'no solution is known'} of {len(votes.tasks):,} tasks")
    if path:
        write_json(Path(path), votes.submission())
        say(f"made   {path}")


def evaluate(
    model: RecursiveModel, rows: PuzzleRows, segments: int, votes: Votes | None, backend: TorchBackend, cfg: Config
) -> None:
    """Print the model's accuracy on rows, with several attempts as a table, and the vote over ARC tasks."""
    batch_size, see = min(cfg.batch_size, len(rows)), votes and collector(votes, rows, backend)
    if cfg.attempts == 1:
        show(measure(model, rows, segments, batch_size, backend, see), cfg.evaluate, segments)
    else:
        table = measure_attempts(model, rows, segments, batch_size, cfg.attempts, cfg.noise, cfg.seed, backend, see)
        show_attempts(table, f"{len(rows):,} rows of {cfg.evaluate} right after {segments} segments", cfg)
    if votes:
        show_votes(votes, cfg.answers)


def show_attempts(table: dict[int, Accuracy], what: str, cfg: Config) -> None:
    say(f"share of the {what}, noise {cfg.noise:g}")
    say(f"{'attempts':>8}  {'halting head':>12}  {'majority vote':>13}  {'any (pass@k)':>12}")
    for k, accuracy in table.items():
        chosen, majority, some = (f"{share:.1%}" for share in accuracy)
        say(f"{k:>8}  {chosen:>12}  {majority:>13}  {some:>12}")
    if cfg.picture is not None and table:
        draw_attempts([table], Path(cfg.picture))
        say(f"picture {cfg.picture}")


def show(figures: dict[str, float], path: str, segments: int) -> None:
    say(f"rows   {figures['heldout_rows']:,} of {path}")
    if not figures["heldout_rows"]:
        return
    say(
        f"halted {figures['heldout_exact']:.1%} of the rows and {figures['heldout_cells']:.1%} of the cells right, "
        f"after {figures['heldout_segments']:.1f} segments on average"
    )
    say(
        f"full   {figures['heldout_exact_full']:.1%} of the rows and {figures['heldout_cells_full']:.1%} of the cells "
        f"right after {segments} segments"
    )


if __name__ == "__main__":
    run_script(main, Config, "solve_puzzles", __doc__)
