"""Run by test_xla_athena.py in a separate process: a recursive model on torch_xla's CPU device and on the CPU.

PYTHONPATH=tests PJRT_DEVICE=CPU python tests/backend/athena_checks.py OUT_DIR
"""

import json
import sys
from pathlib import Path

import torch
import torch_xla
import torch_xla.debug.metrics as met
from loops import train_recursive

from qat_lora.backend import TorchBackend, open_backend
from qat_lora.experiments.athena.evaluation import measure
from qat_lora.experiments.athena.model import RecursiveModel, RecursiveSpec
from qat_lora.experiments.athena.rows import draw, split
from qat_lora.experiments.athena.training import RecursivePlan, Trainer
from qat_lora.run.rundir import Run
from qat_lora.run.session import Every, Session

OUT = Path(sys.argv[1])
XLA = open_backend("xla", "fp32")  # before any backward on the CPU, which would break XLA's in this process
CPU = TorchBackend("cpu", "fp32")
STEPS = 12
SHAPES = {
    "mlp": {"mlp_t": True},
    "attention": {"num_kv_heads": 1},
    "one step": {"mlp_t": True, "one_step_gradient": True},
    "checkpointed": {"num_kv_heads": 1},
}
# An untrained MLP over positions amplifies every rounding error: fp32 is 2e-6 from fp64 after one segment, on CPU and
# XLA alike, and Adam's first steps follow the sign of even the smallest gradients. fp64 has no error to amplify.
IN_FP64 = ("mlp", "one step")


def graphs() -> int:
    """How many graphs XLA has been given so far, cached ones included."""
    return sum(met.counter_value(name) or 0 for name in ("CachedCompile", "UncachedCompile"))


def training(kind: str) -> dict:
    """Twelve updates with halting, warm-up and decay. Every fourth evaluates the EMA and saves a checkpoint."""
    train, heldout = split(draw("sudoku4", 40, 0), 0.2, 0)
    spec = RecursiveSpec(train.vocab, train.length, 16, 2, H_cycles=2, L_cycles=2, **SHAPES[kind])
    plan = RecursivePlan(
        steps=STEPS, batch_size=8, learning_rate=1e-2, warmup_steps=3, floor=0.1, clip_grad_norm=1.0, seed=0,
        segments=3, ema=0.9, exploration=0.5,
    )  # fmt: skip
    lines, halts, given = {}, {}, []
    for name, backend in (("cpu", CPU), ("xla", XLA)):
        before = backend.counters().get("compiles", 0)
        backend.seed(0)
        model = RecursiveModel(spec)
        with torch.no_grad():  # a random head, so that rows halt at different times
            model.halt_weight.normal_(std=3, generator=torch.Generator().manual_seed(1))
            model.halt_bias.zero_()
        model = backend.place(model.double() if kind in IN_FP64 else model)
        if kind == "checkpointed":
            model.checkpoint = backend.checkpoint
        (OUT / f"{kind}-{name}").mkdir()
        run = Run(OUT / f"{kind}-{name}", resumed=False)
        session = Session(run, backend, Every(log=1, evaluate=4, save=4))
        trainer = Trainer(model, plan, backend)
        halts[name], count = [], []

        def begun(batch, segment=trainer.segment, count=count):
            count.append(graphs())
            return segment(batch)

        def ended(*args, update=backend.update, trainer=trainer, name=name, count=count):
            norm = update(*args)
            given.append((name, graphs() - count[-1]))
            halts[name].append(trainer.carry.halted.tolist())
            return norm

        trainer.segment, backend.update = begun, ended

        def evaluate(_, trainer=trainer, backend=backend) -> dict:
            return measure(trainer.shown, heldout, plan.segments, 8, backend)

        train_recursive(trainer, train, session, evaluate)
        del backend.update  # restores the method of the class
        lines[name] = [line | {"compiles": line.get("compiles", 0) - before} for line in run.metrics()]
    return {
        "lines": lines,
        "halts": halts,
        "graphs": [count for name, count in given if name == "xla"],
        "fallbacks": XLA.counters()["fallbacks"],
    }


def planted() -> int:
    """The fallbacks of a step that reads a value, which shows that the other checks would notice one."""
    value = torch.ones(4, device=XLA.device).nonzero()
    torch_xla.sync()
    return len(value) and XLA.counters()["fallbacks"]


if __name__ == "__main__":
    found = {kind: training(kind) for kind in SHAPES}
    found["planted"] = planted()
    (OUT / "found.json").write_text(json.dumps(found))
