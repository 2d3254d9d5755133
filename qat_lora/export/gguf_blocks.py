"""The bodies of GGUF's blocks: how integers lie in bytes. Arrays are [blocks, weights] or [blocks, groups], uint8.

A run of "planes" is one byte for each of n weights with the bits of weight j, j + n, j + 2n, …, the lowest bits first.
Every function has an inverse, `unpack` of what `pack` gives. The layouts are those of llama.cpp's ggml-common.h.
"""

import numpy as np


def planes(q: np.ndarray, bits: int, run: int) -> np.ndarray:
    """[B, W] integers below 2^bits → [B, W·bits/8] bytes; a byte holds 8/bits weights that lie `run` apart."""
    parts = q.reshape(len(q), -1, 8 // bits, run)
    return np.bitwise_or.reduce([parts[:, :, k] << np.uint8(bits * k) for k in range(8 // bits)]).reshape(len(q), -1)


def unplanes(data: np.ndarray, bits: int, run: int) -> np.ndarray:
    """The inverse of `planes`."""
    parts = data.reshape(len(data), -1, 1, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    return ((parts >> shifts) & np.uint8(2**bits - 1)).reshape(len(data), -1)


# -- ternary ---------------------------------------------------------------------------------------------------------
TERNARY_RUNS = (
    (0, 160, 32, 5),
    (160, 80, 16, 5),
    (240, 16, 4, 4),
)  # first weight, weights, their run, digits in a byte
POWERS = np.array([81, 27, 9, 3, 1], np.uint16)  # of the digits in a byte, the first weight's the highest


def pack_tq1(q: np.ndarray) -> np.ndarray:
    """TQ1_0: [B, 256] of 0 to 2 → [B, 52]: five digits of base 3, as a fraction of 243 in 256 parts, rounded up."""
    found = []
    for start, count, run, digits in TERNARY_RUNS:
        parts = q[:, start : start + count].reshape(len(q), digits, run)
        value = (parts * POWERS[:digits, None]).sum(1, dtype=np.uint16)
        found.append((value * 256 + 242) // 243)
    return np.concatenate(found, axis=1).astype(np.uint8)


def unpack_tq1(data: np.ndarray) -> np.ndarray:
    """The inverse of `pack_tq1`."""
    found, place = [], 0
    for _, _, run, digits in TERNARY_RUNS:
        part = data[:, None, place : place + run]
        place += run
        shifted = (part * (243 // POWERS[:digits, None] // 3).astype(np.uint8)).astype(np.uint8)  # times 3ⁿ, modulo 256
        found.append((shifted.astype(np.uint16) * 3 >> 8).reshape(len(data), -1))
    return np.concatenate(found, axis=1).astype(np.uint8)


# -- six-bit scales --------------------------------------------------------------------------------------------------
def pack_sixteen(scales: np.ndarray) -> np.ndarray:
    """Q3_K: [B, 16] scales below 64 → [B, 12]: the low halves, then their upper two bits."""
    return np.concatenate([planes(scales & 15, 4, 8), planes(scales >> 4, 2, 4)], axis=1)


def unpack_sixteen(data: np.ndarray) -> np.ndarray:
    """The inverse of `pack_sixteen`."""
    return unplanes(data[:, :8], 4, 8) | unplanes(data[:, 8:], 2, 4) << 4


def pack_eight(scales: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Q4_K and Q5_K: [B, 8] scales and [B, 8] offsets below 64 → [B, 12]: the first four of each, whose upper bits hold
    the upper two bits of the last four, and the lower halves of those."""
    firsts = [part[:, :4] | (part[:, 4:] >> 4) << 6 for part in (scales, offsets)]
    return np.concatenate([*firsts, scales[:, 4:] & 15 | (offsets[:, 4:] & 15) << 4], axis=1)


def unpack_eight(data: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of `pack_eight`."""
    last = data[:, 8:]
    return tuple(
        np.concatenate([first & 63, half & 15 | first >> 6 << 4], axis=1)
        for first, half in ((data[:, :4], last), (data[:, 4:8], last >> 4))
    )
