"""Exports equal the trained model: other readers give our logits, and a changed bit is detected."""

import copy
import itertools
import json

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf_rows import from_gguf_rows
from peft import LoraConfig, PeftModel, get_peft_model
from students import student_of
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from qat_lora.errors import UserError
from qat_lora.export.gguf import ADAPTER_FILE, MODEL_FILE, check_gguf, export_formats, plan_gguf, summary, write_gguf
from qat_lora.export.hf import hf_bytes, write_hf
from qat_lora.export.source import load_source
from qat_lora.lora.adapter import load_adapter, write_origin
from qat_lora.models.loading import load_model
from qat_lora.quant.student import StudentSpec, load_student, read_student, save_student
from qat_lora.run.files import sha256

TOKENS = torch.arange(3, 35).view(2, 16)
# The modules with an adapter: their names in GGUF, and how many heads' rows are in another order there.
ADAPTED = {
    "self_attn.q_proj": ("attn_q", 4), "self_attn.k_proj": ("attn_k", 2), "self_attn.v_proj": ("attn_v", 0),
    "mlp.down_proj": ("ffn_down", 0),
}  # fmt: skip
SHAPE = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 520}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
# transformers does not read a Qwen3's head size from a GGUF file; it assumes 128.
KINDS = {"llama": HEADS, "qwen2": HEADS, "qwen3": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 128}}
SPEC = StudentSpec(mlp="int4/g32", attn="balanced3/g32", head="int8/g32")


NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def model_dir(full_model_dir):
    """model_dir(kind, **config): a folder with a random tiny model in which every parameter has an effect."""

    def make(kind, **config):
        sizes = SHAPE | KINDS.get(kind, HEADS) | {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
        return full_model_dir(AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes | config)))

    return make


@pytest.fixture(scope="module")
def folder(model_dir):
    """A tiny Llama with a tied head."""
    return model_dir("llama", tie_word_embeddings=True)


def file_of(folder, spec=SPEC, info=None, change=lambda student: None):
    """A student's file beside the model in `folder`; `change` modifies the student before it is saved."""
    student, path = student_of(folder, spec), folder / f"{next(NUMBERS)}.pt"
    change(student)
    save_student(path, student, str(folder), spec, info or {"step": 3})
    return path


def adapter_of(folder, checkpoint, **config):
    """A random adapter, with the record that it belongs to the student."""
    targets = config.pop("target_modules", ["q_proj", "k_proj", "v_proj", "down_proj"])
    options = {"r": 4, "lora_alpha": 8, "target_modules": targets, "task_type": "CAUSAL_LM"} | config
    model = get_peft_model(load_model(str(folder)), LoraConfig(**options))
    random = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = torch.randn(parameter.shape, generator=random) * 0.2
    target = folder / f"{next(NUMBERS)}.adapter"
    model.save_pretrained(target, save_embedding_layers=False)
    write_origin(target, sha256(checkpoint))
    return target


@pytest.fixture(scope="module")
def llama(folder):
    """(student file, adapter folder) of the tiny Llama."""
    checkpoint = file_of(folder)
    return checkpoint, adapter_of(folder, checkpoint)


@pytest.fixture(scope="module", params=itertools.product(KINDS, [True, False]), ids=str)
def source(model_dir, request):
    """The student of each kind of model, with a tied and with an untied head."""
    kind, tied = request.param
    return load_source(file_of(model_dir(kind, tie_word_embeddings=tied)))


@torch.no_grad()
def logits(model):
    return model.eval()(TOKENS).logits


def apart(seen, ours):
    """Root mean square of the difference between logits and ours, in units of our standard deviation."""
    assert ours.std() > 0.5
    return ((seen - ours).square().mean().sqrt() / ours.std()).item()


def merged_logits(source):
    """Our logits with the adapter added by hand."""
    student = copy.deepcopy(source.student)
    for name, lora in source.loras.items():
        student.get_submodule(name).weight.data += lora.factor * (lora.b @ lora.a)
    return logits(student)


def written(source, folder, **how):
    plan = plan_gguf(source, **how)
    folder.mkdir(exist_ok=True)
    write_gguf(source, plan, folder, folder)
    return plan


def read_by_transformers(folder):
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=MODEL_FILE, dtype=torch.float32)


# -- GGUF ------------------------------------------------------------------------------------------------------------
def test_another_reader_of_the_gguf_gives_our_logits(source, tmp_path):
    """Covers the row order of q and k, names, biases, q_norm, embedding and head, heads and RoPE."""
    plan, tied = written(source, tmp_path), source.student.config.tie_word_embeddings
    types = {line["class"]: line["type"] for line in summary(source, plan)}
    head = {"embedding, head": "Q8_0"} if tied else {"embedding": "F16", "head": "Q8_0"}
    assert types == head | {"mlp": "Q4_0", "attention": "Q4_0", "norms, biases": "F32"}
    near = 1e-5 if tied else 1e-2  # the embedding is F16 if it is not quantised
    assert apart(logits(read_by_transformers(tmp_path)), logits(source.student)) < near


def test_balanced4_differs_only_by_its_rounded_offset(folder, tmp_path):
    source = load_source(file_of(folder, StudentSpec("balanced4/g32", "balanced4/g64", "balanced4/g32")))
    plan = written(source, tmp_path)
    assert {e.kind for e in plan.entries if e.quantizer} == {"Q4_1"}
    assert 1e-5 < apart(logits(read_by_transformers(tmp_path)), logits(source.student)) < 1e-2


@pytest.mark.parametrize(
    "spec",
    [
        StudentSpec("int2/g64", "int2/tensor", "int2/g64"),
        StudentSpec("balanced2/g32", "balanced3/g32"),
        StudentSpec("lut4/r4", "int4/g16"),
        StudentSpec("none", "int8/g32"),
        StudentSpec("balanced8/g32", "none"),
    ],
    ids=str,
)
def test_the_file_size_equals_the_computed_one_for_every_type(folder, tmp_path, spec):
    plan = written(load_source(file_of(folder, spec)), tmp_path)
    assert (tmp_path / MODEL_FILE).stat().st_size == plan.model_bytes


def test_a_flipped_bit_is_detected(llama, tmp_path):
    source = load_source(*llama)
    plan = written(source, tmp_path)
    for name in (MODEL_FILE, ADAPTER_FILE):
        whole = (tmp_path / name).read_bytes()
        places = {t.name: t.data_offset + t.n_bytes // 2 for t in GGUFReader(tmp_path / name).tensors}
        places = {f"{tensor}.* changed between": at for tensor, at in places.items() if "blk.1" not in tensor}
        if name == MODEL_FILE:
            for key, skipped in (("llama.rope.freq_base", 4), ("tokenizer.ggml.pre", 12), ("llama.block_count", 4)):
                places[key] = whole.index(key.encode()) + len(key) + skipped
        for said, at in places.items():
            data = bytearray(whole)
            data[at] ^= 4
            (tmp_path / name).write_bytes(data)
            with pytest.raises(UserError, match=said):
                check_gguf(source, plan, tmp_path, tmp_path)
        (tmp_path / name).write_bytes(whole)
    check_gguf(source, plan, tmp_path, tmp_path)


def test_adapter_file_and_merged_layers_both_give_the_adapted_logits(llama, tmp_path):
    source = load_source(*llama)
    ours, alone = merged_logits(source), logits(source.student)
    assert apart(alone, ours) > 0.3
    written(source, tmp_path / "merged", merged=True)
    assert not (tmp_path / "merged" / ADAPTER_FILE).exists()
    assert apart(logits(read_by_transformers(tmp_path / "merged")), ours) < 1e-2

    written(source, tmp_path / "lora")
    model = read_by_transformers(tmp_path / "lora")
    reader = GGUFReader(tmp_path / "lora" / ADAPTER_FILE)
    values = {key: field.contents() for key, field in reader.fields.items()}
    names = ("general.type", "adapter.type", "general.architecture")
    assert [values[name] for name in names] == ["adapter", "lora", "llama"]
    tensors = {t.name: np.array(t.data) for t in reader.tensors}
    for block, layer in enumerate(model.model.layers):
        for path, (name, heads) in ADAPTED.items():
            a, b = (tensors[f"blk.{block}.{name}.weight.lora_{part}"] for part in "ab")
            update = values["adapter.lora.alpha"] / len(a) * from_gguf_rows(b, heads) @ a
            layer.get_submodule(path).weight.data += torch.from_numpy(update.astype(np.float32))
    assert apart(logits(model), ours) < 1e-5


def test_a_layers_own_rank_or_scaling_goes_into_its_b(folder, llama):
    patterns = {"rank_pattern": {"q_proj": 2}, "alpha_pattern": {"v_proj": 6}, "use_rslora": True}
    source = load_source(llama[0], adapter_of(folder, llama[0], **patterns))
    plan = plan_gguf(source)
    for module, lora in source.loras.items():
        _, _, block, path = module.split(".", 3)
        name, heads = ADAPTED[path]
        b = from_gguf_rows(plan.adapter[f"blk.{block}.{name}.weight.lora_b"].numpy(), heads)
        seen = source.alpha / b.shape[1] * b @ lora.a.numpy()
        assert np.allclose(seen, (lora.factor * lora.b @ lora.a).numpy(), rtol=1e-5, atol=1e-6)


# -- HF --------------------------------------------------------------------------------------------------------------
def test_hf_folder_gives_our_logits_bit_for_bit(source, tmp_path, tiny_tokenizer):
    write_hf(source, tmp_path, tmp_path, False)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path)), logits(source.student))
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == tiny_tokenizer.chat_template
    assert (tmp_path / "generation_config.json").is_file() and not (tmp_path / "adapter").exists()
    assert (tmp_path / "model.safetensors").stat().st_size == pytest.approx(hf_bytes(source, False), rel=0.02)


def test_adapter_beside_the_model_and_merged_into_it(llama, tmp_path):
    source = load_source(*llama)
    for name in ("hf", "merged"):
        (tmp_path / name).mkdir()
        write_hf(source, tmp_path / name, tmp_path / name, name == "merged")
    base, ours = AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), merged_logits(source)
    assert torch.equal(logits(base), logits(source.student))
    assert apart(logits(PeftModel.from_pretrained(base, tmp_path / "hf" / "adapter")), ours) < 1e-5
    config = json.loads((tmp_path / "hf" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "hf")
    other = tmp_path / "other.pt"
    torch.save(read_student(llama[0]) | {"info": {"step": 9}}, other)
    with pytest.raises(UserError, match="was trained on another student"):  # it still records its own
        load_adapter(load_student(other)[0], tmp_path / "hf" / "adapter", other)
    assert not (tmp_path / "merged" / "adapter").exists()
    assert apart(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), ours) < 1e-5


# -- adapters on experts ---------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def mixtral(model_dir):
    """(student file, adapter on attention and experts) of a tiny Mixtral."""
    folder = model_dir("mixtral", num_local_experts=4)
    checkpoint = file_of(folder, StudentSpec("none", "int4/g32"))
    experts = [f"mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")]
    return checkpoint, adapter_of(folder, checkpoint, target_modules=["q_proj"], target_parameters=experts)


@pytest.mark.parametrize("merged", [False, True])
def test_adapter_on_experts(mixtral, tmp_path, merged):
    ours, source = logits(load_adapter(load_student(mixtral[0])[0], mixtral[1], mixtral[0])), load_source(*mixtral)
    assert apart(logits(source.student), ours) > 0.1 and len(source.updates) == 2 * 3
    write_hf(source, tmp_path, tmp_path, merged)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    model = model if merged else PeftModel.from_pretrained(model, tmp_path / "adapter")
    assert apart(logits(model), ours) < 1e-5


def test_mixture_of_experts_cannot_be_written_as_gguf(mixtral):
    with pytest.raises(UserError, match="is a mixtral: GGUF export supports llama"):
        plan_gguf(load_source(mixtral[0]))


# -- plans -----------------------------------------------------------------------------------------------------------
def test_formats_of_a_model(model_dir, folder, mixtral):
    assert export_formats(str(folder)) == "export: hf, gguf"
    assert export_formats(str(model_dir("llama", attention_bias=True))).endswith("not written to GGUF")
    said = export_formats(read_student(mixtral[0])["model"])
    assert said.startswith("export: hf; no GGUF: model ") and "is a mixtral" in said and "\n" not in said


# -- Gemma -----------------------------------------------------------------------------------------------------------
def test_norms_of_gemma_include_one_plus_the_weight_and_the_scale_of_q(model_dir, tmp_path):
    source = load_source(file_of(model_dir("gemma3_text", head_dim=16, query_pre_attn_scalar=24)))
    plan = written(source, tmp_path)
    tensors = {t.name: t.data for t in GGUFReader(tmp_path / MODEL_FILE).tensors}
    weights = dict(source.student.named_parameters())
    for name, parameter, factor in (
        ("blk.1.attn_q_norm", "self_attn.q_norm", (16 / 24) ** 0.5),
        ("blk.1.attn_k_norm", "self_attn.k_norm", 1),
        ("blk.1.ffn_norm", "pre_feedforward_layernorm", 1),
        ("blk.1.attn_norm", "input_layernorm", 1),
        ("blk.1.post_attention_norm", "post_attention_layernorm", 1),
        ("blk.1.post_ffw_norm", "post_feedforward_layernorm", 1),
    ):
        ours = (1 + weights[f"model.layers.1.{parameter}.weight"]) * factor
        assert np.array_equal(tensors[f"{name}.weight"], ours.numpy()), name
    assert {e.kind for e in plan.entries if e.quantizer} == {"Q4_0", "Q8_0"}  # codes and scales are exact


# -- bad input -------------------------------------------------------------------------------------------------------
def test_untrained_student(folder):
    with pytest.raises(UserError, match="is untrained"):
        load_source(file_of(folder, info={"step": 0, "trained": False}))
    assert load_source(file_of(folder, info={"stage": "layers"})).loras == {}


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("norm.weight", float("nan"), r"damaged: model\.norm\.weight holds NaN"),
        ("layers.0.mlp.up_proj.quantizer.scale", 1e6, r"damaged: model\.layers\.0\.mlp\.up_proj\.weight"),
    ],
)
def test_student_with_nan_or_a_scale_beyond_fp16(folder, name, value, words):
    bad = file_of(folder, change=lambda student: student.model.get_parameter(name).data.fill_(value))
    with pytest.raises(UserError, match=words):
        load_source(bad)


def test_adapter_of_another_student(folder, llama):
    with pytest.raises(UserError, match="another student"):
        load_source(file_of(folder, StudentSpec("int2/g64", "int2/g64")), llama[1])


def test_adapter_that_is_more_than_a_product(folder, llama):
    with pytest.raises(UserError, match="use_dora=True"):
        load_source(llama[0], adapter_of(folder, llama[0], use_dora=True))


def test_type_that_cannot_hold_a_layer_is_refused_before_anything_is_written(folder):
    source = load_source(file_of(folder, StudentSpec("int2/g64", "int2/g32")))
    with pytest.raises(UserError, match=r"Q2_0 cannot hold model\.layers\.0\.self_attn\.q_proj, which is int2/g32"):
        plan_gguf(source, "Q2_0")
    assert {e.kind for e in plan_gguf(source, "Q4_0").entries if e.quantizer} == {"Q4_0"}
    assert {e.kind for e in plan_gguf(source).entries if e.quantizer} == {"Q2_0", "Q4_0"}
