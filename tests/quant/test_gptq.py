"""GPTQ is the textbook loop; what follows it lowers the error of a layer's outputs in every grid."""

import pytest
import torch
from torch import nn

from qat_lora.quant.gptq import DAMPING, Inputs, _fit, compensated, solve
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
    return compensated(layer.weight.detach(), scale, Inputs.of(moment), quantizer.spec)


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


GRIDS = ("int2/g64", "balanced2/g32", "int2/g64+offset", "ternary/g32", "int2/g32/s8", "q2_k", "lut2/r4", "int4/rows8",
         "int2/g64+zero")  # fmt: skip


@pytest.mark.parametrize("text", GRIDS)
@torch.no_grad()
def test_descent_and_fitted_scales_lower_the_error_of_the_outputs(text):
    layer, (x, moment) = layer_of(text, 256), correlated(256)
    quantizer, weight = layer.quantizer, layer.weight.detach().clone()

    def error(latent) -> float:
        return ((weight - quantizer.decode(quantizer.encode(latent))) @ x.T).square().sum().item()

    offset = quantizer.offset_matrix()
    offset = 0 if offset is None else quantizer.expanded(offset)
    scale = quantizer.expanded(quantizer.scale_matrix())
    gptq = error(compensated(weight - offset, scale, Inputs.of(moment), quantizer.spec) + offset)
    latent = solve(weight, quantizer, Inputs.of(moment))
    print(f"{text}: {error(latent) / gptq:.3f}")
    assert error(latent) < (0.93 if quantizer.spec.scale == "group" and not quantizer.spec.narrow else 0.995) * gptq
    assert torch.equal(layer.weight, weight), "only the quantizer is changed"


@torch.no_grad()
def test_fitted_scales_are_those_of_a_dense_least_squares_problem():
    layer, (x, moment) = layer_of("int2/g64+offset"), correlated()
    quantizer, weight = layer.quantizer, layer.weight.detach()
    ratio = (weight - quantizer.expanded(quantizer.offset_matrix())) / quantizer.expanded(quantizer.scale_matrix())
    codes = quantizer.encode(weight).float()
    _fit(weight, quantizer, ratio, moment)
    for row in (0, 7, 23):
        columns = [x[:, g * 64 : (g + 1) * 64] for g in range(3)]
        design = [c @ codes[row, g * 64 : (g + 1) * 64] for g, c in enumerate(columns)] + [c.sum(1) for c in columns]
        wanted = torch.linalg.lstsq(torch.stack(design, 1).double(), (x @ weight[row]).double()[:, None]).solution[:, 0]
        found = torch.cat([quantizer.scale[row, :, 0], quantizer.offset[row, :, 0]]).double()
        assert torch.allclose(found, wanted, rtol=1e-2, atol=1e-3), (found, wanted)


@torch.no_grad()
def test_a_group_of_zeros_keeps_its_scale():
    layer, (_, moment) = layer_of("ternary/g64"), correlated()
    layer.weight[3, 64:128] *= 1e-4
    initialise(layer)
    solve(layer.weight.detach(), layer.quantizer, Inputs.of(moment))
    assert (layer.quantizer.scale.abs() > 1e-6).all() and layer.quantizer.scale.isfinite().all()
