"""A written model works in plain transformers: all tensors, the same logits, and generation that stops at a turn's
end."""

import pytest
import torch
import transformers as tf
from sizes import DEEPSEEK, TINY
from transformers import AutoModelForCausalLM, AutoTokenizer

from qat_lora.errors import UserError
from qat_lora.models.loading import load_model, load_tokenizer, plain_state, weights_fingerprint
from qat_lora.models.writing import logits_on_cpu, probe, write_model

SHAPE = TINY | {"eos_token_id": 0}
CONFIGS = {
    "gemma3": tf.Gemma3TextConfig(head_dim=16, **SHAPE),
    "gemma4": tf.Gemma4TextConfig(
        head_dim=16, global_head_dim=16, layer_types=["sliding_attention", "full_attention"],
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=512, num_kv_shared_layers=0, **SHAPE
    ),
    "mixtral": tf.MixtralConfig(num_local_experts=4, **SHAPE),
    "deepseek": tf.DeepseekV3Config(**DEEPSEEK | {"eos_token_id": 0}),
    "apertus": tf.ApertusConfig(**SHAPE),
}  # fmt: skip
BUFFERS = {"gemma4": "layer_scalar", "deepseek": "e_score_correction_bias", "apertus": "beta"}


def model(kind: str):
    """A random model in which buffers affect the logits."""
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(CONFIGS[kind], dtype=torch.float32).eval()
    for parameter in made.parameters():
        parameter.data = (0.3 if parameter.ndim > 1 else 0.1) * torch.randn(parameter.shape) + (parameter.ndim < 2)
    for name, buffer in made.named_buffers():
        if name.endswith(BUFFERS.get(kind, "-")):
            buffer.copy_(torch.linspace(0.4, 3, buffer.numel()).view(buffer.shape))
    return made


@pytest.mark.parametrize("kind", CONFIGS)
def test_plain_transformers_computes_the_same_logits(tiny_tokenizer, tmp_path, kind):
    ours = model(kind)
    write_model(ours, tiny_tokenizer, tmp_path, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.arange(3, 35).view(2, 16)
    with torch.no_grad():
        wanted = ours(tokens).logits
        assert torch.allclose(theirs(tokens).logits, wanted, atol=1e-5 * float(wanted.std()))
    if kind in BUFFERS:
        assert any(name.endswith(BUFFERS[kind]) for name in plain_state(ours))


@pytest.mark.parametrize("kind", BUFFERS)
def test_buffers_are_part_of_the_fingerprint(kind):
    before, other = model(kind), model(kind)
    assert weights_fingerprint(before) == weights_fingerprint(other)
    next(b for n, b in other.named_buffers() if n.endswith(BUFFERS[kind])).add_(1)
    assert weights_fingerprint(before) != weights_fingerprint(other)


def test_a_folder_without_a_tensor_is_refused(tiny_tokenizer, tmp_path):
    ours = model("gemma4")
    state = {name: value for name, value in plain_state(ours).items() if "layer_scalar" not in name}
    with pytest.raises(UserError, match=r"layers\.0\.layer_scalar changed between"):
        write_model(ours, tiny_tokenizer, tmp_path, tmp_path, state, logits_on_cpu(ours, probe(ours)))


@pytest.mark.parametrize("wrong", ["shifted", "nan", "scaling"])
def test_a_folder_that_gives_other_logits_is_refused(tiny_tokenizer, tmp_path, wrong):
    """scaling: the written model has the same tensors but computes something else."""
    ours, given = model("gemma3"), ()
    if wrong == "scaling":
        ours.model.layers[0].self_attn.scaling *= 2
    else:
        logits = logits_on_cpu(ours, probe(ours))
        given = plain_state(ours), logits + 1e-3 * logits.std() if wrong == "shifted" else logits * float("nan")
    with pytest.raises(UserError, match="logits from plain transformers differ from the trained"):
        write_model(ours, tiny_tokenizer, tmp_path, tmp_path, *given)


def test_plain_generate_stops_where_a_turn_ends(tiny_model_dir, tmp_path):
    """The model is a base model that ends texts with one token, but whose template ends turns with another."""
    model, tokenizer = load_model(str(tiny_model_dir)), load_tokenizer(str(tiny_model_dir))
    tokenizer.add_special_tokens({"eos_token": "<|pad|>"})
    ends = {tokenizer.convert_tokens_to_ids(t) for t in ("<|pad|>", "<|im_end|>")}
    model.generation_config = tf.GenerationConfig(eos_token_id=tokenizer.eos_token_id, do_sample=False)
    turn_end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    for name, parameter in model.named_parameters():  # it outputs <|im_end|> for any text
        parameter.data.fill_(float("embed" in name or "norm" in name))
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(512, 64))
    model.lm_head.weight.data[turn_end] = 1
    model.config.tie_word_embeddings = False
    write_model(model, tokenizer, tmp_path, tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert set(plain.generation_config.eos_token_id) == ends
    prompt = AutoTokenizer.from_pretrained(tmp_path)("say", return_tensors="pt")
    said = plain.generate(**prompt, max_new_tokens=8)[0, prompt["input_ids"].shape[1] :]
    assert said.tolist() == [turn_end]
