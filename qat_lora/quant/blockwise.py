"""Process a model's decoder blocks one at a time: their inputs, their outputs and GPTQ."""

import contextlib
import copy
import functools
import inspect
import itertools
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from qat_lora.backend import TorchBackend
from qat_lora.errors import UserError
from qat_lora.models.architecture import as_answer, decoder_layers, hidden_states, model_type, replaced
from qat_lora.quant.gptq import Inputs, solve
from qat_lora.quant.init import input_moments, set_scale
from qat_lora.quant.linear import QuantLinear, quantized_layers


class _Seen(Exception):
    """Stops a forward pass once the required input has been seen."""


Call = tuple[tuple, dict]  # positional and keyword arguments of a block, without the hidden states


@torch.no_grad()
def first_inputs(
    model: nn.Module, batches: list[dict], backend: TorchBackend
) -> tuple[list[Tensor], list[tuple[Call, ...]]]:
    """The inputs of the first decoder block, hidden states [B, L, H] on the host, and for each block its Call in every
    batch: masks, rotary embeddings and any other arguments.

    batches: dicts of tokens [B, L], all of the same shape. This runs the model's own forward with blocks that return
    their hidden states unchanged; `check_blocks` checks that the model allows it.
    """
    inputs, calls = [], []
    for number, batch in enumerate(batches):
        with backend.autocast():
            hidden, found = _calls(model, batch["tokens"].to(backend.device, non_blocking=True))
        backend.step_boundary()
        inputs.append(backend.to_host(hidden))
        if number == 1 and _same(found, calls[0]):  # same masks and positions for every batch: keep one copy
            calls = [calls[0]] * len(batches)
        if len(calls) < len(batches):
            calls.append(found)
    return inputs, list(zip(*calls))


@torch.no_grad()
def check_blocks(model: nn.Module) -> None:
    """Raise UserError if the blocks of a model on the CPU pass each other more than hidden states: such a model cannot
    be trained block by block."""
    tokens, real = torch.arange(2, 10).unsqueeze(0), []

    def note(_, args, kwargs):
        real.append((args[1:], {key: value for key, value in kwargs.items() if key != "hidden_states"}))

    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in decoder_layers(model)]
    try:
        hidden_states(model, tokens)
    finally:
        for hook in hooks:
            hook.remove()
    if not _same(real, _calls(model, tokens)[1]):
        raise _entangled(model, "the arguments of a block depend on the blocks before it")


def _calls(model: nn.Module, tokens: Tensor) -> tuple[Tensor, list[Call]]:
    """The first block's hidden states and the Call of every block, with blocks that return their input unchanged."""
    layers, seen, answers = decoder_layers(model), [], {}

    def stand_in(block: nn.Module):
        def forward(*args, **kwargs):
            if not args and list(inspect.signature(type(block).forward).parameters)[1] != "hidden_states":
                raise _entangled(model, "hidden states are not the first argument of its blocks")
            hidden = args[0] if args else kwargs.pop("hidden_states")
            if seen and hidden is not seen[-1][0]:
                raise _entangled(model, "the model changes hidden states between its blocks")
            seen.append((hidden, (args[1:], kwargs)))
            if type(block) not in answers:
                out = type(block).forward(block, hidden, *args[1:], **kwargs)
                answers[type(block)] = 0 if isinstance(out, Tensor) else len(out)
            return as_answer(hidden, answers[type(block)])

        return forward

    with replaced(layers, stand_in):
        hidden_states(model, tokens)
    if len(seen) != len(layers):
        raise _entangled(model, f"its {len(layers)} blocks are called {len(seen)} times")
    return seen[0][0], [call for _, call in seen]


def _entangled(model: nn.Module, reason: str) -> UserError:
    return UserError(
        f"model type {model_type(model)!r} cannot be trained block by block: {reason}; "
        "use --init mse, and no layer-wise stage"
    )


def _same(one, other) -> bool:
    """Whether two nested values hold equal tensors."""
    if one is other:
        return True
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other


def run_block(layer: nn.Module, hidden: Tensor, call: Call) -> Tensor:
    """The output hidden states [B, L, H] of a decoder block for the input `hidden`."""
    args, kwargs = call
    out = layer(hidden, *args, **kwargs)
    return out if isinstance(out, Tensor) else out[0]


@torch.no_grad()
def block_outputs(layer: nn.Module, inputs: list[Tensor], calls: list[Call], backend: TorchBackend) -> list[Tensor]:
    """A block's outputs [B, L, H] for every batch of inputs; inputs and outputs stay on the host."""
    outputs = []
    for hidden, call in zip(inputs, calls):
        with backend.autocast():
            out = run_block(layer, hidden.to(backend.device, non_blocking=True), call)
        backend.step_boundary()
        outputs.append(backend.to_host(out))
    return outputs


@torch.no_grad()
def compensate_block(block: nn.Module, inputs: list[Tensor], calls: list[Call], backend: TorchBackend) -> None:
    """Apply GPTQ to a block, layer by layer in forward order, each with the outputs of the quantised layers before it
    as inputs.

    inputs: a list of [B, L, H]. The compensated weights replace the original ones. Workers have different inputs and
    average their moments. Experts see only some of the tokens, so they get least-squared-error scales instead.
    """
    for layer in quantized_layers(block).values():
        if not isinstance(layer, QuantLinear):
            set_scale(layer)
            backend.broadcast([p.data for p in layer.quantizer.parameters()])
    for layers in _by_input(block, inputs[0].to(backend.device, non_blocking=True), calls[0]):
        reach = functools.partial(_reach, layers[0], block, inputs, calls, backend)
        moment = input_moments(layers[0], reach, cross=True)[""]
        backend.reduce([moment])
        moment = moment.cpu() / backend.world_size
        known = Inputs.of(moment)
        for layer in layers:
            set_scale(layer, moment=moment.diagonal())
            quantizer = copy.deepcopy(layer.quantizer).cpu()
            layer.weight.copy_(solve(layer.weight.detach().cpu(), quantizer, known))
            for p, found in zip(layer.quantizer.parameters(), quantizer.parameters()):
                p.copy_(found)
            backend.broadcast([p.data for p in layer.parameters()])  # machines may round differently


def _reach(layer: QuantLinear, block: nn.Module, inputs: list[Tensor], calls: list[Call], backend) -> None:
    """Run a block on every batch of inputs, stopping after `layer`."""

    def stop(*_):
        raise _Seen

    with layer.register_forward_hook(stop):
        for hidden, call in zip(inputs, calls):
            with contextlib.suppress(_Seen):
                block_outputs(block, [hidden], [call], backend)
            backend.step_boundary()


def _by_input(block: nn.Module, hidden: Tensor, call: Call) -> list[list[QuantLinear]]:
    """The block's quantised layers in forward order, grouped by shared input."""
    seen: list[tuple[Tensor, QuantLinear]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda layer, args: seen.append((args[0], layer)))
        for layer in quantized_layers(block).values()
        if isinstance(layer, QuantLinear)
    ]
    try:
        run_block(block, hidden, call)
    finally:
        for hook in hooks:
            hook.remove()
    return [[layer for _, layer in group] for _, group in itertools.groupby(seen, lambda pair: id(pair[0]))]
