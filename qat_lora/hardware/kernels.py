"""Whether the fused kernels of a device compute what torch's operations do, and how much faster they are."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from qat_lora.ahead.trial import open_trial
from qat_lora.hardware.place import Failed, Figures, Machine, Skipped
from qat_lora.kernels import native
from qat_lora.kernels.head import Head
from qat_lora.kernels.norms import norms_in_one_step
from qat_lora.kernels.optimizer import CautiousAdamW
from qat_lora.quant.linear import Quantizer
from qat_lora.quant.spec import QuantSpec
from qat_lora.train.losses import softmax_of

SIZES = {"tiny": (256, 512, 2048, 16, 3), "real": (3072, 1024, 151936, 512, 20)}


def every_size():
    """Within this context native.c's kernels run for tensors of any size."""
    return patch.object(native, "SMALLEST", 1)


@contextmanager
def plain_forms() -> Iterator[None]:
    """Within this context no kernel is used, neither native.c's nor torch.compile's."""
    with patch.object(native, "library", lambda: None), patch.object(native, "COMPILED", []):
        yield


def cases(size: str, device: torch.device) -> dict[str, tuple[float, Callable[[], list[Tensor]]]]:
    """{name: (largest relative difference allowed, a function whose tensors are compared)}."""
    out, wide, vocab, rows, _ = SIZES[size]
    random = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(device)

    weight, upstream = draw(out, wide), draw(out, wide)
    hidden, table, bias, taken = draw(rows, 64), draw(vocab, 64), draw(vocab), draw(rows, 8).softmax(-1)
    index = torch.randint(vocab, (rows, 8), generator=random).to(device)

    def quantised(text: str, dtype: torch.dtype) -> Callable:
        spec = QuantSpec.parse(text)
        quantizer = Quantizer(spec, out, wide).to(device)
        for name, p in quantizer.named_parameters():
            value = draw(*p.shape).abs() / spec.largest + 0.1
            p.data.copy_(-value if name == "offset" else value)

        def run() -> list[Tensor]:
            latent = weight.clone().requires_grad_()
            quantizer.zero_grad()
            seen = quantizer(latent, dtype)
            seen.backward(upstream.to(dtype))
            return [seen.detach(), latent.grad, *(p.grad for p in quantizer.parameters())]

        return run

    def optimise() -> list[Tensor]:
        p = nn.Parameter(weight.clone())
        optimizer = CautiousAdamW([{"params": [p], "lr": 0.01}])
        for number in range(2):
            p.grad = upstream - number
            optimizer.step()
        return [p.detach(), *optimizer.state[p].values()]

    def head(dtype: torch.dtype, trained: bool, temperature: float) -> Callable:
        def run() -> list[Tensor]:
            own = Head(table.to(dtype), bias, after=0.5) if trained else Head(table.to(dtype))
            softmax = softmax_of(hidden.to(dtype), own, index, dtype, temperature, trained)
            if trained:
                softmax.normalise()
            back = softmax.gradients(taken.sum(1, keepdim=True), taken, (trained, trained))
            return [*(part for part in back if part is not None), softmax.log_probs]

        return run

    layer = norms_in_one_step(LlamaRMSNorm(wide).to(device))

    def norm() -> list[Tensor]:
        x = weight.clone().requires_grad_()
        layer.zero_grad()
        y = layer(x)
        y.backward(upstream)
        return [y.detach(), x.grad, layer.weight.grad]

    return {
        "2 bits": (1e-5, quantised("balanced2/g32", torch.bfloat16)),
        "4 bits": (1e-5, quantised("uniform4/g64", torch.float32)),
        "low-rank scales": (1e-5, quantised("int4/r8", torch.float32)),
        "offsets and narrow scales": (1e-5, quantised("q2_k", torch.float32)),
        "one scale": (1e-5, quantised("int8/tensor", torch.bfloat16)),
        "optimiser": (1e-5, optimise),
        "LM head": (5e-3, head(torch.bfloat16, False, 1.0)),
        "trained LM head": (1e-5, head(torch.float32, True, 0.7)),
        "RMS norm": (1e-5, norm),
    }


def check_kernels(place: Machine) -> Figures:
    """The kernels in C, on a CPU, or of torch.compile, on a GPU, have the results of plain torch functions."""
    backend = open_trial(place.device, "fp32")
    if backend.static_shapes:
        raise Skipped("XLA fuses operations itself")
    if backend.shares_host_memory and native.library() is None:
        raise Skipped("no C compiler with OpenMP; the plain functions are used")
    figures: Figures = {"largest relative difference": 0.0}
    for name, (close, run) in cases(place.size, backend.device).items():
        times, found = [], []
        for forms in (nullcontext, plain_forms):
            with every_size(), forms():
                found.append(run())
                backend.wait()
                began = time.perf_counter()
                for _ in range(SIZES[place.size][-1]):
                    run()
                backend.wait()
                times.append(time.perf_counter() - began)
        for number, (ours, plain) in enumerate(zip(*found)):
            gap = float((ours.double() - plain.double()).norm() / plain.double().norm())
            if not gap <= close:
                raise Failed(f"{name}: tensor {number} of the kernels differs from torch's by {gap:.1e} of its norm")
            figures["largest relative difference"] = max(gap, figures["largest relative difference"])
        if place.size == "real":
            figures[f"{name}: plain torch's time / ours"] = times[1] / times[0]
    if native.FAILED:
        raise Failed(f"torch.compile fails for {', '.join(sorted(native.FAILED))}; the log has the reason")
    return figures
