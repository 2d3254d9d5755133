"""What a Hugging Face causal language model looks like: the one place that reaches into it.

It is found in module types, shapes of parameters, signatures of forward and, where nothing else tells, names and source
code; how hidden states become logits is measured (models/head.py). There is no list of model names. A model that is
described wrongly here is refused (models/check.py): no number is given that plain transformers would not give.
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
from qat_lora.models.attention import PACKED, Layout, laid_out
from qat_lora.models.experts import STATIC

# What a module's forward asks for if its answer at one token depends on others.
OTHER_TOKENS = {
    "attention_mask", "position_embeddings", "position_ids", "past_key_values", "past_key_value", "layer_past",
    "cache_params", "cache_position", "alibi", "sinusoidal_pos", "seq_idx", "state",
}  # fmt: skip
FEWEST_INPUTS = 16  # of a layer worth quantising: Gemma 3n mixes its four streams by layers of 4 inputs
FEED_FORWARD = ("mlp", "feed_forward", "ffn")


def unwrap(model: nn.Module) -> nn.Module:
    """The HF model inside a PEFT wrapper, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def decoder(model: nn.Module) -> nn.Module:
    """The HF model without its LM head."""
    base = unwrap(model)
    stack = base.get_decoder()
    if stack is base.get_output_embeddings():  # a head of that name
        stack = base.base_model
    if stack is base:  # a class that names its decoder after another's
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
    """The parameters of a module's forward, and whether it takes any others."""
    parameters = inspect.signature(kind.forward).parameters
    return frozenset(parameters), any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def hidden_states(model: nn.Module, tokens: Tensor, layout: Layout | None = None, cache=None) -> Tensor:
    """Last hidden states [B, Q, H] of tokens [B, Q], ready for `head_form`'s output matrix.

    layout: who sees whom; None: every row is one text from its start. cache: holds the keys and values of a layout's
    earlier tokens. Switches the model's implementations of attention and experts where it has to, and leaves them so.
    """
    stack = decoder(model)
    if is_xla_device(tokens.device):
        stack.config._experts_implementation = STATIC
    if layout is None and is_xla_device(tokens.device):
        # Without a mask transformers looks for packed sequences by reading a tensor: a host sync a step.
        return _run(stack, tokens, Layout.causal(tokens.shape[1], tokens.device), cache, positions=False)
    if layout is None:
        return stack(input_ids=tokens, use_cache=False).last_hidden_state
    return _run(stack, tokens, layout, cache, positions=True)


def _run(stack: nn.Module, tokens: Tensor, layout: Layout, cache, positions: bool) -> Tensor:
    named, others = _accepts(type(stack))
    options = {"use_cache": False, "attention_mask": tokens.new_ones(tokens.shape)}  # 2-D: its values are not looked at
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
        return stack(input_ids=tokens, **known).last_hidden_state


def own_cache(model: nn.Module) -> DynamicCache:
    """An empty cache of the model's own kind."""
    return DynamicCache(config=unwrap(model).config)


def cached_states(model: nn.Module, tokens: Tensor, mask: Tensor, positions: Tensor, cache: DynamicCache) -> Tensor:
    """Last hidden states [B, Q, H] of the next tokens [B, Q] after those in the model's own cache.

    mask [B, K]: which of all tokens so far are real; positions [B, Q]: of the new ones.
    """
    named, others = _accepts(type(decoder(model)))
    options = {"attention_mask": mask.long(), "position_ids": positions, "use_cache": True}
    options["cache_params" if "cache_params" in named else "past_key_values"] = cache
    known = {key: value for key, value in options.items() if others or key in named}
    return decoder(model)(input_ids=tokens, **known).last_hidden_state


def embedding_rows(model: nn.Module) -> int:
    """How many token ids the embedding has."""
    return unwrap(model).get_input_embeddings().weight.shape[0]


# -- blocks ----------------------------------------------------------------------------------------------------------
def mixes_tokens(module: nn.Module) -> bool:
    """Whether a module's answer at one token depends on others: attention, convolutions and recurrences."""
    return bool(_accepts(type(module))[0] & OTHER_TOKENS)


def _is_block(module: nn.Module) -> bool:
    return any(map(mixes_tokens, module.modules())) and any(p.ndim > 1 for p in module.parameters())


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The stack of decoder blocks. Raises UserError for a model that has none, or several."""
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
    """Of which part of a decoder block its module or parameter `name` is: "attn", whatever mixes tokens, or "mlp"."""
    part, module = "mlp", block
    for step in name.split("."):
        module = getattr(module, step) if isinstance(module, nn.Module) else None
        if step in FEED_FORWARD:
            part = "mlp"
        elif isinstance(module, nn.Module) and mixes_tokens(module):
            part = "attn"
    return part


def experts_of(module: nn.Module) -> dict[str, bool]:
    """The weights [experts, …] of a module that keeps all its experts in one parameter, and whether each is [in,
    out]."""
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
    hidden = getattr(module, "hidden_size", None)  # Llama 4 multiplies from the right, and says so nowhere
    return (
        hidden is not None
        and weight.shape[1 if name.startswith(("gate", "up")) else 2] == hidden
        and hasattr(module, "expert_dim")
    )


@dataclass(frozen=True)
class Matrix:
    """A weight of a decoder block that can be quantised: parameter `name` of `module`, at `path` from the block; [out,
    in] of a linear layer, or [experts, out, in], [experts, in, out] where `transposed`."""

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
    """Whether modules of a subclass of nn.Linear compute what nn.Linear does (Falcon's); measured on a small one."""
    if kind is nn.Linear or not issubclass(kind, nn.Linear) or kind.__init__ is not nn.Linear.__init__:
        return kind is nn.Linear
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        layer, x = kind(3, 2, device="cpu"), torch.rand(4, 3, device="cpu")
        found = layer(x)
    return isinstance(found, Tensor) and torch.allclose(found, nn.functional.linear(x, layer.weight, layer.bias))


def _is_linear(module: nn.Module) -> bool:
    return _computes_linear(type(module)) or (isinstance(module, nn.Linear) and "quantizer" in module._modules)


def matrices(block: nn.Module) -> Iterator[Matrix]:
    """The linear layers, quantised or not, and the experts of a block. What chooses between experts is left alone: it
    is small, and a wrong choice costs more than any rounding; so are layers of a few inputs."""
    modules = list(block.named_modules())
    counts = {
        path.rpartition(".")[0]: max(
            [getattr(module, "num_experts", None) or 0, *(len(module._parameters[n]) for n in names)]
        )
        for path, module in modules
        if (names := experts_of(module)) or "Experts" in type(module).__name__
    }
    inputs: dict[str, set[int]] = {}  # of the linear layers that stand beside each other
    for path, module in modules:
        if isinstance(module, nn.Linear):
            inputs.setdefault(path.rpartition(".")[0], set()).add(module.in_features)
    for path, module in modules:
        owner = path.rpartition(".")[0]
        if _is_linear(module) and module.in_features >= FEWEST_INPUTS and _is_called(block, path):
            # Beside the experts, or at the end of a module that stands there: an expert shared by all tokens may be as
            # wide as there are experts, and its answer feeds another layer.
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
    """Whether the linear layer at `path` of a block is called, on every device. Mamba's code multiplies with the weight
    of some itself, and would see no quantiser or adapter there."""
    owner, _, name = path.rpartition(".")
    return name not in _weights_read(type(block.get_submodule(owner)))


def uncalled(block: nn.Module) -> list[str]:
    """The linear layers of a block that are left as they are, because the model reads their weights itself."""
    return [path for path, module in block.named_modules() if _is_linear(module) and not _is_called(block, path)]


@contextmanager
def replaced(blocks: Iterable[nn.Module], stand_in: Callable) -> Iterator[None]:
    """Within this context each block runs stand_in(block) in place of its forward."""
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
    """Within this context experts are multiplied one after the other, which also works in fp64: torch's grouped product
    does not."""
    config = unwrap(model).config
    before, config._experts_implementation = config._experts_implementation, "eager"
    try:
        yield
    finally:
        config._experts_implementation = before


def as_answer(hidden: Tensor, values: int):
    """Hidden states as a block returns them: alone (values 0), or first of so many values."""
    return (hidden, *[None] * (values - 1)) if values else hidden


def is_recurrent(model: nn.Module) -> bool:
    """Whether some blocks carry a state from token to token instead of looking back: linear attention, convolutions,
    state spaces."""
    base = unwrap(model)
    if base._is_stateful:
        return True
    try:
        return any(DynamicCache(config=base.config).is_linear)
    except (AttributeError, KeyError, ValueError, TypeError):
        return False


def short_range(config: PreTrainedConfig) -> int | None:
    """Tokens up to which a text's answer does not depend on how long others of its batch are, or where in a row it
    stands; None: however long. LongRoPE takes other frequencies beyond it, Llama 4 another attention temperature."""
    ropes = getattr(config, "rope_parameters", None) or {}
    limits = [
        rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)
        for rope in (ropes, *ropes.values())
        if isinstance(rope, dict) and rope.get("rope_type") == "longrope"
    ]
    if getattr(config, "attn_temperature_tuning", False):
        limits.append(getattr(config, "floor_scale", None))
    return min((int(limit) for limit in limits if limit), default=None)


def counts_slots(model: nn.Module) -> bool:
    """Whether some attention has a window by a matrix of its own (GPT-Neo), which counts the slots of a row, not the
    positions in a text."""
    masks = (b for b in decoder(model).buffers() if b.dtype == torch.bool and b.ndim > 1 and b.shape[-1] == b.shape[-2])
    return any(not bool(mask[..., -1, 0].all()) for mask in masks)


def packs(model: nn.Module) -> bool:
    """Whether the examples of a packed row can be kept apart. Measured by `check`; before that, by structure."""
    return unwrap(model).__dict__.get("_packs", not is_recurrent(model))


def set_packs(model: nn.Module, together: bool) -> None:
    """Have `packs` say so."""
    unwrap(model)._packs = together


def refused(model: nn.Module, reason: str) -> UserError:
    base = unwrap(model)
    return UserError(
        f"model type {base.config.model_type!r} ({type(base).__name__}) is not supported: {reason}; use another model"
    )
