"""Only a plain LoRA on an unchanged base is accepted, so that every script computes the same as an export."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from qat_lora.errors import UserError
from qat_lora.lora.adapter import BEYOND_PRODUCT, PLACE, SILENT, SIZE, load_adapter, write_origin
from qat_lora.models.loading import load_model


@pytest.fixture(scope="module")
def base(tiny_model_dir):
    return load_model(str(tiny_model_dir))


@pytest.fixture(scope="module")
def adapter(make_adapter, tiny_model_dir):
    return make_adapter(tiny_model_dir)


@pytest.fixture
def changed(adapter, tmp_path):
    """changed(**settings): a LoRA's folder with these settings changed in its config."""

    def make(**settings):
        folder = shutil.copytree(adapter, tmp_path / "adapter")
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
        return folder

    return make


@pytest.mark.parametrize(
    "settings",
    [
        {"init_lora_weights": "pissa_niter_4"}, {"lora_alpha": 0}, {"alora_invocation_tokens": [1, 2]},
        {"trainable_token_indices": [5]}, {"layer_replication": [[0, 2], [1, 2]]}, {"modules_to_save": ["norm"]},
        {"use_qalora": True}, {"velora_config": {"rank": 4}}, {"a_setting_of_tomorrow": True},
        {"task_type": "SEQ_CLS"}, {"peft_type": "LOHA"},
    ],
    ids=str,
)  # fmt: skip
def test_anything_but_a_lora_on_an_unchanged_base_is_refused(changed, base, settings):
    with pytest.raises(UserError, match=next(iter(settings))) as refused:
        load_adapter(base, changed(**settings))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("settings", [{"ensure_weight_tying": True}, {"lora_dropout": 0.5}, {"inference_mode": False}])
def test_a_setting_without_effect_on_a_plain_lora_is_accepted(changed, adapter, tiny_model_dir, settings):
    plain, other = (load_adapter(load_model(str(tiny_model_dir)), path) for path in (adapter, changed(**settings)))
    tokens = torch.arange(20).unsqueeze(0)
    assert torch.equal(plain(tokens).logits, other(tokens).logits)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("targets, said", [
    (["lm_head"], "changes lm_head, the model's LM head"),
    (["embed_tokens"], "changes model.embed_tokens, the model's embedding"),
    (["q_proj", "lm_head"], "changes lm_head, the model's LM head"),
])  # fmt: skip
def test_an_adapter_of_the_head_or_the_embedding_is_refused_by_name(full_model_dir, tmp_path, targets, said, tied):
    config = LlamaConfig(vocab_size=512, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, eos_token_id=2, tie_word_embeddings=tied)  # fmt: skip
    folder = full_model_dir(LlamaForCausalLM(config))
    adapted = get_peft_model(load_model(str(folder)), LoraConfig(target_modules=targets, task_type="CAUSAL_LM"))
    adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    with pytest.raises(UserError, match=f"{said}, which is not supported; train one without it"):
        load_adapter(load_model(str(folder)), tmp_path / "adapter")


class Evil:
    def __reduce__(self):
        return os.mkdir, ("ran",)


@pytest.mark.parametrize("saved_by_training", [True, False])
@pytest.mark.parametrize("content", [None, [1, 2], {"a": "x"}, Evil()], ids=["none", "list", "text", "hostile"])
def test_a_pickle_without_tensors_is_refused_by_name(changed, base, monkeypatch, content, saved_by_training):
    folder = changed()
    monkeypatch.chdir(folder)
    if saved_by_training:
        write_origin(folder, None)
    (folder / "adapter_model.safetensors").unlink()
    torch.save(content, folder / "adapter_model.bin")
    with pytest.raises(UserError) as refused:
        load_adapter(base, folder)
    assert str(refused.value).startswith(f"{folder}/adapter_model.bin is damaged (it ") and not Path("ran").exists()


def test_a_file_that_training_saved_must_exist(changed, base):
    folder = changed()
    write_origin(folder, None)
    tensors = load_file(folder / "adapter_model.safetensors")
    (folder / "adapter_model.safetensors").unlink()
    torch.save(tensors, folder / "adapter_model.bin")
    with pytest.raises(UserError, match=r"adapter_model.safetensors, which training saved, is missing; copy or train"):
        load_adapter(base, folder)


def test_every_setting_of_the_installed_peft_is_known():
    """An unlisted setting is refused as soon as it is used; this shows which ones a PEFT release added or removed."""
    others = set(LoraConfig().to_dict()) - SIZE - PLACE - SILENT - BEYOND_PRODUCT
    assert others == {
        "alora_invocation_tokens", "arrow_config", "kasa_config", "layer_replication",
        "megatron_config", "modules_to_save", "monteclora_config", "trainable_token_indices", "use_bdlora",
        "use_qalora", "velora_config",
    }  # fmt: skip


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal"])
def test_initialisations_that_leave_the_base_unchanged(tiny_model_dir, tmp_path, start):
    config = LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=start, task_type="CAUSAL_LM")
    get_peft_model(load_model(str(tiny_model_dir)), config).save_pretrained(tmp_path, save_embedding_layers=False)
    before = load_model(str(tiny_model_dir)).state_dict()
    after = load_adapter(load_model(str(tiny_model_dir)), tmp_path).unload().state_dict()
    assert all(torch.equal(value, before[name]) for name, value in after.items())
