"""The structure of a Hugging Face causal language model. Only this module inspects a model's internals.

The structure is inferred from module types, parameter shapes, the signatures of forward and, as a last resort, names
and source code; how hidden states become logits is measured (kernels/head.py). There is no list of model names. If this
module gets a model wrong, the model is refused (models/check.py), so results always match plain transformers.
"""

import functools
import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig

from qat_lora.backend import is_xla_device
from qat_lora.errors import UserError
from qat_lora.models.attention import PACKED, Layout, laid_out, whole_rows

# Arguments of forward that show that a module's output at one token depends on other tokens.
OTHER_TOKENS = {
    "attention_mask", "position_embeddings", "position_ids", "past_key_values", "past_key_value", "layer_past",
    "cache_params", "cache_position", "alibi", "sinusoidal_pos", "seq_idx", "state",
}  # fmt: skip
FEWEST_INPUTS = 16  # smaller layers are not worth quantising (Gemma 3n mixes its four streams with 4-input layers)
FEED_FORWARD = ("mlp", "feed_forward", "ffn")


def unwrap(model: nn.Module) -> nn.Module:
    """The HF model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder(model: nn.Module) -> nn.Module:
    """The HF model without its LM head."""
    base = unwrap(model)
    stack = base.get_decoder()
    if stack is base.get_output_embeddings():  # an LM head named "decoder"
        stack = base.base_model
    if stack is base:  # this class gives its decoder an unusual name
        embedding = base.get_input_embeddings()
        stack = next((child for child in base.children() if any(m is embedding for m in child.modules())), base)
    return stack


def text_config(model: nn.Module):
    """The part of a model's config that describes its decoder."""
    return unwrap(model).config.get_text_config(decoder=True)


def model_type(model: nn.Module) -> str:
    return unwrap(model).config.model_type


# -- hidden states ---------------------------------------------------------------------------------------------------
@functools.cache
def _accepts(kind: type) -> tuple[frozenset[str], bool]:
    """The parameter names of a module's forward, and whether it also takes **kwargs."""
    parameters = inspect.signature(kind.forward).parameters
    return frozenset(parameters), any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def hidden_states(model: nn.Module, tokens: Tensor, layout: Layout | None = None, cache=None) -> Tensor:
    """Last hidden states [B, Q, H] of tokens [B, Q], ready for the LM head (kernels/head.py).

    layout: which tokens attend to which; None: each row is a single text. cache: the keys and values of the layout's
    earlier tokens. May change the model's attention and expert implementations, and does not restore them.
    """
    stack = decoder(model)
    run = getattr(unwrap(model), "_decode", stack)  # of a model that is shared out over workers
    if is_xla_device(tokens.device):
        from qat_lora.models.experts import STATIC

        stack.config._experts_implementation = STATIC
    if layout is None and is_xla_device(tokens.device):
        # Without a mask, transformers reads a tensor to look for packed sequences: one host sync per step.
        return _run(run, stack, tokens, Layout.causal(tokens.shape[1], tokens.device), cache, positions=False)
    if layout is None:
        with whole_rows():
            return run(input_ids=tokens, use_cache=False).last_hidden_state
    return _run(run, stack, tokens, layout, cache, positions=True)


def _run(run: Callable, stack: nn.Module, tokens: Tensor, layout: Layout, cache, positions: bool) -> Tensor:
    named, others = _accepts(type(stack))
    options = {"use_cache": False, "attention_mask": tokens.new_ones(tokens.shape)}  # 2-D: its values are ignored
    if positions:
        options["position_ids"] = layout.query.expand(tokens.shape)
    if cache is not None:
        options["past_key_values"] = cache
    config = stack.config
    if layout.lengths is not None and others and config._attn_implementation in ("sdpa", PACKED):
        config._attn_implementation = PACKED
        options["layout"] = layout
    known = {key: value for key, value in options.items() if others or key in named}
    with laid_out(layout):
        return run(input_ids=tokens, **known).last_hidden_state


def own_cache(model: nn.Module) -> DynamicCache:
    """An empty cache of the type that the model uses."""
    return DynamicCache(config=unwrap(model).config)


def cached_states(model: nn.Module, tokens: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
    """Last hidden states [B, Q, H] of the next tokens [B, Q], which follow those in the model's own cache.

    mask [B, K]: which of all tokens so far are real; positions [B, Q] of the new tokens.
    """
    named, others = _accepts(type(decoder(model)))
    options = {"attention_mask": mask.long(), "position_ids": positions, "use_cache": True}
    options["cache_params" if "cache_params" in named else "past_key_values"] = cache
    known = {key: value for key, value in options.items() if others or key in named}
    return decoder(model)(input_ids=tokens, **known).last_hidden_state


def embedding_rows(model: nn.Module) -> int:
    """The number of token ids in the embedding."""
    return unwrap(model).get_input_embeddings().weight.shape[0]


# -- blocks ----------------------------------------------------------------------------------------------------------
def mixes_tokens(module: nn.Module) -> bool:
    """Whether a module's output at one token depends on other tokens: attention, convolutions and recurrences."""
    return bool(_accepts(type(module))[0] & OTHER_TOKENS)


def _is_block(module: nn.Module) -> bool:
    return any(map(mixes_tokens, module.modules())) and any(p.ndim > 1 for p in module.parameters())


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The list of decoder blocks. Raises UserError for a model that has no such list, or several."""
    stack, found = decoder(model), []
    for name, module in stack.named_modules():
        inside = any(name.startswith(f"{other}.") for other, _ in found)
        if isinstance(module, nn.ModuleList) and not inside and any(map(_is_block, module)):
            found.append((name, module))
    if len(found) != 1:
        lists = ", ".join(name for name, _ in found) or "none"
        raise refused(model, f"its decoder blocks are not in one list (found: {lists})")
    return found[0][1]


def part_of(block: nn.Module, name: str) -> str:
    """The part of a decoder block that module or parameter `name` belongs to: "attn" (everything that mixes tokens) or
    "mlp"."""
    part, module = "mlp", block
    for step in name.split("."):
        module = getattr(module, step) if isinstance(module, nn.Module) else None
        if step in FEED_FORWARD:
            part = "mlp"
        elif isinstance(module, nn.Module) and mixes_tokens(module):
            part = "attn"
    return part


def experts_of(module: nn.Module) -> dict[str, bool]:
    """The parameters of a module that stack all its experts, [experts, …]: for each name, whether an expert is stored
    as [in, out]."""
    marked, experts = hasattr(module, "is_transposed"), getattr(module, "num_experts", None)
    if not (marked or "Experts" in type(module).__name__):
        return {}
    weights = {name: p for name, p in module._parameters.items() if p is not None and p.ndim == 3}
    if experts is not None:
        weights = {name: p for name, p in weights.items() if len(p) == experts}
    return {name: _is_transposed(module, name, p) for name, p in weights.items()}


def _is_transposed(module: nn.Module, name: str, weight: Tensor) -> bool:
    if hasattr(module, "is_transposed"):
        return bool(module.is_transposed)
    hidden = getattr(module, "hidden_size", None)  # Llama 4 stores [in, out] without such a flag
    return (
        hidden is not None
        and weight.shape[1 if name.startswith(("gate", "up")) else 2] == hidden
        and hasattr(module, "expert_dim")
    )


@dataclass(frozen=True)
class Matrix:
    """A quantisable weight of a decoder block: parameter `name` of the module at `path` in the block.

    A linear layer's weight is [out, in]; experts are [experts, out, in], or [experts, in, out] if `transposed`.
    """

    path: str
    module: nn.Module
    name: str
    part: str
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """[out, in], or [experts, out, in]."""
        shape = tuple(self.module._parameters[self.name].shape)
        return (shape[0], shape[2], shape[1]) if self.transposed else shape

    @property
    def is_experts(self) -> bool:
        return not isinstance(self.module, nn.Linear)


@functools.cache
def _computes_linear(kind: type) -> bool:
    """Whether a subclass of nn.Linear (e.g. Falcon's) computes the same as nn.Linear; measured on a small layer."""
    if kind is nn.Linear or not issubclass(kind, nn.Linear) or kind.__init__ is not nn.Linear.__init__:
        return kind is nn.Linear
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        layer, x = kind(3, 2, device="cpu"), torch.rand(4, 3, device="cpu")
        found = layer(x)
    return isinstance(found, Tensor) and torch.allclose(found, nn.functional.linear(x, layer.weight, layer.bias))


def _is_linear(module: nn.Module) -> bool:
    return _computes_linear(type(module)) or (isinstance(module, nn.Linear) and "quantizer" in module._modules)


def matrices(block: nn.Module) -> Iterator[Matrix]:
    """The linear layers, quantised or not, and the experts of a block. Leaves out routers, because they are small and
    a wrong choice of expert does more harm than rounding, and layers with few inputs."""
    modules = list(block.named_modules())
    counts = {
        path.rpartition(".")[0]: max(
            [getattr(module, "num_experts", None) or 0, *(len(module._parameters[n]) for n in names)]
        )
        for path, module in modules
        if (names := experts_of(module)) or "Experts" in type(module).__name__
    }
    inputs: dict[str, set[int]] = {}  # input sizes of the linear layers in each module
    for path, module in modules:
        if isinstance(module, nn.Linear):
            inputs.setdefault(path.rpartition(".")[0], set()).add(module.in_features)
    for path, module in modules:
        owner = path.rpartition(".")[0]
        if _is_linear(module) and module.in_features >= FEWEST_INPUTS and _is_called(block, path):
            # A router is next to the experts, or the last layer of a module next to them. Width alone does not identify
            # it: a shared expert may be as wide as the number of experts, but its output feeds another layer.
            chooses = any(
                owner == other or (owner.startswith(f"{other}.") and count not in inputs[owner])
                for other, count in counts.items()
                if module.out_features in (1, count)
            )
            if not chooses:
                yield Matrix(path, module, "weight", part_of(block, path))
        for name, transposed in experts_of(module).items():
            yield Matrix(path, module, name, part_of(block, path), transposed)


@functools.cache
def _weights_read(kind: type) -> frozenset[str]:
    try:
        return frozenset(re.findall(r"self\.(\w+)\.weight\b(?![.\[])", inspect.getsource(kind)))
    except (OSError, TypeError):
        return frozenset()


def _is_called(block: nn.Module, path: str) -> bool:
    """Whether the block calls the linear layer at `path` on every device. Mamba's code multiplies by some weights
    directly, which would bypass a quantiser or adapter."""
    owner, _, name = path.rpartition(".")
    return name not in _weights_read(type(block.get_submodule(owner)))


def uncalled(block: nn.Module) -> list[str]:
    """The linear layers of a block that stay unchanged because the model reads their weights directly."""
    return [path for path, module in block.named_modules() if _is_linear(module) and not _is_called(block, path)]


@contextmanager
def replaced(blocks: Iterable[nn.Module], stand_in: Callable) -> Iterator[None]:
    """Within this context each block runs stand_in(block) instead of its forward."""
    blocks = list(blocks)
    for block in blocks:
        block.forward = stand_in(block)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


@contextmanager
def eager_experts(model: nn.Module) -> Iterator[None]:
    """Within this context experts are computed one at a time, which also works in fp64, unlike torch's grouped matrix
    product."""
    config = unwrap(model).config
    before, config._experts_implementation = config._experts_implementation, "eager"
    try:
        yield
    finally:
        config._experts_implementation = before


def as_answer(hidden: Tensor, values: int):
    """Hidden states in the form that a block returns: alone (values 0), or first in a tuple of `values` entries."""
    return (hidden, *[None] * (values - 1)) if values else hidden


def is_recurrent(model: nn.Module) -> bool:
    """Whether some blocks carry a state from token to token instead of attending to earlier tokens, as in linear
    attention, convolutions and state-space models."""
    base = unwrap(model)
    if base._is_stateful:
        return True
    try:
        return any(DynamicCache(config=base.config).is_linear)
    except (AttributeError, KeyError, ValueError, TypeError):
        return False


def _ropes(config: PreTrainedConfig) -> list[dict]:
    """The settings of each rotary embedding."""
    held = getattr(config, "rope_parameters", None) or {}
    return [rope for rope in (held, *held.values()) if isinstance(rope, dict) and "rope_type" in rope]


def context_length(config: PreTrainedConfig) -> int | None:
    """The number of positions that a model supports; None: no limit.

    With linear, dynamic or YaRN scaling, max_position_embeddings may be that of the original model, so its product with
    the factor counts, too. Other scaled configs (Llama 3, LongRoPE, one embedding per layer type) give the extended
    length themselves.
    """
    limit, rope = getattr(config, "max_position_embeddings", None), getattr(config, "rope_parameters", None) or {}
    if not limit or rope.get("rope_type") not in ("linear", "dynamic", "yarn"):
        return limit
    return max(limit, int((rope.get("original_max_position_embeddings") or limit) * (rope.get("factor") or 1)))


def short_range(config: PreTrainedConfig) -> int | None:
    """The length in tokens up to which a text's output depends neither on the lengths of other texts in its batch
    nor on its place in a row; None: no limit. Beyond it, LongRoPE and dynamic scaling use other frequencies and Llama 4
    another attention temperature."""
    limits = []
    for rope in _ropes(config):
        if rope["rope_type"] in ("longrope", "dynamic"):
            original = rope.get("original_max_position_embeddings")
            limits.append(original or getattr(config, "original_max_position_embeddings", None))
        if rope["rope_type"] == "dynamic":
            limits.append(config.max_position_embeddings)
    if getattr(config, "attn_temperature_tuning", False):
        limits.append(getattr(config, "floor_scale", None))
    return min((int(limit) for limit in limits if limit), default=None)


def counts_slots(model: nn.Module) -> bool:
    """Whether some attention layer stores its window as a mask matrix over the slots of a row instead of the positions
    in a text (GPT-Neo)."""
    masks = (b for b in decoder(model).buffers() if b.dtype == torch.bool and b.ndim > 1 and b.shape[-1] == b.shape[-2])
    return any(not bool(mask[..., -1, 0].all()) for mask in masks)


def packs(model: nn.Module) -> bool:
    """Whether the model can keep the examples of a packed row apart: measured by `check`; before that, inferred from
    the structure."""
    return unwrap(model).__dict__.get("_packs", not is_recurrent(model))


def set_packs(model: nn.Module, together: bool) -> None:
    """Set what `packs` returns."""
    unwrap(model)._packs = together


def refused(model: nn.Module, reason: str) -> UserError:
    base = unwrap(model)
    return UserError(
        f"model type {base.config.model_type!r} ({type(base).__name__}) is not supported: {reason}; use another model"
    )
