"""Which rows a step uses: each row once per epoch, and the same rows whether or not the run was interrupted."""

import itertools

import pytest
import torch
from torch.utils.data import Dataset

from qat_lora.backend import TorchBackend
from qat_lora.data.batches import batches, epoch_order
from qat_lora.errors import UserError


class Numbers(Dataset):
    """Row i contains i, and its mask keeps i % 3 + 1 positions; reading row `bad` fails."""

    def __init__(self, count, bad=None):
        self.count, self.bad = count, bad

    def __len__(self):
        return self.count

    def kept(self, i):
        return i % 3 + 1

    def __getitem__(self, i):
        if i == self.bad:
            raise OSError(f"row {i} cannot be read")
        return {"tokens": torch.full((4,), i), "mask": (torch.arange(4) <= i % 3).to(torch.uint8)}


def rows_of(stream, count) -> list:
    return [batch["tokens"][:, 0].tolist() for batch in itertools.islice(stream, count)]


def test_every_seed_and_epoch_has_its_own_permutation():
    seeds = (0, 1, 7, 2**12, 2**20)
    orders = {(seed, epoch): tuple(epoch_order(seed, epoch, 50).tolist()) for seed in seeds for epoch in range(3)}
    assert all(sorted(order) == list(range(50)) for order in orders.values())
    assert len(set(orders.values())) == len(orders)


def test_the_global_generator_is_not_used():
    first = rows_of(batches(Numbers(11), 2, 1, seed=3), 8)
    torch.manual_seed(99)
    state = torch.get_rng_state()
    assert rows_of(batches(Numbers(11), 2, 1, seed=3), 8) == first
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("size", [2, 3, 4, 11])
def test_an_epoch_contains_every_row_once(size):
    """11 rows: the batch at the end of an epoch is filled with the first rows of the next."""
    rows = list(itertools.chain(*rows_of(batches(Numbers(11), size, 1, seed=0), -(-33 // size))))
    assert rows[:33] == [row for epoch in range(3) for row in epoch_order(0, epoch, 11).tolist()]


@pytest.mark.parametrize("accumulation", [1, 2, 3])
@pytest.mark.parametrize("start", [1, 4, 5, 6, 11])
def test_a_resumed_stream_equals_the_rest_of_the_uninterrupted_one(accumulation, start):
    """With 5.5 batches per epoch, streams start before, at and after the epoch's end, and some updates span it."""
    whole = list(itertools.islice(batches(Numbers(11), 2, accumulation, seed=0), 15 * accumulation))
    resumed = itertools.islice(batches(Numbers(11), 2, accumulation, seed=0, start=start), (15 - start) * accumulation)
    for ours, wanted in itertools.zip_longest(resumed, whole[start * accumulation :]):
        assert ours.keys() == wanted.keys() and all(torch.equal(ours[key], wanted[key]) for key in ours)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_workers_and_micro_batches_share_the_rows_of_every_update(workers, accumulation):
    """19 rows, which no number of workers divides, from the third update on, as if resumed on other workers; `total`
    counts the target tokens of the whole update."""
    whole = rows_of(batches(Numbers(19), 2 * workers * accumulation, 1, seed=4), 8)
    streams = [batches(Numbers(19), 2, accumulation, 4, 2, rank, workers) for rank in range(workers)]
    for wanted in whole[2:]:
        parts = [next(stream) for _ in range(accumulation) for stream in streams]
        assert [row for part in parts for row in part["tokens"][:, 0].tolist()] == wanted
        assert {float(part["total"]) for part in parts} == {sum(int(part["mask"].sum()) for part in parts)}


@pytest.mark.parametrize("count, size, workers", [(3, 4, 1), (7, 4, 2), (2, 1, 3)])
def test_too_few_rows_are_refused(count, size, workers):
    wanted = f"{count} training rows are fewer than a batch of {size} for each of {workers} workers"
    with pytest.raises(UserError, match=wanted):
        next(batches(Numbers(count), size, 1, 0, 0, 0, workers))


def test_an_update_without_a_target_divides_by_one(monkeypatch):
    """A chat batch of long prompts may contain no completion, and the run must continue."""
    monkeypatch.setattr(Numbers, "kept", lambda self, i: 0)
    assert next(batches(Numbers(8), 2, 1, seed=0))["total"] == 1


@pytest.mark.parametrize("prefetch", [False, True])
def test_a_dataset_error_is_raised_at_its_batch(prefetch):
    """If a loader swallowed exceptions, an epoch would end early and look successful."""
    order = epoch_order(0, 0, 12).tolist()
    stream = batches(Numbers(12, bad=order[7]), 2, 1, seed=0)
    stream = TorchBackend("cpu", "fp32").prefetch(stream) if prefetch else stream
    assert rows_of(stream, 3) == [order[:2], order[2:4], order[4:6]]
    with pytest.raises(OSError, match=f"row {order[7]} cannot be read"):
        next(stream)
