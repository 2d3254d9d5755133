"""Rows of a legal dataset: checked, split by groups, rendered and packed."""

from dataclasses import dataclass, field
from pathlib import Path

from qat_lora.data.supervised import (
    Example,
    PackedExamples,
    checked,
    deduplicated,
    encoded,
    named,
    split_by_length,
    split_groups,
)
from qat_lora.data.text import read_rows
from qat_lora.errors import UserError
from qat_lora.experiments.legal.answers import NEEDED, checked_rows, document, group, readable, same
from qat_lora.experiments.legal.authorities import Authorities
from qat_lora.experiments.legal.rules import generate
from qat_lora.experiments.legal.sections import NUMBERS
from qat_lora.run.files import write_json

GENERATED = "generated"


@dataclass(frozen=True)
class LegalData:
    """Packed training and held-out rows; questions: the held-out rows unpacked; authorities: what may be cited;
    left_out: ids of omitted rows by reason; ignored: columns that nothing is made of."""

    train: PackedExamples
    heldout: PackedExamples
    questions: list[dict]
    authorities: list[str]
    examples: int
    left_out: dict[str, list[str]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """A summary for the log."""
        reasons = {reason: ids for reason, ids in self.left_out.items() if ids}
        return [
            f"{self.examples} examples in {len(self.train)} rows of {self.train.tokens.shape[1]} tokens "
            f"({self.train.filled:.0%} filled), {len(self.questions)} held out, {len(self.authorities)} authorities",
            *(f"left out, {reason}: {len(ids)} ({named(ids)})" for reason, ids in reasons.items()),
            *([f"ignored columns: {', '.join(self.ignored)}"] if self.ignored else []),
        ]

    def write(self, folder: Path) -> None:
        """data.json and authorities.json."""
        ids = [row["id"] for row in self.questions]
        write_json(folder / "data.json", {"train": self.examples, "heldout": ids, "left_out": self.left_out})
        write_json(folder / "authorities.json", {"authorities": self.authorities})


def legal_rows(dataset: str, split: str, count: int, seed: int) -> list[dict]:
    """The checked rows of a dataset, or `count` generated ones."""
    if dataset != GENERATED:
        fix = f'use "{GENERATED}" or a local .jsonl or .parquet file'
        return checked_rows(list(read_rows(dataset, split=split, fix=fix, columns=NEEDED)))
    if split != "train":
        raise UserError(f"--dataset-split {split} needs a hub dataset: the generated one has no splits; use train")
    return checked_rows(list(generate(count, seed)))


def legal_data(
    rows: list[dict], tokenizer, length: int, weights: tuple[float, ...], heldout_fraction: float, seed: int,
    together: bool = True, thinks: bool = False,
) -> LegalData:  # fmt: skip
    """Checked rows, deduplicated, split by groups, rendered and packed. A row that is too long is left out and
    reported, never cut. weights: loss weights of the sections; together: pack several examples per row; thinks: whether
    the chat template renders with thinking on."""
    rows, twice = deduplicated(rows, same)
    whole = [readable(row) for row in rows]
    odd = [row["id"] for row, good in zip(rows, whole) if not good]
    rows = [row for row, good in zip(rows, whole) if good]
    if not rows:
        raise UserError(f"rows {named(odd)}: each has a line that begins like a section's title; reword those lines")
    train, heldout = split_groups(rows, group, heldout_fraction, seed)
    known = {row["id"]: row for row in heldout}
    sides: list[list[Example]] = []
    long: list[Example] = []
    for side in (train, heldout):
        short, too_long = split_by_length(
            checked([encoded(row["id"], document(row, tokenizer, thinks), tokenizer) for row in side]), length
        )
        sides.append(short)
        long += too_long
    end = tokenizer.eos_token_id
    most = f", up to {max(len(example.tokens) for example in long)}" if long else ""
    return LegalData(
        PackedExamples(sides[0], length, weights, end, together=together),
        PackedExamples(sides[1], length, (1.0,) * len(NUMBERS), end, together=together),
        [known[example.id] for example in sides[1]],
        sorted(Authorities(row["case_citation"] for row in rows).names),
        len(sides[0]),
        {
            "the same question as an earlier row": [row["id"] for row in twice],
            "a line begins like a section's title": odd,
            f"longer than {length} tokens{most}": [example.id for example in long],
        },
        tuple(dict.fromkeys(name for row in rows for name in row if name not in NEEDED)),
    )


def section_weights(text: str | None) -> tuple[float, ...]:
    """Weights of the sections in order, from e.g. "answer=2,citation=2"; 1 for sections that are not named."""
    weights = dict.fromkeys(NUMBERS, 1.0)
    for part in filter(None, (text or "").split(",")):
        name, _, value = part.partition("=")
        try:
            weight = float(value)
        except ValueError:
            weight = -1.0
        if name.strip() not in weights or not (weight == 0 or 1e-6 <= weight <= 1e6):
            raise UserError(
                f"--section-weights: {part!r} is not NAME=WEIGHT with a name of {', '.join(NUMBERS)} and a weight that "
                "is 0 or from 1e-6 to 1e6"
            )
        weights[name.strip()] = weight
    if not weights["citation"]:
        raise UserError(
            "--section-weights: citation=0 would also give the end of the answer no loss, because it belongs to that "
            "section; use e.g. 1e-3"
        )
    return tuple(weights.values())
