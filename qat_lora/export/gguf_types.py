"""GGUF's block types: which quantisers each can represent, and conversion of codes and scales to bytes and back.

A block is a run of weights of one row with an fp16 step d (Q4_1: and an fp16 offset m):

  type   weights  bytes  value      integers  body
  Q2_0   64       18     (q − 1)·d  0 … 3     byte i holds weights 4i … 4i+3, lowest bits first
  Q4_0   32       18     (q − 8)·d  0 … 15    byte j holds weight j in its low half, weight j + 16 in its high half
  Q4_1   32       20     q·d + m    0 … 15    as Q4_0
  Q8_0   32       34     q·d        −128 … 127
"""

from dataclasses import dataclass

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from qat_lora.errors import UserError
from qat_lora.quant.spec import QuantSpec


@dataclass(frozen=True)
class BlockType:
    """A type's number in a GGUF file, the file type of a model that uses it, and the weights and bytes of a block."""

    number: int
    file_type: int
    weights: int
    bytes: int


TYPES = {  # by bits per weight
    "Q2_0": BlockType(42, 41, 64, 18),
    "Q4_0": BlockType(2, 2, 32, 18),
    "Q4_1": BlockType(3, 3, 32, 20),
    "Q8_0": BlockType(8, 7, 32, 34),
    "F16": BlockType(1, 1, 1, 2),
    "F32": BlockType(0, 0, 1, 4),
}
QUANTISED = ("Q2_0", "Q4_0", "Q4_1", "Q8_0")
CHOICES = ("auto", *QUANTISED, "F16")


def _teach_library() -> None:
    """Add type 42, which llama.cpp reads, to the enum of gguf 0.19, as in later releases. The library's writer and
    reader look types up there, so that Q2_0 works like any other type."""
    number, shape = TYPES["Q2_0"].number, (TYPES["Q2_0"].weights, TYPES["Q2_0"].bytes)
    if number not in GGMLQuantizationType._value2member_map_:
        member = int.__new__(GGMLQuantizationType, number)
        member._name_, member._value_ = "Q2_0", number
        GGMLQuantizationType._value2member_map_[number] = member
        GGML_QUANT_SIZES[member] = shape


_teach_library()


def library_type(kind: str) -> GGMLQuantizationType:
    """The gguf library's enum member for a type."""
    return GGMLQuantizationType(TYPES[kind].number)


@dataclass(frozen=True)
class Coding:
    """How a type stores level[code] · scale: integer q = turn·code + shift, d = factor·scale and, if the type has an
    offset, m = offset·scale rounded to fp16 (d is exact: factor is ±1 or 1/2, and fp16 holds half of a scale)."""

    turn: int
    shift: int
    factor: float
    offset: float | None = None


def coding(spec: QuantSpec, kind: str) -> Coding | None:
    """How `kind` stores the codes and scales of a quantiser, or None if it cannot represent its levels."""
    if spec.codebook == "uniform" or spec.scale == "lowrank" or kind not in QUANTISED:
        return None
    if kind == "Q2_0":  # levels −1 … 2 are the codebook −2 … 1 mirrored
        return Coding(-1, 3, -1.0) if (spec.codebook, spec.bits) == ("int", 2) else None
    if kind == "Q4_1":
        return Coding(1, 0, 1.0, spec.lowest) if spec.levels <= 16 else None
    zero, half = (8, 8) if kind == "Q4_0" else (0, 128)
    turn = 2 if spec.codebook == "balanced" else 1  # in units of half a step, ±1/2, ±3/2, … are odd integers
    lowest = round(turn * spec.lowest)
    highest = lowest + turn * (spec.levels - 1)
    return Coding(turn, lowest + zero, 1 / turn) if -half <= lowest and highest < half else None


def fitting(spec: QuantSpec, in_features: int) -> list[str]:
    """The types that store the exact codes of a weight with `in_features` columns, smallest first; F16, which rounds
    values, comes last."""
    group = spec.size if spec.scale == "group" else in_features
    exact = [kind for kind in QUANTISED if coding(spec, kind) and group % TYPES[kind].weights == 0]
    return [*exact, "F16"]


def choose(name: str, spec: QuantSpec, in_features: int, wanted: str) -> str:
    """The type for a weight: the smallest that fits for "auto", else `wanted`; raises UserError if it does not fit."""
    fits = fitting(spec, in_features)
    if wanted == "auto":
        return fits[0]
    if wanted not in fits:
        block = TYPES[wanted].weights
        reason = f"its blocks hold {block} weights"
        if in_features % block:
            reason = f"{in_features} inputs are not divisible by its block size {block}"
        elif spec.scale == "lowrank":
            reason = "it has one scale per block, not one per weight"
        elif not coding(spec, wanted):
            reason = f"it cannot represent the levels of {spec.codebook}{spec.bits}"
        raise UserError(
            f"--gguf-type {wanted} cannot hold {name}, which is {spec} ({reason}); use {', '.join(fits)}, or auto"
        )
    return wanted


def row_bytes(kind: str, in_features: int) -> int:
    """Bytes of a row of weights."""
    return in_features // TYPES[kind].weights * TYPES[kind].bytes


def encode(kind: str, spec: QuantSpec, codes: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Encode uint8 codes [out, in] and scales [out, groups], exact in fp16, as bytes: uint8 [out, bytes of a row].

    A scale is repeated in each block of its group.
    """
    how, (rows, columns), block = coding(spec, kind), codes.shape, TYPES[kind].weights
    scale = np.repeat(scale.astype(np.float32), columns // block // scale.shape[1], axis=1)
    heads = [scale * np.float32(how.factor)]
    if how.offset is not None:
        heads.append(scale * np.float32(how.offset))
    q = (how.turn * codes.astype(np.int16) + how.shift).astype(np.int8).reshape(rows, -1, block)
    heads = [head.astype("<f2")[..., None].view(np.uint8) for head in heads]
    return np.concatenate([*heads, _packed(kind, q.view(np.uint8))], axis=2).reshape(rows, -1)


def decode(kind: str, spec: QuantSpec, data: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """The inverse of `encode`, for bytes [out, bytes of a row]: codes uint8 [out, in], the scale of each block fp16
    [out, blocks], and the offset of each block fp16, or None. Integers without a code give invalid codes."""
    how, rows = coding(spec, kind), data.shape[0]
    blocks = np.ascontiguousarray(data).reshape(rows, -1, TYPES[kind].bytes)
    count = 1 if how.offset is None else 2
    heads = np.ascontiguousarray(blocks[..., : 2 * count]).view("<f2")
    q = _unpacked(kind, blocks[..., 2 * count :]).view(np.int8).astype(np.int16).reshape(rows, -1)
    codes, odd = np.divmod(q - how.shift, how.turn)
    codes = np.where(odd == 0, codes, 255).astype(np.uint8)  # 255 marks integers that are no level
    scale = (heads[..., 0].astype(np.float32) / np.float32(how.factor)).astype(np.float16)
    return codes, scale, heads[..., 1] if count == 2 else None


def _packed(kind: str, q: np.ndarray) -> np.ndarray:
    """The bodies of blocks: uint8 [rows, blocks, weights] → [rows, blocks, bytes]."""
    if kind == "Q2_0":
        fours = q.reshape(*q.shape[:2], 16, 4)
        return fours[..., 0] | fours[..., 1] << 2 | fours[..., 2] << 4 | fours[..., 3] << 6
    return q if kind == "Q8_0" else q[..., :16] | q[..., 16:] << 4


def _unpacked(kind: str, body: np.ndarray) -> np.ndarray:
    """The inverse of `_packed`."""
    if kind == "Q2_0":
        return np.stack([body >> shift & 3 for shift in (0, 2, 4, 6)], axis=3).reshape(*body.shape[:2], 64)
    return np.ascontiguousarray(body) if kind == "Q8_0" else np.concatenate([body & 15, body >> 4], axis=2)
