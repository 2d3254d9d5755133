"""Any .gguf file that transformers can read works as a model, with its config, tokenizer and exact weights."""

import json
import shutil
from types import SimpleNamespace

import gguf
import numpy as np
import packaged
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from gguf_rows import from_gguf_rows
from packaged import finish, gguf_bytes
from sizes import TINY
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from qat_lora.errors import UserError
from qat_lora.export.gguf import plan_gguf, write_gguf
from qat_lora.export.gguf_file import SPLITS
from qat_lora.export.source import load_source
from qat_lora.models.gguf_settings import add_implied_settings
from qat_lora.models.loading import empty_model, load_config, load_model, load_tokenizer, model_fingerprint

TOKENS = torch.arange(3, 35).unsqueeze(0)


@pytest.fixture(scope="module")
def folder(tiny_tokenizer, tmp_path_factory):
    """A small Llama whose rows are as long as a K-quant block, with a tokenizer whose pre-tokeniser GGUF can name."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(0)
    config = LlamaConfig(**TINY | {"hidden_size": 256, "intermediate_size": 256})
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer.save_pretrained(folder)
    state = json.loads((folder / "tokenizer.json").read_text())
    split = {"type": "Split", "pattern": {"Regex": next(iter(SPLITS))[0]}, "behavior": "Isolated", "invert": False}
    bytes_alone = state["pre_tokenizer"] | {"use_regex": False}
    state["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, bytes_alone]}
    (folder / "tokenizer.json").write_text(json.dumps(state))
    return folder


def write(folder, path, kind: str) -> dict[str, np.ndarray]:
    """Write the model in a folder as a GGUF file, all its matrices in one type; returns the fp32 value of each
    parameter in that file."""
    wanted, random = {}, np.random.default_rng(0)

    def store(key, rows, heads):
        kind_here = GGMLQuantizationType[kind if rows.ndim > 1 else "F32"]
        try:
            data = gguf.quants.quantize(rows, kind_here)
        except NotImplementedError:  # the library cannot write K-quants: use random codes with small scales
            block, size = gguf.GGML_QUANT_SIZES[kind_here]
            data = random.integers(0, 255, (len(rows), rows.shape[1] // block * size), dtype=np.uint8)
            scales = slice(0, 4) if kind == "Q4_K" else slice(size - 2, size)
            data.reshape(-1, size)[:, scales].view("<f2")[:] = 0.001
        wanted[key] = from_gguf_rows(gguf.quants.dequantize(data, kind_here).reshape(rows.shape), heads)
        return data, kind_here

    gguf_bytes(folder, path, store)
    return wanted


@torch.no_grad()
@pytest.mark.parametrize("kind", ["F32", "BF16", "Q8_0", "Q4_K", "Q6_K"])
def test_loaded_weights_equal_the_dequantised_blocks(folder, tmp_path, kind):
    path = tmp_path / "some model.gguf"
    wanted = write(folder, path, kind)
    model = load_model(str(path))
    for key, parameter in model.named_parameters():
        assert parameter.dtype == torch.float32 and np.array_equal(parameter.numpy(), wanted[key]), key
    if kind != "F32":
        return
    assert torch.equal(model(TOKENS).logits, load_model(str(folder))(TOKENS).logits)
    tokenizer, text = load_tokenizer(str(path)), "def f(x): return x[1:]  # some text"
    assert tokenizer(text)["input_ids"] == AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert load_config(str(path)).hidden_size == 256
    empty_model(str(path))
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "saved")(TOKENS).logits, model(TOKENS).logits)


def test_other_files_in_the_folder_are_ignored(folder, sharp_model_dir, tmp_path, monkeypatch):
    gguf_bytes(folder, tmp_path / "m.gguf")
    known = model_fingerprint(str(tmp_path / "m.gguf"))
    crowd = shutil.copytree(sharp_model_dir, tmp_path / "crowd")
    (crowd / "adapter_config.json").write_text("{}")
    (crowd / "chat_template.jinja").write_text("another's")
    (crowd / "tokenizer_config.json").write_text('{"eos_token": "<|pad|>"}')
    shutil.copy(tmp_path / "m.gguf", crowd)
    monkeypatch.chdir(crowd)
    assert model_fingerprint("m.gguf") == known
    assert load_model("m.gguf").config.hidden_size == 256
    tokenizer = load_tokenizer("m.gguf")
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.chat_template != "another's"


@pytest.mark.parametrize("add, said", [
    (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR), "rope.scaling.type linear"),
    (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.NONE), None),
    (lambda w: w.add_final_logit_softcapping(30.0), "final_logit_softcapping 30.0"),
    (lambda w: w.add_final_logit_softcapping(0.0), None),
    (lambda w: w.add_sliding_window(8), "attention.sliding_window 8"),
    (lambda w: w.add_logit_scale(0.25), "logit_scale 0.25"),
    (lambda w: w.add_layer_norm_eps(2**-10), "attention.layer_norm_epsilon 0.0009765625"),
    (lambda w: w.add_tensor("rope_freqs.weight", np.linspace(1, 8, 32, dtype=np.float32)), "rope_freqs.weight"),
    (lambda w: w.add_tensor("rope_freqs.weight", np.ones(32, np.float32)), None),
])  # fmt: skip
def test_a_setting_that_transformers_does_not_read_from_the_file_is_refused(folder, tmp_path, monkeypatch, add, said):
    def adding(name, kind, make=packaged.model_writer):
        writer, note = make(name, kind)
        add(writer)
        return writer, note

    monkeypatch.setattr(packaged, "model_writer", adding)
    gguf_bytes(folder, tmp_path / "m.gguf")
    if said is None:
        load_config(str(tmp_path / "m.gguf"))
        return
    for load in (load_config, load_tokenizer, load_model):
        with pytest.raises(UserError, match=rf"m\.gguf' has {said}, which transformers .* give the model as a folder"):
            load(str(tmp_path / "m.gguf"))


def gemma(folder, tokenizer, kind="gemma3_text", **config):
    """A folder with a tiny Gemma whose attention is far from uniform."""
    sizes = TINY | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16} | config
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes))
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3 if parameter.ndim > 1 else 1)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
@pytest.mark.parametrize("config", [
    {"head_dim": 128, "query_pre_attn_scalar": 128},  # transformers' default is 256
    {"query_pre_attn_scalar": 24},  # folded into the norm of q
    {"num_hidden_layers": 62, "hidden_size": 48, "query_pre_attn_scalar": 24},  # the 27B model has its own rule
    {"num_hidden_layers": 4, "layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 8},
    {"num_hidden_layers": 3, "layer_types": ["full_attention"] * 3},  # the file names no window
])  # fmt: skip
def test_gemma_is_what_its_file_implies(tiny_tokenizer, tmp_path, config):
    folder = gemma(tmp_path / "gemma", tiny_tokenizer, **config)
    source = load_source(None, model=str(folder))
    write_gguf(source, plan_gguf(source), tmp_path, tmp_path)
    logits = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(TOKENS).logits
    read = load_model(str(tmp_path / "model.gguf"))
    assert (read(TOKENS).logits - logits).std() < 0.02 * logits.std()
    wanted = config.get("query_pre_attn_scalar") if config.get("num_hidden_layers") == 62 else read.config.head_dim
    assert read.config.query_pre_attn_scalar == wanted


def test_the_scale_of_gemma_2():
    config = AutoConfig.for_model(
        "gemma2", num_hidden_layers=46, hidden_size=4608, num_attention_heads=32, head_dim=128
    )
    add_implied_settings(SimpleNamespace(fields={}), config)
    assert config.query_pre_attn_scalar == 144
    config.num_hidden_layers = 42
    add_implied_settings(SimpleNamespace(fields={}), config)
    assert config.query_pre_attn_scalar == 128


def test_unreadable_files_are_refused(folder, tmp_path):
    whole = gguf_bytes(folder, tmp_path / "m.gguf")
    for name, content in (("cut", whole[: len(whole) // 2]), ("head", whole[:3000]), ("text", b"hello"), ("no", b"")):
        (tmp_path / f"{name}.gguf").write_bytes(content)
    writer = GGUFWriter(None, "no_such_architecture")
    writer.add_tensor("x", np.zeros((2, 2), np.float32))
    finish(writer, tmp_path / "odd.gguf")
    for name in ("cut", "head", "text", "no", "odd", "missing"):
        path = str(tmp_path / f"{name}.gguf")
        for load in (load_config, load_tokenizer, empty_model, load_model):
            with pytest.raises(UserError) as error:
                load(path)
            message = str(error.value)
            assert repr(path) in message and len(message.splitlines()) == 1 and "qat_lora_gguf_" not in message
            assert {"missing": "no such file", "odd": "no_such_architecture"}.get(name, "cannot be loaded") in message
    (tmp_path / "weights.pt").write_bytes(b"")
    with pytest.raises(UserError, match=r"not a \.gguf file"):
        load_model(str(tmp_path / "weights.pt"))
