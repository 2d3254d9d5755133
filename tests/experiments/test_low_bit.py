"""The rows from which a low-bit policy's scales are computed."""

import pytest
import torch

from qat_lora.experiments import low_bit
from qat_lora.experiments.low_bit import _packed

PAD = 99


def rows(kind: str, count: int = 40, length: int = 12) -> list[dict]:
    """Row n holds 3 to 9 tokens n, then padding. mask: its last two real tokens are targets."""
    found = []
    for number in range(count):
        real = 3 + number % 7
        tokens = torch.full((length,), PAD)
        tokens[:real] = number
        mask = torch.zeros(length, dtype=torch.uint8)
        mask[real - 2 : real] = 1
        found.append(
            {"tokens": tokens, "mask": mask}
            if kind == "mask"
            else {"tokens": tokens, "segments": (tokens != PAD).long()}
        )
    return found


@pytest.mark.parametrize("kind", ["mask", "segments"])
def test_padding_is_left_out_and_rows_follow_each_other(kind):
    batches = _packed(rows(kind), seed=3)
    assert {tuple(batch["tokens"].shape) for batch in batches} == {(4, 12)}
    tokens = torch.cat([batch["tokens"].flatten() for batch in batches])
    runs, counts = tokens.unique_consecutive(return_counts=True)
    assert PAD not in runs and len(set(runs.tolist())) == len(runs), "each row once"
    assert counts[:-1].tolist() == [3 + number % 7 for number in runs[:-1].tolist()]
    assert runs.tolist() != sorted(runs.tolist()), "in random order"


def test_no_more_tokens_than_wanted_and_at_least_one_row(monkeypatch):
    monkeypatch.setattr(low_bit, "TOKENS", 30)
    assert [tuple(batch["tokens"].shape) for batch in _packed(rows("mask"), 0)] == [(2, 12)]
    assert [tuple(batch["tokens"].shape) for batch in _packed(rows("mask", 1), 0)] == [(1, 3)]
