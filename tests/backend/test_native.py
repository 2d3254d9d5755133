"""The kernels in C, and those in Triton in its interpreter and its compiler: bit-identical to torch's operations when
they quantise, and optional."""

import os
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
    if INTERPRETED:
        monkeypatch.setattr(native, "GPU", "cpu")
        monkeypatch.setattr(optimizers, "_way", lambda p: optimizers._in_launches)
        assert native.gpu_kernels() is not None
    elif native.library() is None:
        pytest.skip("no C compiler with OpenMP")

    def run(function):
        found = function()
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased, temperature", [(False, 1.0), (True, 0.7)])
def test_the_heads_losses_and_gradients_equal_plain_operations(dtype, biased, temperature, both, monkeypatch):
    """In one strip, as on a GPU, with a repeated token, several for each position, and a logit that is far above."""
    monkeypatch.setattr("qat_lora.models.head.strips_at_once", lambda n, vocab, *_: ([slice(0, n)], [slice(0, vocab)]))
    hidden, weight = random(9, 16), random(5000, 16, seed=1)
    hidden[0] *= 40
    index = torch.randint(5000, (9, 5), generator=torch.Generator().manual_seed(2))
    index[3, 1] = index[3, 4]
    taken = random(9, 5, seed=3).abs()

    def run():
        head = Head(weight, random(5000, seed=4) if biased else None, after=1.5 if biased else 1.0)
        strips = Strips(hidden, head, index, dtype, temperature)
        back, *of_head = strips.gradients(taken.sum(1, keepdim=True), taken, (True, biased))
        return back, *(t for t in of_head if t is not None), strips.log_probs

    for ours, wanted in zip(*both(run), strict=True):
        close = 3e-6 if dtype == torch.float32 else 1e-2 if INTERPRETED else 4e-3
        assert (ours - wanted).norm() / wanted.norm() < close


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


@pytest.mark.skipif(INTERPRETED, reason="runs this file")
def test_the_triton_kernels_in_tritons_interpreter():
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-3000:]


@pytest.mark.skipif(INTERPRETED, reason="compiles")
@pytest.mark.parametrize("capability", [80, 90, 120])  # A100, H100 and the consumer GPUs after it
def test_the_triton_kernels_compile_without_a_gpu(capability):
    """Down to machine code; quantisation rounds as torch's operations do."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from qat_lora.backend import triton_kernels

    sizes = {"BLOCK": 1024, "PER": 32, "WIDTH": 32, "GROUPS": 8, "PLACES": 64, "FIRST": True, "PLAIN": False,
             "BIASED": True, "VOCAB": 50304, "COUNT": 64}  # fmt: skip
    types = {"grad": "*bf16", "out": "*bf16", "products": "*bf16", "index": "*i64", "agreeing": "*i32"}
    types |= dict.fromkeys(("n", "count", "start"), "i32")
    tensors = {"w", "s", "of_w", "of_s", "m", "v", "p", "bias", "peaks", "masses", "sums", "chosen", "taken", *types}
    parts = ("_codes", "_level", "_scales", "_move", "_logits")  # of the other kernels
    kernels = {name: found for name, found in vars(triton_kernels).items() if isinstance(found, triton.JITFunction)}
    assert len(kernels) == 12
    for name in kernels.keys() - parts:
        kernel = kernels[name]
        constants = {(place,): sizes[each] for place, each in enumerate(kernel.arg_names) if each in sizes}
        given = {each: "constexpr" if each in sizes else types.get(each, "*fp32" if each in tensors else "fp32")
                 for each in kernel.arg_names}  # fmt: skip
        source = ASTSource(kernel, signature=given, constexprs=constants)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=triton_kernels.OPTIONS)
        code = made.asm["ptx"]
        assert (made.asm["cubin"] and "bf16" in code) or name in ("_update_moments", "_apply_moves")
        if name in ("_quantise", "_gradients", "_group_gradients"):
            assert "div.rn" in code and "fma" not in code and "div.full" not in code
        if name == "_softmax":
            assert code.count("bar.sync") == 2  # around the loop that overwrites what the others read
