"""The kernels in C, and those in Triton in its interpreter and its compiler: bit-identical to torch's operations when
they quantise, and optional."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qat_lora.backend import native
from qat_lora.models.head import Head, Strips
from qat_lora.quant.linear import FakeQuant, Quantizer, Stored
from qat_lora.quant.spec import QuantSpec
from qat_lora.train import optimizer as optimizers
from qat_lora.train.optimizer import CautiousAdamW, _as_graph

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # before Triton is imported


@pytest.fixture
def both(monkeypatch):
    """both(function): its results with the kernels, however small the tensors are, and with torch's operations.

    The kernels are those in C, or, if Triton interprets, those for a GPU, on the CPU.
    """
    monkeypatch.setattr(native, "SMALLEST", 1)
    monkeypatch.setattr(native, "LARGE", 1)
    launched = []
    if INTERPRETED:
        monkeypatch.setattr(native, "GPU", "cpu")
        monkeypatch.setattr(native, "library", lambda: None)
        monkeypatch.setattr(optimizers, "_way", lambda p: optimizers._in_launches)
        launch = type(native.gpu_kernels()._quantise).__getitem__
        monkeypatch.setattr(
            type(native.gpu_kernels()._quantise), "__getitem__",
            lambda kernel, grid: launched.append(kernel.__name__) or launch(kernel, grid),
        )  # fmt: skip
    elif native.library() is None:
        pytest.skip("no C compiler with OpenMP")

    def run(function, *names):
        """names: the Triton kernels that must run."""
        launched.clear()
        found = function()
        assert not INTERPRETED or {*names} <= {*launched}, launched
        with monkeypatch.context() as context:
            context.setattr(native, "library", lambda: None)
            context.setattr(native, "GPU", "cuda")
            return found, function()

    return run


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(ours, theirs) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        if INTERPRETED and (one.dtype == torch.bfloat16 or one.ndim == 3):
            # the interpreter rounds to bf16 towards zero, and a GPU's sums over a group have another order
            close = 2**-7 if one.dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(one, other, rtol=close, atol=1e-6, equal_nan=True)
            continue
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

    same(*both(run, "_quantise", "_group_gradients" if spec.scale == "group" else "_gradients"))


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

        same(*both(run, *(["_quantise", "_group_gradients"] if kind == torch.bfloat16 else [])))


@pytest.mark.skipif(INTERPRETED, reason="no such kernel")
def test_stored_scales_are_bit_equal(both):
    edges = torch.tensor([0.0, -0.0, 1e-9, -1e-9, 65519.9, 65520.0, -7e4, torch.inf, -torch.inf, torch.nan, 2.0**-13])
    scale = torch.cat([edges, random(3000), random(3000) * 1e-4, torch.linspace(-6.6e4, 6.6e4, 4001)]).requires_grad_()
    same(*both(lambda: [Stored.apply(scale, 2.0**-13).detach()]))


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
        _as_graph([(p, gradient, *moments)], (0.9, 0.95), 0.01, step)
    assert p[1, 2].isnan() and p.isnan().sum() == 1
    for found in both(run, "_update_moments", "_apply_moves"):
        for ours, wanted in zip(found, (p, *moments), strict=True):
            torch.testing.assert_close(ours, wanted, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "biased, temperature, count", [(False, 1.0, 5), (True, 0.7, 5), (False, 1.0, 1), (False, 0.9, 70)]
)
def test_the_heads_losses_and_gradients_equal_plain_operations(dtype, biased, temperature, count, both, monkeypatch):
    """In one strip, as on a GPU, with a repeated token, one or several for each position, and a logit that is far
    above the others."""
    monkeypatch.setattr("qat_lora.models.head.strips_at_once", lambda n, vocab, *_: ([slice(0, n)], [slice(0, vocab)]))
    hidden, weight = random(9, 16), random(5000, 16, seed=1)
    hidden[0] *= 40
    index = torch.randint(5000, (9, count), generator=torch.Generator().manual_seed(2))
    index[3, 0] = index[3, -1]
    taken = random(9, count, seed=3).abs()
    if INTERPRETED and count > 5:  # more than one round over the places, and too many for the gradient's kernel
        monkeypatch.setattr(native.gpu_kernels(), "MOST_PLACES", 32)

    def run():
        head = Head(weight, random(5000, seed=4) if biased else None, after=1.5 if biased else 1.0)
        strips = Strips(hidden, head, index, dtype, temperature)
        back, *of_head = strips.gradients(taken.sum(1, keepdim=True), taken, (True, biased))
        return back, *(t for t in of_head if t is not None), strips.log_probs

    names = ["_normalise", *(["_softmax"] if count <= 5 else [])]
    for ours, wanted in zip(*both(run, *names), strict=True):
        close = 3e-6 if dtype == torch.float32 else 1e-2 if INTERPRETED else 4e-3
        assert (ours - wanted).norm() / wanted.norm() < close


@pytest.mark.skipif(INTERPRETED, reason="would measure NumPy's")
def test_exponentials_are_accurate(both):
    """Within 2 units in the last place over the range of fp32, and right beyond it."""
    x = torch.cat([torch.linspace(-86, 88.7, 4096), torch.tensor([-1e4, -torch.inf, 89.0, 1e4, torch.inf, torch.nan])])
    sums, chosen = torch.zeros(len(x), 1), torch.zeros(len(x), 1)
    index, peaks = torch.zeros(len(x), 1, dtype=torch.int64), torch.zeros(len(x), 1)
    assert native.normalise(x.unsqueeze(1).contiguous(), (None, 1.0, 1.0), False, peaks, sums, index, 0, chosen)
    wanted = x.double().exp()
    assert ((sums[:4096, 0] - wanted[:4096]) / wanted[:4096]).abs().max() < 2.5 * 2**-23
    assert sums[4096:, 0].tolist()[:5] == [0.0, 0.0, torch.inf, torch.inf, torch.inf] and sums[-1].isnan()


@pytest.mark.deep
@pytest.mark.skipif(INTERPRETED, reason="runs this file")
def test_the_triton_kernels_in_tritons_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])  # A100, L4, H100, B200, RTX 50
def test_the_triton_kernels_compile_without_a_gpu(capability):
    """Down to machine code, in the forms that a run uses."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from qat_lora.backend import triton_kernels

    types = {"out": "*bf16", "products": "*bf16", "index": "*i64", "agreeing": "*i32"}
    types |= dict.fromkeys(("n", "count", "start"), "i32")
    numbers = "lowest inverse step top first second size eps rate least factor temperature"
    types |= dict.fromkeys(numbers.split(), "fp32")

    def compiled(name: str, **constants) -> str:
        kernel = getattr(triton_kernels, name)
        own = types | {"grad": "*bf16"} if "gradients" in name else types
        given = {each: "constexpr" if each in constants else own.get(each, "*fp32")
                 for each in kernel.arg_names}  # fmt: skip
        places = {(place,): constants[each] for place, each in enumerate(kernel.arg_names) if each in constants}
        source = ASTSource(kernel, signature=given, constexprs=places)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=triton_kernels.OPTIONS)
        assert made.asm["cubin"]
        return made.asm["ptx"]

    block = {"BLOCK": triton_kernels.BLOCK}
    exact = [compiled("_quantise", PER=per, **block) for per in (0, 1, 32)]
    exact += [compiled("_gradients", PER=per, **block) for per in (0, 1)]
    exact += [compiled("_group_gradients", PER=per, WIDTH=width, GROUPS=32) for per, width in ((32, 32), (48, 64))]
    for code in exact:  # rounded like torch's operations
        assert re.search(r"div\.rn(\.ftz)?\.f32", code) and "fma" not in code and "div.full" not in code
    compiled("_update_moments", **block)
    compiled("_apply_moves", **block)
    for plain, places in ((True, 1), (False, 64)):
        form = {"PLAIN": plain, "BIASED": not plain, "VOCAB": 50304, "BLOCK": triton_kernels.ROW_BLOCK}
        form |= {"COUNT": places, "PLACES": places}
        for first in (True, False):
            compiled("_normalise", FIRST=first, **form)
        before, between, after = compiled("_softmax", **form).split("bar.sync")
        assert "ld.global" in before and "st.global" not in before, "the tokens' products are read first"
        assert "ld.global" in between and "st.global" in between
        assert "ld.global" not in after and "st.global" in after, "and written last"
