"""One step of cautious AdamW for a parameter."""

import math
from ctypes import c_float

import torch
from torch import Tensor

from qat_lora.kernels import native
from qat_lora.kernels.compiled import fused

LEAST = 2.0**-10  # lower bound for the share of agreeing elements, by which steps are divided


def corrections(betas: tuple[float, float], eps: float, step: int) -> tuple[float, float]:
    """(size, eps) that make m / (√v · size + eps) the quotient of the bias-corrected moments in step `step`."""
    start = 1 - betas[0] ** step
    return start / math.sqrt(1 - betas[1] ** step), start * eps


@fused
def plain_step(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, numbers: Tensor, first: float, second: float) -> None:
    """m ← first·m + (1 − first)·grad; v ← second·v + (1 − second)·grad²; p ← keep·p − lr·agree·move / share, where
    move = m / (√v · size + eps), agree = 1 where move · grad > 0, share = mean(agree), but at least `LEAST`.

    numbers [4]: lr, keep, size and eps, on the parameter's device; see `corrections`. keep: 1 − lr · weight decay.
    """
    lr, keep, size, eps = numbers.unbind()
    m.lerp_(grad, 1 - first)
    v.mul_(second).addcmul_(grad, grad, value=1 - second)
    move = m / (v.sqrt() * size + eps)
    agree = (move * grad > 0).to(p.dtype)
    p.mul_(keep).sub_((move * agree).mul_(lr / agree.mean().clamp(min=LEAST)))  # a NaN reaches the parameter


def step_in_c(
    p: Tensor, grad: Tensor, m: Tensor, v: Tensor, room: Tensor, numbers: tuple[float, ...], betas: tuple[float, float]
) -> None:
    """`plain_step` for tensors on the CPU that `native.suits`. room: scratch memory of at least their size."""
    lr, keep, size, eps = numbers
    if keep != 1:
        p.mul_(keep)
    moves = room[: p.numel()].view(p.shape)
    numbers = [c_float(value) for value in (1 - betas[0], 1 - betas[1], size, eps)]
    agreeing = native.run("move_moments", (p.numel(),), grad, m, v, moves, *numbers)  # moves: 0 where they disagree
    rate = lr / max(agreeing / p.numel(), LEAST)
    p.add_(moves, alpha=min(rate, torch.finfo(p.dtype).max))
