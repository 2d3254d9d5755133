"""Load HF causal language models by name: a package's file, a .gguf file, a local folder, or a hub repository."""

import copy
import functools
import hashlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from logging import WARNING, Handler, LogRecord
from pathlib import Path
from unittest.mock import patch

import gguf
import numpy as np
import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, modeling_gguf_pytorch_utils
from transformers.integrations.gguf import gguf_tokenizer_mapping
from transformers.utils import logging

from qat_lora.backend.machine import check_memory, giving_memory_back
from qat_lora.errors import UserError, first_line, one_line, to_stderr
from qat_lora.models import gguf_q2  # noqa: F401
from qat_lora.models.architecture import context_length, short_range
from qat_lora.models.check import check
from qat_lora.models.identity import check_pickle, fingerprint, headers, tokenizer_fingerprint
from qat_lora.models.multimodal import full_class, language_model, loads_as_text, text_class, text_config, text_part
from qat_lora.models.packaged import EMBEDDED, PACKAGED
from qat_lora.models.packed import packing, unpacked
from qat_lora.models.source import (
    TOKENIZERS,
    WEIGHTS,
    absolute_name,
    check_source,
    config_json,
    file_of,
    files_key,
    hub_fault,
    is_hub,
    is_planned,
    model_source,
    own_tokens,
    weight_files,
)
from qat_lora.models.tokens import check_vocabulary

# loading changes global defaults of transformers, and workers may be threads (TPU v3)
_one_at_a_time = threading.RLock()

# transformers rebuilds the same table for every module of a GGUF file's model, which takes half the loading time.
gguf.get_tensor_name_map = functools.cache(gguf.get_tensor_name_map)


class WarnOnce(Handler):
    """Prints each warning of transformers once, except its report of missing tensors, which are refused here."""

    def __init__(self):
        super().__init__(WARNING)
        self.said: set[str] = set()

    def emit(self, record: LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        if text and text not in self.said and not record.name.endswith("loading_report"):
            self.said.add(text)
            to_stderr(f"warning from transformers: {text}")


logging.disable_default_handler()
logging.add_handler(WarnOnce())
logging.disable_progress_bar()

# llama.cpp requires a non-empty list; this pair never occurs, since all symbols are single bytes.
NO_MERGES = "no merges"

# Tensors that a file may hold in addition to its model: multi-token prediction heads, and buffers that older versions
# stored but newer ones compute.
NO_PART = re.compile(r"(^|\.)mtp([._]|$)|rotary_emb\.inv_freq$|(^|\.)position_ids$|_extra_state$")


def _load(kind, name: str, **options):
    check_source(name)
    packing(name)  # refuses other methods
    source = {"pretrained_model_name_or_path": None} if "state_dict" in options else model_source(name)
    fault = hub_fault("model", name) if is_hub(name) else None
    offline = fault is not None  # files downloaded by an earlier run still load
    with (
        _building(name, fault),
        patch.object(gguf, "GGUFReader", gguf_reader),
        patch.object(gguf_tokenizer_mapping, "get_merges", _merges),
        patch.object(modeling_gguf_pytorch_utils, "tqdm", lambda tensors, **shown: tensors),  # no progress bar
    ):
        return kind.from_pretrained(**source, **options, trust_remote_code=False, local_files_only=offline)


@contextmanager
def _building(name: str, fault: str | None = None) -> Iterator[None]:
    """Context in which transformers builds a model; raises UserError if that fails. fault: why the hub is silent."""
    try:
        with _one_at_a_time:
            yield
    except Exception as error:  # transformers may raise anything for arbitrary files
        source = model_source(name)
        said = (fault or one_line(error, 500)).replace(f"{source['pretrained_model_name_or_path']}/", "")[:160]
        if (
            fault
            and isinstance(error, OSError)
            and any(file_of(name, file) for file in ("config.json", *TOKENIZERS, *WEIGHTS))
        ):
            raise UserError(
                f"model {name!r} was only partly downloaded ({first_line(error)[:160]}), and the hub cannot be "
                f"reached ({said}); download it again, or give a local folder"
            ) from error
        fix = (
            "the file is damaged or of a type that transformers cannot read: download it again, or give a model folder"
            if "gguf_file" in source
            else "give a local folder, a .gguf file, a hub name where the hub can be reached, or the embedded --model "
            f"{EMBEDDED}"
        )
        raise UserError(f"model {name!r} cannot be loaded ({said}); {fix}") from error


@functools.lru_cache(1)
def _parsed(path: str, size: int, time: int, read=gguf.GGUFReader) -> gguf.GGUFReader:
    whole = np.memmap(path, mode="r").view(np.ndarray)  # slices of a memmap take three times as long
    with patch.object(np, "memmap", lambda *_, **__: whole):
        return read(path)


def gguf_reader(path) -> gguf.GGUFReader:
    """A cached GGUFReader: transformers parses a file three times (config, tokenizer, weights), and each pass takes
    seconds with a large vocabulary."""
    there = os.stat(path)
    return _parsed(str(path), there.st_size, there.st_mtime_ns)


def _merges(values: dict, *scores, read=gguf_tokenizer_mapping.get_merges) -> list[tuple[str, ...]]:
    """A .gguf file's merges, without the one that our export writes for a vocabulary of single bytes."""
    return [] if values.get("merges") == [NO_MERGES] else read(values, *scores)


def _per_files(function: Callable) -> Callable:
    """Cache a function of a model's name for as long as the model's files do not change."""
    cached = functools.cache(lambda name, state: function(name))
    return functools.wraps(function)(lambda name: cached(name, files_key(name)))


@_per_files  # reading it from a GGUF file takes seconds
def _full_config(name: str) -> PreTrainedConfig:
    config, source = _load(AutoConfig, name), model_source(name)
    if "gguf_file" in source:
        from qat_lora.models.gguf_settings import add_implied_settings, unread

        reader = gguf_reader(Path(source["pretrained_model_name_or_path"], source["gguf_file"]))
        add_implied_settings(reader, config)
        if lost := unread(reader, config):
            raise UserError(
                f"model {name!r} has {lost}, which transformers {transformers.__version__} does not read from a .gguf "
                "file, so its results would be wrong; give the model as a folder"
            )
    for key in ("quantization_config", "quantization"):  # load_model reads what they describe
        if packing(name) and hasattr(config, key):
            delattr(config, key)
    for part in (config, text_part(config)):  # unused here, and transformers would not save a config that requests them
        part.output_attentions = part.output_hidden_states = False
        part.return_dict = True
    return config


@_per_files
def load_config(name: str) -> PreTrainedConfig:
    """The model's HF config, read without its weights; for a multimodal model, that of its language model. Do not
    modify it: every caller gets the same object. Raises UserError for anything but a causal language model."""
    return text_config(name, _full_config(name))


def adapter_notes(name: str) -> list[str]:
    """Notes for the user if plain PEFT cannot load an adapter of this model's language model onto the whole model."""
    config = _full_config(name)
    if loads_as_text(name, config):
        return []
    return [f"adapter/ fits only the language model: PEFT cannot load it onto the whole {config.model_type} model"]


def check_length(name: str, length: int, flags: str = "--length", mixed: bool = False) -> None:
    """Raise UserError for rows with more positions than the model supports, where its output would be noise.

    mixed: a batch or row has texts of several lengths. LongRoPE's rotary embedding depends on the longest of them, and
    Llama 4's attention counts slots of the row, so beyond `short_range` a text's output depends on the other texts.
    """
    config = load_config(name)
    limit = context_length(config)
    if limit and length > limit:
        raise UserError(f"{flags} {length} exceeds the {limit} positions of {name}; use at most {limit}")
    limit = short_range(config)
    if mixed and limit and length > limit:
        raise UserError(
            f"{flags} {length} exceeds {limit}, beyond which the output of model type {config.model_type!r} for a text "
            f"depends on the longest text of its batch; use at most {limit}"
        )


def load_tokenizer(name: str):
    """The model's tokenizer. Raises UserError if the model is not a causal language model, has no tokenizer, or its
    tokenizer has no end-of-sequence token."""
    is_gguf = "gguf_file" in model_source(name)
    if is_gguf or file_of(name, "config.json"):
        load_config(name)
        if not is_gguf and not is_hub(name) and not any(file_of(name, file) for file in TOKENIZERS):
            raise UserError(f"model {name!r} has no tokenizer; copy its tokenizer.json there")
    tokenizer = _load(AutoTokenizer, name)
    if tokenizer.eos_token_id is None:
        raise UserError(f"model {name!r}: its tokenizer has no end-of-sequence token; set eos_token in its config")
    check_vocabulary(tokenizer, load_config(name), name, own_tokens(name))
    return tokenizer


@giving_memory_back()
def load_model(name: str) -> nn.Module:
    """The model in fp32 on the CPU, in evaluation mode, ready for save_pretrained; for a multimodal model, its language
    model. Its attribute `fingerprint` is the result of `model_fingerprint`.

    Raises UserError for an incomplete model, and for one whose files contain more than its config describes or
    contradict it; also, before any weight is read, for a model that does not fit into this machine's memory.
    """
    check_headers(name)
    count = sum(p.numel() for p in empty_model(name).parameters())
    what = f"model {name!r} with {count:,} weights (vocabulary {load_config(name).vocab_size:,})"
    check_memory(4 * count, what, "the model size, or use a machine with more memory")
    config = _full_config(name)
    options = {"dtype": torch.float32, "config": copy.deepcopy(config), "output_loading_info": True}
    if "gguf_file" in model_source(name) and hasattr(transformers, "GgufConfig"):
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)  # keep no quantised blocks
    if packing(name):
        packed, plain = unpacked(name)
        options["state_dict"] = plain | {f"{layer}.weight": weight.value() for layer, weight in packed.items()}
    try:
        full, found = _load(full_class(name, config), name, ignore_mismatched_sizes=True, **options)
    except UserError:
        for file in [] if is_hub(name) else weight_files(name):
            if file.suffix == ".bin":
                check_pickle(file)  # names the damaged file
        raise
    _parsed.cache_clear()  # 200 MB of small objects for SmolLM2's vocabulary
    model, prefixes = language_model(name, full, load_config(name))
    _check_found(name, model.config, found, prefixes)
    for one, other in full.get_expanded_tied_weights_keys(all_submodels=True).items():
        if full.get_parameter(one) is not full.get_parameter(other):  # transformers leaves them untied if they differ
            raise _differently_tied(name, one, other)
    if getattr(model.config, "quantization_config", None) is not None:
        del model.config.quantization_config  # loading a GGUF file sets it, but save_pretrained refuses it
        model.hf_quantizer = None
        model.is_quantized = False
    _settle_generation(name, model.generation_config)
    origin = PACKAGED[name].hub if name in PACKAGED else absolute_name(name)  # where other programs find the model
    model.config._name_or_path = model.name_or_path = origin
    model.fingerprint = model_fingerprint(name)
    check(model.eval())
    return model


# Generation settings that apply only to sampling, and those that apply only with several beams.
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff")
BEAMS = ("early_stopping", "length_penalty")


def _settle_generation(name: str, settings: GenerationConfig) -> None:
    """Drop settings without effect, which transformers refuses to save. Raises UserError for invalid settings."""
    idle = (() if settings.do_sample else SAMPLING) + (() if (settings.num_beams or 1) > 1 else BEAMS)
    for key in idle:
        if hasattr(settings, key):
            setattr(settings, key, getattr(GenerationConfig(), key))
    ends = settings.eos_token_id
    try:
        if not all(type(one) is int for one in (ends if isinstance(ends, list) else [ends]) if one is not None):
            raise ValueError(f"eos_token_id {ends!r}")
        settings.validate(strict=True)
    except (ValueError, TypeError) as error:
        raise UserError(
            f"model {name!r}: its generation_config.json is not valid ({first_line(error)[:160]}); correct it"
        ) from error


def _check_found(name: str, config: PreTrainedConfig, found: dict, prefixes: tuple[str, ...]) -> None:
    """Raise UserError unless the files contain exactly the model's tensors. found: transformers' loading info;
    prefixes: the name prefixes of the tensors to compare."""
    missing = sorted(key for key in found["missing_keys"] if key.startswith(prefixes))
    if missing:
        raise UserError(
            f"model {name!r}: its weight files lack {len(missing)} of its tensors ({missing[0]} is the first); copy "
            "the model again"
        )
    for key, there, wanted in sorted(found["mismatched_keys"]):
        if key.startswith(prefixes):
            raise UserError(
                f"model {name!r} cannot be loaded: {key} is {tuple(there)} in its file but {tuple(wanted)} by its "
                "config.json, so one of them belongs to another model; copy both from one model"
            )
    extra = getattr(config, "num_nextn_predict_layers", None) or 0  # stored as extra blocks after the last one
    layers = {str(config.num_hidden_layers + number) for number in range(extra)}
    more = sorted(
        key
        for key in found["unexpected_keys"]
        if key.startswith(prefixes) and not NO_PART.search(key) and not layers & set(key.split("."))
    )
    if more:
        raise UserError(
            f"model {name!r}: its weight files hold {len(more)} tensors that its config.json does not describe "
            f"({more[0]} is the first); correct the config, or give the weights that it describes"
        )


def _differently_tied(name: str, one: str, other: str) -> UserError:
    return UserError(
        f"model {name!r}: its config.json says tie_word_embeddings, but {one} and {other} differ in its file; set "
        "tie_word_embeddings to false there to use both, or remove one of the tensors"
    )


@_per_files
def model_fingerprint(name: str) -> str:
    """sha256 (hex) of a model's weights, config and tokenizer, independent of where the model is stored, how its path
    is written, and how many files its weights are in. Reads all weights."""
    load_config(name)  # raises a clear error for anything that is not a model
    files = weight_files(name)
    if "gguf_file" in model_source(name):
        return fingerprint(files, {}, "")  # everything is in the file
    try:
        tokenizer = tokenizer_fingerprint(load_tokenizer(name))
    except UserError:
        tokenizer = "none"
    return fingerprint(files, config_json(name), tokenizer)


def plain_state(model: nn.Module) -> dict[str, Tensor]:
    """A model's state without its quantisers: the parameters (tied ones once) and the buffers stored in files."""
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if ".quantizer" not in name}
    first = {id(value): name for name, value in reversed(state.items())}
    return {name: value for name, value in state.items() if first[id(value)] == name}


def weights_fingerprint(model: nn.Module) -> str:
    """sha256 (hex) of all named parameters and stored buffers of a model on the CPU."""
    digest = hashlib.sha256()
    for name, value in sorted({**dict(model.named_parameters()), **plain_state(model)}.items()):
        digest.update(name.encode())
        digest.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def empty_model(name: str) -> nn.Module:
    """The model's architecture without storage for its parameters. Raises UserError unless the headers of its local
    safetensors files list exactly its tensors."""
    config, whole = load_config(name), _full_config(name)
    with _building(name), torch.device("meta"):
        model = text_class(name, whole)._from_config(copy.deepcopy(config), dtype=torch.float32)
    check_headers(name)
    model.tie_weights()
    return model.eval()


@_per_files
def check_headers(name: str) -> None:
    """Raise UserError unless the headers of a local model's safetensors files list exactly its tensors. Hub models and
    other formats are checked when they are loaded."""
    whole = _full_config(name)
    kind = full_class(name, whole)
    files = [] if is_hub(name) or is_planned(name) or packing(name) else weight_files(name)
    if not files or any(file.suffix != ".safetensors" for file in files):
        return
    stored = headers(files)
    tensors = {key: header.empty() for key, header in stored.items()}
    with _building(name):
        full, found = kind.from_pretrained(
            None, config=copy.deepcopy(whole), state_dict=tensors, device_map={"": "meta"}, dtype=torch.float32,
            ignore_mismatched_sizes=True, output_loading_info=True,
        )  # fmt: skip
    model, prefixes = language_model(name, full, load_config(name))
    _check_found(name, model.config, found, prefixes)
    for one, other in full.get_expanded_tied_weights_keys(all_submodels=True).items():
        if one in stored and other in stored and not stored[one].may_equal(stored[other]):
            raise _differently_tied(name, one, other)
