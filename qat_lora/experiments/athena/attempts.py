"""Several attempts at the same rows: noise in the latent answer makes them differ, and the halting head picks one.

Probabilistic Tiny Recursive Model, arXiv 2605.19943. The weights are those of the plain model.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from qat_lora.backend import TorchBackend
from qat_lora.data.batches import seed_of
from qat_lora.experiments.athena.evaluation import steps
from qat_lora.experiments.athena.model import IGNORE, RecursiveModel
from qat_lora.experiments.athena.rows import PuzzleRows
from qat_lora.run.console import watched
from qat_lora.run.files import writing
from qat_lora.run.plots import pyplot


@dataclass(frozen=True)
class Attempts:
    """K attempts at each of B rows, on the host: the answers' tokens [K, B, L] and halting logits [K, B] after the last
    segment."""

    tokens: Tensor
    halt: Tensor

    def votes(self, count: int) -> Tensor:
        """How many of the first `count` attempts give the same answer as each of them [count, B]."""
        tokens = self.tokens[:count]
        return torch.stack([(tokens == each).all(-1).sum(0) for each in tokens])

    def chosen(self, count: int) -> Tensor:
        """For each row, the number of the attempt, from 0, with the highest halting logit of the first `count` [B];
        among equals the earliest."""
        return self.halt[:count].argmax(0)

    def majority(self, count: int) -> Tensor:
        """For each row, the number of the first attempt that gives the most frequent answer of the first `count` [B];
        among equally frequent answers the one that came first."""
        return self.votes(count).argmax(0)


@torch.no_grad()
def run_attempts(
    model: RecursiveModel, batch: dict[str, Tensor], segments: int, count: int, noise: float, seed: int,
    backend: TorchBackend,
) -> Attempts:  # fmt: skip
    """Answer one batch on the device `count` times, each time with all `segments`.

    The first attempt is the plain model. Each later one adds Gaussian noise of standard deviation `noise` to z_H before
    every segment. The noise depends on the seed, the attempt's number and the batch's size, not on `count`. Attempts
    run one after the other, so memory does not grow with their number. Seeds the backend's generators.
    """
    found = []
    for number in range(count):
        backend.seed(seed_of(seed, number))
        for step in steps(model, batch, segments, backend, noise if number else 0.0):
            last = step.logits.argmax(-1), step.halt
        found.append(backend.to_host(last))
    return Attempts(*(torch.stack(parts) for parts in zip(*found)))


class Accuracy(NamedTuple):
    """Shares of rows that are right: in the attempt that the halting head chooses, in the most frequent answer, and in
    at least one attempt (pass@k)."""

    chosen: float
    majority: float
    any: float


def counts_up_to(most: int) -> list[int]:
    """1, 2, 4, … below `most`, and `most`."""
    return [*(2**power for power in range(most.bit_length()) if 2**power < most), most]


def measure_attempts(
    model: RecursiveModel, rows: PuzzleRows, segments: int, batch_size: int, count: int, noise: float, seed: int,
    backend: TorchBackend, see: Callable[[np.ndarray, Tensor, Tensor], object] | None = None,
) -> dict[int, Accuracy]:  # fmt: skip
    """Accuracy with the first 1, 2, 4, … up to `count` attempts at each row, on one worker. Rows without labels are
    left out (empty if no row has any), and answers are compared at labelled positions only. All batches have the same
    size (the last one is padded). see: as in `measure`, for each attempt."""
    sums, total = {k: np.zeros(3) for k in counts_up_to(count)}, 0
    firsts = range(0, len(rows), batch_size)
    for first in watched(firsts, "evaluating", len(firsts)):
        at = first + np.arange(batch_size)
        batch = rows.batch(np.minimum(at, len(rows) - 1))
        found = run_attempts(model, backend.to_device(batch), segments, count, noise, seed_of(seed, first), backend)
        for tokens, halt in zip(found.tokens, found.halt) if see else ():
            see(at, tokens, halt.float().sigmoid())
        labelled = batch["labels"] != IGNORE
        counted = labelled.any(1) & torch.from_numpy(at < len(rows))
        found = Attempts(torch.where(labelled, found.tokens, IGNORE)[:, counted], found.halt[:, counted])
        for k in sums:
            sums[k] += rights(found, batch["labels"][counted], k)
        total += int(counted.sum())
    return {k: Accuracy(*(each / total).tolist()) for k, each in sums.items() if total}


def rights(found: Attempts, labels: Tensor, count: int) -> list[int]:
    """How many rows are right with the first `count` attempts, in the order of Accuracy; labels [B, L]."""
    right = (found.tokens[:count] == labels).all(-1)
    picked = [right.gather(0, pick[None]) for pick in (found.chosen(count), found.majority(count))]
    return [int(each.sum()) for each in (*picked, right.any(0))]


def draw_attempts(tables: Sequence[dict[int, Accuracy]], path: Path) -> None:
    """Plot accuracy against the number of attempts: the mean over tables, and each table as a thin line."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 4.2))
    labels = {"any": "any attempt right (pass@k)", "chosen": "chosen by the halting head", "majority": "majority vote"}
    ks = list(tables[0])
    for colour, (name, label) in enumerate(labels.items()):
        lines = [[100 * getattr(table[k], name) for k in ks] for table in tables]
        axis.plot(ks, np.mean(lines, 0), f"C{colour}o-", label=label)
        for line in lines if len(lines) > 1 else ():
            axis.plot(ks, line, f"C{colour}-", linewidth=0.7, alpha=0.5)
    axis.set_xscale("log", base=2)
    axis.set_xticks(ks, map(str, ks))
    axis.set(xlabel="attempts per row", ylabel="rows right after all segments, %")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    with writing(path):
        figure.savefig(path, dpi=110, format="png")
    plt.close(figure)
