"""best.pt: packed codes survive a round trip, and a bad file gives a one-line error that names it."""

import copy
import re
from collections import Counter

import pytest
import torch
from students import student_of
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from qat_lora.errors import UserError
from qat_lora.kernels.codes import pack_codes, unpack_codes
from qat_lora.models.loading import empty_model, load_model
from qat_lora.quant.linear import Quantizer, QuantLinear, effective_weight, freeze, quantized_layers
from qat_lora.quant.student import (
    StudentSpec,
    bits_per_weight,
    load_student,
    megabytes,
    plain_model,
    quantize,
    save_student,
)

SPEC = StudentSpec(mlp="balanced2/g32", attn="lut4/r4")
TIED = StudentSpec(mlp="int3/tensor", attn="none", head="balanced4/g32")
TOKENS = torch.arange(60).reshape(3, 20) * 7


@pytest.fixture
def trained(tiny_model_dir):
    """trained(spec): a student as after training, with latents, scales and norms away from their initial values."""

    def make(spec):
        student = student_of(tiny_model_dir, spec)
        random = torch.Generator().manual_seed(3)
        for parameter in student.parameters():
            parameter.data.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=random))
        return student

    return make


@pytest.fixture
def saved(trained, tiny_model_dir, tmp_path):
    """saved(spec) → (student, path of its best.pt)."""

    def make(spec=SPEC):
        student, path = trained(spec), tmp_path / "best.pt"
        save_student(path, student, str(tiny_model_dir), spec, {"step": 3})
        return student, path

    return make


def refused(path, *args) -> str:
    """The one-line error with which load_student refuses a file."""
    with pytest.raises(UserError) as error:
        load_student(path, *args)
    assert str(path) in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_survive_packing(bits):
    for shape in ((1, 1), (3, 5), (7, 9), (16, 32)):
        codes = torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
        packed = pack_codes(codes, bits)
        assert packed.dtype == torch.uint8 and packed.shape == (-(-codes.numel() * bits // 8),)
        assert torch.equal(unpack_codes(packed, bits, shape), codes)


def test_packed_bytes_by_hand():
    assert pack_codes(torch.tensor([[1, 2, 3, 0, 2]], dtype=torch.uint8), 2).tolist() == [0b00111001, 0b10]
    assert pack_codes(torch.tensor([[5, 2, 7]], dtype=torch.uint8), 3).tolist() == [0b11010101, 0b1]
    assert pack_codes(torch.tensor([[15, 1]], dtype=torch.uint8), 4).tolist() == [0x1F]


@pytest.mark.parametrize("spec", [SPEC, TIED], ids=str)
@torch.no_grad()
def test_a_file_gives_the_same_student_bit_for_bit(saved, spec, tiny_model_dir):
    student, path = saved(spec)
    loaded, content = load_student(path, str(tiny_model_dir))
    assert torch.equal(loaded(TOKENS).logits, student(TOKENS).logits)
    assert content["info"] == {"step": 3} and StudentSpec(**content["spec"]) == spec
    assert not any(p.requires_grad for p in loaded.parameters())


@torch.no_grad()
def test_a_scale_close_to_zero_keeps_its_sign_in_the_file(trained, tiny_model_dir, tmp_path):
    student = trained(StudentSpec("int2/g32", "int2/g32"))
    for layer in quantized_layers(student).values():
        layer.quantizer.scale[::3], layer.quantizer.scale[1::3] = 1e-9, -1e-9
    save_student(tmp_path / "best.pt", student, str(tiny_model_dir), StudentSpec("int2/g32", "int2/g32"), {})
    assert torch.equal(load_student(tmp_path / "best.pt")[0](TOKENS).logits, student(TOKENS).logits)


@torch.no_grad()
def test_codes_are_read_and_never_recomputed(saved, tiny_model_dir, monkeypatch):
    """The original's multi-chip scripts encoded the base weights again when loading and lost the trained codes."""
    student, path = saved()
    codes = {name: layer.quantizer.encode(layer.weight) for name, layer in quantized_layers(student).items()}
    logits = student(TOKENS).logits
    other_weights = load_model(str(tiny_model_dir))
    for parameter in other_weights.parameters():
        parameter.normal_()
    monkeypatch.setattr(Quantizer, "encode", lambda *_: pytest.fail("codes are in the file"))
    for base in (None, other_weights):
        loaded, _ = load_student(path, base=base)
        assert torch.equal(loaded(TOKENS).logits, logits)
        for name, layer in quantized_layers(loaded).items():
            assert torch.equal(layer.quantizer.codes, codes[name]) and layer.quantizer.codes.dtype == torch.uint8


def test_a_loaded_student_saves_the_same_codes_again(saved, tiny_model_dir, tmp_path):
    _, path = saved()
    loaded, content = load_student(path)
    next(iter(quantized_layers(loaded).values())).weight.data.zero_()  # codes are saved, not the decoded weight
    save_student(tmp_path / "again.pt", loaded, str(tiny_model_dir), SPEC, content["info"])
    first, second = (torch.load(p, weights_only=True)["tensors"] for p in (path, tmp_path / "again.pt"))
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_saving_does_not_disturb_training(trained, tmp_path):
    student, twin = (copy.deepcopy(trained(SPEC)).train() for _ in range(2))
    student(TOKENS).logits.square().mean().backward()
    save_student(tmp_path / "best.pt", student, "m", SPEC, {})
    twin(TOKENS).logits.square().mean().backward()
    assert student.training and student.state_dict().keys() == twin.state_dict().keys()
    for (name, p), q in zip(student.named_parameters(), twin.parameters()):
        assert p.requires_grad == q.requires_grad and torch.equal(p, q), name
        assert torch.equal(p.grad, q.grad) if p.requires_grad else p.grad is q.grad is None, name
    assert all(layer.quantizer.codes is None for layer in quantized_layers(student).values())


def test_a_truncated_file_and_one_with_a_flipped_byte_are_refused(saved):
    _, path = saved()
    whole = path.read_bytes()
    for at in [len(whole) * percent // 100 for percent in (0, 5, 30, 60, 99)]:
        for rest in (b"", bytes([whole[at] ^ 0x10]) + whole[at + 1 :]):
            path.write_bytes(whole[:at] + rest)
            assert "damaged" in refused(path)


def test_other_files_and_another_model_are_refused(saved, tmp_path):
    path = saved()[1]
    assert "--model 'other/model' cannot be read" in refused(path, "other/model")
    assert "no such file" in refused(tmp_path / "none.pt")
    for content in ({"format": "qat_lora.student.0", "tensors": {}}, {"w": torch.ones(2)}, torch.ones(2)):
        torch.save(content, path)
        assert "not a student file" in refused(path)
    path.write_text("hello")
    assert "damaged or not a student file" in refused(path)


def test_tensors_that_fit_neither_the_spec_nor_the_base_model_are_refused(saved, tiny_model_dir):
    _, path = saved()
    config = LlamaConfig.from_pretrained(tiny_model_dir, intermediate_size=64)
    with pytest.raises(UserError, match="does not fit"):  # the model at the stored path or hub name has changed since
        load_student(path, base=LlamaForCausalLM(config))
    content = torch.load(path, weights_only=True)
    for mlp, attn in (("lut4/r4", "balanced2/g32"), ("balanced2/g16", "lut4/r4"), ("balanced4/g32", "lut4/r4")):
        torch.save(content | {"spec": dict(vars(StudentSpec(mlp, attn)))}, path)
        assert "does not fit" in refused(path)


def test_which_layers_are_quantised(trained):
    student = trained(SPEC)
    kinds = [(".mlp." in name, str(layer.quantizer.spec)) for name, layer in quantized_layers(student).items()]
    assert Counter(kinds) == {(True, "balanced2/g32"): 2 * 3, (False, "uniform4/r4"): 2 * 4}
    only_attention = trained(StudentSpec(mlp="none", attn="int4/g32"))
    assert {name.split(".")[3] for name in quantized_layers(only_attention)} == {"self_attn"}
    assert type(only_attention.model.layers[0].mlp.up_proj) is nn.Linear


def test_a_size_that_does_not_fit_names_the_layer(tiny_model_dir):
    with pytest.raises(UserError, match=r"self_attn.q_proj: 64 inputs are not divisible by group 48; use one of"):
        quantize(load_model(str(tiny_model_dir)), StudentSpec(mlp="none", attn="int4/g48"))


@pytest.mark.parametrize("spec", [SPEC, TIED])
def test_embedding_and_head_are_trained_only_if_they_are_quantised(trained, spec):
    trainable = {name: p.requires_grad for name, p in trained(spec).named_parameters()}
    assert trainable.pop("model.embed_tokens.weight") == (spec is TIED) and all(trainable.values())


@torch.no_grad()
def test_a_tied_head_is_quantised_once(trained):
    student = trained(TIED)
    head, embedding = student.lm_head, student.model.embed_tokens
    assert head.weight is embedding.weight and head.quantizer is embedding.quantizer
    assert [name for name in quantized_layers(student) if "mlp" not in name] == ["lm_head"]
    quantised = effective_weight(head)
    assert not torch.equal(quantised, head.weight)
    assert torch.equal(embedding(torch.arange(512)), quantised)
    freeze(student)
    assert torch.equal(head.weight, quantised) and torch.equal(embedding(torch.arange(512)), quantised)


def test_an_untied_embedding_keeps_full_precision(tiny_model_dir):
    student = quantize(LlamaForCausalLM(LlamaConfig.from_pretrained(tiny_model_dir, tie_word_embeddings=False)), TIED)
    assert isinstance(student.lm_head, QuantLinear) and type(student.model.embed_tokens) is nn.Embedding
    assert student.lm_head.weight.requires_grad and not student.model.embed_tokens.weight.requires_grad


def test_bits_and_megabytes_by_hand(trained):
    mlp, attention, rest = 2 * 3 * 64 * 128, 2 * (2 * 64 * 64 + 2 * 32 * 64), 512 * 64 + 5 * 64
    scales = mlp // 32 + 2 * 4 * (2 * (64 + 64 + 1) + 2 * (32 + 64 + 1))
    student = trained(SPEC)
    bits = 2 * mlp + 4 * attention + 16 * scales
    assert bits_per_weight(student) == pytest.approx(bits / (mlp + attention))
    assert megabytes(student) == pytest.approx((bits + 16 * rest) / 8e6)
    assert bits_per_weight(student, 100) == pytest.approx((bits + 1600) / (mlp + attention))
    assert megabytes(student, 100) == pytest.approx((bits + 16 * rest + 1600) / 8e6)
    frozen = copy.deepcopy(student)
    freeze(frozen)
    assert megabytes(frozen) == megabytes(student)
    assert bits_per_weight(trained(StudentSpec())) == 2 + 16 / 32
    tied = trained(TIED)
    bits = 3 * mlp + 6 * 16 + 16 * attention + (4 + 0.5) * 512 * 64  # unquantised weights count too
    assert bits_per_weight(tied) == pytest.approx(bits / (mlp + attention + 512 * 64))


def test_single_layers_get_quantisers_of_their_own(saved, tiny_model_dir):
    spec = StudentSpec("int2/g64", "balanced2/g32", layers="0.*.down_proj=q4_0,0.mlp.*=int3/g64|int3/g32,*.v_proj=none")
    assert str(spec).endswith("layers=0.*.down_proj=int4/g32,0.mlp.*=int3/g64|int3/g32,*.v_proj=none")
    student, path = saved(spec)
    kinds = {name.removeprefix("model.layers."): str(q.quantizer.spec) for name, q in quantized_layers(student).items()}
    assert kinds["0.mlp.down_proj"] == "int4/g32" and kinds["0.mlp.up_proj"] == "int3/g64"
    assert kinds["1.mlp.down_proj"] == "int2/g64" and kinds["1.self_attn.q_proj"] == "balanced2/g32"
    assert not any("v_proj" in name for name in kinds)
    loaded, content = load_student(path)
    assert StudentSpec(**content["spec"]) == spec and torch.equal(loaded(TOKENS).logits, student(TOKENS).logits)
    assert bits_per_weight(loaded) == bits_per_weight(student) > 3.5  # v_proj has 16


@pytest.mark.parametrize(
    "layers, part",
    [
        ("9.*=int4/g32", "'9.*' matches no layer; the first is 0.self_attn.q_proj"),
        ("0.*", "'0.*' is not PATTERN=QUANTISER"),
        ("0.*=int9/g32", "quantiser 'int9/g32' is not of the form"),
        ("0.*=int4/g7", "inputs are not divisible by group 7"),
    ],
)
def test_layers_that_no_model_could_have_are_refused(tiny_model_dir, layers, part):
    with pytest.raises(UserError, match=re.escape(part)):
        quantize(empty_model(str(tiny_model_dir)), StudentSpec("int2/g64", "int2/g64", layers=layers))


def test_a_four_bit_student_becomes_a_two_bit_one(trained):
    """The new student's latent weights are the old one's quantised weights, and its norms are copied too."""
    fine = trained(StudentSpec("balanced4/g32", "balanced4/g32"))
    freeze(fine)
    shown = {name: p.detach().clone() for name, p in fine.named_parameters()}
    coarse = quantize(plain_model(fine), StudentSpec("int2/g32", "lut2/r4"))
    for name, p in coarse.named_parameters():
        if ".quantizer." not in name:
            assert torch.equal(p, shown[name]), name
    assert coarse.model.layers[0].mlp.up_proj.quantizer.spec.bits == 2
    assert coarse.model.layers[0].mlp.up_proj.weight.requires_grad
