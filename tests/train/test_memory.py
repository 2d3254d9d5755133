"""Lower bounds of memory are below the measured peak, but not far below; estimates follow from the shapes."""

import dataclasses
import subprocess
import sys

import pytest

from qat_lora.backend import TorchBackend
from qat_lora.experiments.athena.model import RecursiveSpec, recursive_memory
from qat_lora.experiments.stories.models import Shape, build, story_memory
from qat_lora.experiments.stories.reservoir import ReservoirSpec
from qat_lora.models.loading import empty_model, load_model
from qat_lora.quant.student import StudentSpec, quantize
from qat_lora.train import language_memory as memory
from qat_lora.train.language_memory import answer_memory, evaluation_memory, loading_memory, training_memory
from qat_lora.train.memory import memory_line

# Runs in a separate process, and each case in a fork of it, which starts without memory freed by another case: prints
# its peak memory while training a model, minus its memory before.
PEAK = """
import torch._dynamo  # otherwise the first optimiser imports it, and the peak includes it
import os, sys, torch
from qat_lora.ahead.rehearsal import Updates
from qat_lora.backend import TorchBackend
from qat_lora.experiments.athena.rows import draw
from qat_lora.experiments.athena.model import RecursiveModel, RecursiveSpec
from qat_lora.experiments.athena.training import RecursivePlan, Trainer
from qat_lora.run.scripts import load_script

train_segments = load_script("pretrain").train_segments

def train(width, size, precision, steps):
    rows = draw("maze9", 40, 0)
    spec = RecursiveSpec(rows.vocab, rows.length, hidden_size=int(width), num_heads=4, H_cycles=1, L_cycles=3)
    plan = RecursivePlan(
        steps=int(steps), batch_size=int(size), learning_rate=1e-3, warmup_steps=0, clip_grad_norm=1.0, seed=0
    )
    backend = TorchBackend("cpu", precision)
    before = backend.peak_memory_mb()
    train_segments(Trainer(RecursiveModel(spec), plan, backend), rows, Updates(backend), None)
    print(int((backend.peak_memory_mb() - before) * 2**20), flush=True)

for case in sys.argv[1:]:
    if not os.fork():
        train(*case.split())
        os._exit(0)
    os.wait()
"""


def test_the_lower_bound_of_a_recursive_model_is_below_its_peak():
    """For a model whose weights need the most, and for one whose activations do: those need no second update."""
    cases = (512, 2, "fp32", 2, 0.5), (64, 32, "bf16", 1, 0.15)
    words = [sys.executable, "-c", PEAK, *(" ".join(map(str, case[:4])) for case in cases)]
    peaks = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    for (width, rows, precision, _, least), taken in zip(cases, map(int, peaks), strict=True):
        spec = RecursiveSpec(6, 81, hidden_size=width, num_heads=4, H_cycles=1, L_cycles=3)
        said = sum(recursive_memory(spec, rows, True, precision == "bf16", False).values())
        assert least * taken < said < taken


def test_the_options_to_lower_are_those_that_need_the_most_memory():
    spec = RecursiveSpec(6, 81, hidden_size=4096, num_heads=4)

    def lower(changes=None, rows=8) -> str:
        parts = recursive_memory(dataclasses.replace(spec, **(changes or {})), rows, True, False, False)
        return max(parts, key=parts.__getitem__)

    assert "arch.L_layers" in lower() and "global_batch_size" in lower(rows=10**6)
    assert "arch.L_cycles" in lower({"L_cycles": 10**4}) and "identifiers" in lower({"identifiers": 10**9})
    assert "arch.mlp_t" in lower({"mlp_t": True, "length": 10**6})


SHAPE = Shape(32, 2, 80, (ReservoirSpec(24), ReservoirSpec(20, "esn", radius=0.9)))


@pytest.mark.parametrize("kind", ["reservoir", "transformer", "mingru"])
def test_the_bound_of_a_story_model_is_close_to_its_memory(kind):
    model = build(kind, 50, SHAPE, 0)
    trained, fixed, tokens = story_memory(50, SHAPE, 100, False).values()
    there = 16 * sum(p.numel() for p in model.parameters())
    assert 0.9 * there < trained < there * 1.01 and tokens == 100 * 2 * 32 * 4
    if kind == "reservoir":  # not counting the tensors that a scan keeps
        w = [b.numel() for name, b in model.named_buffers() if name.split(".")[-1] in ("w", "w_in")]
        assert fixed == 4 * sum(w)


HIDDEN, INNER, KEYS, VOCAB, LAYERS = 64, 128, 32, 512, 2  # sizes of `tiny_model_dir`


def test_lower_bounds_of_a_language_model_equal_those_computed_by_hand(tiny_model_dir):
    model = empty_model(str(tiny_model_dir))
    count = sum(p.numel() for p in model.parameters())
    assert memory.least_training_memory(model, 2, 8, True) == 16 * count + LAYERS * 2 * 8 * HIDDEN * 2
    model.requires_grad_(False)
    assert memory.least_training_memory(model, 2, 8, True) == 4 * count
    assert memory.least_rollout_memory(model, 3, 4, 10) == 12 * (160 + 2 * VOCAB)
    assert memory.least_teacher_memory(model, 2, 8, 5, True) == 4 * count + 16 * (8 + 2 * HIDDEN + 4 * 5)


def test_the_parts_of_training_follow_from_the_shapes(tiny_model_dir):
    """In fp32, then for QAT in bf16: a matrix keeps its input and output, and a norm keeps two fp32 tensors."""
    model = empty_model(str(tiny_model_dir))
    count = sum(p.numel() for p in model.parameters())
    linear = 2 * (HIDDEN + HIDDEN) + 2 * (HIDDEN + KEYS) + 3 * (HIDDEN + INNER) + INNER  # q, o; k, v; MLP; its product
    host = {"interpreter and libraries": memory.LIBRARIES + memory.TOKEN * VOCAB}
    assert training_memory(model, 2, 8, False, False) == host | {
        "weights": 4 * count + sum(b.nbytes for b in model.buffers()),
        "gradients and moments": 12 * count,
        "activations": LAYERS * 16 * (4 * linear + 8 * 2 * HIDDEN),
        "bf16 copies of weights": 0,
        "LM head": 16 * VOCAB * 4 + 16 * HIDDEN * 4,
    }
    quantize(model, StudentSpec())
    parts = training_memory(model, 2, 8, True, False)
    matrices = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * KEYS + 3 * HIDDEN * INNER
    assert parts["bf16 copies of weights"] == LAYERS * 2 * matrices
    assert parts["activations"] == LAYERS * 16 * (2 * linear + 8 * 2 * HIDDEN)
    assert parts["LM head"] == 2 * VOCAB * HIDDEN + 16 * VOCAB * 2 + 16 * HIDDEN * 6


def total(parts) -> int:
    return sum(parts.values())


def test_more_rows_need_more_memory_and_checkpointing_less(tiny_model_dir):
    model = empty_model(str(tiny_model_dir))
    for estimate in (
        lambda rows, length: training_memory(model, rows, length, True, False),
        lambda rows, length: evaluation_memory(model, rows, length, True),
        lambda rows, length: evaluation_memory(model, rows, length, True, model),
        lambda rows, length: answer_memory(model, rows, length, True),
    ):
        assert total(estimate(2, 8)) < total(estimate(4, 8)) < total(estimate(4, 16))
    whole, recomputed = (training_memory(model, 4, 64, True, again) for again in (False, True))
    assert total(recomputed) < total(whole) and recomputed["weights"] == whole["weights"]


def test_a_larger_vocabulary_needs_more_memory(tiny_model_dir):
    model, found = load_model(str(tiny_model_dir)), []
    for _ in range(2):
        estimates = loading_memory(model), training_memory(model, 2, 8, True, False), answer_memory(model, 2, 8, True)
        found.append(list(map(total, estimates)))
        model.resize_token_embeddings(1024)
    assert all(small < large for small, large in zip(*found))


def test_the_line_shows_the_phase_that_needs_the_most():
    backend = TorchBackend("cpu", "fp32")
    phases = {
        "loading": {"interpreter and libraries": 10**9, "weights": 3 * 10**9},
        "training": {"interpreter and libraries": 10**9, "weights": 2 * 10**9, "activations": 5 * 10**8},
    }
    parts = "interpreter and libraries 1.00 GB, weights 3.00 GB, total 4.00 GB"
    said = memory_line(phases, backend)
    assert said == f"memory of a worker's process (estimated; the peak is in loading): {parts}"
    backend.kind = "cuda"  # host memory does not count for the device
    parts = "weights 2.00 GB, activations 0.50 GB, total 2.50 GB"
    assert memory_line(phases, backend).endswith(f"(estimated; the peak is in training): {parts}")
