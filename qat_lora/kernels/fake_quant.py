"""Fake quantisation of a weight, its straight-through gradients, and scales as they are stored."""

from ctypes import Structure, c_float, c_long, c_void_p
from typing import Protocol

import torch
from torch import Tensor

from qat_lora.kernels import native
from qat_lora.kernels.lazy import number_like
from qat_lora.kernels.tiles import tiles


class Grid(Protocol):
    """Evenly spaced levels: `lowest`, `lowest` + `step`, …, `levels` of them. A QuantSpec is one."""

    lowest: float
    step: float
    levels: int


class FakeQuant(torch.autograd.Function):
    """Nearest level times scale, plus an offset.

    weight [O, G, g] latent; scale broadcastable to it; with an offset, both are [O, G, 1]. With q the level nearest to
    x = (w − m)/s:
      output q·s + m in `dtype`;
      ∂/∂w = 1 where rounding x needs no clipping (the edge levels' own cells included), 0 elsewhere;
      ∂/∂s = q and ∂/∂m = 1, times gradient_scale: with the codes held fixed.
    LSQ's ∂/∂s = q − x (arXiv 1902.08153) also counts that codes change with s. But weights have moved against their
    gradient g, so q − x tends to have the sign of g; Σ (q − x)·g is then positive, and scales shrink whatever the loss
    (docs/benchmarks.md).
    Only weight, scale and offset are saved for the backward pass; x and q are recomputed.
    """

    @staticmethod
    def forward(
        ctx, weight: Tensor, scale: Tensor, grid: Grid, gradient_scale: float, dtype: torch.dtype,
        offset: Tensor | None = None,
    ):  # fmt: skip
        ctx.save_for_backward(weight, scale, offset)
        ctx.grid, ctx.gradient_scale = grid, gradient_scale
        quantised = _quantised_in_c if _suits_c(dtype, weight, scale, offset) else _quantised
        return quantised(weight, scale, offset, grid, dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        weight, scale, offset = ctx.saved_tensors
        gradients = _gradients_in_c if _suits_c(grad.dtype, weight, scale, offset) else _gradients
        of_weight, of_scale = gradients(weight, scale, offset, grad, ctx.grid)
        of_scale = of_scale.sum_to_size(scale.shape) * ctx.gradient_scale
        of_offset = None
        if offset is not None:
            of_offset = grad.to(weight.dtype).sum_to_size(offset.shape) * ctx.gradient_scale
        return of_weight, of_scale, None, None, None, of_offset


@native.fused
def _quantised(weight: Tensor, scale: Tensor, offset: Tensor | None, grid: Grid, dtype: torch.dtype) -> Tensor:
    if offset is None:
        return nearest_level(weight / scale, grid).mul_(scale).to(dtype)
    return nearest_level((weight - offset) / scale, grid).mul_(scale).add_(offset).to(dtype)


@native.fused
def _gradients(weight: Tensor, scale: Tensor, offset: Tensor | None, grad: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """∂/∂weight and ∂/∂scale; the latter is summed over a group's weights if the scale is [O, G, 1]."""
    x = (weight if offset is None else weight - offset) / scale
    code = x.sub_(grid.lowest).div_(grid.step).round_()
    clipped = code.clamp(0, grid.levels - 1)
    inside = code.eq_(clipped)  # in fp32: products with a bool mask take ten times as long on a CPU
    level = clipped.mul_(grid.step).add_(grid.lowest)
    grad = grad.to(weight.dtype)
    of_weight, of_scale = grad * inside, level.mul_(grad)
    return of_weight, of_scale.sum(2, keepdim=True) if _one_a_group(scale, weight) else of_scale


def _one_a_group(scale: Tensor, weight: Tensor) -> bool:
    return scale.shape == (*weight.shape[:2], 1)


class Stored(torch.autograd.Function):
    """A learned scale as it is stored: sign kept, magnitude raised to at least `least`, then rounded to fp16.
    Magnitudes below 1024 · least are rounded to multiples of `least` instead. The gradient passes straight through the
    rounding and is zero where the magnitude was raised."""

    @staticmethod
    def forward(ctx, scale: Tensor, least: float = 0.0):
        ctx.save_for_backward(scale)
        ctx.least = least
        if least and native.suits(scale, smallest=native.SMALLEST // 32):
            out = torch.empty_like(scale)
            native.run("store_scales", (scale.numel(),), scale, out, c_float(least))
            return out
        return rounded_scale(scale, least)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (scale,) = ctx.saved_tensors
        if not ctx.least:
            return grad, None
        return torch.where(scale.abs() >= number_like(ctx.least, scale), grad, 0), None


def stored_scale(scale: Tensor, least: float = 0.0) -> Tensor:
    """The fp16 values of a scale as stored in a file, see `Stored`. `least`: 0, or a power of two from 2⁻²⁴ on."""
    return rounded_scale(scale, least).half()


def rounded_scale(scale: Tensor, least: float) -> Tensor:
    """`stored_scale` in the scale's own dtype."""
    if not least:
        return scale.half().to(scale.dtype)
    kept = not_zero(scale, least)
    multiple = (kept / least).round() * least  # a device may flush fp16's subnormal numbers to zero
    return torch.where(kept.abs() < number_like(1024 * least, kept), multiple, kept.half().to(kept.dtype))


def not_zero(scale: Tensor, least: float | Tensor) -> Tensor:
    """The scale with magnitudes clamped to at least `least`, so that w/s is finite; signs are kept."""
    if isinstance(least, Tensor):
        return torch.where(scale < 0, torch.minimum(scale, -least), torch.maximum(scale, least))
    below, above = number_like(-least, scale), number_like(least, scale)
    return torch.where(scale < 0, scale.clamp(max=below), scale.clamp(min=above))


def nearest_code(x: Tensor, grid: Grid) -> Tensor:
    """Codes 0 … levels − 1 (as floats) of the levels nearest to x = weight / scale. Overwrites x."""
    return x.sub_(grid.lowest).div_(grid.step).round_().clamp_(0, grid.levels - 1)


def nearest_level(x: Tensor, grid: Grid) -> Tensor:
    """The levels nearest to x = weight / scale. Overwrites x."""
    return nearest_code(x, grid).mul_(grid.step).add_(grid.lowest)


def levels_of(codes: Tensor, grid: Grid) -> Tensor:
    """The fp32 levels of codes."""
    return codes.to(torch.float32).mul_(grid.step).add_(grid.lowest)


# -- in C ------------------------------------------------------------------------------------------------------------
def _suits_c(dtype: torch.dtype, weight: Tensor, *values: Tensor | None) -> bool:
    return native.suits(weight, *(value for value in values if value is not None)) and dtype in native.TYPES


class _Scale(Structure):
    """Where each weight's scale or offset is: strides are in elements, 0 where weights share a value."""

    _fields_ = (("data", c_void_p), ("row", c_long), ("group", c_long), ("element", c_long))

    @classmethod
    def of(cls, scale: Tensor | None, weight: Tensor) -> "_Scale":
        return cls() if scale is None else cls(scale.data_ptr(), *scale.expand_as(weight).stride())


class Levels(Structure):
    _fields_ = (("lowest", c_float), ("step", c_float), ("top", c_float))

    @classmethod
    def of(cls, grid: Grid) -> "Levels":
        return cls(grid.lowest, grid.step, grid.levels - 1)


def _quantised_in_c(weight: Tensor, scale: Tensor, offset: Tensor | None, grid: Grid, dtype: torch.dtype) -> Tensor:
    out, values = torch.empty(weight.shape, dtype=dtype), (_Scale.of(scale, weight), _Scale.of(offset, weight))
    native.run("quantise", weight.shape, weight, *values, out, native.TYPES[dtype], Levels.of(grid))
    return out


def _gradients_in_c(
    weight: Tensor, scale: Tensor, offset: Tensor | None, grad: Tensor, grid: Grid
) -> tuple[Tensor, Tensor]:
    grad, of_weight = grad.contiguous(), torch.empty_like(weight)
    summed = _one_a_group(scale, weight)
    # tiles keep the products in cache until they are summed
    slices = tiles(len(weight), weight[0].numel(), weight.device) if summed else [slice(None)]
    of_scale = torch.empty_like(scale if summed else weight)
    room = torch.empty_like(weight[slices[0]]) if summed else of_scale
    for rows in slices:
        w, g, back, products = weight[rows], grad[rows], of_weight[rows], room[: len(weight[rows])]
        values = [part[rows] if part is not None and len(part) > 1 else part for part in (scale, offset)]
        there = *(_Scale.of(part, w) for part in values), native.TYPES[grad.dtype], Levels.of(grid)
        native.run("gradients", w.shape, w, g, back, products, *there)
        if summed:
            torch.sum(products, 2, keepdim=True, out=of_scale[rows])
    return of_weight, of_scale
