"""Models that are incomplete, contradict their config, or are not causal language models are refused."""

import json
import logging
import os
import pickle
import shutil
import subprocess
import sys

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sizes import DEEPSEEK, TINY
from transformers import AutoModelForCausalLM
from transformers.utils.logging import get_verbosity, set_verbosity, set_verbosity_warning

from qat_lora.errors import UserError
from qat_lora.models.architecture import hidden_states
from qat_lora.models.loading import (
    WarnOnce,
    check_headers,
    check_length,
    empty_model,
    load_config,
    load_model,
    load_tokenizer,
)
from qat_lora.models.writing import write_model

NAME = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(sharp_model_dir, tmp_path):
    return shutil.copytree(sharp_model_dir, tmp_path / "model")


def edit(folder, **config):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def rewrite(folder, change):
    """Add or replace these tensors in the model's file, or remove those that are None."""
    tensors = load_file(folder / "model.safetensors") | change
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})


def embedding(folder) -> torch.Tensor:
    return load_file(folder / "model.safetensors")["model.embed_tokens.weight"]


def refused(folder, *functions) -> str:
    """The one-line error with which all the functions refuse a model."""
    found = set()
    for function in functions:
        with pytest.raises(UserError) as error:
            function(str(folder))
        found.add(str(error.value))
    (said,) = found
    assert len(said.splitlines()) == 1
    return said


# -- config and weights ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("tensors, words", [
    ({NAME: None}, f"its weight files lack 1 of its tensors ({NAME} is the first)"),
    ({"model.norm.weight": torch.ones(3)}, "model.norm.weight is (3,) in its file but (64,) by its config.json"),
    ({f"{NAME}s": torch.ones(64)}, f"hold 1 tensors that its config.json does not describe ({NAME}s is"),
])  # fmt: skip
def test_tensors_that_contradict_the_config_are_refused(folder, tensors, words):
    rewrite(folder, tensors)
    assert words in refused(folder, load_model, empty_model)


def test_a_wrong_number_of_experts_in_the_config_is_refused(tmp_path):
    """Loading stacks the expert tensors, and only then is the shape wrong."""
    config = transformers.MixtralConfig(**TINY, num_local_experts=4)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert load_model(str(tmp_path)).config.num_local_experts == 4
    edit(tmp_path, num_local_experts=2)
    assert "(4, 64, 128) in its file but (2, 64, 128) by its config.json" in refused(tmp_path, load_model, empty_model)


def test_a_config_that_ties_a_head_and_embedding_which_differ_in_the_file_is_refused(folder):
    """Workers cannot exchange gradients if some have a tied and others an untied model: torch aborts the process."""
    rewrite(folder, {"lm_head.weight": embedding(folder) + 1})
    message = refused(folder, load_model, empty_model)
    assert "tie_word_embeddings" in message and "lm_head.weight" in message and "embed_tokens" in message
    edit(folder, tie_word_embeddings=False)
    model = load_model(str(folder))
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight + 1)


def test_a_tied_head_stored_twice_is_tied(folder):
    rewrite(folder, {"lm_head.weight": embedding(folder)})
    for model in (load_model(str(folder)), empty_model(str(folder))):
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_some_extra_tensors_are_ignored(folder, tmp_path):
    """Buffers that older versions stored, and multi-token prediction heads."""
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8), "mtp.layers.0.norm.weight": torch.ones(3)}
    rewrite(folder, more)
    load_model(str(folder)), empty_model(str(folder))
    config = transformers.DeepseekV3Config(**DEEPSEEK, num_nextn_predict_layers=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "deep")
    rewrite(tmp_path / "deep", {"model.layers.2.eh_proj.weight": torch.ones(3)})
    assert "model.layers.2.eh_proj.weight" in refused(tmp_path / "deep", load_model, empty_model)
    edit(tmp_path / "deep", num_nextn_predict_layers=1)
    load_model(str(tmp_path / "deep")), empty_model(str(tmp_path / "deep"))


@pytest.mark.parametrize("size", [0, 100, 100_000])
def test_a_truncated_file_is_refused(folder, size):
    os.truncate(folder / "model.safetensors", size)
    assert "model.safetensors is damaged" in refused(folder, load_model, empty_model)


def test_a_missing_shard_is_refused(folder):
    load_model(str(folder)).save_pretrained(folder, max_shard_size="100KB")
    (folder / "model-00002-of-00005.safetensors").unlink()
    (folder / "model.safetensors").unlink(missing_ok=True)
    words = "model-00002-of-00005.safetensors, listed in model.safetensors.index.json, is missing"
    assert words in refused(folder, load_model, empty_model)


def test_a_folder_without_weights_is_refused(folder):
    (folder / "model.safetensors").unlink()
    assert "has no weights" in refused(folder, load_model, empty_model)


def test_a_pickle_is_read_without_running_code_from_it(folder, tmp_path):
    model = load_model(str(folder))
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    again = load_model(str(folder))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), again.parameters()))

    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Evil()))
    said = "is damaged (it holds something other than tensors, and none of it was run); copy or download it again"
    assert refused(folder, load_model) == f"{folder}/pytorch_model.bin {said}"
    torch.save({NAME: "text"}, folder / "pytorch_model.bin")
    assert f"{folder}/pytorch_model.bin is damaged (it does not hold tensors by name)" in refused(folder, load_model)
    shards = {"weight_map": {NAME: "a.bin", "model.norm.weight": "b.bin"}}
    (folder / "pytorch_model.bin").unlink()
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(shards))
    torch.save({NAME: torch.ones(2)}, folder / "a.bin")
    (folder / "b.bin").write_bytes(pickle.dumps(Evil()))
    assert f"{folder}/b.bin is damaged (it holds something other" in refused(folder, load_model)
    assert not (tmp_path / "ran").exists()


# -- not a causal language model -------------------------------------------------------------------------------------
EVERYTHING = (load_config, load_tokenizer, empty_model, check_headers, load_model)


@pytest.mark.parametrize("change, parts", [
    ({"model_type": "foo"}, ["'foo'", "transformers", "does not know"]),
    ({"model_type": "foo", "auto_map": {"AutoModelForCausalLM": "m.M"}}, ["'foo'", "its own Python code"]),
    ({"model_type": None}, ["no model_type"]), ({"model_type": "bert"}, ["'bert'", "an encoder;"]),
    ({"model_type": "t5", "is_encoder_decoder": True}, ["'t5'", "an encoder-decoder;"]),
    ({"model_type": "vit"}, ["'vit'", "no causal language model"]), ({"hidden_size": "wide"}, ["hidden_size", "wide"]),
])  # fmt: skip
def test_an_unsupported_config_is_refused(folder, change, parts):
    edit(folder, **change)
    message = refused(folder, *EVERYTHING)
    assert [part for part in (str(folder), *parts) if part not in message] == []


def test_remote_code_is_not_needed_if_transformers_has_the_class(folder):
    edit(folder, auto_map={"AutoModelForCausalLM": "modeling_llama.Other"})
    assert type(load_model(str(folder))).__module__.startswith("transformers.")


def test_a_damaged_or_missing_config_is_refused(folder, tmp_path):
    (folder / "config.json").write_text("{")
    assert "config.json is damaged" in refused(folder, *EVERYTHING)
    assert "no config.json" in refused(tmp_path, load_config, empty_model, load_model)


def test_a_folder_with_a_model_and_an_adapter_is_refused(folder):
    """transformers would silently apply the adapter to the model."""
    peft.get_peft_model(load_model(str(folder)), peft.LoraConfig(task_type="CAUSAL_LM")).save_pretrained(folder)
    message = refused(folder, *EVERYTHING)
    assert "contains a full model and an adapter" in message and "--adapter" in message
    (folder / "config.json").unlink()
    message = refused(folder, *EVERYTHING)
    assert "is an adapter, not a model" in message and "--model" in message


def test_a_damaged_or_missing_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").write_text("{}")
    assert "cannot be loaded" in refused(folder, load_tokenizer)
    for file in folder.glob("token*"):
        file.unlink()
    assert "has no tokenizer" in refused(folder, load_tokenizer)


def test_the_same_name_in_another_folder_is_another_model(folder, tmp_path, monkeypatch):
    """Cached results belong to a model's location and files, not to the path as typed."""
    other = shutil.copytree(folder, tmp_path / "elsewhere" / "model")
    edit(other, rope_theta=5e5, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    monkeypatch.chdir(folder.parent)
    assert load_config("model").rope_parameters["rope_theta"] == 10000
    monkeypatch.chdir(other.parent)
    assert load_config("model").rope_parameters["rope_theta"] == 5e5
    edit(other, rope_parameters={"rope_type": "default", "rope_theta": 70000.0})
    assert load_config("model").rope_parameters["rope_theta"] == 70000


# -- settings ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("settings", [
    {"temperature": 0.6, "top_p": 0.9, "top_k": 7}, {"do_sample": True, "temperature": 0.6},
    {"early_stopping": True, "length_penalty": 2.0, "num_beams": 1},
])  # fmt: skip
def test_ineffective_generation_settings_that_transformers_would_not_save_are_dropped(folder, tmp_path, settings):
    (folder / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": [2, 5]}))
    model = load_model(str(folder))
    write_model(model, load_tokenizer(str(folder)), tmp_path / "out", tmp_path / "out")
    read = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert read["eos_token_id"] == [2, 5]
    assert read.get("temperature") == (settings["temperature"] if settings.get("do_sample") else None)


def test_an_end_token_that_is_not_a_number_is_refused(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "x"}))
    assert "its generation_config.json is not valid (eos_token_id 'x'); correct it" in refused(folder, load_model)


def test_a_config_that_requests_more_than_logits_can_be_written_again(folder, tmp_path):
    """And a null quantization_config means no quantisation."""
    edit(folder, output_attentions=True, output_hidden_states=True, quantization_config=None)
    write_model(load_model(str(folder)), load_tokenizer(str(folder)), tmp_path / "out", tmp_path / "out")


# -- stored quantised ------------------------------------------------------------------------------------------------
METHODS = (  # without the layouts that models.packed reads
    "aqlm", "auto-round", "bitnet", "bitsandbytes", "compressed-tensors", "eetq", "fbgemm_fp8", "fp8", "higgs",
    "hqq", "mxfp4", "quanto", "quark", "spqr", "torchao", "vptq", "a method of tomorrow",
)  # fmt: skip


@pytest.mark.parametrize("where", [
    *({"quantization_config": {"quant_method": method, "bits": 4}} for method in METHODS),
    {"compression_config": {"format": "pack-quantized"}},
    {"text_config": {"quantization_config": {"quant_method": "gptq", "bits": 4}}},
])  # fmt: skip
def test_a_model_that_is_stored_quantised_is_refused_by_name(folder, where):
    edit(folder, **where)
    said = refused(folder, load_config, load_tokenizer, load_model, empty_model)
    method = next(iter(where.values())).get("quant_method", next(iter(where)))
    assert f"is stored quantised ({'gptq' if 'text_config' in where else method}), which is not read here" in said


@pytest.mark.parametrize("where", [
    {"quantization_config": {"quant_method": "gptq", "bits": 4}}, {"quantization": {"group_size": 64, "bits": 4}},
    {"quantization_config": {"quant_method": "awq", "bits": 4, "version": "gemm"}},
])  # fmt: skip
def test_a_model_whose_config_says_that_it_is_packed_has_to_be(folder, where):
    edit(folder, **where)
    assert "none of its layers is packed" in refused(folder, load_model)


@pytest.mark.parametrize("file", ["quantize_config.json", "quant_config.json", "hf_quant_config.json"])
def test_a_file_that_describes_quantised_weights_counts_too(folder, file):
    (folder / file).write_text('{"bits": 4}')
    assert f"is stored quantised ({file})" in refused(folder, load_config, load_tokenizer, load_model)


@pytest.mark.parametrize("number, count", [(1, 3), (3, 3)])
def test_a_part_of_a_gguf_file_is_refused_as_one(gguf_file, tmp_path, number, count):
    path = shutil.copy(gguf_file, tmp_path / f"m-{number:05}-of-{count:05}.gguf")
    said = refused(path, load_config, load_tokenizer, load_model)
    assert f"is part {number} of {count} of a .gguf file; join the parts with llama.cpp's llama-gguf-split" in said


# -- what transformers warns of --------------------------------------------------------------------------------------
def test_a_warning_of_transformers_reaches_the_user_once(folder, capsys, monkeypatch):
    (handler,) = (one for one in logging.getLogger("transformers").handlers if isinstance(one, WarnOnce))
    monkeypatch.setattr(handler, "said", set())
    before = get_verbosity()
    set_verbosity_warning()  # other tests may have made transformers quiet
    edit(folder, rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 0.5})
    for _ in range(2):
        load_config.__wrapped__(str(folder))
    load_model(str(folder))
    set_verbosity(before)
    err = capsys.readouterr().err
    assert err.count("factor field must be a float or int >= 1, got 0.5") == 1
    assert err.startswith("warning from transformers: ")


def test_an_export_of_a_wrong_tokenizer_is_still_warned_of(folder, tmp_path, monkeypatch):
    """transformers warns of the wrong expression of a Mistral's tokenizer only if its version was below 5."""
    edit(folder, transformers_version="4.51.3")
    model, tokenizer = load_model(str(folder)), load_tokenizer(str(folder))
    tokenizer.backend_tokenizer.fix_mistral_regex = False
    write_model(model, tokenizer, tmp_path / "out", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["transformers_version"] == "4.51.3"


def test_a_config_with_letters_beyond_ascii_is_read_in_any_locale(folder):
    edit(folder)
    path = folder / "config.json"
    held = json.loads(path.read_text()) | {"note": "naïve — 東京"}
    path.write_text(json.dumps(held, ensure_ascii=False), encoding="utf-8")
    script = f"from qat_lora.models.loading import load_model; load_model({str(folder)!r})"
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", script], env=os.environ | ascii_only, check=True)


# -- lengths ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rope, limit", [
    ({"rope_type": "linear", "factor": 2.0}, 128),
    ({"rope_type": "dynamic", "factor": 4.0}, 256),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
    ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}, 64),
    ({"rope_type": "default"}, 64),
    ({"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8, "low_freq_factor": 1.0,
      "high_freq_factor": 4.0}, 64),
])  # fmt: skip
def test_a_scaled_rotary_embedding_extends_the_context(folder, rope, limit):
    edit(folder, max_position_embeddings=64, rope_parameters=rope | {"rope_theta": 1e4})
    check_length(str(folder), limit)
    with pytest.raises(UserError, match=f"exceeds the {limit} positions"):
        check_length(str(folder), limit + 1)
    tokens = torch.arange(limit).unsqueeze(0) % 500
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        hidden = hidden_states(load_model(str(folder)), tokens)
        assert torch.allclose(plain.lm_head(hidden), plain(tokens).logits, atol=1e-4)


@pytest.mark.parametrize("config, limit", [
    (transformers.LlamaConfig(**TINY, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}), 512),
    (transformers.Phi3Config(**TINY | {"max_position_embeddings": 4096}, rope_parameters={
        "rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8},
        original_max_position_embeddings=64), 64),
    (transformers.Llama4TextConfig(**TINY, head_dim=16, attn_temperature_tuning=True, floor_scale=96,
        num_local_experts=2), 96),
    (transformers.LlamaConfig(**TINY), 512),
])  # fmt: skip
def test_texts_of_several_lengths_are_limited_to_the_short_range(folder, config, limit):
    config.save_pretrained(folder)
    check_length(str(folder), limit, mixed=True)
    with pytest.raises(UserError, match=rf"--length {limit + 1} exceeds .*use at most {limit}$"):
        check_length(str(folder), limit + 1, mixed=True)
    if limit < 512:
        check_length(str(folder), 512)
