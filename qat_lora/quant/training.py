"""Which parameters of a student are trained, and how fast."""

import math

import torch
from torch import nn

from qat_lora.errors import UserError
from qat_lora.models.architecture import decoder_layers, part_of
from qat_lora.quant.linear import quantized_layers
from qat_lora.run.options import MOST_RATE

LEAST_RATE = 1e-12  # learning rate of a student whose weights are all zero
RATE_SHARE = 3.1e-3  # peak learning rate of 2-bit weights, as a share of their root mean square


def select_parameters(student: nn.Module, scope: str) -> None:
    """Freeze the parameters outside `scope`: "mlp" and "attn" train only that part of the decoder blocks, "weights"
    everything but the scales, and "all" everything (see SCOPES)."""
    keep = {id(p) for p in student.parameters()}
    if scope in ("mlp", "attn"):
        keep = {
            id(p)
            for block in decoder_layers(student)
            for child, module in block.named_children()
            if any(p.ndim > 1 for p in module.parameters())  # not the block's own norms
            for name, p in module.named_parameters(child)
            if part_of(block, name) == scope
        }
    elif scope == "weights":
        keep -= {id(p) for layer in quantized_layers(student).values() for p in layer.quantizer.parameters()}
    for p in student.parameters():
        p.requires_grad_(p.requires_grad and id(p) in keep)
    if not any(p.requires_grad for p in student.parameters()):
        raise UserError(f"--scope {scope} leaves no trainable parameters in this model; use another scope")


def usual_rates(student: nn.Module) -> tuple[float, float]:
    """The default peak learning rates of a student, end to end and layer by layer, rounded to two digits.

    At 2 bits both are 0.31% of the root mean square of the quantised weights: a latent weight has to move to the next
    level to have an effect, and the distance between levels is proportional to the size of the weights. The shares were
    tuned on SmolLM2, whose weights (0.19) are five times as large as Gemma 3's (0.034). Every two more bits divide
    the share by six; the end-to-end rate is also halved at 3 bits and quartered from 4 bits on (docs/benchmarks.md,
    "A second model"; 3 and 8 bits: unmeasured). With several quantisers, the one with the fewest bits decides.
    """
    layers = quantized_layers(student).values()
    squares = sum(float(torch.linalg.vector_norm(layer.weight.detach())) ** 2 for layer in layers)
    size = math.sqrt(squares / sum(layer.weight.numel() for layer in layers))
    bits = min(layer.quantizer.spec.bits for layer in layers)
    layerwise = RATE_SHARE * 6 ** (1 - bits / 2) * size
    rates = (float(f"{rate:.1e}") for rate in (layerwise / 2 ** min(bits - 2, 2), layerwise))
    return tuple(min(max(LEAST_RATE, rate), MOST_RATE) for rate in rates)  # an error elsewhere names NaN weights
