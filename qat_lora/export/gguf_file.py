"""What a GGUF file holds besides the weights: tensor names, row order, shape, tokenizer."""

import json
import re
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType, GGUFWriter, TokenType, get_tensor_name_map
from gguf.constants import Keys

from qat_lora.errors import UserError
from qat_lora.models.gguf_settings import ARCHITECTURES, add_settings, unwritten
from qat_lora.models.loading import NO_MERGES, gguf_reader, load_config, load_tokenizer, model_source

# GPT-4's Split expression; %s is how digits are grouped.
_GPT4 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# llama.cpp's name for a byte-level BPE, by (Split expression, ignore_merges).
SPLITS = {
    (_GPT4 % r"\p{N}", False): "qwen2",
    (_GPT4 % r"\p{N}{1,3}", True): "llama-bpe",
    (_GPT4 % r"\p{N}{1,3}", False): "smaug-bpe",
}
DIGITS = {"type": "Digits", "individual_digits": True}
BYTE = re.compile("<0x[0-9A-F]{2}>")
# How a SentencePiece tokenizer turns spaces into ▁ (normalizer, pre-tokenizer), and whether it prepends one.
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
_PREPEND = {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, _REPLACE]}
SPACES = {
    json.dumps(steps, sort_keys=True): prefix
    for steps, prefix in (([_REPLACE, None], False), ([_REPLACE, _SPLIT], False), ([_PREPEND, None], True))
}


def check_architecture(name: str) -> None:
    """Raise UserError for a model that llama.cpp would compute differently."""
    if reason := unwritten(load_config(name)):
        raise UserError(f"model {name!r} {reason}; use --format hf")


def tensor_names(name: str, parameters: list[str]) -> dict[str, str]:
    """HF's parameter names → GGUF's. Raises UserError for a parameter without a name in the architecture."""
    config = load_config(name)
    table = get_tensor_name_map(ARCHITECTURES[config.model_type].kind, config.num_hidden_layers)
    names = {parameter: table.get_name(parameter, (".weight", ".bias")) for parameter in parameters}
    for parameter in (parameter for parameter, there in names.items() if there is None):
        raise UserError(f"model {name!r}: GGUF has no name for {parameter}; use --format hf")
    return names


def turned_heads(name: str, module: str) -> int:
    """The number of heads in a module's weight whose rows GGUF stores in another order; 0 if the order is HF's.

    HF's Llama rotates row j of a head as a pair with row j + half; llama.cpp pairs neighbouring rows.
    """
    config = load_config(name)
    leaf = module.rpartition(".")[2]
    if not ARCHITECTURES[config.model_type].turned or leaf not in ("q_proj", "k_proj"):
        return 0
    return config.num_attention_heads if leaf == "q_proj" else config.num_key_value_heads


def to_gguf_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """rows [out, …] in GGUF's order: in each head row j + half comes right after row j."""
    if not heads:
        return rows
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def from_gguf_rows(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `to_gguf_rows`."""
    return rows.reshape(heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape) if heads else rows


def model_writer(name: str, file_type: int) -> tuple[GGUFWriter, list[str]]:
    """A writer with a model's metadata and tokenizer but no file yet, and notes about them for the user."""
    config = load_config(name)
    writer = GGUFWriter(None, ARCHITECTURES[config.model_type].name)
    writer.add_type("model")
    writer.add_name(Path(name).name)
    writer.add_file_type(file_type)
    writer.add_quantization_version(2)
    add_settings(writer, config)
    source = model_source(name)
    if "gguf_file" in source:
        _copy_tokenizer(writer, Path(source["pretrained_model_name_or_path"]) / source["gguf_file"])
        return writer, [f"tokenizer: copied from {source['gguf_file']}"]
    return writer, _add_tokenizer(writer, load_tokenizer(name), name, config.vocab_size)


def adapter_writer(name: str, alpha: float) -> GGUFWriter:
    """A writer with the metadata of a model's LoRA adapter but no file yet."""
    writer = GGUFWriter(None, ARCHITECTURES[load_config(name).model_type].name)
    writer.add_type("adapter")
    writer.add_string(Keys.Adapter.TYPE, "lora")
    writer.add_float32(Keys.Adapter.LORA_ALPHA, alpha)
    return writer


def metadata(writer: GGUFWriter) -> dict:
    """The keys and values of a writer."""
    return {key: field.value for key, field in writer.kv_data[0].items()}


def file_bytes(writer: GGUFWriter, tensors: list[tuple[str, int, int]]) -> int:
    """The exact size of the file that a writer would write with tensors (name, dimensions, bytes)."""
    size = 24 + sum(12 + len(key.encode()) + _value_bytes(f.value, f.type) for key, f in writer.kv_data[0].items())
    size += sum(24 + len(name.encode()) + 8 * dimensions for name, dimensions, _ in tensors)
    pad = writer.ggml_pad
    return pad(size, writer.data_alignment) + sum(pad(count, writer.data_alignment) for _, _, count in tensors)


def _value_bytes(value, kind: GGUFValueType) -> int:
    if kind == GGUFValueType.STRING:
        return 8 + len(value if isinstance(value, bytes) else value.encode())
    if kind == GGUFValueType.ARRAY:
        return 12 + sum(_value_bytes(item, GGUFValueType.get_type(item)) for item in value)
    return np.dtype(GGUFReader.gguf_scalar_to_np[kind]).itemsize


# -- tokenizer -------------------------------------------------------------------------------------------------------
def _copy_tokenizer(writer: GGUFWriter, path: Path) -> None:
    """Every tokenizer value of a GGUF file, unchanged."""
    for key, field in gguf_reader(path).fields.items():
        if key.startswith("tokenizer."):
            inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], inner)


def _add_tokenizer(writer: GGUFWriter, tokenizer, name: str, rows: int) -> list[str]:
    """Add the values of an HF tokenizer, padded to `rows` tokens, the number of rows in the embedding. Returns
    notes."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    added = {token["id"]: token for token in state["added_tokens"]}
    texts = {number: text for text, number in state["model"]["vocab"].items()}
    texts |= {number: token["content"] for number, token in added.items()}
    if max(texts) >= rows:
        raise UserError(
            f"model {name!r} has {rows} embeddings, but its tokenizer has {max(texts) + 1} tokens; fix the folder"
        )
    kinds = dict.fromkeys(texts, TokenType.NORMAL)
    if state["model"]["type"] == "BPE" and "ByteLevel" in {step["type"] for step in _steps(state)}:
        said = _add_byte_level(writer, state)
    else:
        kinds |= {number: TokenType.BYTE for number, text in texts.items() if BYTE.fullmatch(text)}
        said = _add_sentencepiece(writer, state, texts, kinds.keys() - added.keys(), name)
    kinds |= {number: TokenType.CONTROL if t["special"] else TokenType.USER_DEFINED for number, t in added.items()}
    writer.add_token_list([texts.get(number, f"[PAD{number}]") for number in range(rows)])
    writer.add_token_types([int(kinds.get(number, TokenType.UNUSED)) for number in range(rows)])
    for kind in ("bos", "eos", "unk", "pad"):
        if (number := getattr(tokenizer, f"{kind}_token_id")) is not None:
            getattr(writer, f"add_{kind}_token_id")(number)
    ids = tokenizer("a")["input_ids"]
    writer.add_add_bos_token(tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(len(ids) > 1 and ids[-1] == tokenizer.eos_token_id)
    if template := tokenizer.chat_template:
        named = isinstance(template, dict)
        writer.add_chat_template(
            [{"name": key, "template": text} for key, text in template.items()] if named else template
        )
    return [f"tokenizer: {rows} tokens, {said}" + ("" if template else "; no chat template")]


def _add_byte_level(writer: GGUFWriter, state: dict) -> str:
    pre, merges = _pre_tokenizer(state), _merges(state)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre or "default")
    writer.add_token_merges([" ".join(pair) for pair in merges] or [NO_MERGES])
    writer.add_add_space_prefix(False)
    if not pre:
        return 'unknown pre-tokenizer, written as "default": compare the token ids'
    nfc = "; llama.cpp does not normalise texts to NFC, as this tokenizer does" if state["normalizer"] else ""
    return f'pre-tokenizer "{pre}"{nfc}'


def _add_sentencepiece(writer: GGUFWriter, state: dict, texts: dict[int, str], normal: set[int], name: str) -> str:
    """A BPE over characters with spaces as ▁, as in Gemma: llama.cpp merges by the score of the resulting token."""
    prefix = SPACES.get(json.dumps([state["normalizer"], state["pre_tokenizer"]], sort_keys=True))
    model = state["model"]
    if model["type"] != "BPE" or not model.get("byte_fallback") or model.get("ignore_merges") or prefix is None:
        raise UserError(
            f"model {name!r}: its tokenizer is neither a byte-level BPE nor a SentencePiece BPE like Gemma's; "
            "use --format hf"
        )
    merges, order = _merges(state), {}
    results = [left + right for left, right in merges]
    for before, text in zip([None, *results], results):
        if text != before and text in order:
            raise _not_by_score(name, text)
        order.setdefault(text, len(order))
    pairs, vocab = set(merges), model["vocab"]
    for text in (texts[number] for number in normal if not BYTE.fullmatch(texts[number])):
        cuts = ((text[:at], text[at:]) for at in range(1, len(text)))
        if any(pair not in pairs and pair[0] in vocab and pair[1] in vocab for pair in cuts):
            raise _not_by_score(name, text)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    rows = max(texts) + 1
    writer.add_token_scores([float(-order.get(texts.get(number), len(order))) for number in range(rows)])
    writer.add_add_space_prefix(prefix)
    return "SentencePiece, scores from the order of merges"


def _not_by_score(name: str, text: str) -> UserError:
    return UserError(
        f"model {name!r}: its tokenizer does not merge by the score of the resulting token (at {text!r}), as llama.cpp "
        "would; use --format hf"
    )


def _merges(state: dict) -> list[tuple[str, str]]:
    return [tuple(m.split(" ", 1)) if isinstance(m, str) else tuple(m) for m in state["model"]["merges"]]


def _steps(state: dict) -> list[dict]:
    pre = state["pre_tokenizer"] or {"type": None}
    return pre["pretokenizers"] if pre["type"] == "Sequence" else [pre]


def _pre_tokenizer(state: dict) -> str | None:
    """llama.cpp's name for a byte-level BPE, whose whole pipeline must be the one that the name stands for; None if
    this module knows no such name."""
    # trim_offsets does not change the ids
    *first, last = ({key: value for key, value in step.items() if key != "trim_offsets"} for step in _steps(state))
    model, normalizer = state["model"], state["normalizer"] or {"type": "NFC"}
    changed = any(model.get(key) for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix"))
    if normalizer != {"type": "NFC"} or changed:
        return None
    whole_words, after = bool(model.get("ignore_merges")), {"type": "ByteLevel", "add_prefix_space": False}
    if last == after | {"use_regex": True} and not whole_words:
        return "gpt-2" if not first else "smollm" if first == [DIGITS] else None
    if last != after | {"use_regex": False} or len(first) != 1:
        return None
    expression = first[0].get("pattern", {}).get("Regex")
    split = {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}
    return SPLITS.get((expression, whole_words)) if first == [split] else None
