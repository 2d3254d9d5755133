"""Rollouts with static shapes: greedy ones equal HF generate, sampled ones follow the model's distribution."""

import pytest
import torch
import transformers as tf

from qat_lora.errors import UserError
from qat_lora.kernels.fake_quant import FakeQuant
from qat_lora.models.loading import load_model
from qat_lora.quant.init import initialise
from qat_lora.quant.linear import freeze, quantized_layers
from qat_lora.quant.student import StudentSpec, quantize
from qat_lora.rl.policy import Prompts, log_probs
from qat_lora.rl.rollout import Sampling, draw, rollout

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8}
KINDS = {
    "llama": tf.LlamaConfig(**SHAPE), "qwen2": tf.Qwen2Config(**SHAPE), "qwen3": tf.Qwen3Config(**SHAPE, head_dim=8),
    "mistral": tf.MistralConfig(**SHAPE, sliding_window=5), "gemma3": tf.Gemma3TextConfig(**SHAPE, **WINDOWS),
    "gemma2": tf.Gemma2Config(**SHAPE, **WINDOWS, final_logit_softcapping=2.0),
    "mixtral": tf.MixtralConfig(**SHAPE, num_local_experts=4),
    "gpt_oss": tf.GptOssConfig(**SHAPE, **WINDOWS, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_5": tf.Qwen3_5TextConfig(
        **SHAPE, head_dim=8, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    ),
}  # fmt: skip
TEXTS = [[5, 6, 7, 8, 9, 10], [40, 41], [3, 3, 3]]
GREEDY = Sampling(temperature=0)


def make(kind: str):
    torch.manual_seed(3)
    model = tf.AutoModelForCausalLM.from_config(KINDS[kind]).eval()
    for p in model.parameters():
        if p.ndim > 1:
            p.data.mul_(8)  # far from uniform, so that the most probable token is not a matter of rounding
    model.get_output_embeddings().weight.requires_grad_(False)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_generate_token_for_token(kind, backend):
    model, length, stopped = make(kind), 20, 0
    free = rollout(model, Prompts.of(TEXTS, 9, 0), 1, length, GREEDY, [63], backend)
    ends = [63, int(free.tokens[0, 0, 7]), int(free.tokens[1, 0, 3])]  # tokens that do occur
    got = rollout(model, Prompts.of(TEXTS, 9, 0), 2, length, GREEDY, ends, backend)
    settings = {"max_new_tokens": length, "do_sample": False, "eos_token_id": ends, "pad_token_id": ends[0]}
    for row, text in enumerate(TEXTS):
        wanted = model.generate(torch.tensor([text]), **settings)[0, len(text) :].tolist()
        for tokens, mask, ended in zip(got.tokens[row], got.mask[row], got.ended[row]):
            assert tokens[mask].tolist() == wanted and ended.item() == (wanted[-1] in ends)
            assert set(tokens[len(wanted) :].tolist()) <= {ends[0]}
        stopped += wanted[-1] in ends
    assert stopped


@pytest.mark.parametrize(("kind", "head"), [("llama", "none"), ("qwen3", "int4/g16"), ("gpt_oss", "none")])
def test_a_student_in_training_quantises_its_weights_once_and_samples_from_what_will_be_served(
    kind, head, backend, monkeypatch
):
    student = quantize(make(kind), StudentSpec("int2/g16", "int4/g16", head))
    initialise(student)
    prompts, calls, forward = Prompts.of(TEXTS, 9, 0), [], FakeQuant.forward
    monkeypatch.setattr(FakeQuant, "forward", lambda ctx, *given: calls.append(1) or forward(ctx, *given))
    drawn = rollout(student, prompts, 2, 12, GREEDY, [63], backend)
    assert len(calls) == len(quantized_layers(student)), "each weight once"
    logp = log_probs(student, prompts, drawn.tokens)
    assert logp.requires_grad and len(calls) > len(quantized_layers(student))
    torch.testing.assert_close(drawn.logp, logp.detach() * drawn.mask, rtol=1e-4, atol=1e-4)
    freeze(student)
    assert torch.equal(rollout(student, prompts, 2, 12, GREEDY, [63], backend).tokens, drawn.tokens)


def test_early_stopping_only_saves_time(backend):
    model = make("llama")
    first = rollout(model, Prompts.of(TEXTS, 9, 0), 1, 3, GREEDY, [63], backend)
    ends = first.tokens[:, 0, 1].tolist()  # every completion ends at its second token at the latest
    short, long = (rollout(model, Prompts.of(TEXTS, 9, 0), 1, n, GREEDY, ends, backend) for n in (4, 40))
    assert long.ended.all() and torch.equal(long.tokens, short.tokens)
    assert long.tokens.shape == (3, 1, 2), "nothing is computed beyond the longest completion"


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_the_samplers_log_probabilities_equal_the_scoring_pass(sharp_model_dir, backend, temperature):
    model = load_model(str(sharp_model_dir))
    model.get_output_embeddings().weight.requires_grad_(False)
    backend.seed(0)
    prompts = Prompts.of(TEXTS, 8, 0)
    drawn = rollout(model, prompts, 4, 12, Sampling(temperature), [2, 30, 31, 32, 33, 34], backend)
    with torch.no_grad():
        logp = log_probs(model, prompts, drawn.tokens, temperature)
    torch.testing.assert_close(drawn.logp, logp * drawn.mask, rtol=1e-4, atol=1e-4)
    assert len({tuple(row) for row in drawn.tokens.flatten(0, 1).tolist()}) > 6, "the completions of a prompt differ"


def test_the_seed_determines_the_draws(backend):
    model, found = make("llama"), []
    for seed in (1, 1, 2):
        backend.seed(seed)
        found.append(rollout(model, Prompts.of(TEXTS, 9, 0), 3, 6, Sampling(), [63], backend).tokens)
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


# -- draws -----------------------------------------------------------------------------------------------------------
LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0])


@pytest.mark.parametrize("sampling, left", [
    (Sampling(), 5), (Sampling(0.5), 5), (Sampling(2.0), 5), (Sampling(top_k=2), 2), (Sampling(top_p=0.6), 2),
    (Sampling(top_p=0.5), 1),
])  # fmt: skip
def test_draws_follow_the_softmax_of_what_top_k_and_top_p_leave(sampling, left):
    """softmax of the logits: .56 .21 .12 .08 .03"""
    logits, count = LOGITS / sampling.temperature, 40_000
    torch.manual_seed(0)
    token, logp, entropy = draw(LOGITS.expand(count, -1), sampling)
    expected = torch.distributions.Categorical(logits=logits)
    torch.testing.assert_close(logp, expected.log_prob(token))
    torch.testing.assert_close(entropy, expected.entropy().expand(count))
    wanted = torch.where(torch.arange(5) < left, logits, -torch.inf).softmax(0)
    torch.testing.assert_close(torch.bincount(token, minlength=5) / count, wanted, rtol=0, atol=0.01)


@pytest.mark.parametrize(
    "values", [{"temperature": -1}, {"temperature": 1e-9}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}]
)
def test_impossible_sampling_is_refused(values):
    with pytest.raises(UserError, match=next(iter(values)).replace("_", "-")):
        Sampling(**values)
