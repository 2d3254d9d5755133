"""Run by test_xla_sft.py in a process of its own: packed fine-tuning on torch_xla's CPU device and on the CPU.

PYTHONPATH=tests PJRT_DEVICE=CPU python tests/backend/sft_checks.py MODEL_DIR OUT_DIR
"""

import json
import sys
from itertools import pairwise
from pathlib import Path

import torch_xla.debug.metrics as met
from loops import train_plain

from qat_lora.backend import TorchBackend, open_backend
from qat_lora.experiments.legal.data import legal_data, legal_rows, section_weights
from qat_lora.experiments.legal.evaluation import LegalEvaluation
from qat_lora.lora.adapter import save_adapter
from qat_lora.lora.add import add_adapter
from qat_lora.lora.merge import merged
from qat_lora.lora.targets import PROJECTIONS
from qat_lora.models.loading import load_model, load_tokenizer
from qat_lora.rl.sampler import Sampler
from qat_lora.run.rundir import Run
from qat_lora.run.session import Every, Session
from qat_lora.train.loop import Plan
from qat_lora.train.supervised import packed_loss

MODEL, OUT = sys.argv[1], Path(sys.argv[2])
XLA = open_backend("xla", "fp32")  # before any backward on the CPU, which would break XLA's in this process
CPU = TorchBackend("cpu", "fp32")


def graphs() -> int:
    """How many graphs XLA has been given so far, cached ones included."""
    return sum(met.counter_value(name) or 0 for name in ("CachedCompile", "UncachedCompile"))


def training(backend, checkpointing: bool, dropout: float = 0.0) -> dict:
    """Eight updates of two micro-batches, past the partial batch that ends an epoch. Every fourth evaluates held-out
    figures and answers and saves a checkpoint."""
    tokenizer = load_tokenizer(MODEL)
    data = legal_data(legal_rows("generated", "train", 46, 0), tokenizer, 512, section_weights("answer=2"), 0.2, 0)
    model = backend.place(add_adapter(load_model(MODEL).requires_grad_(False), 4, 8, PROJECTIONS, 0, dropout))
    if checkpointing:
        backend.gradient_checkpointing(model)
    folder = OUT / f"{backend.kind}-{checkpointing}-{dropout}"
    folder.mkdir()
    run = Run(folder, resumed=False)
    session = Session(run, backend, Every(log=1, evaluate=4, save=4))
    evaluation = LegalEvaluation(Sampler(tokenizer, backend, (tokenizer.eos_token_id,), 2, 256, 4), data)
    plan = Plan(8, 4, 2, 1e-3, 3, 1.0, 0, weight_decay=0.01)
    before, given = backend.counters().get("compiles", 0), []

    def loss_of(model, batch):
        given.append(graphs())
        return packed_loss(model, batch)

    train_plain(model, data.train, loss_of, plan, session, lambda step: evaluation.glance(model, 4, 3), "sft")
    save_adapter(model, folder / "adapter", None)
    gap = merged(model, MODEL, None, folder / "adapter", data.train[0]["tokens"], CPU)[1]
    lines = [line | {"compiles": line.get("compiles", 0) - before} for line in run.metrics()]
    return {"lines": lines, "rows": len(data.train), "heldout": sum(map(bool, data.heldout.rows)), "gap": gap,
            "graphs": [b - a for a, b in pairwise(given)],
            "fallbacks": backend.counters().get("fallbacks", 0)}  # fmt: skip


if __name__ == "__main__":
    found = {
        f"{backend.kind}{' checkpointed' if checkpointing else ''}": training(backend, checkpointing)
        for checkpointing in (False, True)
        for backend in (XLA, CPU)
    } | {"xla dropout": training(XLA, True, 0.05)}
    (OUT / "found.json").write_text(json.dumps(found))
