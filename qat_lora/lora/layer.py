"""A LoRA layer computed in one step: PEFT's layer and parameters, with fewer passes over the activations."""

import torch
from peft.tuners.lora import Linear
from torch import Tensor, nn

from qat_lora.backend import compute_dtype
from qat_lora.backend.devices import is_lazy, without_autocast
from qat_lora.quant.linear import effective_weight


class _Sum(torch.autograd.Function):
    """x·Wᵀ + bias + scaling·(d·Aᵀ)·Bᵀ [..., out], computed in `dtype`; W [out, in] and bias get no gradient.

    x [..., in]; d: x after dropout, or None without dropout; A [r, in], B [out, r]. The second product is accumulated
    into the first, and so are the two gradients of x.
    """

    @staticmethod
    def forward(ctx, x, d, weight, bias, a, b, scaling, dtype):
        with without_autocast(x):
            seen = (x if d is None else d).reshape(-1, x.shape[-1]).to(dtype)
            weight, a, b = (tensor.to(dtype) for tensor in (weight, a, b))
            rows = seen if d is None else x.reshape(-1, x.shape[-1]).to(dtype)
            result = rows.new_empty(*x.shape[:-1], len(weight))  # not a view: Falcon adds to it in place
            flat = result.view(-1, len(weight))
            if bias is None:
                torch.mm(rows, weight.T, out=flat)
            else:
                torch.addmm(bias.to(dtype), rows, weight.T, out=flat)
            low = seen @ a.T
            flat.addmm_(low, b.T, alpha=scaling)
        ctx.save_for_backward(seen, low, weight, a, b)
        ctx.scaling, ctx.shape, ctx.dropped = scaling, x.shape, d is not None
        ctx.types = x.dtype, None if d is None else d.dtype
        return result

    @staticmethod
    def backward(ctx, grad):
        seen, low, weight, a, b = ctx.saved_tensors
        with without_autocast(grad):
            grad = grad.reshape(-1, grad.shape[-1]).to(seen.dtype)
            inner = (grad @ b).mul_(ctx.scaling)
            of_a, of_b = inner.T @ seen, (grad.T @ low).mul_(ctx.scaling)
            of_x = of_d = None
            if ctx.needs_input_grad[0]:
                of_x = grad @ weight
                if not ctx.dropped:
                    of_x.addmm_(inner, a)
                of_x = of_x.view(ctx.shape).to(ctx.types[0])
            if ctx.dropped and ctx.needs_input_grad[1]:
                of_d = (inner @ a).view(ctx.shape).to(ctx.types[1])
        return of_x, of_d, None, None, of_a.float(), of_b.float(), None, None


class OneStep(Linear):
    """PEFT's LoRA on a linear layer, computed by `_Sum`. Cases that it does not cover, such as merged adapters, are
    left to PEFT, and so are passes without gradients, such as an evaluation."""

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        base, name = self.base_layer, "default"
        own = args or kwargs or self.merged or self.disable_adapters or self.active_adapters != [name]
        watched = base._forward_pre_hooks or base._forward_hooks
        if own or watched or is_lazy(x) or not torch.is_grad_enabled():
            return super().forward(x, *args, **kwargs)
        weight = effective_weight(base)
        if weight.requires_grad:
            return super().forward(x)
        dropout = self.lora_dropout[name]
        dropped = None if isinstance(dropout, nn.Identity) or not self.training else dropout(x.float())
        a, b = self.lora_A[name].weight, self.lora_B[name].weight
        return _Sum.apply(x, dropped, weight, base.bias, a, b, self.scaling[name], compute_dtype(x))


def in_one_step(layer: nn.Module) -> None:
    """Make a new PEFT LoRA layer compute in one step if it is a plain product on a frozen linear layer."""
    plain = type(layer) is Linear and isinstance(layer.base_layer, nn.Linear) and not layer.fan_in_fan_out
    if plain and not layer.lora_variant and not any(layer.lora_bias.values()):
        layer.__class__ = OneStep
