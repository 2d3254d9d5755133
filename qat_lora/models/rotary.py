"""Rotary position embeddings (arXiv 2104.09864)."""

import math

import torch
from torch import Tensor


def rotation(start: int, count: int, width: int, dtype: torch.dtype, device) -> tuple[Tensor, Tensor]:
    """The rotations of positions start, start + 1, … (arXiv 2104.09864) as two tensors [count, width]: the cosines of
    their angles, repeated for the two halves of a head, and the sines, negated in the first half."""
    wide = torch.promote_types(dtype, torch.float32)
    rates = torch.exp(torch.arange(width // 2, device=device, dtype=wide) * (-2 * math.log(10_000) / width))
    angles = torch.arange(start, start + count, device=device)[:, None] * rates
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    return torch.cat([cos, cos], 1), torch.cat([-sin, sin], 1)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, T, D] with elements i and i + D/2 rotated as a pair; cos, sin [T, D] from `rotation`, or any shape
    that broadcasts to x."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
