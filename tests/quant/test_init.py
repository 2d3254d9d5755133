"""Scale initialisation: the search beats absmax, importance lowers the weighted error, bad weights are refused."""

import pytest
import torch
from torch import nn

from qat_lora.errors import UserError
from qat_lora.quant.init import initialise, input_moments, least_error_scale, set_scale
from qat_lora.quant.linear import SMALLEST_SCALE, QuantLinear, show_quantized
from qat_lora.quant.spec import QuantSpec

CODEBOOKS = ("balanced", "int", "lut")


def gaussian(rows=32, columns=64, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def started(text, weight, search=True, moment=None):
    """A QuantLinear on `weight`, its scale initialised."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data.copy_(weight)
    layer = QuantLinear(linear, QuantSpec.parse(text))
    set_scale(layer, search, moment)
    return layer


def relative_error(layer, moment=1.0):
    """Σ moment·(w − ŵ)² / Σ moment·w²."""
    weight, quantised = layer.weight.detach(), layer.quantizer(layer.weight, torch.float32).detach()
    return float(((weight - quantised).square() * moment).sum() / (weight.square() * moment).sum())


@pytest.mark.parametrize("text", [f"{c}{b}/{s}" for c in CODEBOOKS for b in (2, 3, 4, 8) for s in ("g32", "tensor")])
def test_the_search_is_never_worse_than_the_absolute_maximum(text):
    outlier = gaussian().index_fill(1, torch.tensor([5]), 20)
    for weight in (gaussian(), gaussian().erf(), outlier):
        found, absmax = (relative_error(started(text, weight, search)) for search in (True, False))
        assert found <= 1.001 * absmax  # scales are rounded to fp16 after the search


@pytest.mark.parametrize("sigma", [3e-3, 1e-3, 1e-4])
@pytest.mark.parametrize("text", [f"{codebook}{bits}/g32" for codebook in CODEBOOKS for bits in (2, 4, 8)])
def test_small_weights_lose_no_more_than_large_ones(text, sigma):
    """Beyond the rounding of a scale to a multiple of 2⁻²³."""
    large, small = (relative_error(started(text, gaussian() * size)) for size in (1, sigma))
    assert small**0.5 < 1.05 * large**0.5 + (0.003 if sigma < 1e-3 else 0)


@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_absmax_puts_the_edge_level_on_the_largest_weight(codebook):
    layer = started(f"{codebook}4/g32", gaussian(), search=False)
    largest = layer.quantizer.grouped(layer.weight).abs().amax(2, keepdim=True)
    torch.testing.assert_close(layer.quantizer.scale * layer.quantizer.spec.largest, largest)


def test_errors_on_gaussian_weights():
    """Known values at g = 64; at 2 bits absmax, the common initialisation, is the worst."""
    weight = gaussian(256, 128)
    error = {text: relative_error(started(f"{text}/g64", weight)) for text in ("balanced2", "lut2", "int2")}
    assert error["balanced2"] == pytest.approx(0.113, rel=0.03)
    assert error["lut2"] == pytest.approx(error["balanced2"], rel=1e-3), "the same grid"
    assert error["int2"] == pytest.approx(0.124, rel=0.03)
    assert relative_error(started("int2/g64", weight, search=False)) > 1.3 * error["int2"]
    assert relative_error(started("balanced2/g64", weight, search=False)) > 2 * error["balanced2"]


def test_the_search_tries_both_signs_for_an_asymmetric_codebook():
    weight = gaussian().abs() + 0.1
    weight[:16] *= -1
    layer = started("int2/g64", weight)
    assert (layer.quantizer.scale[:16] > 0).all() and (layer.quantizer.scale[16:] < 0).all()


@pytest.mark.parametrize("importance", [torch.ones(16, 32), gaussian(16, 32, seed=1).square()], ids=["equal", "own"])
@pytest.mark.parametrize("text", ["balanced2/g32", "int2/g32", "int3/g32", "lut2/g32"])
def test_a_fine_grid_finds_no_much_better_scale(text, importance):
    """A brute-force grid over the scale, far finer than the search, gains less than 1% in all."""
    spec, groups = QuantSpec.parse(text), gaussian(16, 32, seed=3)
    codes = torch.arange(spec.levels) * spec.step + spec.lowest

    def error(scale):
        nearest = (groups.unsqueeze(2) - codes * scale.unsqueeze(2)).abs().amin(2)
        return (nearest.square() * importance).sum(1)

    found = error(least_error_scale(groups, importance, spec))
    reach = groups.abs().amax(1, keepdim=True) / spec.largest
    signs = (1, -1) if spec.codebook == "int" else (1,)
    grid = torch.stack([error(reach * f * s) for f in torch.linspace(0.2, 1.2, 800) for s in signs]).amin(0)
    assert (found.sum() <= 1.01 * grid.sum()) and (found >= 0.99 * grid).all()


@pytest.mark.parametrize("text", ["balanced2/g32", "int2/tensor", "lut3/g32"])
def test_importance_lowers_the_weighted_error(text):
    moment = torch.linspace(-3, 3, 64).exp().square()
    plain, weighted = started(text, gaussian()), started(text, gaussian(), moment=moment)
    assert relative_error(weighted, moment) < 0.985 * relative_error(plain, moment)
    assert relative_error(weighted) > relative_error(plain)


@pytest.mark.parametrize("rank", [2, 5, 16])
def test_a_lowrank_scale_starts_at_the_truncated_svd_of_the_group_scales(rank):
    """256 inputs are eight groups of 32, so rank 16 represents their scales exactly."""
    weight = gaussian(32, 256) * torch.rand(32, 256, generator=torch.Generator().manual_seed(1))
    quantizer = started(f"balanced4/r{rank}", weight).quantizer
    groups = started("balanced4/g32", weight).quantizer.scale.squeeze(2).detach()
    u, s, v = torch.linalg.svd(groups, full_matrices=False)
    nearest = ((u[:, :rank] * s[:rank]) @ v[:rank]).repeat_interleave(32, 1)
    torch.testing.assert_close(quantizer.scale_matrix().squeeze(1), nearest, rtol=2e-3, atol=1e-5)  # factors in fp16
    torch.testing.assert_close(quantizer.a.norm(dim=0), torch.ones(rank))
    torch.testing.assert_close(quantizer.b.norm(dim=1), torch.ones(rank))
    assert not quantizer.g[8:].any(), "ranks that are not needed start at zero"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_is_named(value):
    model = nn.ModuleDict({"up": QuantLinear(nn.Linear(32, 8), QuantSpec.parse("balanced2/g32"))})
    model["up"].weight.data[3, 4] = value
    with pytest.raises(UserError, match="up: the weight holds NaN or infinity"):
        initialise(model)


@pytest.mark.parametrize("search", [True, False])
@pytest.mark.parametrize("scale", ["g32", "r4", "tensor"])
@pytest.mark.parametrize("codebook", CODEBOOKS)
def test_zero_weights_are_trainable(codebook, scale, search):
    layer = started(f"{codebook}2/{scale}", torch.zeros(8, 64), search, moment=torch.zeros(64))
    assert all(torch.isfinite(p).all() for p in layer.parameters())
    output = layer(torch.randn(3, 64))
    output.square().sum().backward()
    assert output.abs().max() < 64 * 4 * SMALLEST_SCALE
    assert all(torch.isfinite(p.grad).all() for p in layer.parameters())


def test_input_moments_are_mean_squares():
    torch.manual_seed(0)
    first, second = (started("balanced2/g32", gaussian(*shape)) for shape in ((64, 32), (8, 64)))
    model = nn.Sequential(first, nn.ReLU(), second)
    batches = [torch.randn(2, 5, 32), torch.randn(3, 1, 32)]
    moments = input_moments(model, lambda: [model(batch) for batch in batches])
    rows = torch.cat([batch.reshape(-1, 32) for batch in batches])
    torch.testing.assert_close(moments["0"], rows.square().mean(0))
    torch.testing.assert_close(moments["2"], model[0](rows).relu().square().mean(0))
    assert not model[0]._forward_pre_hooks


def test_a_tied_head_is_initialised_from_its_weight():
    linear, embedding = nn.Linear(64, 32, bias=False), nn.Embedding(32, 64)
    embedding.weight = linear.weight
    head = QuantLinear(linear, QuantSpec.parse("balanced4/g32"))
    show_quantized(embedding, head.quantizer, ("weight",))
    initialise(nn.ModuleDict({"embedding": embedding, "head": head}))
    assert torch.equal(head.quantizer.scale, started("balanced4/g32", linear.weight).quantizer.scale)
