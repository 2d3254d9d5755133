"""A recursive model's answers and their accuracy."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qat_lora.backend import TorchBackend
from qat_lora.experiments.athena.model import IGNORE, RecursiveModel, fresh, halting, refill, stablemax_loss
from qat_lora.experiments.athena.rows import PuzzleRows
from qat_lora.run.console import watched


@dataclass(frozen=True)
class Answers:
    """A model's answers: tokens [N, L] when each row first halts (early) and after all segments (full), and the number
    of segments [N] until each row first halts."""

    early: Tensor
    full: Tensor
    segments: Tensor


@torch.no_grad()
def answer(
    model: RecursiveModel, batch: dict[str, Tensor], segments: int, backend: TorchBackend
) -> tuple[Answers, Tensor]:
    """Answer one batch on the device; returns the answers and the stablemax loss [B, L] of the last segment. Every row
    runs all `segments`, and a mask records its answer when it first halts, so one pass gives both answers."""
    rows = refill(fresh(model, len(batch["inputs"])), batch, model)
    z_H, z_L, picked = rows.z_H, rows.z_L, model.identity.index_select(0, batch["identifiers"])
    early, used, done = torch.zeros_like(batch["inputs"]), rows.segments, torch.zeros_like(rows.halted)
    backend.step_boundary()
    for _ in range(segments):
        with backend.autocast():
            z_H, z_L, logits, halt = model(z_H, z_L, batch["inputs"], picked)
        full = logits.argmax(-1)
        early = torch.where(done[:, None], early, full)
        used = used + (~done).long()
        done = done | halting(halt, used, batch["budgets"], segments)
        backend.step_boundary()
    return Answers(early, full, used), stablemax_loss(logits, batch["labels"])


@torch.no_grad()
def measure(
    model: RecursiveModel, rows: PuzzleRows, segments: int, batch_size: int, backend: TorchBackend
) -> dict[str, float]:
    """Measure a model on held-out rows. heldout_exact and heldout_cells: shares of rows and of labelled cells that are
    right when the row halts; heldout_exact_full and heldout_cells_full: the same after all segments; heldout_loss: mean
    loss per labelled cell after all segments; heldout_segments: mean number of segments until a row halts.

    All batches have the same size (the last one is padded), and each worker measures its share of every batch. Rows
    without labels are left out of all metrics; heldout_rows is the number of rows measured.
    """
    sums = torch.zeros(8, device=backend.device)
    share = batch_size // backend.world_size
    firsts = range(0, len(rows), batch_size)  # the same number for every worker
    for first in watched(firsts, "evaluating", len(firsts), shown=backend.is_main):
        at = first + backend.rank * share + np.arange(share)
        batch = rows.batch(np.minimum(at, len(rows) - 1))
        batch["labels"][torch.from_numpy(at >= len(rows))] = IGNORE
        batch = backend.to_device(batch)
        found, loss = answer(model, batch, segments, backend)
        labelled = batch["labels"] != IGNORE
        counts = labelled.any(1)
        tallies = [counts.sum(), labelled.sum(), loss.sum(), (found.segments * counts).sum()]
        for tokens in (found.early, found.full):
            right = (tokens == batch["labels"]) & labelled
            tallies += [((right | ~labelled).all(1) & counts).sum(), right.sum()]
        sums = sums + torch.stack([tally.float() for tally in tallies])
        backend.step_boundary()
    totals = [sum(column) for column in zip(*backend.group.gather(backend.to_host(sums).tolist()))]
    count, cells, loss, used, early, early_cells, full, full_cells = totals
    return {
        "heldout_exact": early / count, "heldout_cells": early_cells / cells,
        "heldout_exact_full": full / count, "heldout_cells_full": full_cells / cells,
        "heldout_loss": loss / cells, "heldout_segments": used / count, "heldout_rows": int(count),
    }  # fmt: skip


def kept(model: RecursiveModel, backend: TorchBackend) -> dict[str, Tensor]:
    """A copy of the model's whole state on the host."""
    return {name: tensor.clone() for name, tensor in backend.to_host(model.state_dict()).items()}
