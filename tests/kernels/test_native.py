"""The C form of the kernels: bit-identical to the plain form where it quantises, and optional."""

import pytest
import torch

from qat_lora.backend import open_backend
from qat_lora.kernels import native
from qat_lora.kernels.fake_quant import FakeQuant, Stored
from qat_lora.kernels.head import Head
from qat_lora.kernels.head_softmax import HeadSoftmax
from qat_lora.kernels.optimizer import EPS, CautiousAdamW, corrections, plain_step
from qat_lora.kernels.softmax import normalise
from qat_lora.kernels.two_passes import TwoPasses
from qat_lora.quant.gptq import Inputs, _descended, compensated
from qat_lora.quant.linear import SMALLEST_SCALE, Quantizer
from qat_lora.quant.spec import QuantSpec


@pytest.fixture
def both(monkeypatch):
    """both(function): its results with the kernels, however small the tensors are, and with the plain forms."""
    monkeypatch.setattr(native, "SMALLEST", 1)
    if native.library() is None:
        pytest.skip("no C compiler with OpenMP")

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
@pytest.mark.parametrize(
    "text",
    ["balanced2/g8", "lut4/g16", "int4/g48", "int8/g8", "balanced3/tensor", "lut2/r3", "ternary/g8", "int4/g32+offset",
     "int2/g16+offset/s4x48", "int2/g32/s8"],
)  # fmt: skip
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
    small = [random(3000) * 10.0**power for power in (-4, -5, -6, -7)]
    scale = torch.cat([edges, random(3000), *small, torch.linspace(-6.6e4, 6.6e4, 4001)]).requires_grad_()
    same(*both(lambda: [Stored.apply(scale, SMALLEST_SCALE).detach()]))


@pytest.mark.parametrize("step", ["gptq", "descent"])
@torch.no_grad()
def test_rounding_column_after_column_is_the_same_in_most_rows(step, both):
    spec = QuantSpec.parse("balanced2/g32")
    quantizer, weight, x = Quantizer(spec, 100, 192), random(100, 192), random(500, 192, seed=1)
    quantizer.scale.copy_(random(*quantizer.scale.shape, seed=2).abs() + 0.5)
    scale, inputs = quantizer.expanded(quantizer.scale_matrix()), Inputs.of(x.T @ x / 500)

    def run():
        if step == "gptq":
            return compensated(weight, scale, inputs, spec)
        return _descended(weight, weight, scale, inputs.moment, spec)

    found, plain = both(run)
    close = ((found - plain).abs() < 1e-4).all(1).float().mean()
    assert close > 0.9, f"only {close:.1%} of the rows agree"  # a value on a rounding boundary changes its whole row


def test_the_optimisers_steps_equal_plain_operations(both):
    """Parameters and moments, with and without the kernel; a NaN reaches the parameter."""
    start, gradients = random(70, 33), [random(70, 33, seed=seed) for seed in range(5)]
    gradients[3][1, 2], gradients[2][5, 6] = torch.nan, 0.0

    def run():
        p = torch.nn.Parameter(start.clone())
        optimizer = CautiousAdamW([{"params": [p], "lr": 0.01}])
        for gradient in gradients:
            p.grad = gradient.clone()
            optimizer.step()
        return p.detach(), *optimizer.state[p].values()

    p, moments = start.clone(), [torch.zeros_like(start) for _ in range(2)]
    for step, gradient in enumerate(gradients, 1):
        numbers = torch.tensor([0.01, 1.0, *corrections((0.9, 0.95), EPS, step)])
        plain_step(p, gradient, *moments, numbers, 0.9, 0.95)
    assert p[1, 2].isnan() and p.isnan().sum() == 1
    for found in both(run):
        for ours, wanted in zip(found, (p, *moments), strict=True):
            torch.testing.assert_close(ours, wanted, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "biased, temperature, count", [(False, 1.0, 5), (True, 0.7, 5), (False, 1.0, 1), (False, 0.9, 70)]
)
def test_the_heads_losses_and_gradients_equal_plain_operations(dtype, biased, temperature, count, both, monkeypatch):
    """In one strip, with a repeated token, one or several for each position, and a logit far above the others."""
    one = lambda n, vocab, *_: ([slice(0, n)], [slice(0, vocab)])  # noqa: E731
    monkeypatch.setattr("qat_lora.kernels.two_passes.strips_at_once", one)
    hidden, weight = random(9, 16), random(5000, 16, seed=1)
    hidden[0] *= 40
    index = torch.randint(5000, (9, count), generator=torch.Generator().manual_seed(2))
    index[3, 0] = index[3, -1]
    taken = random(9, count, seed=3).abs()

    def run():
        head = Head(weight, random(5000, seed=4) if biased else None, after=1.5 if biased else 1.0)
        softmax = TwoPasses(hidden, head, index, dtype, temperature)
        back, *of_head = softmax.gradients(taken.sum(1, keepdim=True), taken, (True, biased))
        return back, *(t for t in of_head if t is not None), softmax.log_probs

    for ours, wanted in zip(*both(run), strict=True):
        close = 3e-6 if dtype == torch.float32 else 4e-3
        assert (ours - wanted).norm() / wanted.norm() < close


def test_exponentials_are_accurate(both):
    """Within 2 units in the last place over the range of fp32, and right beyond it."""
    x = torch.cat([torch.linspace(-86, 88.7, 4096), torch.tensor([-1e4, -torch.inf, 89.0, 1e4, torch.inf, torch.nan])])
    given = x.unsqueeze(1).contiguous(), torch.zeros(len(x), 1, dtype=torch.int64), 0, 1.0, torch.zeros(len(x), 1)
    (_, sums, _), _ = both(lambda: normalise(Head(torch.ones(1, 1)), *given))
    wanted = x.double().exp()
    assert ((sums[:4096, 0] - wanted[:4096]) / wanted[:4096]).abs().max() < 2.5 * 2**-23
    assert sums[4096:, 0].tolist()[:5] == [0.0, 0.0, torch.inf, torch.inf, torch.inf] and sums[-1].isnan()


@pytest.mark.slow
def test_what_torch_compile_writes_equals_the_plain_form(monkeypatch):
    """As on a GPU, by inductor's C++."""
    if not open_backend("cpu", "fp32").compiles("on"):
        pytest.skip("no C++ compiler")
    spec, weight, scale = QuantSpec.parse("int4/g32"), random(40, 3, 32), random(40, 3, 1, seed=1).abs() + 0.1
    p, grad, m, v = (random(300, seed=seed) for seed in range(4))
    numbers = torch.tensor([0.01, 0.999, *corrections((0.9, 0.95), EPS, 3)])
    head, hidden = Head(random(500, 16, seed=5)), random(9, 16, seed=6)
    index = torch.randint(500, (9, 5), generator=torch.Generator().manual_seed(2))

    def run():
        latent = weight.clone().requires_grad_()
        seen = FakeQuant.apply(latent, scale, spec, 0.5, torch.float32)
        seen.square().sum().backward()
        moved = [t.clone() for t in (p, grad, m, v.abs())]
        plain_step(*moved, numbers, 0.9, 0.95)
        softmax = HeadSoftmax(hidden, head, index, torch.float32)
        back, *_ = softmax.gradients(torch.ones(9, 1), torch.full((9, 5), 0.2), (False, False))
        return [seen.detach(), latent.grad, *moved, back, softmax.log_probs]

    monkeypatch.setattr(native, "library", lambda: None)
    wanted = run()
    monkeypatch.setattr(native, "COMPILED", ["cpu"])
    torch.testing.assert_close(run(), wanted, rtol=1e-5, atol=1e-6)
    assert not native.FAILED


def test_a_function_that_cannot_be_compiled_runs_as_it_is_with_one_line(monkeypatch, capsys):
    def broken(*_, **__):
        raise RuntimeError("no Triton\nmore")

    monkeypatch.setattr(torch, "compile", lambda function: broken)
    monkeypatch.setattr(native, "COMPILED", ["cpu"])
    monkeypatch.setattr(native, "FAILED", set())

    @native.fused
    def _twice(x):
        return 2 * x

    assert [float(_twice(torch.ones(()))) for _ in range(2)] == [2.0, 2.0]
    assert capsys.readouterr().err == "torch.compile fails here (no Triton); twice will be slower\n"
