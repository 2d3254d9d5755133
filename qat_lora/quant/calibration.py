"""The student before training: the model or student that it starts from, its scales and, with GPTQ, its weights."""

from pathlib import Path

import torch
from torch import nn

from qat_lora.backend import TorchBackend
from qat_lora.errors import UserError
from qat_lora.models.architecture import decoder_layers, hidden_states, unwrap
from qat_lora.models.loading import load_model
from qat_lora.quant.blockwise import block_outputs, check_blocks, compensate_block, first_inputs
from qat_lora.quant.init import initialise, input_moments, set_scale
from qat_lora.quant.linear import QuantLinear, full_precision, quantized_layers
from qat_lora.quant.student import StudentSpec, load_student, plain_model, quantize, read_student, thaw
from qat_lora.run.console import watched
from qat_lora.run.files import sha256


def check_start(checkpoint: str, model: str, spec: StudentSpec, layer_steps: int) -> tuple[str, bool]:
    """The checksum of the student file that a run starts from, and whether its codes are trained ones of `spec`. Raises
    UserError if it is not a student of this model."""
    made = read_student(checkpoint, model)
    same = StudentSpec(**made["spec"]) == spec
    if same and layer_steps:
        raise UserError(
            f"--layer-steps {layer_steps}: {checkpoint} already has these quantisers, so its blocks would only learn "
            "from themselves; use --layer-steps 0"
        )
    return sha256(Path(checkpoint)), same and made["info"].get("trained") is not False


def load_start(checkpoint: str | None, model: str, spec: StudentSpec, by_block: bool) -> tuple[nn.Module, bool]:
    """The student before training, from the base model or a student file, and whether its scales are set. by_block:
    raise UserError unless its blocks can be trained one by one."""
    student, made = load_student(checkpoint, model) if checkpoint else (None, None)
    if made and StudentSpec(**made["spec"]) == spec:
        return thaw(student), True
    base = plain_model(student) if made else load_model(model)
    if by_block:
        check_blocks(base)
    return quantize(base, spec), False


@torch.no_grad()
def calibrate(
    student: nn.Module, method: str, batches: list[dict], precision: str = "auto", blocks: bool = True
) -> None:
    """Initialise the quantisers of a student on the CPU from its weights and calibration rows, in this worker alone.

    method: "rtn" (round to nearest: the edge level times the scale is the largest weight), "mse" (least squared error,
    each weight weighted by the mean square of its input), "gptq" ("mse", then error compensation block by block on the
    quantised inputs; the compensated weights replace the latent ones, so that the student starts as the GPTQ model. A
    quantised head is outside the blocks and is initialised as with "mse").
    batches: dicts of tokens [B, L], all of the same shape; "rtn" does not use them.
    blocks: False makes "gptq" initialise the decoder blocks as "rtn" does, for a stage that compensates each block
    before training it.
    """
    backend = TorchBackend("cpu", precision)
    initialise(student, search=False)
    layers = {} if method == "rtn" else quantized_layers(student)
    if method == "gptq":  # layers in blocks are initialised below, on their quantised inputs
        inside = {id(p) for block in decoder_layers(student) for p in block.parameters()}
        layers = {name: layer for name, layer in layers.items() if id(layer.weight) not in inside}
    if layers:
        _least_error(student, layers, batches, backend)
    if method == "gptq" and blocks:
        inputs, calls = first_inputs(student, batches, backend)
        found = decoder_layers(student)
        for index, block in watched(enumerate(found), "GPTQ, block by block", len(found)):
            compensate_block(block, inputs, calls[index], backend)
            inputs = block_outputs(block, inputs, calls[index], backend)


def _least_error(student: nn.Module, layers: dict[str, nn.Module], batches: list[dict], backend: TorchBackend) -> None:
    def forward():
        for batch in watched(batches, "calibrating", len(batches)):
            with backend.autocast(), full_precision(student):
                hidden = hidden_states(student, batch["tokens"])
                if isinstance(head, QuantLinear):
                    for row in hidden:  # the logits of a whole batch may not fit in memory
                        head(row)

    head = unwrap(student).get_output_embeddings()
    moments = input_moments(student, forward)
    for name, layer in watched(layers.items(), "initial scales", len(layers)):
        set_scale(layer, moment=moments.get(name))  # experts have no moment
