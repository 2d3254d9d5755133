"""RMS norm with a learned weight, and its gradients: the C form. The plain form is the model's own norm."""

from ctypes import c_float, c_void_p

import torch
from torch import Tensor

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
