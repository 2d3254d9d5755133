"""Which settings of a model's config GGUF stores, and how llama.cpp interprets them.

This module lists the settings that are written. A config in which any other setting differs from its class's default
is refused, so that no unknown setting is lost silently.
"""

import math
from dataclasses import dataclass, field

import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, GGUFReader, GGUFWriter, RopeScalingType
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SHAPE = {
    "vocab_size", "max_position_embeddings", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "tie_word_embeddings",
}  # fmt: skip
# Settings that a forward pass in evaluation mode ignores. Qwen's layer_types say which layers have a window.
SILENT = {
    "architectures", "model_type", "name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache",
    "initializer_range", "attention_dropout", "pretraining_tp", "bos_token_id", "eos_token_id", "pad_token_id",
    "unk_token_id", "use_sliding_window", "max_window_layers", "is_llama_config", "rope_interleaved",
    "transformers.js_config", "unsloth_fixed", "unsloth_version", "output_attentions", "output_hidden_states",
    "return_dict", "chunk_size_feed_forward", "id2label", "label2id", "problem_type",
}  # fmt: skip
# The settings of each type of rotary embedding; llama.cpp fixes yarn's other settings at their defaults.
ROPES = {
    "default": set(),
    "linear": {"factor"},
    "yarn": {"factor", "original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
}
ROPE_DEFAULTS = {"partial_rotary_factor": 1.0, "beta_fast": 32, "beta_slow": 1, "truncate": True}
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Architecture:
    """A model type in llama.cpp: its name, the settings that llama.cpp fixes, those written in addition to SHAPE, the
    supported types of rotary embedding, and whether the rows of q and k are reordered (see gguf_file.turned_heads)."""

    kind: MODEL_ARCH
    fixed: dict[str, object]
    written: frozenset[str] = field(default_factory=frozenset)
    ropes: tuple[str, ...] = ("default", "linear", "yarn")
    turned: bool = False

    @property
    def name(self) -> str:
        return MODEL_ARCH_NAMES[self.kind]


PLAIN = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "sliding_window": None}
GEMMA3 = {
    "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False,
    "attn_logit_softcapping": None,
    "use_bidirectional_attention": False,
}
ARCHITECTURES = {
    "llama": Architecture(MODEL_ARCH.LLAMA, PLAIN, ropes=tuple(ROPES), turned=True),
    "mistral": Architecture(MODEL_ARCH.LLAMA, PLAIN, ropes=tuple(ROPES), turned=True),
    "granite": Architecture(
        MODEL_ARCH.GRANITE,
        PLAIN,
        ropes=tuple(ROPES),
        turned=True,
        written=frozenset({"attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier"}),
    ),
    "qwen2": Architecture(MODEL_ARCH.QWEN2, PLAIN),
    "qwen3": Architecture(MODEL_ARCH.QWEN3, PLAIN),
    "gemma3_text": Architecture(
        MODEL_ARCH.GEMMA3,
        GEMMA3,
        ropes=("default", "linear"),
        written=frozenset({"sliding_window", "layer_types", "query_pre_attn_scalar", "final_logit_softcapping"}),
    ),
}


def unwritten(config) -> str | None:
    """Why a config cannot be written, as the rest of a sentence that begins with "model …"; None if it can."""
    if config.model_type not in ARCHITECTURES:
        return f"is a {config.model_type}: GGUF export supports {', '.join(ARCHITECTURES)}"
    architecture = ARCHITECTURES[config.model_type]
    odd = _odd_settings(config, architecture) | _odd_rope(config, architecture)
    for name, value in odd.items():
        return f"has {name} {str(value)[:80]!s}, which is not written to GGUF"
    return None


def _odd_settings(config, architecture: Architecture) -> dict:
    values, usual = config.to_dict(), type(config)().to_dict()
    if config.model_type in ("qwen2", "qwen3") and SLIDING not in (values.get("layer_types") or []):
        values["sliding_window"] = None  # no layer uses it
    if (values.get("sliding_window") or 0) >= config.max_position_embeddings and config.model_type == "mistral":
        values["sliding_window"] = None  # at least as long as any text
    odd = {}
    for name, value in values.items():
        if name in SHAPE | SILENT | architecture.written or name.startswith("_"):
            continue
        if name == "layer_types":
            known = not value or set(value) == {FULL}
        elif name in architecture.fixed:
            known = value == architecture.fixed[name] or (not value and not architecture.fixed[name])
        else:
            known = value == usual[name] if name in usual else not value
        if not known:
            odd[name] = repr(value)
    return odd


def _odd_rope(config, architecture: Architecture) -> dict:
    odd, ropes = {}, [rope_of(config), rope_of(config, SLIDING)]
    for rope, types in zip(ropes, (architecture.ropes, ("default",) if ropes[0] is not ropes[1] else ROPES)):
        kind = rope.get("rope_type", "default")
        if kind not in types:
            return {"rope_type": repr(kind)}
        for name in ROPES[kind] - {n for n, value in rope.items() if value is not None}:
            odd[name] = None  # a setting that the type requires is missing
        for name in rope.keys() - ROPES[kind] - {"rope_type", "type", "rope_theta"}:
            if rope[name] is not None and rope[name] != ROPE_DEFAULTS.get(name):
                odd[name] = repr(rope[name])
    return odd


def rope_of(config, kind: str = FULL) -> dict:
    """The rotary embedding's settings; those for layers of `kind` if the config has settings for several kinds."""
    rope = config.rope_parameters or {}
    return rope.get(kind, rope)


def head_size(config) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def add_settings(writer: GGUFWriter, config) -> None:
    """Write every setting of a config that `unwritten` accepts, except for the vocabulary."""
    width, rope = head_size(config), rope_of(config)
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.model_type == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_logit_scale(config.logits_scaling)
        writer.add_residual_scale(config.residual_multiplier)
    if config.model_type == "gemma3_text":
        _add_gemma3(writer, config)


def _add_gemma3(writer: GGUFWriter, config) -> None:
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if SLIDING in config.layer_types:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == SLIDING for kind in config.layer_types])
        writer.add_rope_freq_base_swa(rope_of(config, SLIDING)["rope_theta"])


def frequency_factors(config) -> list[float] | None:
    """The factors by which llama.cpp divides the rotary embedding's frequencies; None if the file does not need
    them."""
    rope, width = rope_of(config), head_size(config)
    if rope.get("rope_type") != "llama3":
        return None
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    plain = 1 / rope["rope_theta"] ** (torch.arange(0, width, 2).float() / width)
    return (plain / scaled).tolist()


def norm_change(config, parameter: str) -> tuple[float, float]:
    """(a, b) such that GGUF stores (w + a)·b for the weight w of a norm.

    Gemma multiplies by 1 + w. If the config's scale of q differs from `implied_scalar`, the ratio is folded into the
    norm of q.
    """
    if config.model_type != "gemma3_text" or not parameter.endswith("norm.weight"):
        return 0.0, 1.0
    is_q = parameter.endswith("q_norm.weight")
    return 1.0, (implied_scalar(config) / config.query_pre_attn_scalar) ** 0.5 if is_q else 1.0


def implied_scalar(config) -> int:
    """n where llama.cpp scales Gemma's q by 1/√n. A file does not store it: n is the head size, except in Gemma 2 27B
    and Gemma 3 27B, which llama.cpp recognises by their number of layers."""
    largest = {"gemma2": 46, "gemma3_text": 62}[config.model_type] == config.num_hidden_layers
    return config.hidden_size // config.num_attention_heads if largest else head_size(config)


# -- reading -----------------------------------------------------------------------------------------------------------
SCALES = {
    "attention.scale": "attention_multiplier",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "final_logit_softcapping": "final_logit_softcapping",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "attention.sliding_window": "sliding_window",
}
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps")
FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
WITHOUT = (None, 0, 1, "none")  # values with which a setting has no effect


def add_implied_settings(reader: GGUFReader, config) -> None:
    """Correct `config`, in place, where transformers uses a default of its class but llama.cpp derives the value from
    the file: Qwen3's head size, Gemma's scale of q, and which of Gemma 3's layers have a sliding window, and with which
    rotation."""
    values = _values(reader)
    if "attention.key_length" in values and config.model_type == "qwen3":
        config.head_dim = values["attention.key_length"]()
    if config.model_type in ("gemma2", "gemma3_text"):
        config.query_pre_attn_scalar = implied_scalar(config)
    if config.model_type != "gemma3_text":
        return
    pattern = values["attention.sliding_window_pattern"]() if "attention.sliding_window_pattern" in values else 6
    if "attention.sliding_window" not in values:
        pattern = 1
    if isinstance(pattern, int):  # every pattern-th layer has no window
        pattern = [bool((layer + 1) % pattern) for layer in range(config.num_hidden_layers)]
    config.layer_types = [SLIDING if windowed else FULL for windowed in pattern]
    if "rope.freq_base_swa" in values:
        config.rope_parameters[SLIDING]["rope_theta"] = values["rope.freq_base_swa"]()


def _values(reader: GGUFReader) -> dict:
    """Functions that read a file's values, by key without the architecture's name."""
    return {key.split(".", 1)[1]: field.contents for key, field in reader.fields.items() if "." in key}


def unread(reader: GGUFReader, config) -> str | None:
    """A setting of a .gguf file that changes the model's results but that transformers did not read correctly into
    `config`; None if there is none."""
    values, rope = _values(reader), rope_of(config)
    epsilon = next((getattr(config, name) for name in EPSILONS if hasattr(config, name)), None)
    kinds = {"default": "none", "llama3": "none"}
    here = {
        "rope.scaling.type": kinds.get(kind := rope.get("rope_type", "default"), kind),
        "rope.scaling.factor": rope.get("factor"),
        "rope.freq_base": rope.get("rope_theta"),
        "logit_scale": getattr(config, "logits_scaling", getattr(config, "logit_scale", None)),
        "attention.layer_norm_epsilon": epsilon,
        "attention.layer_norm_rms_epsilon": epsilon,
    } | {key: getattr(config, name, None) for key, name in SCALES.items()}
    if "rope.dimension_count" in values and config.model_type != "gemma4_text":  # which has two head sizes
        here["rope.dimension_count"] = head_size(config) * (rope.get("partial_rotary_factor") or 1)
    for key, value in here.items():
        there = values[key]() if key in values else None
        if there not in WITHOUT and not _same(there, value):
            return f"{key} {there}"
    pattern = values["attention.sliding_window_pattern"]() if "attention.sliding_window_pattern" in values else None
    if isinstance(pattern, list) and [bool(one) for one in pattern] != [k == SLIDING for k in config.layer_types]:
        return "attention.sliding_window_pattern"
    if rope.get("rope_type", "default") not in ("llama3", "longrope"):
        for tensor in reader.tensors:
            if tensor.name in FACTORS and (tensor.data != 1).any():
                return tensor.name
    return None


def _same(one, other) -> bool:
    return math.isclose(one, other, rel_tol=1e-5) if isinstance(other, int | float) else one == other
