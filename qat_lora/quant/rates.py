"""Learning rates of quantised weights, from the size of the weights and their bits."""

import math

import torch
from torch import nn

from qat_lora.quant.linear import quantized_layers
from qat_lora.run.options import MOST_RATE

LEAST_RATE = 1e-12  # learning rate of a student whose weights are all zero
RATE_SHARE = 3.1e-3  # peak learning rate of 2-bit weights, as a share of their root mean square


def usual_rates(student: nn.Module) -> tuple[float, float]:
    """The default peak learning rates of a student, end to end and layer by layer, rounded to two digits.

    At 2 bits both are 0.31% of the root mean square of the quantised weights: a latent weight has to move to the next
    level to have an effect, and the distance between levels is proportional to the size of the weights. The shares were
    tuned on SmolLM2, whose weights (0.19) are five times as large as Gemma 3's (0.034). How the rates fall with the
    bits: `by_bits`. With several quantisers they are those of the fewest bits; the others' follow from `rate_shares`.
    """
    layers = quantized_layers(student).values()
    squares = sum(float(torch.linalg.vector_norm(layer.weight.detach())) ** 2 for layer in layers)
    size = math.sqrt(squares / sum(layer.weight.numel() for layer in layers))
    bits = min(layer.quantizer.spec.bits for layer in layers)
    rates = (float(f"{RATE_SHARE * size * by_bits(bits, layerwise):.1e}") for layerwise in (False, True))
    return tuple(min(max(LEAST_RATE, rate), MOST_RATE) for rate in rates)  # an error elsewhere names NaN weights


def by_bits(bits: int, layerwise: bool = False) -> float:
    """The learning rate of weights of `bits` bits over that of 2 bits: every two more bits divide it by six; end to end
    it is also halved at 3 bits and quartered from 4 bits on (docs/benchmarks.md, "A second model"; 3 and 8 bits:
    unmeasured)."""
    return 6 ** (1 - bits / 2) / (1 if layerwise else 2 ** min(bits - 2, 2))


def rate_shares(model: nn.Module, layerwise: bool = False) -> dict[nn.Parameter, float]:
    """The learning rates of quantised weights, and of their scales and offsets, over that of the fewest bits in the
    model. Otherwise layers of 8 bits among others of 4 would train at 36 times their own rate."""
    layers = quantized_layers(model).values()
    most = max((by_bits(layer.quantizer.spec.bits, layerwise) for layer in layers), default=1.0)
    return {
        p: by_bits(layer.quantizer.spec.bits, layerwise) / most
        for layer in layers for p in (layer.weight, *layer.quantizer.parameters())
    }  # fmt: skip
