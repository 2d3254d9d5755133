"""Grids with offsets or zero points, narrow scales and offsets, three levels, and a scale for several rows."""

import pytest
import torch
from torch import nn

from qat_lora.kernels.codes import pack_ternary, unpack_ternary
from qat_lora.quant.gptq import Inputs, solve
from qat_lora.quant.init import set_scale
from qat_lora.quant.linear import QuantLinear
from qat_lora.quant.spec import NAMES, QuantSpec

GRIDS = sorted({*NAMES.values(), "ternary/g64", "int2/g64+offset", "int2/g32/s8", "int4/rows8", "int2/g32+offset/s8",
                "balanced2/g32/s8", "int5/g32", "int7/g32+offset", "int2/g64+zero", "int4/g128+zero"})  # fmt: skip


def made(text: str, out: int = 16, inputs: int = 512, mean: float = 0.004) -> QuantLinear:
    layer = nn.Linear(inputs, out, bias=False)
    torch.manual_seed(0)
    layer.weight.data = torch.randn(out, inputs) * 0.02 + mean
    layer = QuantLinear(layer, QuantSpec.parse(text))
    set_scale(layer)
    return layer


@pytest.mark.parametrize("text", GRIDS)
def test_what_is_trained_is_what_is_stored(text):
    layer, there = made(text), made(text, mean=0.0)
    used = layer.quantizer(layer.weight, torch.float32).detach()
    codes = layer.quantizer.encode(layer.weight)
    assert int(codes.max()) < layer.quantizer.spec.levels and torch.equal(layer.quantizer.decode(codes), used)
    for (parameter, _), (_, value) in zip(there.quantizer.stored(), layer.quantizer.stored()):
        assert value.dtype in (torch.float16, torch.int16)
        parameter.data.copy_(value)
    there.quantizer.from_stored()
    assert torch.equal(there.quantizer.decode(codes), used)
    for (_, one), (_, other) in zip(there.quantizer.stored(), layer.quantizer.stored()):
        assert torch.equal(one, other), "stored once more, it is the same"


@pytest.mark.parametrize("text", [text for text in GRIDS if "/s" in text or "+zero" in text])
def test_narrow_scales_offsets_and_zero_points_are_integers_that_fit(text):
    quantizer = made(text).quantizer
    for value, parameter in ((v, p) for p, v in quantizer.stored() if v.dtype == torch.int16):
        levels = quantizer.spec.scale_levels if parameter is quantizer.scale else quantizer.spec.offset_levels
        assert levels.lowest <= int(value.min()) and int(value.max()) <= levels.lowest + levels.levels - 1
        assert parameter is not quantizer.scale or int(value.abs().min()) > 0, "a scale is never 0"


@pytest.mark.parametrize("text", GRIDS)
def test_gradients_are_those_of_rounding_passed_straight_through(text):
    """Against autograd through plain operations, with rounding straight through for the weight and for zero points."""
    layer = made(text)
    quantizer, spec = layer.quantizer, layer.quantizer.spec
    scale = quantizer.scale_matrix().detach().requires_grad_()
    offset = quantizer.offset_matrix()
    offset = torch.zeros(()) if offset is None else offset.detach().requires_grad_()
    free = offset
    if spec.zero:
        ratio = free.detach() / scale
        offset = (ratio + (ratio.round() - ratio).detach()) * scale + free - free.detach()
    weight = quantizer.grouped(layer.weight.detach()).clone().requires_grad_()
    code = (((weight - offset.detach()) / scale - spec.lowest) / spec.step).round().detach()
    nearest = code.clamp(0, spec.levels - 1)
    moved = (weight - weight.detach()) * (nearest == code)
    out = torch.randn(weight.shape)
    (((nearest * spec.step + spec.lowest) * scale + offset + moved) * out).sum().backward()
    (quantizer(layer.weight, torch.float32).view(weight.shape) * out).sum().backward()
    torch.testing.assert_close(quantizer.grouped(layer.weight.grad), weight.grad, rtol=1e-4, atol=1e-5)
    if not spec.narrow:
        factor = (layer.weight.numel() / quantizer.scale.numel() * spec.largest) ** -0.5
        torch.testing.assert_close(quantizer.scale.grad, scale.grad * factor, rtol=1e-3, atol=1e-3)
        if spec.offset:
            torch.testing.assert_close(quantizer.offset.grad, free.grad * factor, rtol=1e-3, atol=1e-3)


def test_narrow_scales_within_the_reach_are_trained_and_those_beyond_it_widen_it():
    quantizer = made("int2/g32/s8").quantizer
    with torch.no_grad():
        quantizer.reach.copy_(1.05 * quantizer.scale.abs().amax(1, keepdim=True))
        quantizer.scale[0, 3] = 2 * quantizer.reach[0]
    quantizer.scale_matrix().sum().backward()
    assert quantizer.scale.grad[0, 3] == 0 and quantizer.scale.grad.sum() == quantizer.scale.numel() - 1
    assert quantizer.reach.grad[0] > 0.9
    assert quantizer.reach.grad[1:].abs().max() < 0.1, "the sum of what rounding leaves"


@pytest.mark.parametrize("text", GRIDS)
def test_the_search_is_at_least_as_good_as_the_range_and_training_improves_it(text):
    layer = made(text)
    target = layer.weight.detach().clone()

    def error() -> torch.Tensor:
        return (layer.quantizer(layer.weight, torch.float32) - target).square().sum()

    searched = float(error().detach())
    set_scale(layer, search=False)
    assert searched <= float(error().detach())
    set_scale(layer)
    optimizer = torch.optim.Adam(layer.quantizer.parameters(), 1e-5)  # of the scales alone
    found = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = error()
        found.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
    assert min(found) <= searched * 1.0001


def test_an_offset_and_smaller_groups_lower_the_error():
    def error(text: str) -> float:
        layer = made(text)
        weight = layer.weight.detach()
        return float((layer.quantizer.decode(layer.quantizer.encode(weight)) - weight).norm())

    assert error("int2/g64+offset") < error("int2/g64+zero") <= error("int2/g64")
    assert error("int2/g32/s8") < error("int2/g64"), "narrow scales buy smaller groups"
    assert error("q6_k") < error("q5_k") < error("q4_k") < error("q3_k") < error("q2_k") < error("ternary/g256")


@pytest.mark.parametrize("text", GRIDS)
def test_gptq_lowers_the_error_of_outputs(text):
    layer = made(text)
    torch.manual_seed(1)
    inputs = torch.randn(2048, 512) @ (torch.randn(512, 512) * 0.2 + torch.eye(512))
    quantizer, weight = layer.quantizer, layer.weight.detach()

    def error(latent: torch.Tensor) -> float:
        return float(((quantizer.decode(quantizer.encode(latent)) - weight) @ inputs.T).norm())

    before = error(weight)
    assert error(solve(weight, quantizer, Inputs.of(inputs.T @ inputs / len(inputs)))) < 0.9 * before


@pytest.mark.parametrize("shape", [(1,), (5,), (7, 3), (64, 96)])
def test_five_ternary_codes_share_a_byte(shape):
    codes = torch.randint(0, 3, shape, dtype=torch.uint8)
    packed = pack_ternary(codes)
    assert packed.dtype == torch.uint8 and len(packed) == -(-codes.numel() // 5)
    assert torch.equal(unpack_ternary(packed, shape), codes)
