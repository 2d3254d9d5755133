"""Writes one side of a dataset in the layout of the Tiny Recursive Model: dataset.json and all__*.npy."""

import io
import json
from array import array
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import numpy as np

IGNORED = 0  # ignore_label_id: a cell of the labels that has no answer
INDICES = ("puzzle_identifiers", "puzzle_indices", "group_indices")


def facts_of(length: int, vocab: int, identifiers: int, groups: int, puzzles: int, rows: int) -> dict:
    """The content of a side's dataset.json."""
    return {
        "seq_len": length, "vocab_size": vocab, "pad_id": 0, "ignore_label_id": IGNORED, "blank_identifier_id": 0,
        "num_puzzle_identifiers": identifiers, "total_groups": groups, "mean_puzzle_examples": rows / puzzles,
        "total_puzzles": puzzles, "sets": ["all"],
    }  # fmt: skip


def write_facts(folder: Path, facts: dict) -> None:
    (folder / "dataset.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def write_array(folder: Path, name: str, values: np.ndarray) -> None:
    """Write all__<name>.npy as int32. np.save is no use here: on a full disk it raises OSError without an errno, just
    "9720 requested and 4064 written"."""
    values = np.ascontiguousarray(values, np.int32)
    with open(folder / f"all__{name}.npy", "wb") as file:
        file.write(_header(values.shape, values.dtype))
        file.write(values.data)


def _header(shape: tuple[int, ...], dtype: np.dtype) -> bytes:
    """NumPy leaves room in it for more rows, so its length does not depend on their number."""
    header = io.BytesIO()
    facts = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, facts)
    return header.getvalue()


class Side:
    """train/ or test/ of a dataset, written group by group in uint8, so that only one group has to be in memory. Use it
    as a context, and call `finish` once all groups are written."""

    def __init__(self, folder: Path, length: int, vocab: int):
        folder.mkdir()
        self.folder, self.length, self.vocab, self.rows = folder, length, vocab, 0
        self.indices = {name: array("i", [] if name == INDICES[0] else [0]) for name in INDICES}

    def __enter__(self) -> "Side":
        with ExitStack() as stack:
            names = ("inputs", "labels")
            self.files = [stack.enter_context(open(self.folder / f"all__{name}.npy", "wb")) for name in names]
            for file in self.files:
                file.write(_header((0, self.length), np.dtype(np.uint8)))
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *_) -> None:
        self.stack.close()

    def group(self, puzzles: Iterable[tuple[int, np.ndarray, np.ndarray]]) -> None:
        """Add a group of puzzles: the identifier, inputs and labels [rows, length] (uint8) of each."""
        identifiers, starts, firsts = self.indices.values()
        for identifier, *rows in puzzles:
            for file, values in zip(self.files, rows, strict=True):
                file.write(np.ascontiguousarray(values, np.uint8).data)
            self.rows += len(rows[0])
            identifiers.append(identifier)
            starts.append(self.rows)
        firsts.append(len(identifiers))

    def finish(self, identifiers: int) -> None:
        """Write the rest; identifiers: how many there are in both sides, including the blank one."""
        for file in self.files:
            file.seek(0)
            file.write(_header((self.rows, self.length), np.dtype(np.uint8)))
        for name, numbers in self.indices.items():
            write_array(self.folder, name, np.array(numbers, np.int32))
        puzzles, groups = len(self.indices["puzzle_identifiers"]), len(self.indices["group_indices"]) - 1
        write_facts(self.folder, facts_of(self.length, self.vocab, identifiers, groups, puzzles, self.rows))


def write_names(folder: Path, names: list[str]) -> None:
    """The names of the puzzle identifiers, by number."""
    (folder / "identifiers.json").write_text(json.dumps(names), encoding="utf-8")
