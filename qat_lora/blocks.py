"""The decoder blocks of a model, one at a time: their inputs, their outputs, and GPTQ on them."""

import contextlib
import functools
import itertools

import torch
from torch import Tensor, nn

from qat_lora.backend import TorchBackend
from qat_lora.errors import UserError
from qat_lora.models.loading import decoder_layers, hidden_states
from qat_lora.quant.gptq import compensated
from qat_lora.quant.init import input_moments, set_scale
from qat_lora.quant.linear import QuantLinear, quantized_layers


class _Seen(Exception):
    """Ends a forward pass once what it was for is known."""


def block_inputs(model: nn.Module, tokens: Tensor) -> tuple[Tensor, dict]:
    """What the first decoder block is called with for tokens [B, L]: hidden states [B, L, H] and keyword arguments.

    The keywords (positions, masks) depend on the shape alone, so they serve every block and batch of that shape.
    """
    seen = {}

    def watch(_, args, kwargs):
        seen.update(hidden=args[0] if args else kwargs.pop("hidden_states"), kwargs=dict(kwargs))
        raise _Seen

    hook = decoder_layers(model)[0].register_forward_pre_hook(watch, with_kwargs=True)
    try:
        with torch.no_grad():
            hidden_states(model, tokens)
    except _Seen:
        return seen["hidden"], seen["kwargs"]
    finally:
        hook.remove()
    raise UserError(f"{type(model).__name__} does not call its decoder layers; layer-wise training needs one that does")


def run_block(layer: nn.Module, hidden: Tensor, kwargs: dict) -> Tensor:
    """The hidden states [B, L, H] that a decoder block makes of `hidden`."""
    out = layer(hidden, **kwargs)
    return out[0] if isinstance(out, tuple) else out


@torch.no_grad()
def block_outputs(layer: nn.Module, inputs: list[Tensor], kwargs: dict, backend: TorchBackend) -> list[Tensor]:
    """A block's outputs [B, L, H] for every batch of inputs; both are kept on the host."""
    outputs = []
    for hidden in inputs:
        with backend.autocast():
            out = run_block(layer, hidden.to(backend.device), kwargs)
        backend.step_boundary()
        outputs.append(backend.to_host(out))
    return outputs


@torch.no_grad()
def compensate_block(block: nn.Module, inputs: list[Tensor], kwargs: dict, backend: TorchBackend) -> None:
    """GPTQ on a block, layer after layer in the order of its forward pass, each on what the quantised ones before it
    give for `inputs` (a list of [B, L, H]). The weights become the compensated ones. Several workers, each with inputs
    of its own, put their moments together."""
    for layers in _by_input(block, inputs[0].to(backend.device), kwargs):
        reach = functools.partial(_reach, layers[0], block, inputs, kwargs, backend)
        moment = input_moments(layers[0], reach, cross=True)[""]
        backend.reduce([moment])
        moment = moment.cpu() / backend.world_size
        for layer in layers:
            set_scale(layer, moment=moment.diagonal())
            quantizer, weight = layer.quantizer, layer.weight.detach().cpu()
            scale = quantizer.scale_matrix().expand_as(quantizer.grouped(layer.weight)).reshape(weight.shape).cpu()
            layer.weight.copy_(compensated(weight, scale, moment, quantizer.spec))
            backend.broadcast([p.data for p in layer.parameters()])  # another machine may round another way


def _reach(layer: QuantLinear, block: nn.Module, inputs: list[Tensor], kwargs: dict, backend: TorchBackend) -> None:
    """Run a block on every batch of inputs, as far as one of its layers."""

    def stop(*_):
        raise _Seen

    with layer.register_forward_hook(stop):
        for hidden in inputs:
            with contextlib.suppress(_Seen):
                block_outputs(block, [hidden], kwargs, backend)
            backend.step_boundary()


def _by_input(block: nn.Module, hidden: Tensor, kwargs: dict) -> list[list[QuantLinear]]:
    """The block's quantised layers in the order of the forward pass, those with one and the same input together."""
    seen: list[tuple[Tensor, QuantLinear]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda layer, args: seen.append((args[0], layer)))
        for layer in quantized_layers(block).values()
    ]
    try:
        run_block(block, hidden, kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return [[layer for _, layer in group] for _, group in itertools.groupby(seen, lambda pair: id(pair[0]))]
