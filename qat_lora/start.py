"""Where a student starts before any training: its scales, and with GPTQ its weights too."""

import itertools

import torch
from torch import Tensor, nn

from qat_lora.backend import TorchBackend
from qat_lora.layer_qat import block_inputs, block_outputs, run_block
from qat_lora.models.loading import decoder_layers, hidden_states
from qat_lora.quant.gptq import compensated
from qat_lora.quant.init import initialise, input_moments
from qat_lora.quant.linear import QuantLinear, quantized_layers, unquantized

METHODS = ("rtn", "mse", "gptq")


@torch.no_grad()
def start(student: nn.Module, method: str, batches: list[dict], backend: TorchBackend) -> None:
    """Set the quantisers of a student on the CPU from its weights and some calibration rows.

    method: "rtn" (edge level = largest weight: plain rounding), "mse" (least squared error, each weight counted by how
    active its input is), "gptq" (that, then error compensation block by block on the quantised inputs; the latent
    weights become the compensated ones, so that the student's first answer is GPTQ's).
    batches: dicts of tokens [B, L], all of one shape; "rtn" does not look at them.
    """
    moments = None
    if method != "rtn":

        def forward(model, batch):
            with backend.autocast(), unquantized(model):
                hidden_states(model, batch["tokens"])

        moments = input_moments(student, lambda: [forward(student, batch) for batch in batches])
    initialise(student, method != "rtn", moments)
    if method == "gptq":
        _compensate_blocks(student, batches, backend)


def _compensate_blocks(student: nn.Module, batches: list[dict], backend: TorchBackend) -> None:
    """GPTQ in the order of the forward pass: every layer sees what the quantised layers before it really give."""
    with backend.autocast():
        seen = [block_inputs(student, batch["tokens"]) for batch in batches]
    inputs, kwargs = [hidden for hidden, _ in seen], seen[0][1]
    for block in decoder_layers(student):
        _compensate(block, inputs, kwargs, backend)
        inputs = block_outputs(block, inputs, kwargs, backend)


def _compensate(block: nn.Module, inputs: list[Tensor], kwargs: dict, backend: TorchBackend) -> None:
    for layers in _by_input(block, inputs[0], kwargs):
        moment = input_moments(layers[0], lambda: block_outputs(block, inputs, kwargs, backend), cross=True)[""]
        for layer in layers:
            initialise(layer, moments={"": moment.diagonal()})
            layer.weight.copy_(compensated(layer.weight, moment, layer.quantizer))


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
