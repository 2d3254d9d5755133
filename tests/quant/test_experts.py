"""Experts that share a parameter are quantised as separate matrices, counted, trained, frozen and read back."""

import copy
from types import SimpleNamespace

import pytest
import torch
import transformers as tf
from students import student_of

from qat_lora.errors import UserError
from qat_lora.models.experts import STATIC
from qat_lora.quant.init import set_scale
from qat_lora.quant.linear import (
    ExpertWeight,
    Quantizer,
    QuantLinear,
    freeze,
    full_precision,
    quantized_layers,
    rows_of,
)
from qat_lora.quant.spec import QuantSpec
from qat_lora.quant.student import StudentSpec, bits_per_weight, quantize, student_content, thaw

SIZE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_local_experts": 3, "num_experts_per_tok": 2, "head_dim": 8,
}  # fmt: skip
KINDS = ("Mixtral", "GptOss")  # [experts, out, in] and [experts, in, out]
TOKENS = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(1))
SPECS = ("balanced2/g16", "int4/tensor", "lut4/r4")


def make(kind: str):
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(getattr(tf, f"{kind}Config")(**SIZE), dtype=torch.float32).eval()
    for p in model.parameters():
        p.data = 0.3 * torch.randn(p.shape)
    return model


def quantised(kind: str, spec: str = "balanced2/g16"):
    return student_of(make(kind), StudentSpec(spec, "none"))


@pytest.mark.parametrize("spec", SPECS)
def test_each_expert_is_quantised_independently(spec):
    weight = torch.randn(3, 32, 64, generator=torch.Generator().manual_seed(0))

    def initialised(weight):
        quantizer = Quantizer(QuantSpec.parse(spec), *weight.shape)
        layer = SimpleNamespace(weight=torch.nn.Parameter(weight), quantizer=quantizer)
        set_scale(layer)
        value = quantizer(layer.weight, torch.float32)
        value.square().sum().backward()
        return value, layer.weight, quantizer

    found, latent, together = initialised(weight)
    for expert in range(3):
        own, alone, quantizer = initialised(weight[expert])
        assert torch.equal(found[expert], own) and torch.equal(latent.grad[expert], alone.grad)
    assert together.bits == 3 * quantizer.bits
    assert torch.equal(together.decode(together.encode(latent)), found.detach())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", SPECS)
def test_the_forward_pass_uses_quantised_experts(kind, spec):
    """The same outputs as a model with replaced weights; without quantisers, as the original model."""
    student, plain = quantised(kind, spec), make(kind)
    with torch.no_grad():
        with full_precision(student):
            assert torch.equal(student(TOKENS).logits, plain(TOKENS).logits)
        for name, layer in quantized_layers(student).items():
            owner, _, leaf = name.rpartition(".")
            rows = layer.quantizer(rows_of(layer), torch.float32)
            plain.get_submodule(owner)._parameters[leaf].copy_(rows.transpose(1, 2) if layer.transposed else rows)
        torch.testing.assert_close(student(TOKENS).logits, plain(TOKENS).logits)
        frozen = copy.deepcopy(student)
        freeze(frozen)
        torch.testing.assert_close(frozen(TOKENS).logits, plain(TOKENS).logits)
    assert dict(student.named_parameters()).keys() >= dict(plain.named_parameters()).keys(), "names do not change"


@pytest.mark.parametrize("kind", KINDS)
def test_experts_and_their_scales_are_trainable(kind):
    student = quantised(kind)
    student(TOKENS, labels=TOKENS).loss.backward()
    for layer in quantized_layers(student).values():
        assert isinstance(layer, ExpertWeight) and layer.weight.grad.abs().sum() > 0
        assert all(p.grad.abs().sum() > 0 for p in layer.quantizer.parameters())
    freeze(student)
    codes = [layer.quantizer.codes for layer in quantized_layers(student).values()]
    assert all(layer.weight.requires_grad for layer in quantized_layers(thaw(student)).values())
    freeze(student)
    assert all(map(torch.equal, codes, [layer.quantizer.codes for layer in quantized_layers(student).values()]))


@pytest.mark.parametrize("kind", KINDS)
def test_experts_on_static_shapes_give_the_same_results(kind):
    found = []
    for implementation in ("eager", STATIC):
        student = quantised(kind)
        student.config._experts_implementation = implementation
        out = student(TOKENS, labels=TOKENS)
        out.loss.backward()
        found.append((out.logits, [p.grad for p in student.parameters() if p.grad is not None]))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_every_block_weight_is_counted():
    student = quantised("Mixtral")
    experts, rest = 2 * 3 * (128 * 32 + 32 * 64), 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32)
    bits = experts * 2 + experts // 16 * 16 + rest * 16
    assert bits_per_weight(student) == pytest.approx(bits / (experts + rest))
    student.fingerprint = "f"
    content = student_content(student, "a", StudentSpec("balanced2/g16", "none"), {})
    packed = content["tensors"]["model.layers.0.mlp.experts.gate_up_proj.codes"]
    assert packed.numel() == 3 * 128 * 32 * 2 // 8


def test_a_student_in_which_nothing_is_quantised_is_refused():
    model = tf.GPT2LMHeadModel(tf.GPT2Config(n_layer=1, n_embd=32, n_head=2, vocab_size=9))
    with pytest.raises(UserError, match=r"mlp=balanced2/g32 attn=none head=none quantises nothing: .*'gpt2'"):
        quantize(model, StudentSpec("balanced2/g32", "none"))
    assert any(isinstance(m, QuantLinear) for m in quantize(make("Mixtral"), StudentSpec("none", "int4/g16")).modules())
