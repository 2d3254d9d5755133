"""Checks of the recursive model on torch_xla's CPU device, run by xla_process.py."""

import re
from dataclasses import replace
from functools import partial

import numpy as np
import torch
import torch_xla
from loops import train_recursive
from xla_process import CPU, XLA, difference, graphs, on_both

from qat_lora.experiments.athena.attempts import run_attempts
from qat_lora.experiments.athena.evaluation import measure
from qat_lora.experiments.athena.model import RecursiveModel, RecursiveSpec, rows_to_sum, sign_update
from qat_lora.experiments.athena.rows import draw, split
from qat_lora.experiments.athena.training import RecursivePlan, Trainer
from qat_lora.run.session import Every

PUZZLES = 5003  # identifiers; no other size in a graph


def training(name: str, exact: bool = False, checkpointing: bool = False, rate: float = 1e-2, **shape) -> dict:
    """Nine updates with halting, warm-up and decay. Every third evaluates the EMA and saves a checkpoint. exact: in
    fp64."""
    train_rows, heldout = split(draw("sudoku4", 40, 0), 0.2, 0)
    train_rows = replace(train_rows, identifiers=np.arange(len(train_rows)) % 5 * 1000 + 1)
    shape |= {"H_cycles": 2, "L_cycles": 2, "identifiers": PUZZLES}
    spec = RecursiveSpec(train_rows.vocab, train_rows.length, 16, 2, **shape)
    plan = RecursivePlan(
        steps=9, batch_size=8, learning_rate=rate, warmup_steps=3, floor=0.1, clip_grad_norm=1.0, seed=0, segments=3,
        ema=0.9, exploration=0.5,
    )  # fmt: skip
    halts, given, tables = {"xla": [], "cpu": []}, [], {}

    def train(backend, session) -> None:
        model = RecursiveModel(spec)
        with torch.no_grad():  # a random head, so that rows halt at different times
            model.halt_weight.normal_(std=3, generator=torch.Generator().manual_seed(1))
            model.halt_bias.zero_()
        model = backend.place(model.double() if exact else model)
        if checkpointing:
            model.checkpoint = backend.checkpoint
        trainer = Trainer(model, plan, backend)
        refill, update, before = trainer.refill, backend.update, []

        def begun(batch):
            before.append(graphs())
            return refill(batch)

        def ended(*args):
            norm = update(*args)
            if backend is XLA:
                given.append(graphs() - before[-1])
            halts[backend.kind].append(trainer.carry.halted.tolist())
            return norm

        trainer.refill, backend.update = begun, ended
        train_recursive(trainer, train_rows, session, lambda _: measure(trainer.shown, heldout, 3, 8, backend))
        del backend.update  # restores the method of the class
        tables[backend.kind] = model.identity.cpu()

    found = on_both(name, train, Every(log=1, evaluate=3, save=3)) | {"halts": halts, "graphs": given}
    moved = [torch.equal(table.any(1).nonzero()[:, 0], torch.arange(5) * 1000 + 1) for table in tables.values()]
    return found | {"moved": moved, "table": difference(tables["xla"], tables["cpu"])}


# An untrained MLP over positions amplifies every rounding error: fp32 is 2e-6 from fp64 after one segment, on CPU and
# XLA alike, and Adam's first steps follow the sign of even the smallest gradients. fp64 has no error to amplify, at a
# rate at which the weights do not carry a difference of 1e-16 on to where it counts.
attention = partial(training, "athena-attention", num_kv_heads=1)
checkpointed = partial(training, "athena-checkpointed", checkpointing=True, num_kv_heads=1)
one_step = partial(training, "athena-one-step", exact=True, rate=1e-4, mlp_t=True, one_step_gradient=True)


def table() -> dict:
    """The operations of the puzzle embeddings' update that read or return the whole table."""
    tensors = torch.zeros(PUZZLES, 16), torch.arange(8) % 5, torch.randn(8, 16), torch.tensor([True])
    table, *rows = (tensor.to(XLA.device) for tensor in tensors)
    torch_xla.sync()
    sign_update(table, rows_to_sum(*rows), 0.1, 0.5)
    lines = torch_xla._XLAC._get_xla_tensors_hlo([table]).splitlines()
    found = [re.search(r" = .*? ([a-z-]+)\(", line) for line in lines if f"[{PUZZLES}," in line]
    return {"operations": [operation[1] for operation in found if operation]}


def attempts() -> dict:
    """Halting logits of four attempts on both devices, again with XLA after a change of the seed, and what XLA compiled
    until the second attempt and after it."""
    rows, found, compiled = draw("sudoku4", 8, 0), {}, []
    before = XLA.counters()["fallbacks"]
    for name, backend, count, seed in (
        ("cpu", CPU, 4, 0), ("first two", XLA, 2, 0), ("xla", XLA, 4, 0), ("other seed", XLA, 4, 1),
    ):  # fmt: skip
        torch.manual_seed(0)
        model = RecursiveModel(RecursiveSpec(rows.vocab, rows.length, 16, 2, H_cycles=2, L_cycles=2)).eval()
        torch.nn.init.normal_(model.halt_weight, std=3)
        batch = backend.to_device(rows.batch(np.arange(8)))
        tried = run_attempts(backend.place(model), batch, 3, count, 0.5, seed, backend)
        found[name] = tried.halt.tolist()
        compiled.append(XLA.counters()["compiles"])
    return {"halt": found, "compiles": compiled, "fallbacks": XLA.counters()["fallbacks"] - before}


def planted() -> dict:
    """The fallbacks of a step that reads a value, which shows that the other checks would notice one."""
    before, value = XLA.counters()["fallbacks"], torch.ones(4, device=XLA.device).nonzero()
    torch_xla.sync()
    return {"fallbacks": len(value) and XLA.counters()["fallbacks"] - before}
