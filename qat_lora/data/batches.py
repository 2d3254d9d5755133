"""Which rows a step uses: depends only on seed and step, so a resumed run uses the same rows."""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from qat_lora.errors import UserError


def epoch_order(seed: int, epoch: int, count: int) -> Tensor:
    """The permutation of `count` rows for one epoch."""
    return torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(count))


def order_by_file(seed: int, epoch: int, files: np.ndarray, window: int) -> Tensor:
    """The order of rows in one epoch when only some files can be local: files in random order, `window` at a time, with
    the rows of each window shuffled. files [rows]: each row's file number, from 0."""
    random = np.random.default_rng([seed, epoch])
    turns = random.permutation(files.max() + 1)[files] // window
    return torch.from_numpy(np.lexsort((random.random(len(files)), turns)))


def seed_of(seed: int, index: int) -> int:
    """A seed for the draws of batch number `index`: independent of other batches and of how many draws they take."""
    return int(np.random.default_rng([seed, index]).integers(2**63))


def chosen_rows(
    seed: int, count: int, rows: int, start: int = 0, order: Callable[[int, int], Tensor] | None = None
) -> Iterator[list[int]]:
    """Iterate endlessly over the row numbers of each update, from update number `start` on: the orders of all epochs of
    `count` rows are concatenated, and each update takes the next `rows` of them. order(seed, epoch): the rows of an
    epoch; by default `epoch_order`."""
    order = order or partial(epoch_order, count=count)
    orders: dict[int, np.ndarray] = {}  # lists of int would take five times as much memory
    for update in range(start, 2**63):
        places = [divmod(place, count) for place in range(update * rows, (update + 1) * rows)]
        epochs = {epoch for epoch, _ in places}
        orders = {e: orders[e] if e in orders else order(seed, e).numpy() for e in epochs}
        yield [int(orders[epoch][at]) for epoch, at in places]


def batches(
    dataset: Dataset, batch_size: int, accumulation: int, seed: int, start: int = 0, rank: int = 0, world_size: int = 1,
    updates: int | None = None,
) -> Iterator[dict]:  # fmt: skip
    """Iterate over this worker's micro-batches of `updates` updates (None: endlessly) from update number `start` on.

    Each update takes the next batch_size · accumulation · world_size rows of `chosen_rows`: every row once per epoch,
    even if the numbers do not divide, and the same rows per update for any number of workers. dataset[i] is a dict of
    tensors; dataset.kept(i) is its number of target tokens, or the sum of their weights. Every micro-batch also has
    `total`, the sum of `kept` over all micro-batches and workers of the update. Divide its loss by `total`, so that the
    losses and gradients of workers and micro-batches add up. A dataset may have its own epoch_order(seed, epoch), and
    read_ahead(iterator over the rows of each update), which yields these while it fetches the next ones.
    """
    count, rows = len(dataset), batch_size * accumulation * world_size
    if count < batch_size * world_size:
        raise UserError(
            f"{count} training rows are fewer than a batch of {batch_size} for each of {world_size} workers; "
            "lower --batch-size or add text"
        )
    every = islice(chosen_rows(seed, count, rows, start, getattr(dataset, "epoch_order", None)), updates)
    for chosen in getattr(dataset, "read_ahead", iter)(every):
        total = torch.tensor(float(sum(map(dataset.kept, chosen)) or 1))  # an update may have no target token: loss 0
        for first in range(rank * batch_size, rows, batch_size * world_size):
            items = [dataset[i] for i in chosen[first : first + batch_size]]
            yield {key: torch.stack([item[key] for item in items]) for key in items[0]} | {"total": total}


def first_batches(
    dataset: Dataset, rows: int, batch_size: int, seed: int, rank: int = 0, world_size: int = 1
) -> list[dict]:
    """One worker's share of `rows` training rows, in full batches; the seed chooses the rows."""
    updates = max(1, min(rows, len(dataset)) // (batch_size * world_size))
    return list(batches(dataset, batch_size, 1, seed, 0, rank, world_size, updates))


class SameRows(Dataset):
    """`count` rows that are all the same, for what needs only their shapes."""

    fingerprint = ""

    def __init__(self, count: int, **row: Tensor):
        self.count, self.row = count, row

    def kept(self, i: int) -> int:
        return int(self.row["mask"].sum()) if "mask" in self.row else len(self.row.get("weights", [1]))

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return self.row
