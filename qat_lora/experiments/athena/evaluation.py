"""A recursive model's answers and their accuracy."""

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from qat_lora.backend import TorchBackend
from qat_lora.backend.devices import on_host
from qat_lora.errors import UserError, first_line
from qat_lora.experiments.athena.model import (
    IGNORE,
    RecursiveModel,
    RecursiveSpec,
    fresh,
    halting,
    refill,
    stablemax_loss,
)
from qat_lora.experiments.athena.published import (
    TABLE,
    kind_of,
    load_state,
    open_published,
    read_state,
    renamed,
    state_of,
)
from qat_lora.experiments.athena.rows import PuzzleRows
from qat_lora.run.checkpoint import read_best
from qat_lora.run.console import say, watched
from qat_lora.run.resuming import read_config


@dataclass(frozen=True)
class Answers:
    """A model's answers: tokens [N, L] when each row first halts (early) and after all segments (full), the number of
    segments [N] until each row first halts, and the halting probability [N] after all segments (confidence)."""

    early: Tensor
    full: Tensor
    segments: Tensor
    confidence: Tensor


class Step(NamedTuple):
    """What a model says after a segment: logits [B, L, V], halting logits [B], which rows [B] had halted before it, and
    how many segments [B] each row has run without those after it halted."""

    logits: Tensor
    halt: Tensor
    halted: Tensor
    segments: Tensor


@torch.no_grad()
def steps(
    model: RecursiveModel, batch: dict[str, Tensor], segments: int, backend: TorchBackend, noise: float = 0.0
) -> Iterator[Step]:
    """Run all `segments` on one batch on the device, one after the other. noise: standard deviation of the Gaussian
    noise added to z_H, whose root mean square is 1, before each segment, the first included."""
    rows = refill(fresh(model, len(batch["inputs"])), batch, model)
    z_H, z_L, picked = rows.z_H, rows.z_L, model.identity.index_select(0, batch["identifiers"])
    used, done = rows.segments, torch.zeros_like(rows.halted)
    backend.step_boundary()
    for _ in range(segments):
        if noise:
            z_H = z_H + noise * torch.randn_like(z_H)
        with backend.autocast():
            z_H, z_L, logits, halt = model(z_H, z_L, batch["inputs"], picked)
        used = used + (~done).long()
        yield Step(logits, halt, done, used)
        done = done | halting(halt, used, batch["budgets"], segments)
        backend.step_boundary()


@torch.no_grad()
def answer(
    model: RecursiveModel, batch: dict[str, Tensor], segments: int, backend: TorchBackend
) -> tuple[Answers, Tensor]:
    """Answer one batch on the device; returns the answers and the stablemax loss [B, L] of the last segment. Every row
    runs all `segments`, and a mask records its answer when it first halts, so one pass gives both answers."""
    early = torch.zeros_like(batch["inputs"])
    for step in steps(model, batch, segments, backend):
        full = step.logits.argmax(-1)
        early = torch.where(step.halted[:, None], early, full)
    found = Answers(early, full, step.segments, step.halt.float().sigmoid())
    return found, stablemax_loss(step.logits, batch["labels"])


@torch.no_grad()
def measure(
    model: RecursiveModel, rows: PuzzleRows, segments: int, batch_size: int, backend: TorchBackend,
    see: Callable[[np.ndarray, Tensor, Tensor], object] | None = None,
) -> dict[str, float]:  # fmt: skip
    """Measure a model on held-out rows. heldout_exact and heldout_cells: shares of rows and of labelled cells that are
    right when the row halts; heldout_exact_full and heldout_cells_full: the same after all segments; heldout_loss: mean
    loss per labelled cell after all segments; heldout_segments: mean number of segments until a row halts.

    All batches have the same size (the last one is padded), and each worker measures its share of every batch. Rows
    without labels are left out of all metrics; heldout_rows is the number of rows measured, and the only metric if it
    is 0. see(at, tokens, confidence) gets the row numbers [B] of each batch, which may go beyond the last row, and this
    worker's answers to them after all segments with their halting probabilities, on the device.
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
        if see:
            see(at, found.full, found.confidence)
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
    if not count:
        return {"heldout_rows": 0}
    return {
        "heldout_exact": early / count, "heldout_cells": early_cells / cells,
        "heldout_exact_full": full / count, "heldout_cells_full": full_cells / cells,
        "heldout_loss": loss / cells, "heldout_segments": used / count, "heldout_rows": int(count),
    }  # fmt: skip


def load_run(run: Path, length: int | None = None) -> tuple[RecursiveModel, str | None, int]:
    """The best model of a finished run, its kind of puzzle, and its maximum of segments. `run` may also be a published
    checkpoint, whose rows have `length` tokens (None: those of a 9×9 Sudoku). Raises UserError if a file is missing,
    damaged, or of another experiment."""
    if run.is_file():
        model, segments = open_published(run, length or 81)
        return model, kind_of(model.spec), segments
    best, settings = read_best(run, "config.yaml"), read_config(run)
    try:
        model = RecursiveModel(RecursiveSpec(**best["spec"]))
        load_state(model, best["state"], str(run / "best.pt"))
        return model.eval(), best["kind"], settings["halt_max_segments"]
    except (KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{run} is not a run of pretrain.py ({first_line(error)}); give one of that script") from error


def starting_model(start: str, spec: RecursiveSpec, shown: bool = True) -> RecursiveModel:
    """The best model of a run, or a published checkpoint, to train further. With another number of puzzle identifiers,
    all embeddings start as their mean, as in the published training; `shown` prints so. Raises UserError if other
    sizes differ from `spec`."""
    if Path(start).is_file():
        state = read_state(Path(start))
    else:
        there = load_run(Path(start))[0]
        for name, size in asdict(there.spec).items():
            if size != getattr(spec, name) and name != "identifiers":
                raise UserError(
                    f"--start {start} was trained with {name} {size}, and this run has {getattr(spec, name)}; use the "
                    "same value"
                )
        state = state_of(there)
    model, table = RecursiveModel(spec), state.get(TABLE)
    if table is not None and table.ndim == 2 and len(table) != spec.identifiers:
        if shown:
            say(f"{len(table):,} puzzle embeddings there, {spec.identifiers:,} here: all start as their mean")
        state[TABLE] = table.mean(0, keepdim=True).expand(spec.identifiers, -1)
    load_state(model, state, f"--start {start}")
    return model


def kept(model: RecursiveModel, backend: TorchBackend) -> dict[str, Tensor]:
    """A copy of the model's whole state on the host, under the published names."""
    state = model.state_dict()
    there = backend.to_host(state)
    return renamed(model.spec, {n: there[n].clone() if on_host(state[n]) else there[n] for n in state})
