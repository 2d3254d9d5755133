"""Decoder blocks are compiled without a graph break and into one graph for training; their results stay the same."""

import copy

import pytest
import torch
from torch._dynamo.utils import counters

from qat_lora.lora.add import add_adapter
from qat_lora.models import compiling
from qat_lora.models.loading import load_model
from qat_lora.quant.init import initialise
from qat_lora.quant.linear import freeze
from qat_lora.quant.student import StudentSpec, quantize
from qat_lora.train.losses import text_loss

BATCH = {"tokens": torch.arange(32).view(2, 16), "mask": torch.ones(2, 16)}
KINDS = ("qat", "low rank", "recovery", "recomputed")


@pytest.fixture
def graphs(monkeypatch):
    """The graphs that dynamo has captured; they run as captured, since inductor takes half a minute."""
    captured = []

    def keep(graph, _):
        captured.append(graph)
        return graph.forward

    compiled = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **how: compiled(function, backend=keep, **how))
    torch._dynamo.reset()
    counters.clear()
    compiling._compiled.cache_clear()
    yield captured
    compiling._compiled.cache_clear()


def model_of(kind: str, folder, backend):
    model = quantize(
        load_model(str(folder)), StudentSpec("uniform4/r8", "int4/g32") if kind == "low rank" else StudentSpec()
    )
    initialise(model)
    if kind == "recovery":
        freeze(model)
        model = add_adapter(model.requires_grad_(False), 4, 8, ("q", "v", "down"), seed=0)
    model = backend.place(model).train()
    if kind == "recomputed":
        backend.gradient_checkpointing(model)
    return model


def step(model) -> list[torch.Tensor]:
    loss = text_loss(model, BATCH)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("kind", KINDS)
def test_training_has_one_graph_and_no_break_and_the_same_gradients(kind, sharp_model_dir, backend, graphs):
    model = model_of(kind, sharp_model_dir, backend)
    wanted = step(model)
    model.zero_grad()
    compiling.compile_blocks(model)
    for _ in range(2):
        model.zero_grad()
        found = step(model)
    assert not counters["graph_break"] and len(graphs) == 1
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    with torch.no_grad():
        text_loss(model, BATCH)
    assert len(graphs) == 1, "evaluation is not compiled"


def test_a_copy_of_a_compiled_model_computes_with_its_own_weights(sharp_model_dir, backend, graphs):
    model = model_of("qat", sharp_model_dir, backend)
    compiling.compile_blocks(model)
    average = copy.deepcopy(model)
    before = text_loss(average, BATCH)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    assert torch.equal(text_loss(average, BATCH), before) and not torch.equal(text_loss(model, BATCH), before)
