"""A tiny random model of every causal-LM config class of transformers.

The classes come from transformers' own table. SMALL has sizes by config field. STRONG replaces defaults that would hide
a mistake, such as a multiplier of 1, a window longer than the text or a bias of zeros. OWN has the extra settings that
a class needs; NO_TEXT_MODEL says why a class is left out.
"""

import dataclasses
import functools
import math
import warnings
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import logging

from qat_lora.models.multimodal import full_class

VOCAB = 257  # every byte, and EOS
LAYERS = 4
WINDOW = 8
SPECIAL = ("eos_token", "pad_token", "unk_token")  # if not set, some classes would add them to the vocabulary
LARGEST = 30_000_000  # maximum number of parameters of a model
PATTERNS = ("layer_types", "mlp_layer_types")
SMALL = {
    # sizes
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 512,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "n_embd": 64, "n_layer": LAYERS, "n_head": 4, "n_positions": 512, "n_inner": 128, "n_ctx": 512,
    "d_model": 64, "d_inner": 128, "d_ff": 128, "d_kv": 16, "ffn_dim": 128, "num_layers": LAYERS, "num_heads": 4,
    "decoder_layers": LAYERS, "encoder_layers": 2, "decoder_ffn_dim": 128, "encoder_ffn_dim": 128,
    "decoder_attention_heads": 4, "encoder_attention_heads": 4, "embedding_size": 64, "n_heads": 4, "n_layers": LAYERS,
    "max_seq_len": 512, "attention_hidden_size": 64, "global_head_dim": 16, "rotary_dim": 8,
    "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": VOCAB, "laurel_rank": 32,
    "is_decoder": True,
    # tokens: the byte tokenizer's
    "pad_token_id": 0, "eos_token_id": 0, "bos_token_id": 0,
    # experts
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_num_experts": 4,
    "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64, "shared_intermediate_size": 64, "moe_k": 2,
    "moe_topk": 2, "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "num_dense_layers": 1, "expert_ffn_hidden_size": 64, "zero_expert_num": 2, "ffn_hidden_size": 128,
    "shared_experts_intermediate_size": 64, "route_scale": 2.0, "routed_scaling_factor": 2.0,
    # latent and sparse attention
    "q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "index_n_heads": 8, "index_head_dim": 16, "index_topk": 8,
    # states
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_ssm": 128,
    "mamba_d_state": 16, "mamba_n_groups": 1,
    "mamba_expand": 2, "mamba_chunk_size": 8, "state_size": 16, "n_groups": 1, "chunk_size": 8, "time_step_rank": 32,
    "linear_num_heads": 2, "linear_head_dim": 32, "lru_width": 64, "block_multiple_of": 32,
}  # fmt: skip
STRONG = {
    # windows
    "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 2, "attention_chunk_size": WINDOW,
    "sliding_window_size": WINDOW, "window_size": WINDOW, "attention_window_size": WINDOW, "keep_window_size": WINDOW,
    # between hidden states and logits, and around the blocks
    "logits_scaling": 8.0, "logit_scale": 0.25, "final_logit_softcapping": 20.0, "logits_soft_cap": 20.0,
    "attn_logit_softcapping": 5.0, "lm_head_multiplier": 0.5, "lm_head_bias": True, "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5, "attention_multiplier": 0.3, "query_pre_attn_scalar": 9, "scale_embedding": True,
    "scale_emb": 3, "scale_depth": 1.1, "dim_model_base": 32, "mup_enabled": True, "logits_mup_width_multiplier": 3.0,
    "attention_in_multiplier": 0.7, "attention_out_multiplier": 1.3, "key_multiplier": 0.6, "ssm_in_multiplier": 0.8,
    "ssm_out_multiplier": 1.2, "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.3], "mlp_multipliers": [0.6, 1.4],
    "attention_value_scale": 0.7, "clip_qkv": 2.0, "attention_bias": True, "mlp_bias": True, "use_qkv_bias": True,
    "scale_attn_by_inverse_layer_idx": True,
}  # fmt: skip
NO_NOISE = """
    activation_dropout attention_dropout attention_probs_dropout_prob attn_pdrop decoder_layerdrop dropout emb_pdrop
    embd_pdrop embed_dropout embedding_dropout encoder_layerdrop hidden_dropout hidden_dropout_prob input_jitter_noise
    layerdrop local_attention_probs_dropout_prob lsh_attention_probs_dropout_prob resid_dropout resid_pdrop
    residual_dropout router_jitter_noise
"""  # fields set to 0 so that training is deterministic
EVERY_HEAD_ITS_OWN_KEYS = {"num_key_value_heads": 4}
SLIDING = ["sliding_attention", "full_attention"] * 2
LINEAR = ["linear_attention", "full_attention"] * 2
OWN: dict[str, dict] = {
    **{key: {"hidden_size_global": 64} for key in ("blt_local_encoder", "blt_local_decoder")},
    **{key: {"num_kv_shared_layers": 2} for key in ("gemma3n_text", "gemma4_text", "gemma4_unified_text")},
    **{key: {"layer_types": SLIDING} for key in ("laguna", "mellum", "ministral")},
    **{key: {"layer_types": ["conv", "full_attention"] * 2} for key in ("lfm2", "lfm2_moe")},
    "axk2": {"gated_norm_rank": 32}, "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "cohere_compass_text": {"layer_types": SLIDING, "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0}, "full_attention": None}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 10_000.0},
             "ffn_config": {"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2}},
    "dots3_note_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 32,
                        "swa_kv_lora_rank": 32, "swa_qk_nope_head_dim": 8, "swa_qk_rope_head_dim": 8,
                        "swa_v_head_dim": 16, "swa_head_dim": 16},
    "dots3_note_audio_encoder": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "dots3_note_vision_encoder": {"mlp_bias": False, "adapter_in_dim": 64, "adapter_out_dim": 64},
    "emu3": {"vocabulary_map": {"<image>": 5}},
    "emu3_vqgan": {"base_channels": 32, "channel_multiplier": (1, 1), "attn_resolutions": (), "codebook_size": 32},
    "gemma3": {"text_config": {"final_logit_softcapping": None}},  # the whole model ignores it
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]}, "granitemoehybrid": {"layer_types": LINEAR},
    "hrm_text": {"L_cycles": 1, "L_bp_cycles": [1, 1]},  # more cycles amplify fp32 rounding beyond the tolerance
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "longcat_flash": {"head_dim": 8}, "mamba2": {"num_heads": 8},
    "mpt": {"attn_config": {"attn_pdrop": 0}},  # does not accept a float
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
                       "indexer_compress_ratio": 2},
    "reformer": {"axial_pos_embds": False}, "smollm3": {"no_rope_layers": [1, 0, 1, 0]},
    "xlm": {"emb_dim": 64, "causal": True}, "xmod": {"default_language": "en_XX"},
    "zamba": {"attention_hidden_size": 128, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zaya": {"num_experts_per_tok": 1, "sliding_window": WINDOW, "layer_types": ["hybrid", "hybrid_sliding"] * 2},
}  # fmt: skip
NO_TEXT_MODEL = {
    "gemma3n": "needs timm for its images; its language model is gemma3n_text",
    "gemma4_assistant": "is a draft model, which needs the keys and values of another model",
    "gemma4_unified_assistant": "is a draft model, which needs the keys and values of another model",
    "musicgen": "generates audio codes",
    "musicgen_melody": "generates audio codes",
}


def names() -> list[str]:
    """Model types with a causal LM, one per config class: its own model_type if that is in transformers' table."""
    types = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    kinds = {CONFIG_MAPPING_NAMES[name]: name for name in reversed(types)}
    own = {name: CONFIG_MAPPING[name].model_type for name in kinds.values()}
    return sorted({own[name] if own[name] in types else name for name in own} - NO_TEXT_MODEL.keys())


def config(name: str, strong: bool = True, **more) -> PreTrainedConfig:
    """A small config of a model type. strong: use the STRONG settings instead of the defaults; more: extra fields."""
    kind = CONFIG_MAPPING[name]
    return kind(**_values(kind(), name, SMALL | STRONG if strong else SMALL) | more)


def _values(default: PreTrainedConfig, name: str, wanted: dict) -> dict:
    fields = {field.name for field in dataclasses.fields(default)}
    values = {key: value for key, value in wanted.items() if key in fields}
    values |= {key: 0.0 for key in NO_NOISE.split() if key in fields}
    for key in PATTERNS:  # alternate between all kinds of block that the class has
        pattern = getattr(default, key, None) if key in fields else None
        if pattern and len(set(pattern)) > 1:
            values[key] = (list(dict.fromkeys(pattern)) * LAYERS)[:LAYERS]
    if "kv_lora_rank" in fields:
        values |= EVERY_HEAD_ITS_OWN_KEYS
    for key in type(default).sub_configs:
        part = getattr(default, key, None)
        if isinstance(part, PreTrainedConfig):
            values[key] = _values(part, part.model_type, wanted) | OWN.get(name, {}).get(key, {})
    return values | {key: value for key, value in OWN.get(name, {}).items() if key not in type(default).sub_configs}


def model(name: str, whole: bool = False, **more) -> nn.Module:
    """A random model of a model type, in fp32 and evaluation mode, in which every tensor affects the results. whole:
    the whole model of a multimodal type, not just its language model."""
    logging.set_verbosity_error()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        make = functools.partial(AutoModelForCausalLM.from_config, dtype=torch.float32)
        if whole and "text_config" in CONFIG_MAPPING[name].sub_configs:
            make = full_class(name, config(name, **more))
        with torch.device("meta"):
            size = sum(p.numel() for p in make(config(name, **more)).parameters())
        if size > LARGEST:
            raise ValueError(f"{name} has {size / 1e6:.0f}M parameters; set its sizes in SMALL or OWN")
        torch.manual_seed(0)
        return randomized(make(config(name, **more)).eval())


@torch.no_grad()
def randomized(made: nn.Module) -> nn.Module:
    """The model with random values in every parameter and stored buffer, large enough to reveal a mistake."""
    random = torch.Generator().manual_seed(0)
    for name, parameter in made.named_parameters():
        noise = torch.randn(parameter.shape, generator=random)
        if parameter.ndim > 1:
            parameter.copy_(0.3 * noise)
        else:
            parameter.add_((0.5 if name.endswith("bias") else 0.2) * noise)
    stored = made.state_dict().keys()
    for name, buffer in made.named_buffers():
        if name in stored and buffer.ndim == 1 and buffer.is_floating_point():  # others follow from the config
            buffer.copy_(0.5 - 0.8 * (torch.arange(len(buffer)) % 2))
    return made


@torch.no_grad()
def plain_perplexity(folder: Path, text: Path, windows: int, length: int, bos: bool = False, **source) -> float:
    """Perplexity by plain transformers on the first windows of a text; bos: BOS replaces the first token of each."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder, **source)
    rows = torch.tensor(tokenizer(text.read_text(), add_special_tokens=bos)["input_ids"][: windows * length])
    rows = rows.view(windows, length)
    if bos:
        rows[:, 0] = tokenizer.bos_token_id
    logp = torch.cat([model(input_ids=row.unsqueeze(0)).logits[:, :-1].float().log_softmax(-1) for row in rows])
    return math.exp(-logp.gather(2, rows[:, 1:, None]).mean().item())


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with one token per byte; EOS is 0."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE({sign: number for number, sign in enumerate(["<eos>", *alphabet])}, []))
    bpe.add_special_tokens(["<eos>"])
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bpe, **dict.fromkeys(SPECIAL, "<eos>"), model_max_length=512)
