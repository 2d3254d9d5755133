"""Running an fp32 model temporarily in fp64, to compare a merged model with its adapter."""

import copy

import pytest
import torch
from zoo import model

from qat_lora.lora.merge import _largest_gap, exact_hidden_states, in_fp64
from qat_lora.models.architecture import eager_experts, hidden_states

TOKENS = torch.arange(5, 17).unsqueeze(0)


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt2", "qwen3_moe", "mamba"])
def test_layer_by_layer_fp64_equals_the_model_in_fp64_and_restores_its_weights(kind):
    made = model(kind).eval()
    before = {name: value.clone() for name, value in made.state_dict().items()}
    with torch.no_grad(), eager_experts(made):
        wanted = hidden_states(copy.deepcopy(made).double(), TOKENS)
        with in_fp64(made):
            found = hidden_states(made, TOKENS)
        torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-7 * float(wanted.abs().max()))
    for name, value in made.state_dict().items():
        assert value.dtype == before[name].dtype and torch.equal(value, before[name])


@pytest.mark.parametrize("kind", ["xglm", "inkling2_text"])
def test_a_model_without_fp64_support_computes_in_fp32(kind):
    made = model(kind).eval()
    with torch.no_grad(), eager_experts(made):
        found = exact_hidden_states(made, TOKENS)
        assert found.dtype == torch.float64 and torch.equal(found, hidden_states(made, TOKENS).double())
    assert {value.dtype for value in made.state_dict().values() if value.is_floating_point()} == {torch.float32}


def test_an_error_inside_the_context_restores_the_model():
    made = model("llama").eval()
    with pytest.raises(IndexError), torch.no_grad(), in_fp64(made):
        hidden_states(made, TOKENS + 10**6)
    assert {value.dtype for value in made.state_dict().values()} == {torch.float32}
    assert hidden_states(made, TOKENS).dtype == torch.float32


@torch.no_grad()
def test_the_largest_gap_is_measured_on_the_models_own_logits():
    made = model("gemma2").eval()  # with a soft cap
    one, other = (torch.randn(1, 6, made.config.hidden_size, dtype=torch.float64) for _ in range(2))
    cap, weight = made.config.final_logit_softcapping, made.lm_head.weight.double()
    logits = [cap * torch.tanh(hidden @ weight.T / cap) for hidden in (one, other)]
    assert _largest_gap(made, one, other) == pytest.approx(float((logits[0] - logits[1]).abs().max()), rel=1e-12)
