"""Which rows a step sees: a function of seed and step alone, so that a resumed run sees the same ones."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from qat_lora.errors import UserError


def epoch_order(seed: int, epoch: int, count: int) -> Tensor:
    """A permutation of `count` rows, one for each epoch."""
    return torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(count))


def chosen_rows(seed: int, count: int, rows: int, start: int = 0) -> Iterator[list[int]]:
    """Which of `count` rows each update has, from number `start` on, without end: all epochs' orders stand end to end,
    and each update takes the next `rows` of them."""
    orders: dict[int, np.ndarray] = {}  # lists of int would take five times the memory
    for update in range(start, 2**63):
        places = [divmod(place, count) for place in range(update * rows, (update + 1) * rows)]
        epochs = {epoch for epoch, _ in places}
        orders = {e: orders[e] if e in orders else epoch_order(seed, e, count).numpy() for e in epochs}
        yield [int(orders[epoch][at]) for epoch, at in places]


def batches(
    dataset: Dataset, batch_size: int, accumulation: int, seed: int, start: int = 0, rank: int = 0, world_size: int = 1
) -> Iterator[dict]:
    """This worker's micro-batches from update number `start` on, without end.

    Each update takes the next batch_size · accumulation · world_size of `chosen_rows`: every row once an epoch,
    whatever the numbers divide by, and the same rows in an update for one worker and for many. dataset[i] is a dict of
    tensors, and dataset.kept(i) how much of it there is to learn, in positions or their weights. Every micro-batch also
    carries `total`: that of the whole update, in all micro-batches and workers, by which its loss is to be divided; the
    losses and gradients of workers and micro-batches then add up.
    """
    count, rows = len(dataset), batch_size * accumulation * world_size
    if count < batch_size * world_size:
        raise UserError(
            f"{count} training rows are fewer than a batch of {batch_size} for each of {world_size} workers; "
            "lower --batch-size or add text"
        )
    for chosen in chosen_rows(seed, count, rows, start):
        total = torch.tensor(float(sum(map(dataset.kept, chosen)) or 1))  # an update may keep no target: loss 0
        for first in range(rank * batch_size, rows, batch_size * world_size):
            items = [dataset[i] for i in chosen[first : first + batch_size]]
            yield {key: torch.stack([item[key] for item in items]) for key in items[0]} | {"total": total}


def first_batches(
    dataset: Dataset, rows: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1
) -> list[dict]:
    """One worker's whole batches of `rows` training rows in all workers, chosen by the seed."""
    stream = batches(dataset, batch_size, 1, seed, 0, rank, world_size)
    return [next(stream) for _ in range(max(1, min(rows, len(dataset)) // (batch_size * world_size)))]
