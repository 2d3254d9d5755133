"""Run by xla_workers.py: several workers train a recursive model on the rows that one worker would take."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from loops import train_recursive

from qat_lora.ahead.rehearsal import Updates
from qat_lora.experiments.athena.evaluation import measure
from qat_lora.experiments.athena.model import RecursiveModel, RecursiveSpec
from qat_lora.experiments.athena.rows import draw, split
from qat_lora.experiments.athena.training import RecursivePlan, Trainer

STEPS, IDENTIFIERS = 6, 7  # of which the rows have 1, 3 and 5
ONE_AT_A_TIME = threading.Lock()  # the workers are threads of one process and share its generator


def train(backend, out: Path) -> None:
    """Write this worker's weights (puzzle embeddings included), and each update's figures and graphs as JSON."""
    with ONE_AT_A_TIME:
        train, heldout = split(draw("sudoku4", 40, 0), 0.2, 0)
        train = replace(train, identifiers=np.arange(len(train)) % 3 * 2 + 1)
        shape = {"num_kv_heads": 1, "H_cycles": 2, "L_cycles": 2, "identifiers": IDENTIFIERS}
        plan = RecursivePlan(
            steps=STEPS, batch_size=8, learning_rate=1e-2, warmup_steps=3, clip_grad_norm=0.1, seed=0, segments=3,
            ema=0.9, exploration=0.5,
        )  # fmt: skip
        backend.seed(0)
        model = RecursiveModel(RecursiveSpec(train.vocab, train.length, 16, 2, **shape))
        with torch.no_grad():
            model.halt_weight.normal_(std=3, generator=torch.Generator().manual_seed(1))
            model.halt_bias.zero_()
    trainer = Trainer(backend.place(model), plan, backend)
    lines, session = [], Updates(backend)

    def after(number: int) -> None:
        figures = session.figures[-1]
        fetched = backend.fetch(figures["loss"].value, figures["grad_norm"])
        lines.append({"loss": sum(backend.group.gather(fetched[0])), "grad_norm": fetched[1]} | backend.counters())

    session.after = after
    train_recursive(trainer, train, session)
    found = measure(trainer.shown, heldout, plan.segments, 8, backend)
    tensors, rest = trainer.state()
    kept = backend.to_host({**tensors, "identity": rest["identity"], "average": rest["average"]["head"]})
    torch.save(kept | {"halted": rest["carry"]["halted"]}, out / f"weights{backend.rank}.pt")
    (out / f"found{backend.rank}.json").write_text(json.dumps({"lines": lines, "measured": found}))
