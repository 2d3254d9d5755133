"""Norms in one step give transformers' results up to rounding; where the kernel does not apply, its own code runs."""

import copy

import pytest
import torch
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

from qat_lora.kernels import native
from qat_lora.kernels.norms import OneStepNorm, norms_in_one_step


class ScaledRMSNorm(LlamaRMSNorm):
    """A norm that the kernel does not support."""

    def forward(self, x):
        return super().forward(x) * 2


class GatedRMSNorm(LlamaRMSNorm):
    """Another that it does not support."""

    def forward(self, x, gate):
        return super().forward(x) * gate


class MaybeGatedRMSNorm(LlamaRMSNorm):
    """A plain norm unless it gets a gate, like Mamba 2's."""

    def forward(self, x, gate=None):
        return super().forward(x if gate is None else x * gate)


class UnweightedRMSNorm(nn.Module):
    eps = 1e-6

    def forward(self, x):
        return x


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def both(norm):
    """(the norm's own, ours) of the values, the gradient of the input and, if it is trained, that of the weight."""
    norm.weight.data.copy_(random(48))
    ours, found = copy.deepcopy(norm), []
    norms_in_one_step(ours)
    assert isinstance(ours, type(norm)) and isinstance(ours, OneStepNorm)
    for module in (norm, ours):
        x = (random(2, 7, 48, seed=1) * 3).requires_grad_()
        y = module(x)
        y.backward(random(7, 2, 48, seed=2).transpose(0, 1))
        found.append([y.detach(), x.grad, *([module.weight.grad] if module.weight.requires_grad else [])])
    return zip(*found)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("kind", [LlamaRMSNorm, Gemma3RMSNorm])
def test_values_and_gradients_equal_the_original_norms(kind, trained, kernels):
    for theirs, ours in both(kind(48).requires_grad_(trained)):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "norm", [ScaledRMSNorm(8), GatedRMSNorm(8), UnweightedRMSNorm(), T5LayerNorm(8), nn.LayerNorm(8)]
)
def test_modules_that_compute_something_else_are_left_alone(norm):
    norms_in_one_step(norm)
    assert not isinstance(norm, OneStepNorm)


def test_a_call_with_a_gate_runs_the_original_norm():
    norm, x, gate = MaybeGatedRMSNorm(48), random(5, 48), random(5, 48, seed=1)
    ours = copy.deepcopy(norm)
    norms_in_one_step(ours)
    assert isinstance(ours, OneStepNorm)
    for given, named in (((x, gate), {}), ((x,), {"gate": gate}), ((), {"x": x})):
        assert torch.equal(ours(*given, **named), norm(*given, **named))


def test_evaluation_runs_the_original_norm(monkeypatch):
    """The same holds for inputs that are not fp32 and for norms with a hook."""
    monkeypatch.setattr(native, "SMALLEST", 1)
    norm, x = LlamaRMSNorm(16), random(5, 16)
    norms_in_one_step(norm)
    wanted = LlamaRMSNorm(16)(x)
    monkeypatch.setattr(native, "run", None)
    with torch.no_grad():
        assert torch.equal(norm(x), wanted)
    assert norm(x.bfloat16()).dtype == torch.float32
    seen = []
    norm.register_forward_hook(lambda module, given, output: seen.append(output))
    assert torch.equal(norm(x), wanted) and len(seen) == 1


def test_a_norm_without_storage_is_recognised_and_keeps_its_class_name(tmp_path):
    with torch.device("meta"):
        norm = LlamaRMSNorm(16)
    norms_in_one_step(norm)
    norms_in_one_step(norm)
    assert type(norm).__name__ == "LlamaRMSNorm" and type(norm).__mro__[1:3] == (OneStepNorm, LlamaRMSNorm)
    assert norm.state_dict().keys() == {"weight"} and norm.weight.is_meta
