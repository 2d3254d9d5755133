"""The C kernels: bit-identical to torch's operations when they quantise, and optional."""

import pytest
import torch

from qat_lora.backend import native
from qat_lora.quant.linear import FakeQuant, Quantizer, Stored
from qat_lora.quant.spec import QuantSpec
from qat_lora.train.optimizer import CautiousAdamW, _as_graph


@pytest.fixture
def both(monkeypatch):
    """both(function): its results with the kernels, however small the tensors are, and with torch's operations."""
    if native.library() is None:
        pytest.skip("no C compiler with OpenMP")
    monkeypatch.setattr(native, "SMALLEST", 1)

    def run(function):
        found = function()
        with monkeypatch.context() as context:
            context.setattr(native, "library", lambda: None)
            return found, function()

    return run


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(ours, theirs) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("text", ["balanced2/g8", "lut4/g16", "int4/g48", "int8/g8", "balanced3/tensor", "lut2/r3"])
def test_fake_quantisation_is_bit_equal(text, dtype, both):
    spec = QuantSpec.parse(text)
    quantizer, weight, upstream = Quantizer(spec, 40, 96), random(40, 96), random(40, 96, seed=1).to(dtype)
    for number, p in enumerate(quantizer.parameters()):
        p.data.copy_(random(*p.shape, seed=number + 2) / spec.largest)
    weight[0, :6] = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 1e-42])

    def run():
        latent = weight.clone().requires_grad_()
        quantizer.zero_grad()
        seen = quantizer(latent, dtype)
        seen.backward(upstream)
        return seen.detach(), latent.grad, *(p.grad.clone() for p in quantizer.parameters())

    same(*both(run))


def test_any_layout_and_type_of_gradient_is_accepted(both):
    """A gradient that is a view, a matrix of more than one tile, and a type that no kernel supports."""
    spec = QuantSpec.parse("balanced2/g32")
    weight, scale = random(700, 18, 32), random(700, 18, 1, seed=1).abs() + 0.1
    for kind in (torch.bfloat16, torch.float16):
        upstream = random(32, 18, 700, seed=2).to(kind).transpose(0, 2)

        def run(kind=kind, upstream=upstream):
            given = [t.clone().requires_grad_() for t in (weight, scale)]
            FakeQuant.apply(*given, spec, 0.5, kind).backward(upstream)
            return [t.grad for t in given]

        same(*both(run))


def test_stored_scales_are_bit_equal(both):
    edges = torch.tensor([0.0, -0.0, 1e-9, -1e-9, 65519.9, 65520.0, -7e4, torch.inf, -torch.inf, torch.nan, 2.0**-13])
    scale = torch.cat([edges, random(3000), random(3000) * 1e-4, torch.linspace(-6.6e4, 6.6e4, 4001)]).requires_grad_()
    same(*both(lambda: [Stored.apply(scale, 2.0**-13).detach()]))


def test_the_optimisers_steps_equal_plain_operations(both):
    """Parameters and moments, with and without the kernel."""
    start, gradients = random(70, 33), [random(70, 33, seed=seed) for seed in range(5)]

    def run():
        p = torch.nn.Parameter(start.clone())
        optimizer = CautiousAdamW([{"params": [p], "lr": 0.01}])
        for gradient in gradients:
            p.grad = gradient.clone()
            optimizer.step()
        return p.detach(), *optimizer.state[p].values()

    p, moments = start.clone(), [torch.zeros_like(start) for _ in range(2)]
    for step, gradient in enumerate(gradients, 1):
        _as_graph([(p, gradient, *moments)], (0.9, 0.95), 0.01, step)
    for found in both(run):
        for ours, wanted in zip(found, (p, *moments), strict=True):
            torch.testing.assert_close(ours, wanted)


def test_exponentials_are_accurate(both):
    """Within 2 units in the last place over the range of fp32, and right beyond it."""
    x = torch.cat([torch.linspace(-86, 88.7, 4096), torch.tensor([-1e4, -torch.inf, 89.0, 1e4, torch.inf, torch.nan])])
    sums, chosen = torch.zeros(len(x), 1), torch.zeros(len(x), 1)
    index, peaks = torch.zeros(len(x), 1, dtype=torch.int64), torch.zeros(len(x), 1)
    assert native.normalise(x.unsqueeze(1).contiguous(), (None, 1.0, 1.0), False, peaks, sums, index, 0, chosen)
    wanted = x.double().exp()
    assert ((sums[:4096, 0] - wanted[:4096]) / wanted[:4096]).abs().max() < 2.5 * 2**-23
    assert sums[4096:, 0].tolist()[:5] == [0.0, 0.0, torch.inf, torch.inf, torch.inf] and sums[-1].isnan()


@pytest.mark.parametrize("compiler", ["/nowhere/cc", "false", "sh -c 'echo no >&2; exit 1'"])
def test_without_a_compiler_there_are_no_kernels(compiler, monkeypatch):
    monkeypatch.setenv("CC", compiler)
    assert native.library.__wrapped__() is None
