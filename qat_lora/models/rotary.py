"""Rotary position embeddings (arXiv 2104.09864)."""

import math

import torch
from torch import Tensor


def rotation(start: int, count: int, width: int, dtype: torch.dtype, device) -> tuple[Tensor, Tensor]:
    """What turns positions start, start + 1, … (arXiv 2104.09864), [count, width] each: the cosines of their angles,
    once for either half of a head, and the sines, negative for the first half."""
    wide = torch.promote_types(dtype, torch.float32)
    rates = torch.exp(torch.arange(width // 2, device=device, dtype=wide) * (-2 * math.log(10_000) / width))
    angles = torch.arange(start, start + count, device=device)[:, None] * rates
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, T, D] with its two halves turned as pairs; cos, sin [T, D] of `rotation`, or as fits x."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
