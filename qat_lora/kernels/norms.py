"""RMS norms in one step on the CPU: the model keeps its modules and parameters, but makes fewer passes over their
inputs."""

import copy
import functools
from ctypes import c_float, c_void_p

import torch
from torch import Tensor, nn

from qat_lora.kernels import native


class RmsNorm(torch.autograd.Function):
    """x·weight/√(mean x² + eps) [..., H] (arXiv 1910.07467, equation 4), for x and weight [H] that `native.suits`."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float):
        y, width = torch.empty_like(x), x.shape[-1]
        r = x.new_empty(x.numel() // width)
        native.run("rms_norm", (len(r), width), x, weight, y, r, c_float(eps))
        ctx.save_for_backward(x, weight, r)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight, r = ctx.saved_tensors
        of_x, width, threads = torch.empty_like(x), len(weight), torch.get_num_threads()
        of_weight = torch.empty_like(weight) if ctx.needs_input_grad[1] else None
        sums = x.new_zeros(threads, 0 if of_weight is None else width)
        there = c_void_p(None) if of_weight is None else of_weight
        native.run("rms_norm_back", (len(r), width), grad.contiguous(), x, weight, r, of_x, there, sums)
        return of_x, of_weight, None


class OneStepNorm:
    """A mixin that `norms_in_one_step` adds to a norm's class. The original norm still runs when no gradient is needed,
    e.g. in evaluation, and for inputs that the kernel does not support, e.g. a gate in addition to x."""

    offset, eps_name = 0.0, "eps"

    def forward(self, *given, **named) -> Tensor:
        known = len(given) == 1 and not named and isinstance(given[0], Tensor)
        if not known or not torch.is_grad_enabled() or self._forward_hooks or self._forward_pre_hooks:
            return super().forward(*given, **named)
        if not native.suits(*given, self.weight):
            return super().forward(*given)
        weight = self.weight + self.offset if self.offset else self.weight
        return RmsNorm.apply(*given, weight, getattr(self, self.eps_name))


def norms_in_one_step(model: nn.Module) -> nn.Module:
    """Make a model's RMS norms run in one step when it is trained on the CPU. Running each class's own forward
    shows which modules are RMS norms, and whether the weight is an offset from 1. Returns the model."""
    for module in model.modules():
        if "RMSNorm" in type(module).__name__ and not isinstance(module, OneStepNorm) and (form := _form(module)):
            module.__class__ = _class_of(type(module), *form)
    return model


def _form(module: nn.Module) -> tuple[float, str] | None:
    """(offset, name of eps) if a norm computes exactly x·(offset + weight)/√(mean x² + eps), otherwise None."""
    names = [name for name in ("eps", "variance_epsilon", "epsilon") if isinstance(getattr(module, name, None), float)]
    parameters = dict(module.named_parameters())
    if len(names) != 1 or parameters.keys() != {"weight"} or parameters["weight"].ndim != 1 or [*module.buffers()]:
        return None
    probe, random = copy.deepcopy(module).to_empty(device="cpu").float(), torch.Generator().manual_seed(0)
    x = torch.randn(3, len(parameters["weight"]), generator=random) * torch.tensor([[1e-3], [1.0], [30.0]])
    with torch.no_grad():
        probe.weight.copy_(torch.randn(x.shape[1], generator=random))
        plain = x * (x.square().mean(1, keepdim=True) + getattr(module, names[0])).rsqrt()
        try:
            found = probe(x)
        except (TypeError, RuntimeError):  # it needs more inputs than x
            return None
        for offset in (0.0, 1.0):
            wanted = plain * (probe.weight + offset)
            if isinstance(found, Tensor) and found.shape == x.shape and torch.allclose(found, wanted, 1e-5, 1e-6):
                return offset, names[0]
    return None


@functools.cache
def _class_of(kind: type, offset: float, eps_name: str) -> type:
    body = {"offset": offset, "eps_name": eps_name, "__module__": __name__}
    return type(kind.__name__, (OneStepNorm, kind), body)
