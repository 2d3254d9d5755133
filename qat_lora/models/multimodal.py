"""The language model inside a multimodal model."""

import copy

import torch
import transformers
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MASKED_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from qat_lora.errors import UserError, one_line
from qat_lora.models.architecture import decoder


def text_class(name: str, config: PreTrainedConfig) -> type:
    """The causal LM class of a config's language model. Raises UserError with the model type if there is none: for
    encoders, encoder-decoders, and multimodal models whose language model transformers cannot build alone."""
    text = text_part(config)
    kind = f"model {name!r} is of type {config.model_type!r}"
    if getattr(text, "is_encoder_decoder", False) or getattr(config, "is_encoder_decoder", False):
        raise UserError(f"{kind}, an encoder-decoder; give a decoder-only language model")
    if type(text) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(text, "is_decoder", False):
        raise UserError(f"{kind}, an encoder; give a decoder-only language model")
    if type(text) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return MODEL_FOR_CAUSAL_LM_MAPPING[type(text)]
    if text is config:
        raise UserError(
            f"{kind}, for which transformers {transformers.__version__} has no causal language model; give another "
            "model"
        )
    raise UserError(
        f"{kind}, whose language model ({text.model_type}) transformers {transformers.__version__} cannot build alone; "
        "give a text-only model"
    )


def text_part(config: PreTrainedConfig) -> PreTrainedConfig:
    """The part of a multimodal config for its language model, or the config itself."""
    text = getattr(config, "text_config", None)
    return text if isinstance(text, PreTrainedConfig) else config


def loads_as_text(name: str, config: PreTrainedConfig) -> bool:
    """Whether AutoModelForCausalLM, and therefore PEFT, loads only the language model from this model's folder."""
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and (
        MODEL_FOR_CAUSAL_LM_MAPPING[type(config)] is text_class(name, config)
    )


def full_class(name: str, config: PreTrainedConfig) -> type:
    """The class that reads a model's files: that of the whole model if it is multimodal."""
    text = text_class(name, config)
    if text_part(config) is config:
        return text
    for mapping in (MODEL_FOR_MULTIMODAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping and mapping[type(config)] is not text:
            return mapping[type(config)]
    raise UserError(
        f"model {name!r} is of type {config.model_type!r}, for which transformers {transformers.__version__} has no "
        "generative model; give a text-only model"
    )


def text_config(name: str, config: PreTrainedConfig) -> PreTrainedConfig:
    """The config of the language model alone. The whole model's class and config decide whether its head is tied."""
    text, whole = text_part(config), full_class(name, config)
    if text is config:
        return config
    alone = copy.deepcopy(text)
    if whole._tied_weights_keys:
        alone.tie_word_embeddings = getattr(config, "tie_word_embeddings", False)
    return alone


def language_model(name: str, full: nn.Module, config: PreTrainedConfig) -> tuple[nn.Module, tuple[str, ...]]:
    """The language model of a loaded model as a separate causal LM that shares its tensors, and the prefixes of those
    tensors in the whole model. config: the result of `text_config`. A text-only model is returned unchanged.

    Raises UserError if the language model cannot be extracted, or computes other logits alone than inside the whole
    model.
    """
    kind = text_class(name, full.config)
    if type(full) is kind:
        return full, ("",)
    paths = {module: path for path, module in full.named_modules()}
    inside = [module for module in paths if type(module) is kind]
    if inside:
        text, prefixes = inside[0], (f"{paths[inside[0]]}.",)
    else:
        with torch.device("meta"):
            text = kind(copy.deepcopy(config))
        stack, head = decoder(text), full.get_output_embeddings()
        body, place = type(stack), next(path for path, module in text.named_modules() if module is stack)
        inside = [module for module in paths if type(module) is body]
        if len(inside) != 1 or head is None:
            raise _not_alone(name, full, f"{len(inside)} parts of it are a {body.__name__}")
        text.set_submodule(place, inside[0])
        text.set_output_embeddings(head)
        prefixes = tuple(f"{paths[module]}." for module in (inside[0], head))
        _check_same_logits(name, full, text)
    text.config = copy.deepcopy(config)
    text.generation_config = full.generation_config
    return text, prefixes


def _not_alone(name: str, full: nn.Module, reason: str) -> UserError:
    return UserError(
        f"model {name!r} is of type {full.config.model_type!r}, whose language model cannot be used alone ({reason}); "
        "give a text-only model"
    )


@torch.no_grad()
def _check_same_logits(name: str, full: nn.Module, text: nn.Module) -> None:
    """Raise UserError if the two compute different logits: some multimodal models scale logits differently from the
    class of their language model."""
    if any(p.is_meta for p in full.parameters()):
        return
    tokens = torch.arange(8).remainder(text.config.vocab_size).unsqueeze(0)
    try:
        whole, alone = (model(input_ids=tokens, use_cache=False).logits for model in (full.eval(), text.eval()))
    except Exception as error:  # e.g. it requires an image
        raise _not_alone(name, full, one_line(error, 120)) from error
    gap = float((whole - alone).abs().max())
    if not gap <= 1e-3 * float(whole.abs().max()):
        raise _not_alone(name, full, f"its logits differ by {gap:.2g} from the whole model's")
