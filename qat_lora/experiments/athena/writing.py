"""Writes datasets in the layout of the Tiny Recursive Model: train/ and test/, with dataset.json and all__*.npy."""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from qat_lora.run.console import say
from qat_lora.run.files import new_folder, write_json

BLANK = "<blank>"  # name of identifier 0
IGNORED = 0  # ignore_label_id: a cell of the labels that has no answer


def write_facts(
    folder: Path, length: int, vocab: int, identifiers: int, groups: int, puzzles: int, rows: int, **more
) -> None:
    """Write a side's dataset.json; more: facts that the published code does not know."""
    facts = {
        "seq_len": length, "vocab_size": vocab, "pad_id": 0, "ignore_label_id": IGNORED, "blank_identifier_id": 0,
        "num_puzzle_identifiers": identifiers, "total_groups": groups, "mean_puzzle_examples": rows / puzzles,
        "total_puzzles": puzzles, "sets": ["all"],
    }  # fmt: skip
    write_json(folder / "dataset.json", facts | more)


def write_array(folder: Path, name: str, values: np.ndarray) -> None:
    """Write all__<name>.npy as int32. np.save is no use here: on a full disk it raises OSError without an errno, just
    "9720 requested and 4064 written"."""
    values = np.ascontiguousarray(values, np.int32)
    with open(folder / f"all__{name}.npy", "wb") as file:
        _write_header(file, values.shape, "<i4")
        file.write(values.data)


def _write_header(file: BinaryIO, shape: tuple[int, ...], dtype: str) -> None:
    """NumPy leaves room in it for more rows, so its length does not depend on their number."""
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})


class Side:
    """train/ or test/ of a new dataset, written group by group in uint8, so that only one group has to be in memory."""

    def __init__(self, folder: Path, length: int, vocab: int, stack: ExitStack):
        folder.mkdir()
        self.folder, self.length, self.vocab, self.rows, self.unlabelled = folder, length, vocab, 0, 0
        self.indices: dict[str, list[int]] = {"puzzle_identifiers": [], "puzzle_indices": [0], "group_indices": [0]}
        self.files = [stack.enter_context((folder / f"all__{name}.npy").open("wb")) for name in ("inputs", "labels")]
        for file in self.files:
            _write_header(file, (0, length), "|u1")

    def group(self, puzzles: Iterable[tuple[int, np.ndarray, np.ndarray]]) -> None:
        """Add a group of puzzles: the identifier, inputs and labels [rows, length] (uint8) of each."""
        identifiers, starts, firsts = self.indices.values()
        for identifier, inputs, labels in puzzles:
            for file, values in zip(self.files, (inputs, labels)):
                file.write(np.ascontiguousarray(values).data)
            self.rows += len(inputs)
            self.unlabelled += int((labels == IGNORED).all(1).sum())
            identifiers.append(identifier)
            starts.append(self.rows)
        firsts.append(len(identifiers))

    def finish(self, identifiers: int) -> None:
        """Write everything else; identifiers: how many both sides have together, the blank one included."""
        for file in self.files:
            file.seek(0)
            _write_header(file, (self.rows, self.length), "|u1")
        for name, values in self.indices.items():
            write_array(self.folder, name, values)
        puzzles, _, groups = map(len, self.indices.values())
        write_facts(self.folder, self.length, self.vocab, identifiers, groups - 1, puzzles, self.rows)


@contextmanager
def new_dataset(folder: Path, length: int, vocab: int, names: list[str]) -> Iterator[tuple[Path, Side, Side]]:
    """Yield the temporary folder, train/ and test/ of a dataset, which becomes `folder` at the end of the block; print
    how many rows it has. names: of the puzzle identifiers; the block may add to them."""
    with new_folder(folder) as part, ExitStack() as stack:
        train, test = (Side(part / name, length, vocab, stack) for name in ("train", "test"))
        yield part, train, test
        for side in (train, test):
            side.finish(len(names))
        write_json(part / "identifiers.json", names)
    puzzles = len(train.indices["puzzle_identifiers"])
    say(f"{train.rows:,} rows ({puzzles:,} puzzles) in {folder}/train, {test.rows:,} rows in {folder}/test")
    if test.unlabelled:
        say(f"{test.unlabelled:,} rows of test/ have no known solution; they are answered, but not measured")
    if test.unlabelled == test.rows:
        say("pretrain.py needs some solutions to measure with: add a --test-source that has them")
