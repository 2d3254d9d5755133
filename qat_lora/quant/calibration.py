"""Where a student starts before any training: its scales, and with GPTQ its weights too."""

import torch
from torch import nn

from qat_lora.backend import TorchBackend
from qat_lora.models.architecture import decoder_layers, hidden_states, unwrap
from qat_lora.quant.blockwise import block_outputs, compensate_block, first_inputs
from qat_lora.quant.init import initialise, input_moments, set_scale
from qat_lora.quant.linear import QuantLinear, quantized_layers, unquantized
from qat_lora.run.console import watched


@torch.no_grad()
def calibrate(
    student: nn.Module, method: str, batches: list[dict], precision: str = "auto", blocks: bool = True
) -> None:
    """Set the quantisers of a student on the CPU from its weights and some calibration rows, in this worker alone.

    method: "rtn" (edge level = largest weight: plain rounding), "mse" (least squared error, each weight counted by how
    active its input is), "gptq" (that, then error compensation block by block on the quantised inputs; the latent
    weights become the compensated ones, so that the student's first answer is GPTQ's. What stands outside the blocks, a
    quantised head, starts as with "mse").
    batches: dicts of tokens [B, L], all of one shape; "rtn" does not look at them.
    blocks: False leaves the blocks of "gptq" at plain rounding, for a stage that compensates each when its turn comes.
    """
    backend = TorchBackend("cpu", precision)
    initialise(student, search=False)
    layers = {} if method == "rtn" else quantized_layers(student)
    if method == "gptq":  # those of the blocks are set below, on the inputs that they will really get
        inside = {id(p) for block in decoder_layers(student) for p in block.parameters()}
        layers = {name: layer for name, layer in layers.items() if id(layer.weight) not in inside}
    if layers:
        _least_error(student, layers, batches, backend)
    if method == "gptq" and blocks:
        _compensate(student, batches, backend)


def _least_error(student: nn.Module, layers: dict[str, nn.Module], batches: list[dict], backend: TorchBackend) -> None:
    def forward():
        for batch in watched(batches, "calibrating", len(batches)):
            with backend.autocast(), unquantized(student):
                hidden = hidden_states(student, batch["tokens"])
                if isinstance(head, QuantLinear):
                    for row in hidden:  # logits of a whole batch may not fit
                        head(row)

    head = unwrap(student).get_output_embeddings()
    moments = input_moments(student, forward)
    for name, layer in watched(layers.items(), "initial scales", len(layers)):
        set_scale(layer, moment=moments.get(name))  # experts have no input of their own


def _compensate(student: nn.Module, batches: list[dict], backend: TorchBackend) -> None:
    inputs, calls = first_inputs(student, batches, backend)
    blocks = decoder_layers(student)
    for index, block in watched(enumerate(blocks), "GPTQ, block by block", len(blocks)):
        compensate_block(block, inputs, calls.block(index), backend)
        inputs = block_outputs(block, inputs, calls.block(index), backend)
