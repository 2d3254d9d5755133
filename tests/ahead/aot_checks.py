"""Records the graphs of experiments at tiny size, for test_aot*.py: in a process of its own, as torch_xla needs.

python aot_checks.py MODEL OUT fp32|bf16 NAME…    # MODEL: a folder with a tiny model; NAME: of RUNS or FAULTS
"NAME late" records the updates of `LATE` in a long run; "NAME planted" the same with numbers that are constants.
"""

import dataclasses
import os
import pickle
import sys
from pathlib import Path

os.environ["PJRT_DEVICE"] = "CPU"

import pytest
import torch
import torch_xla

from qat_lora.ahead.recording import RecordingBackend
from qat_lora.ahead.rehearsal import Rehearsal
from qat_lora.errors import UserError
from qat_lora.experiments.athena import model
from qat_lora.kernels import optimizer
from qat_lora.run.scripts import load_script, read_options
from qat_lora.run.tpu import record
from qat_lora.train.loop import Plan

MODEL, OUT, PRECISION = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
SIZES = ["--batch-size", "2", "--accumulation-steps", "2", "--max-steps", "4"]
CACHE = ["--cache-dir", "caches/none_L16_K4"]
TEACHER = ["--length", "16", "--top-k", "4", "--draws", "4", "--cache-dir", "caches/none"]
SHORT = ["--max-prompt-length", "16", "--max-new-tokens", "4"]
FEW = ["--sft-batch-size", "2", "--num-generations", "2"]
STORIES = "--embedding 32 --blocks 1 --reservoirs diagonal:16 --length 16 --batch-size 2 --tokenizer chars"
ATHENA = "--config tiny --puzzle maze9 --global-batch-size 2 --hidden-size 32 --H-cycles 2 --halt-max-segments 2"
RUNS = {  # name: script, its options, chips
    "qat": ("train_qat", ["--model", MODEL, *CACHE, *SIZES, "--layer-steps", "2"], 1),
    "qat on 4": ("train_qat", ["--model", MODEL, *CACHE, *SIZES, "--mlp", "uniform4/r4", "--attn", "uniform4/r4"], 4),
    "recovery": ("train_recovery_lora", ["--model", MODEL, *CACHE, *SIZES], 1),
    "recovery on 8": ("train_recovery_lora", ["--model", MODEL, *CACHE, *SIZES], 8),
    "cache": ("build_kd_cache", ["--model", MODEL, *TEACHER], 1),
    "grpo": ("train_musclebob_improved", ["--model", MODEL, "--sft", *FEW, *SHORT], 1),
    "grpo, int4": ("train_musclebob_improved", ["--model", MODEL, "--quantize", "int4/g32", *FEW, *SHORT], 1),
    "legal": ("train_cot_sft", ["--model", MODEL, "--length", "32", "--answer-rows", "2", *SIZES[:4], *SHORT], 1),
    "stories": ("train_tinystories_reservoir", STORIES.split(), 1),
    "athena": ("pretrain", ATHENA.split(), 1),
}


def recorded(name: str) -> dict:
    """The graphs of each phase of an experiment."""
    script, words, chips = RUNS[name]
    module = load_script(script)
    if hasattr(module, "ROWS"):  # answers per batch of a validation: 80 of them compile several times longer
        module.ROWS = 2
    options = read_options(module, [*words, "--precision", PRECISION], chips if chips > 1 else None)
    return record(module.rehearse, options, chips).graphs


WARMUP, STEPS = 100, 200_000
LATE = (1, 2, 3, WARMUP, WARMUP + 1, 310, 311, 312, 100_000, STEPS)  # at 311 a bias correction rounds to a power of 2


def late(name: str, planted: bool) -> dict[str, dict[int, list[str]]]:
    """{stage: {number of an update: hashes of its graphs}}, with the rates and bias corrections of that update."""
    name, found = name.rpartition(" ")[0], {}

    def steps(self, stage, total, state, load, evaluate=None):
        with self.backend.phase(stage):
            yield 1  # may have graphs of its own
        for number in LATE:
            for group in state.__self__.optimizer.param_groups:
                group["step"] = number - 1
            with self.backend.phase(stage):
                yield number
            self.backend.step_boundary()
            found.setdefault(stage, {})[number] = [graph.hash for graph in self.backend.graphs[stage]]

    def constants(tensor, *values):
        return torch.stack([torch.full((), value, device=tensor.device) for value in values])

    def factor(self, step, steps):  # that of a run of STEPS updates
        return factor_of(dataclasses.replace(self, steps=STEPS, warmup_steps=WARMUP), step)

    factor_of = Plan.factor
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rehearsal, "steps", steps)
        patch.setattr(Plan, "factor", factor)
        for module in (optimizer, model) if planted else ():
            patch.setattr(module, "numbers_on", constants)
        recorded(name)
    return found


def planted(name: str) -> dict | str:
    """A graph with a fault, or what the recording says about it; "linear" has none."""
    backend = RecordingBackend(PRECISION)
    model = backend.place(torch.nn.Linear(256, 256, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    backend.prepare(optimizer)
    rows = backend.to_device({"x": torch.ones(64, 256)})["x"]
    try:
        with backend.phase(name):
            kept = FAULTS[name](model.weight, model, rows, optimizer)
    except UserError as error:
        return str(error)
    del kept
    return backend.graphs


def callback(weight, *_):
    shape = [[256, 256]], [torch.float32]
    return torch_xla._XLAC._xla_custom_call([weight], "host_callback", *shape, False, "", 0, {})


def too_large(weight, *_):
    flat = weight.detach().flatten()
    return (flat[:, None] * flat[None, :]).exp()  # 16 GiB


def linear(weight, model, rows, optimizer):
    model(rows).square().sum().backward()
    optimizer.step()
    return weight.grad.zero_()


FAULTS = {
    "linear": linear,
    "float64": lambda weight, *_: weight.double().sum(),
    "callback": callback,
    "too large": too_large,
    "read": lambda weight, *_: weight.sum().item(),
}


if __name__ == "__main__":
    found = {}
    for name in sys.argv[4:]:
        if name.endswith(("late", "planted")):
            found[name] = late(name, name.endswith("planted"))
        else:
            found[name] = (recorded if name in RUNS else planted)(name)
    OUT.write_bytes(pickle.dumps(found))
