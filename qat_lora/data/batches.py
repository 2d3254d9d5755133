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


def batches(dataset: Dataset, batch_size: int, accumulation: int, seed: int, start: int = 0) -> Iterator[dict]:
    """Micro-batches from update number `start` on, without end; each epoch drops its ragged last batch.

    dataset[i] is a dict of tensors with a `mask`. Every micro-batch also carries `total`: the positions that are
    kept in the whole update (`accumulation` micro-batches), by which its loss is to be divided.
    """
    per_epoch = len(dataset) // batch_size
    if not per_epoch:
        raise UserError(f"{len(dataset)} training rows are fewer than --batch-size {batch_size}; lower it or add text")
    number, epoch, order = start * accumulation, -1, None
    while True:
        group = []
        for _ in range(accumulation):
            if number // per_epoch != epoch:
                epoch = number // per_epoch
                order = epoch_order(seed, epoch, len(dataset)).tolist()
            at = number % per_epoch * batch_size
            items = [dataset[i] for i in order[at : at + batch_size]]
            group.append({key: torch.stack([item[key] for item in items]) for key in items[0]})
            number += 1
        total = torch.stack([batch["mask"].sum(dtype=torch.float32) for batch in group]).sum()
        for batch in group:  # an update whose rows happen to keep no target has loss 0
            yield batch | {"total": total.clamp(min=1)}
