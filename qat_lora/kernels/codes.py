"""Codes as they are packed in files."""

import math

import numpy as np
import torch
from torch import Tensor

UNPACKED = 2**20  # codes packed or unpacked at a time, with one byte per bit; a multiple of 8
POWERS = 3 ** np.arange(5, dtype=np.uint8)  # of ternary digits in a byte


def pack_codes(codes: Tensor, bits: int) -> Tensor:
    """uint8 codes of any shape → a flat uint8 tensor of ⌈n·bits/8⌉ bytes, lowest bit first."""
    flat = codes.numpy().reshape(-1, 1)
    packed = np.empty(-(-len(flat) * bits // 8), np.uint8)
    for start in range(0, len(flat), UNPACKED):
        planes = np.unpackbits(flat[start : start + UNPACKED], axis=1, bitorder="little", count=bits)
        part = np.packbits(planes.reshape(-1), bitorder="little")
        packed[start * bits // 8 :][: len(part)] = part
    return torch.from_numpy(packed)


def unpack_codes(packed: Tensor, bits: int, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `pack_codes`: uint8 codes of `shape`."""
    codes, held = np.empty(math.prod(shape), np.uint8), packed.numpy()
    for start in range(0, len(codes), UNPACKED):
        count = min(UNPACKED, len(codes) - start)
        planes = np.unpackbits(held[start * bits // 8 :], bitorder="little", count=count * bits).reshape(count, bits)
        codes[start : start + count] = np.packbits(planes, axis=1, bitorder="little")[:, 0]
    return torch.from_numpy(codes.reshape(shape))


def pack_ternary(codes: Tensor) -> Tensor:
    """uint8 codes 0 to 2 of any shape → a flat uint8 tensor of ⌈n/5⌉ bytes: five digits of base 3, the lowest first."""
    flat = codes.numpy().reshape(-1)
    return torch.from_numpy((np.pad(flat, (0, -len(flat) % 5)).reshape(-1, 5) * POWERS).sum(1, dtype=np.uint8))


def unpack_ternary(packed: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `pack_ternary`: uint8 codes of `shape`."""
    digits = packed.numpy()[:, None] // POWERS % 3
    return torch.from_numpy(digits.reshape(-1)[: math.prod(shape)].reshape(shape))
