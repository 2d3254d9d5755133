"""Supervised examples: filter them, hold some out, and pack them into rows of one length."""

import calendar
import hashlib
import re
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from qat_lora.data.appearance import WORD, folded
from qat_lora.data.chat import Document
from qat_lora.data.packing import encode
from qat_lora.errors import UserError

NAMED = 5  # how many ids an error lists


@dataclass(frozen=True)
class Example:
    """tokens int32 [T]; sections uint8 [T]: the section number of each target token, 0 elsewhere."""

    id: str
    tokens: np.ndarray
    sections: np.ndarray


def named(ids: Iterable[str]) -> str:
    """The first few row ids, for an error message."""
    ids = list(ids)
    return ", ".join(ids[:NAMED]) + (f" and {len(ids) - NAMED} more" if len(ids) > NAMED else "")


def encoded(id: str, document: Document, tokenizer) -> Example:
    """A document as tokens that end with EOS, which is a target if the last turn is the assistant's. The first token
    has no context, so it is never a target."""
    tokens, sections = encode(document, tokenizer)
    sections[:1] = 0
    return Example(id, tokens, sections)


def checked(examples: list[Example]) -> list[Example]:
    """The examples unchanged; raises UserError with the ids of examples without target tokens."""
    empty = [example.id for example in examples if not example.sections.any()]
    if empty:
        raise UserError(f"rows {named(empty)}: no target token is left (all labels masked); give them a completion")
    return examples


def split_by_length(examples: list[Example], length: int) -> tuple[list[Example], list[Example]]:
    """(examples that fit a row of `length` tokens, longer ones): an example is never cut.

    Raises UserError if none fits.
    """
    short = [example for example in examples if len(example.tokens) <= length]
    long = [example for example in examples if len(example.tokens) > length]
    if long and not short:
        most = max(len(example.tokens) for example in long)
        raise UserError(
            f"no example fits a row of {length} tokens (rows {named(e.id for e in long)}, up to {most} tokens); "
            f"raise --length, e.g. to {most}"
        )
    return short, long


# -- duplicates and near-duplicates ----------------------------------------------------------------------------------
MONTHS = "|".join(calendar.month_name[1:])


def without_figures(text: str) -> str:
    """A text in lower case and without punctuation, with every number and month replaced by "#". Texts that differ only
    in their figures, in the plurals that the figures require, or in Unicode normalisation give the same result."""
    text = re.sub(rf"\b(?:{MONTHS.lower()})\b|\d+(?:[,.]\d+)*", "#", folded(text))
    return " ".join(re.findall(rf"#|{WORD}+", re.sub(r"#\s+(\w+?)s?\b", r"# \1", text)))


def deduplicated(rows: list[dict], key: Callable[[dict], str]) -> tuple[list[dict], list[dict]]:
    """(the first row of every key, the other rows), both in the original order."""
    seen: set[str] = set()
    first, others = [], []
    for row in rows:
        own = key(row)
        (others if own in seen else first).append(row)
        seen.add(own)
    return first, others


def split_groups(
    rows: list[dict], group: Callable[[dict], str], fraction: float, seed: int
) -> tuple[list[dict], list[dict]]:
    """(train, held-out), which share no group. Goes through the groups in an order that depends on their names and the
    seed, and holds out each group that keeps the held-out rows within `fraction`; if none does, the smallest.

    Raises UserError for a fraction outside (0, 1), and if nothing would be left for training.
    """
    if not 0 < fraction < 1:
        raise UserError(f"--heldout-fraction {fraction} is outside (0, 1); use e.g. 0.1")
    names = [group(row) for row in rows]
    members = Counter(names)
    order = sorted(members, key=lambda name: hashlib.sha256(f"{seed} {name}".encode()).digest())
    held: set[str] = set()
    count = 0
    for name in order:
        if count + members[name] <= fraction * len(rows):
            held.add(name)
            count += members[name]
    held = held or {min(order, key=members.__getitem__)}
    train, heldout = ([row for row, name in zip(rows, names) if (name in held) == side] for side in (False, True))
    if not train:
        raise UserError(f"the {len(rows)} rows are one group of near-duplicates: nothing is left to train on; add rows")
    return train, heldout


# -- packing ---------------------------------------------------------------------------------------------------------
def best_fit(lengths: list[int], room: int) -> list[list[int]]:
    """Which examples share a row of `room` tokens: longest first, each goes into the fullest row that still has room
    (best-fit decreasing, Johnson 1973; at most 11/9 of the minimum number of rows, plus one)."""
    rows: list[list[int]] = []
    spare: list[tuple[int, int]] = []  # (tokens left, row), sorted
    for number in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        size = lengths[number]
        at = bisect_left(spare, (size, -1))
        if at < len(spare):
            left, row = spare.pop(at)
            rows[row].append(number)
        else:
            left, row = room, len(rows)
            rows.append([number])
        insort(spare, (left - size, row))
    return rows


class PackedExamples(Dataset):
    """Examples in rows of one length, several per row; the results for an example do not depend on the others.

    An item: tokens [L] int64, padded with EOS; segments [L], the number of the example from 1 on, 0 in the padding;
    positions [L], counted from each example's start; places [K], the positions of the target tokens, padded with 1;
    sections [K] and weights [K] fp32 of the target tokens, padded with 0. K is the largest number of target tokens in
    any row.
    """

    def __init__(
        self, examples: list[Example], length: int, weights: tuple[float, ...], end: int, together: bool = True
    ):
        """weights: the weights of sections 1, 2, …; end: the EOS token; together: put several examples in a row,
        otherwise one. Raises UserError if all target tokens have weight 0."""
        lengths = [len(example.tokens) for example in examples]
        rows = best_fit(lengths, length) if together else [[number] for number in range(len(lengths))]
        self.tokens = np.full((len(rows), length), end, np.int32)
        self.sections, self.segments, self.positions = (
            np.zeros((len(rows), length), kind) for kind in (np.uint8, np.int32, np.int32)
        )
        for row, members in enumerate(rows):
            at = 0
            for number, member in enumerate(members, 1):
                part = slice(at, at + lengths[member])
                self.tokens[row, part], self.sections[row, part] = examples[member].tokens, examples[member].sections
                self.segments[row, part], self.positions[row, part] = number, np.arange(lengths[member])
                at = part.stop
        self.rows = rows
        self.weights = np.asarray((0.0, *weights), np.float32)
        self.width = max(1, int((self.sections > 0).sum(1).max()))
        self.filled = sum(lengths) / max(1, self.tokens.size)
        self.totals = self.weights[self.sections].sum(1)
        if not self.totals.any():
            raise UserError("the section weights leave nothing to learn; give an existing section a weight above 0")

    def __len__(self) -> int:
        return len(self.rows)

    def kept(self, i: int) -> float:
        """The sum of the weights of row i."""
        return float(self.totals[i])

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        found = np.flatnonzero(self.sections[i])
        places, sections = np.ones(self.width, np.int64), np.zeros(self.width, np.int64)
        places[: len(found)], sections[: len(found)] = found, self.sections[i, found]
        whole = {"tokens": self.tokens[i], "segments": self.segments[i], "positions": self.positions[i]}
        whole = {name: torch.from_numpy(value).long() for name, value in whole.items()}
        return whole | {
            "places": torch.from_numpy(places),
            "sections": torch.from_numpy(sections),
            "weights": torch.from_numpy(self.weights[sections]),
        }

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of everything that determines the items."""
        digest = hashlib.sha256(repr((self.tokens.shape, self.weights.tolist())).encode())
        for part in (self.tokens, self.sections, self.segments):
            digest.update(np.ascontiguousarray(part).tobytes())
        return digest.hexdigest()
