"""GPTQ: equal to the textbook loop."""

import pytest
import torch
from torch import nn

from qat_lora.quant.gptq import DAMPING, compensated
from qat_lora.quant.init import initialise
from qat_lora.quant.linear import QuantLinear
from qat_lora.quant.spec import QuantSpec


def layer_of(text, in_features=192):
    torch.manual_seed(0)
    layer = QuantLinear(nn.Linear(in_features, 24, bias=False), QuantSpec.parse(text))
    initialise(layer)
    return layer


def correlated(in_features=192, rows=600):
    torch.manual_seed(1)
    x = torch.randn(rows, in_features) @ (torch.eye(in_features) + 0.3 * torch.randn(in_features, in_features))
    x = x * torch.linspace(0.2, 3, in_features)
    return x, x.T @ x / rows


def compensate(layer, moment):
    quantizer = layer.quantizer
    scale = quantizer.scale_matrix().detach().expand_as(quantizer.grouped(layer.weight)).reshape(layer.weight.shape)
    return compensated(layer.weight.detach(), scale, moment, quantizer.spec)


@pytest.mark.parametrize("text", ["int2/g64", "balanced2/g32", "int4/g32", "lut2/r4", "balanced2/tensor"])
def test_it_equals_the_column_by_column_loop(text):
    """The optimal-brain form: after each column, its row and column are eliminated from the inverse moment."""
    layer = layer_of(text)
    _, moment = correlated()
    latent = compensate(layer, moment)
    h = moment.double()
    inverse = torch.linalg.inv(h + DAMPING * h.diagonal().mean() * torch.eye(len(h)).double())
    w = layer.weight.detach().double().clone()
    scale = layer.quantizer.scale_matrix().expand_as(layer.quantizer.grouped(layer.weight)).reshape(w.shape).double()
    spec = layer.quantizer.spec
    for j in moment.diagonal().argsort(descending=True, stable=True).tolist():
        code = ((w[:, j] / scale[:, j] - spec.lowest) / spec.step).round().clamp(0, spec.levels - 1)
        lost = (w[:, j] - (code * spec.step + spec.lowest) * scale[:, j]) / inverse[j, j]
        change = lost[:, None] * inverse[j]
        change[:, j] = 0  # the column itself keeps its value before rounding
        w -= change
        inverse = inverse - inverse[:, j : j + 1] @ inverse[j : j + 1] / inverse[j, j]
    close = ((latent - w).abs() < 1e-4).all(1).float().mean()
    assert close > 0.8, f"only {close:.1%} of the rows agree"  # a value on a rounding boundary changes its whole row


def test_inputs_that_are_always_zero_do_no_harm():
    layer = layer_of("int2/g64")
    x, _ = correlated()
    x[:, 50:60] = 0
    latent = compensate(layer, x.T @ x / len(x))
    assert torch.isfinite(latent).all() and torch.equal(latent[:, 50:60], layer.weight[:, 50:60])
