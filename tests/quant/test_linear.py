"""The quantised layer: values by brute force, LSQ gradients equal to a dense reference, frozen codes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qat_lora.kernels.fake_quant import stored_scale
from qat_lora.quant.init import initialise
from qat_lora.quant.linear import SMALLEST_SCALE, QuantLinear, effective_weight, freeze, full_precision
from qat_lora.quant.spec import QuantSpec

SPECS = [f"{c}{b}/{s}" for c in ("balanced", "int", "lut") for b in (2, 3, 4, 8) for s in ("g16", "r3", "tensor")]
LEVEL_TEXTS = [f"{c}{b}" for c in ("balanced", "int", "lut") for b in (2, 4)]


def levels_of(spec):
    return spec.lowest + spec.step * torch.arange(spec.levels, dtype=torch.float64)


def layer_of(text):
    """A QuantLinear on Gaussian weights whose scale clips some of them."""
    torch.manual_seed(0)
    layer = QuantLinear(nn.Linear(64, 24), QuantSpec.parse(text))
    layer.weight.data.normal_()
    initialise(layer)
    return layer


@pytest.mark.parametrize("text", SPECS)
def test_forward_is_the_nearest_level_times_the_scale(text):
    layer = layer_of(text)
    quantizer = layer.quantizer
    scale = quantizer.scale_matrix().detach().double().expand_as(quantizer.grouped(layer.weight))
    candidates = levels_of(quantizer.spec) * scale.reshape(24, 64, 1)
    nearest = (candidates - layer.weight.detach().double().unsqueeze(2)).abs().argmin(2, keepdim=True)
    wanted = candidates.gather(2, nearest).squeeze(2).float()
    torch.testing.assert_close(quantizer(layer.weight, torch.float32), wanted, rtol=1e-5, atol=1e-6)
    x = torch.randn(2, 5, 64)
    torch.testing.assert_close(layer(x), F.linear(x, wanted, layer.bias), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("scale", "shared"), [("g16", 16), ("tensor", 24 * 64), ("r3", 1)])
@pytest.mark.parametrize("text", LEVEL_TEXTS)
def test_layer_gradients_equal_a_dense_reference(text, scale, shared):
    """Gradients from W_eff built with detach(): rounding passes the weight on, clipping does not, and levels stay as
    they are for the scale. Covers the sum over a group, LSQ's 1/√(N·Q_max), and A, g, B."""
    layer = layer_of(f"{text}/{scale}").double()
    quantizer, spec = layer.quantizer, layer.quantizer.spec
    upstream = torch.randn(24, 64, dtype=torch.float64)
    quantizer(layer.weight, torch.float64).backward(upstream)
    learned = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    layer.zero_grad()

    s = quantizer.scale_matrix()
    s = (s.expand_as(quantizer.grouped(layer.weight))).reshape(24, 64)
    s = s.detach() + (s - s.detach()) / (shared * spec.largest) ** 0.5
    code = ((layer.weight / s - spec.lowest) / spec.step).round().detach()
    inside = (code >= 0) & (code < spec.levels)
    assert 0 < inside.sum() < inside.numel()
    level = levels_of(spec)[code.clamp(0, spec.levels - 1).long()]
    dense = level * s + (layer.weight - layer.weight.detach()) * inside
    dense.backward(upstream)
    reference = {name: p.grad for name, p in layer.named_parameters() if p.grad is not None}
    assert learned.keys() == reference.keys() == {n for n, _ in layer.named_parameters() if n != "bias"}
    for name, grad in learned.items():
        torch.testing.assert_close(grad, reference[name], rtol=1e-6, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}")


def test_the_sum_over_ranks_is_the_same_weight_and_g_alone_carries_magnitude():
    """The deployment form, for engines that never form S."""
    layer = layer_of("lut4/r5").double()
    quantizer = layer.quantizer
    with torch.no_grad():  # the norms of A's columns and B's rows do not matter
        quantizer.a.mul_(torch.tensor([4.0, 0.125, 8.0, 3.0, 1.0]))
        quantizer.b.mul_(torch.tensor([[0.25], [4.0], [16.0], [1.0], [5.0]]))
    a, g, b = (p.detach().half().double() for p in (quantizer.a, quantizer.g, quantizer.b))
    a, b = a / a.norm(dim=0), b / b.norm(dim=1, keepdim=True)
    level = levels_of(quantizer.spec)[quantizer.encode(layer.weight).long()]
    ranks = [level * (a[:, k : k + 1] * g[k] * b[k]) for k in range(5)]
    torch.testing.assert_close(quantizer(layer.weight, torch.float64), sum(ranks), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("text", ["int2/g32", "balanced2/tensor", "lut4/r5"])
def test_a_scale_is_used_at_fp16_precision(text):
    layer = layer_of(text)
    before = layer(torch.eye(64)[:3])
    with torch.no_grad():
        for p in layer.quantizer.parameters():
            assert not torch.equal(p, p.half().float()), "the masters are finer than fp16"
            p.copy_(p.half())
    assert torch.equal(layer(torch.eye(64)[:3]), before)


def test_a_scale_never_reaches_zero_and_keeps_its_sign():
    layer = layer_of("int2/g32")
    with torch.no_grad():
        layer.quantizer.scale[::2], layer.quantizer.scale[1::2] = 1e-9, -1e-9
    scale = layer.quantizer.scale_matrix()
    assert (scale[::2] == SMALLEST_SCALE).all() and (scale[1::2] == -SMALLEST_SCALE).all()


def test_a_stored_scale_is_an_fp16_number_and_so_is_its_half():
    scale = torch.randn(4000, generator=torch.Generator().manual_seed(0)) * torch.logspace(-8, 2, 4000)
    stored = stored_scale(scale, SMALLEST_SCALE)
    half = stored.float() / 2
    assert torch.equal(half.half().float(), half)
    off = (stored.float() - scale).abs() - scale.abs() * 2.0**-11
    assert off.max() <= SMALLEST_SCALE  # half a step below 2⁻¹³, a whole one at the smallest scale
    assert (stored.abs() >= SMALLEST_SCALE).all()


@pytest.mark.parametrize("text", SPECS)
def test_freezing_is_bit_exact(text):
    layer = layer_of(text)
    x = torch.randn(3, 64)
    output, weight = layer(x), layer.quantizer(layer.weight, torch.float32).detach()
    codes = layer.quantizer.encode(layer.weight)
    assert torch.equal(layer.quantizer.decode(codes), weight)
    freeze(layer)
    assert torch.equal(layer.weight, weight) and torch.equal(layer(x), output)
    assert layer.quantizer.codes.dtype == torch.uint8 and torch.equal(layer.quantizer.codes, codes)
    assert int(codes.max()) < layer.quantizer.spec.levels
    assert not any(p.requires_grad for name, p in layer.named_parameters() if name != "bias")


@pytest.mark.parametrize("text", ["balanced2/g16", "lut4/r3"])
def test_frozen_codes_survive_a_change_of_scale(text):
    layer = layer_of(text)
    freeze(layer)
    codes = layer.quantizer.codes.clone()
    parameter = next(layer.quantizer.parameters())
    parameter.data.mul_(1 + torch.rand(parameter.shape))
    freeze(layer)
    assert torch.equal(layer.quantizer.codes, codes)
    assert torch.equal(layer.weight, layer.quantizer.decode(codes))
    assert not torch.equal(layer.quantizer.encode(layer.weight * 0.5), codes)  # encoding again would give other codes


def test_unquantized_uses_the_latent_weight_and_ends_on_an_error():
    layer = layer_of("balanced2/g16")
    x = torch.randn(2, 64)
    quantised = layer(x)
    with full_precision(layer):
        assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
    assert torch.equal(layer(x), quantised) and not torch.equal(quantised, F.linear(x, layer.weight, layer.bias))
    with pytest.raises(KeyError), full_precision(layer):
        raise KeyError
    assert torch.equal(layer(x), quantised)


@pytest.mark.parametrize("text", ["balanced2/g16", "lut4/r3"])
def test_bf16_autocast_rounds_the_result_alone_and_gradients_are_fp32(text):
    layer = layer_of(text)
    with torch.autocast("cpu", torch.bfloat16):
        y, weight = layer(torch.randn(2, 64)), effective_weight(layer)
    assert y.dtype == weight.dtype == torch.bfloat16
    assert torch.equal(weight, effective_weight(layer).bfloat16()), "A·B is not rounded"
    y.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 and p.grad.abs().sum() > 0 for p in layer.parameters())
