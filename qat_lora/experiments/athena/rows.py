"""Rows of equal length for a recursive model: puzzles or prompt → response, split with equivalent rows kept together.

On disk they have the layout of the Tiny Recursive Model's datasets (arXiv 2510.04871): train/ and test/, each with
dataset.json and arrays.
"""

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qat_lora.backend.machine import check_memory
from qat_lora.data.batches import chosen_rows
from qat_lora.errors import UserError, first_line
from qat_lora.experiments.athena import ANY, LARGE, puzzles, symmetries
from qat_lora.experiments.athena.groups import Groups
from qat_lora.experiments.athena.mapped import AGAIN, array_of, pieces, taken
from qat_lora.experiments.athena.model import IGNORE, ROWS
from qat_lora.experiments.athena.writing import BLANK, IGNORED, write_array, write_facts
from qat_lora.run import remote as urls
from qat_lora.run.files import new_folder, read_json, write_json

PAD, BLANK_TOKEN, END, BYTE = 0, 1, 2, 3  # tokens of text; BYTE is the token of byte 0
TEXT_VOCAB = BYTE + 256
LONGEST = 2**20
SIDES = ("train", "test")
COUNTS = {"seq_len": 1, "vocab_size": 2, "num_puzzle_identifiers": 1}  # minimum values in dataset.json


@dataclass(frozen=True)
class PuzzleRows:
    """N rows of L tokens. inputs, labels [N, L], where a label is IGNORE if no answer is expected; identifiers [N], the
    number of each row's puzzle embedding; budgets [N], the maximum segments per row, 0: the run's setting; difficulty
    [N]. inputs and labels may be mapped from files, in the files' type; a batch always has IGNORE.

    kind: a kind from `puzzles`; batches may apply its symmetries. causal: a label is the next token. puzzle, group [N]:
    the number of each row's puzzle and of its group (see Groups); None: each row is its own group. unlabelled: how many
    rows without labels `load` left out. ignored: a label that stands for IGNORE.
    """

    inputs: np.ndarray
    labels: np.ndarray
    identifiers: np.ndarray
    budgets: np.ndarray
    difficulty: np.ndarray
    vocab: int
    identifiers_count: int = 1
    kind: str | None = None
    causal: bool = False
    puzzle: np.ndarray | None = None
    group: np.ndarray | None = None
    unlabelled: int = 0
    ignored: int = IGNORE

    @property
    def length(self) -> int:
        return self.inputs.shape[1]

    @property
    def groups(self) -> Groups | None:
        return None if self.group is None else Groups.of(self.puzzle, self.group)

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of everything that affects training."""
        digest = hashlib.sha256(f"{self.inputs.shape} {self.vocab} {self.kind} {self.causal}".encode())
        grouping = () if self.group is None else (self.puzzle, self.group)
        for values in (self.inputs, self.labels, self.identifiers, self.budgets, *grouping):
            for piece in pieces(values):
                piece = self._with_ignore(piece) if values is self.labels else piece
                digest.update(piece.astype("<i4").tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, indices: np.ndarray, rng: np.random.Generator | None = None) -> dict[str, Tensor]:
        """inputs, labels [B, L], identifiers, budgets [B], int64; with `rng`, each puzzle gets a random symmetry."""
        rows = {name: getattr(self, name)[indices].astype(np.int32) for name in ROWS}
        rows["labels"] = self._with_ignore(rows["labels"])
        if rng is not None and self.kind:
            rows["inputs"], rows["labels"] = symmetries.variant(self.kind, rows["inputs"], rows["labels"], rng)
        return {name: torch.from_numpy(values.astype(np.int64)) for name, values in rows.items()}

    def _with_ignore(self, labels: np.ndarray) -> np.ndarray:
        labels = labels.astype(np.int32)
        return np.where(labels == self.ignored, np.int32(IGNORE), labels)

    def take(self, indices: np.ndarray) -> "PuzzleRows":
        """The rows with these numbers; they keep their puzzle and group numbers."""
        names = ARRAYS if self.group is None else (*ARRAYS, "puzzle", "group")
        return dataclasses.replace(self, **{name: taken(getattr(self, name), indices) for name in names})

    def first(self, count: int) -> "PuzzleRows":
        return self.take(np.arange(min(count, len(self))))

    def spread(self, count: int) -> "PuzzleRows":
        """`count` rows at equal distances; all if there are fewer."""
        count = min(count, len(self))
        return self.take(np.arange(count) * len(self) // count)

    def updates(self, epochs: int, batch_size: int) -> int:
        """Number of updates in `epochs` epochs. Without groups it is rounded up, so that fewer rows than a batch still
        make one; with groups it is rounded down, as the Tiny Recursive Model does, but at least 1."""
        if groups := self.groups:
            return groups.updates(epochs, batch_size)
        return -(-epochs * len(self) // batch_size)

    def chosen(self, seed: int, batch_size: int, start: int = 0) -> Iterator[Sequence[int]]:
        """The row numbers [batch_size] of each update from number `start` (0-based) on, without end; they depend only
        on seed and update number. An epoch has every row once or, with groups, the rows of one puzzle per group."""
        if groups := self.groups:
            return groups.chosen_rows(seed, batch_size, start)
        return chosen_rows(seed, len(self), batch_size, start)


ARRAYS = (*ROWS, "difficulty")


def _rows(inputs: np.ndarray, labels: np.ndarray, difficulty=0, budgets=0, **facts) -> PuzzleRows:
    numbers = [np.broadcast_to(np.asarray(value, np.int32), len(inputs)) for value in (0, budgets, difficulty)]
    return PuzzleRows(inputs.astype(np.int32), labels.astype(np.int32), *numbers, **facts)


def row_memory(length: int, count: int) -> int:
    """Lower bound on the bytes that `count` rows of `length` tokens take while they are split: int32 inputs and labels,
    twice (before and after the split)."""
    return 16 * length * count


# -- puzzles ---------------------------------------------------------------------------------------------------------
def draw(
    kind: str, count: int, seed: int, blanks: tuple[float, float] = (0.4, 1.0), flag: str = "--count"
) -> PuzzleRows:
    """`count` different puzzles from `puzzles.generate`; raises the same UserErrors."""
    questions, answers, difficulty = puzzles.generate(kind, count, seed, blanks, flag)
    return _rows(questions, answers, difficulty, vocab=puzzles.vocab(kind), kind=kind)


def planned_rows(data_path: str | None, kind: str) -> PuzzleRows:
    """One row of a run's shapes, to plan the run: a puzzle of `kind` or, with a data_path, of its data. A folder that
    does not exist yet is assumed to hold the kind that it is named after.

    Raises UserError if its name is not a kind.
    """
    if data_path and ("://" in data_path or Path(data_path).exists()):
        return load(data_path)[0].first(1)
    if data_path:
        kind = Path(data_path).name
        try:
            puzzles.side(kind)
        except UserError:
            raise UserError(
                f"{data_path} does not exist, and its name does not tell its shapes; build it, or name it after a "
                "kind, e.g. data/sudoku9"
            ) from None
    return draw(kind, 1, seed=0)


def split(rows: PuzzleRows, fraction: float, seed: int) -> tuple[PuzzleRows, PuzzleRows]:
    """(training, held-out) rows, about `fraction` of them held out. No held-out row is a symmetry of a training row:
    rows are compared by the whole answer for 6×6 and 9×9 Sudoku, and by the question for mazes and for 4×4 Sudoku,
    whose answers have only two classes. Text rows with the same prompt and rows of one group also stay on one side.
    Raises UserError if that leaves one side empty.
    """
    if not 0 < fraction < 1:
        raise UserError(f"--heldout-fraction {fraction} is not between 0 and 1; use e.g. 0.1")
    if rows.kind in ("sudoku6", "sudoku9"):
        keys = symmetries.answer_class(rows.kind, rows.labels)
    elif rows.kind:
        keys = symmetries.form(rows.kind, rows.inputs)
    else:
        asked = rows.labels != rows.ignored
        before = asked.cumsum(1) == asked  # up to and including the first label; in causal rows the prompt
        given = np.where(before, rows.inputs, PAD) if rows.causal else rows.inputs
        keys = [row.tobytes() for row in given]
    groups, target = _classes(keys, range(len(rows)) if rows.group is None else rows.group), fraction * len(rows)
    if len(groups) < 2:
        raise UserError(f"{len(rows)} rows are all essentially the same, so none can be held out; make more")
    held: list[int] = []
    for number in np.random.default_rng(seed).permutation(len(groups)):
        if len(held) + len(groups[number]) <= target:
            held += groups[number]
    held = np.sort(held or min(groups, key=len))
    return rows.take(np.setdiff1d(np.arange(len(rows)), held)), rows.take(held)


def _classes(*keys: Sequence) -> list[list[int]]:
    """The row numbers in classes: rows that share any key, directly or through other rows; ordered by first row."""
    root = list(range(len(keys[0])))
    for each in keys:
        first: dict = {}
        for row, key in enumerate(each):
            one, other = puzzles.root_of(root, first.setdefault(key, row)), puzzles.root_of(root, row)
            root[max(one, other)] = min(one, other)
    classes: dict[int, list[int]] = {}
    for row in range(len(root)):
        classes.setdefault(puzzles.root_of(root, row), []).append(row)
    return list(classes.values())


# -- prompt → response -----------------------------------------------------------------------------------------------
def corpus(rows, where: str, length: int, causal: bool, iterations: int) -> tuple[PuzzleRows, int]:
    """(rows, how many were left out because they are longer than `length` bytes) from dicts with text `prompt` and
    `response`, and optionally `iterations`, the row's maximum segments (default: the argument `iterations`).

    Tokens are bytes. Only the response and its end have labels. The input is the prompt followed by blanks up to the
    length, so that it leaks neither the response nor its length; with causal=True the response follows the prompt in
    the input, because each position sees only earlier ones. Raises UserError if a row is malformed, the length is bad,
    no row fits or there is too little memory.
    """
    if not 2 <= length <= LONGEST:
        raise UserError(f"--length {length} must be from 2 to {LONGEST:,}")
    pairs, budgets, long = [], [], 0
    for number, row in enumerate(rows, 1):
        prompt, response = (_tokens(row, name, f"{where} row {number}") for name in ("prompt", "response"))
        budget = row.get("iterations", iterations)
        if type(budget) is not int or not 0 <= budget < ANY:
            raise UserError(f"{where} row {number}: iterations {budget!r} is not a whole number of at least 0")
        response.append(END)
        if len(prompt) + len(response) - causal > length:  # causal: END is a label only
            long += 1
            continue
        pairs.append((prompt, response))
        budgets.append(budget)
    if not pairs:
        raise UserError(f"{where}: none of {long} rows fits --length {length}; raise it")
    size = row_memory(length, len(pairs))
    check_memory(size, f"{where}: {len(pairs):,} rows of --length {length}", "--length")
    inputs = np.full((len(pairs), length), PAD if causal else BLANK_TOKEN, np.int32)
    labels = np.full(inputs.shape, IGNORE, np.int32)
    for number, (prompt, response) in enumerate(pairs):
        shown, first = prompt + response[:-1] * causal, len(prompt) - causal
        inputs[number, : len(shown)] = shown
        labels[number, first : first + len(response)] = response
    return _rows(inputs, labels, 0, budgets, vocab=TEXT_VOCAB, causal=causal), long


def _tokens(row: dict, name: str, where: str) -> list[int]:
    text = row.get(name)
    if not isinstance(text, str) or not text:
        raise UserError(f"{where}: {name} is {text!r}, but must be text; the row has {', '.join(map(str, row))}")
    try:
        return [BYTE + byte for byte in text.encode()]
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: {name} is not UTF-8 text ({first_line(error)})") from error


# -- files -----------------------------------------------------------------------------------------------------------
def save(folder: Path, train: PuzzleRows, heldout: PuzzleRows) -> None:
    """Write both sides to a new folder; raises UserError naming it if that fails, e.g. on a full disk."""
    with new_folder(folder) as part:
        for side, rows in zip(SIDES, (train, heldout)):
            (part / side).mkdir()
            _save(part / side, rows)
        write_json(part / "identifiers.json", [BLANK])


def _save(side: Path, rows: PuzzleRows) -> None:
    each = np.arange(len(rows))
    groups = rows.groups or Groups.of(each, each)
    rows, puzzle_count, group_count = rows.take(groups.order), len(groups.starts) - 1, len(groups.firsts) - 1
    counts = rows.identifiers_count, group_count, puzzle_count, len(rows)
    write_facts(side, rows.length, rows.vocab, *counts, kind=rows.kind, causal=rows.causal)
    arrays = {
        "inputs": rows.inputs, "labels": np.where(rows.labels == rows.ignored, IGNORED, rows.labels),
        "puzzle_identifiers": rows.identifiers[groups.starts[:-1]], "puzzle_indices": groups.starts,
        "group_indices": groups.firsts, "budgets": rows.budgets, "difficulty": rows.difficulty,
    }  # fmt: skip
    for name, values in arrays.items():
        write_array(side, name, values)


def load(path: str, unlabelled: bool = False) -> tuple[PuzzleRows, PuzzleRows]:
    """Training and held-out rows from a folder or URL; inputs and labels stay in their files, mapped into memory, which
    all workers of a host share. unlabelled: keep held-out rows without any label, to answer them.

    Raises UserError naming the file that is missing or does not match dataset.json, if the two sides do not match, and
    if the arrays do not fit in this machine's memory.
    """
    with urls.local_folder(path) as folder:
        size = sum(file.stat().st_size for side in SIDES for file in (folder / side).glob("all__*.npy"))
        check_memory(size, f"{path} (the arrays in its train/ and test/)", "the number of examples in it")
        train, heldout = (
            _load(folder / side, f"{path.rstrip('/')}/{side}", unlabelled and side == "test") for side in SIDES
        )
    for name in ("length", "vocab", "identifiers_count", "kind", "causal"):
        if getattr(train, name) != getattr(heldout, name):
            raise UserError(
                f"{path}: {name} is {getattr(train, name)} in train and {getattr(heldout, name)} in test; "
                "use two sides from the same build"
            )
    return train, heldout


def _facts(folder: Path, shown: str) -> dict:
    """Read and check the dataset.json of a side."""
    try:
        facts = read_json(folder / "dataset.json")
    except UserError as error:
        raise UserError(str(error).replace(str(folder), shown)) from error
    for name, least in COUNTS.items():
        if type(facts.get(name)) is not int or not least <= facts[name] <= LARGE:
            raise UserError(
                f"{shown}/dataset.json: {name} is {facts.get(name)!r}, not a whole number from {least} to {LARGE:,}"
                f"{AGAIN}"
            )
    vocab, kind, sets = facts["vocab_size"], facts.get("kind"), facts.get("sets", ["all"])
    if sets != ["all"]:
        raise UserError(f"{shown}/dataset.json: sets is {sets!r}; only ['all'] can be read{AGAIN}")
    ignored = facts.get("ignore_label_id")
    if type(ignored) not in (int, type(None)):
        raise UserError(f"{shown}/dataset.json: ignore_label_id is {ignored!r}, not a whole number or null{AGAIN}")
    try:
        sizes = None if kind is None else (puzzles.vocab(kind), puzzles.side(kind) ** 2)
    except (UserError, TypeError) as error:
        raise UserError(
            f"{shown}/dataset.json: kind is {kind!r}, which is unknown ({first_line(error)}){AGAIN}"
        ) from error
    if sizes not in (None, (vocab, facts["seq_len"])):
        raise UserError(
            f"{shown}/dataset.json: vocab_size {vocab} and seq_len {facts['seq_len']} do not match kind {kind}{AGAIN}"
        )
    return facts


def _load(folder: Path, shown: str, unlabelled: bool) -> PuzzleRows:
    if not folder.is_dir():
        raise UserError(f"{shown}: no such folder; scripts/build_puzzle_data.py writes train/ and test/")
    facts = _facts(folder, shown)
    vocab, kind, ignored = facts["vocab_size"], facts.get("kind"), facts.get("ignore_label_id")

    def mapped(name: str, below: int, *shape: int | None) -> np.ndarray:
        return array_of(folder / f"all__{name}.npy", f"{shown}/all__{name}.npy", below, shape)

    def array(name: str, below: int, *shape: int | None) -> np.ndarray:
        return np.array(mapped(name, below, *shape), np.int32)

    inputs = mapped("inputs", vocab, None, facts["seq_len"])
    labels = mapped("labels", vocab, *inputs.shape)
    ignored = -1 if ignored is None else ignored  # no label is −1
    asked = np.concatenate([(piece != ignored).sum(1) for piece in pieces(labels)])
    if not ((asked == labels.shape[1]).all() if kind else unlabelled or asked.any()):
        what = f"cells without a label, but a {kind} needs one in each" if kind else "no label at all"
        raise UserError(f"{shown}/all__labels.npy holds {what}{AGAIN}")
    named = array("puzzle_identifiers", facts["num_puzzle_identifiers"], None)
    starts = array("puzzle_indices", ANY, len(named) + 1)
    if starts[0] != 0 or starts[-1] != len(inputs) or (np.diff(starts) < 0).any():
        raise UserError(f"{shown}/all__puzzle_indices.npy does not rise from 0 to the row count {len(inputs)}{AGAIN}")
    firsts = array("group_indices", ANY, None)
    if firsts[0] != 0 or firsts[-1] != len(named) or (np.diff(firsts) < 1).any():
        raise UserError(f"{shown}/all__group_indices.npy does not rise from 0 to the puzzle count {len(named)}{AGAIN}")
    puzzle = np.repeat(np.arange(len(named), dtype=np.int32), np.diff(starts))
    extra = {
        name: np.broadcast_to(np.int32(0), len(inputs)) for name in ("budgets", "difficulty")
    }  # TRM's own folders lack them
    extra |= {name: array(name, ANY, len(inputs)) for name in extra if (folder / f"all__{name}.npy").exists()}
    rows = PuzzleRows(
        inputs, labels, named[puzzle], **extra, vocab=vocab, ignored=ignored,
        identifiers_count=facts["num_puzzle_identifiers"], kind=kind, causal=facts.get("causal") is True,
        puzzle=puzzle, group=np.repeat(np.arange(len(firsts) - 1, dtype=np.int32), np.diff(firsts))[puzzle],
    )  # fmt: skip
    labelled = (asked > 0) | unlabelled
    kept = rows if labelled.all() else rows.take(np.flatnonzero(labelled))
    # without groups if every remaining row is its own
    alone = {"puzzle": None, "group": None} if len(np.unique(kept.group)) == len(kept) else {}
    return dataclasses.replace(kept, unlabelled=len(rows) - len(kept), **alone)
