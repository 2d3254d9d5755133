"""Of a multimodal model, only the language model is used: same logits, and saved as a text-only folder."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sizes import TINY
from transformers import AutoModelForCausalLM

from qat_lora.errors import UserError
from qat_lora.models.architecture import decoder
from qat_lora.models.loading import empty_model, load_config, load_model, load_tokenizer, model_fingerprint
from qat_lora.models.writing import write_model

VISION = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
MIXED = {
    "head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 2,
    "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
TOWER = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 64}
FAMILIES = {
    "Gemma3": ({"head_dim": 16}, {"vision_config": VISION, "mm_tokens_per_image": 4}),
    "Mistral3": ({"model_type": "mistral", "head_dim": 16}, {"vision_config": VISION | {"model_type": "pixtral"}}),
    "Qwen3_5": (MIXED, {"vision_config": TOWER}),
    "Llama4": (
        {"head_dim": 16, "num_local_experts": 2, "intermediate_size_mlp": 64},
        {"vision_config": VISION | {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}},
    ),
    "Llava": ({"model_type": "llama"}, {"vision_config": VISION | {"model_type": "clip_vision_model"}}),
    "Qwen2Audio": (
        {"model_type": "qwen2"},
        {"audio_config": {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 64}},
    ),
}
TOKENS = torch.arange(1, 81).view(2, 40)


def tokenizer(tiny, name: str):
    """The tiny tokenizer; for a Qwen2, in transformers' own class, which decides how a text is split."""
    if name != "Qwen2Audio":
        return tiny
    held = json.loads(tiny.backend_tokenizer.to_str())["model"]
    named = dict.fromkeys(("eos_token", "pad_token", "unk_token"), tiny.eos_token)
    return transformers.Qwen2Tokenizer(vocab=held["vocab"], merges=[tuple(pair) for pair in held["merges"]], **named)


@pytest.fixture
def make(tiny_tokenizer, tmp_path):
    """make(name, text={}, rest={}): a folder with a random model of nameForConditionalGeneration, and the model."""

    def made(name: str, text: dict | None = None, **rest):
        kind, (more, others) = getattr(transformers, f"{name}ForConditionalGeneration"), FAMILIES.get(name, ({}, {}))
        torch.manual_seed(0)
        model = kind(kind.config_class(text_config=TINY | more | (text or {}), **others | rest)).eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data = 0.3 * torch.randn(parameter.shape)
        folder = tmp_path / name
        model.save_pretrained(folder)
        tokenizer(tiny_tokenizer, name).save_pretrained(folder)
        return folder, model

    return made


@torch.no_grad()
@pytest.mark.parametrize("name", FAMILIES)
def test_the_language_model_computes_the_logits_of_the_whole_model(make, tmp_path, name):
    folder, full = make(name)
    model, config = load_model(str(folder)), load_config(str(folder))
    logits = model(input_ids=TOKENS).logits
    if name == "Llama4" and transformers.__version__ == "5.24.0":
        pytest.skip("this version's own forward pass fails without images")
    assert torch.equal(logits, full(input_ids=TOKENS).logits)
    assert decoder(model).config._attn_implementation == "sdpa", "the check at load restores it"
    assert not any("vision" in key or "audio" in key for key in model.state_dict())
    assert config.model_type == model.config.model_type and not hasattr(config, "vision_config")
    assert config.vocab_size == 512 and config.max_position_embeddings == 512
    empty = {key: p.shape for key, p in empty_model(str(folder)).named_parameters()}
    assert empty == {key: p.shape for key, p in model.named_parameters()}

    plain = tmp_path / "plain"
    write_model(model, load_tokenizer(str(folder)), plain, plain)
    assert "text_config" not in json.loads((plain / "config.json").read_text())
    again, found = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, output_loading_info=True)
    assert type(again) is type(model) and not found["missing_keys"] and not found["unexpected_keys"]
    assert torch.equal(again(input_ids=TOKENS).logits, logits)
    assert torch.equal(load_model(str(plain))(input_ids=TOKENS).logits, logits)


def test_a_folder_that_would_split_texts_otherwise_is_not_kept(make, tiny_tokenizer, tmp_path):
    """transformers has its own tokenizer for a Qwen2, whatever tokenizer.json says, but not for a Qwen2Audio."""
    folder, _ = make("Qwen2Audio")
    tiny_tokenizer.save_pretrained(folder)
    with pytest.raises(UserError, match="for model type 'qwen2', transformers replaces this tokenizer"):
        write_model(load_model(str(folder)), load_tokenizer(str(folder)), tmp_path / "plain", tmp_path / "plain")


@pytest.mark.parametrize("tied", [True, False])
def test_the_whole_model_decides_whether_the_head_is_tied(make, tied):
    """In Mistral 3 the outer config decides, whatever its text_config says."""
    folder, full = make("Mistral3", {"tie_word_embeddings": not tied}, tie_word_embeddings=tied)
    model = load_model(str(folder))
    assert load_config(str(folder)).tie_word_embeddings == model.config.tie_word_embeddings == tied
    for one in (model, empty_model(str(folder))):
        assert (one.lm_head.weight is one.model.embed_tokens.weight) == tied
    assert torch.equal(model.lm_head.weight, full.lm_head.weight)


def test_the_vision_tower_may_be_missing_but_not_the_language_model(make):
    folder, full = make("Gemma3")
    known = model_fingerprint(str(folder))
    tensors = load_file(folder / "model.safetensors")
    text = {key: value for key, value in tensors.items() if "vision" not in key}
    assert len(text) < len(tensors)
    save_file(text | {"audio_tower.weight": torch.ones(3)}, folder / "model.safetensors", {"format": "pt"})
    with torch.no_grad():
        assert torch.equal(load_model(str(folder))(input_ids=TOKENS).logits, full(input_ids=TOKENS).logits)
    assert model_fingerprint(str(folder)) != known
    key = next(key for key in text if "layers.1.mlp.up_proj" in key)
    less, more = dict(text), text | {key.replace("layers.1", "layers.2"): text[key].clone()}
    del less[key]
    for changed, part in ((less, "lack"), (more, "hold")):
        save_file(changed, folder / "model.safetensors", {"format": "pt"})
        for load in (load_model, empty_model):
            with pytest.raises(UserError, match=f"its weight files {part} "):
                load(str(folder))


def test_a_language_model_that_transformers_cannot_build_alone_is_refused(make):
    tower = {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2}
    folder, _ = make("Qwen2VL", vision_config=tower)
    with pytest.raises(UserError, match=r"'qwen2_vl'.*text-only"):
        load_config(str(folder))


def test_a_language_model_with_different_logits_alone_is_refused(make):
    """The class of the whole Cohere 2 Vision does not scale its logits; that of its language model does."""
    vision = VISION | {"model_type": "siglip_vision_model"}
    folder, _ = make("Cohere2Vision", {"model_type": "cohere2"}, vision_config=vision)
    with pytest.raises(UserError, match=r"'cohere2_vision'.*logits differ"):
        load_model(str(folder))


@pytest.mark.parametrize("kind", ["MllamaConfig", "Emu3Config"])
def test_a_language_model_without_its_own_type_is_refused_at_once(tmp_path, kind):
    """transformers could not read it back after export."""
    getattr(transformers, kind)().save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"cannot build alone; give a text-only model"):
        load_config(str(tmp_path))
