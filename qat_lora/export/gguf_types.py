"""GGUF's block types: which quantisers each can represent, and conversion of codes, scales and offsets to bytes and
back.

A block is a run of weights of one row. In the flat types it has an fp16 step d (Q4_1, Q5_1: and an fp16 offset m); in
llama.cpp's k-quants each group of its 256 weights has an integer scale s (and offset m), times the fp16 d (and m') of
the block:

  type   weights  bytes  value            integers    groups
  TQ1_0  256      54     (q − 1)·d        0 … 2
  TQ2_0  256      66     (q − 1)·d        0 … 2
  Q2_0   64       18     (q − 1)·d        0 … 3
  Q2_K   256      84     d·s·q − m'·m     0 … 3       16 of 16, s and m of 4 bits
  Q3_K   256      110    d·(s − 32)·(q − 4)  0 … 7    16 of 16, s of 6 bits
  Q4_0   32       18     (q − 8)·d        0 … 15
  Q4_K   256      144    d·s·q − m'·m     0 … 15      8 of 32, s and m of 6 bits
  Q4_1   32       20     q·d + m          0 … 15
  Q5_0   32       22     (q − 16)·d       0 … 31
  Q5_K   256      176    d·s·q − m'·m     0 … 31      8 of 32, s and m of 6 bits
  Q5_1   32       24     q·d + m          0 … 31
  Q6_K   256      210    d·s·(q − 32)     0 … 63      16 of 16, s of 8 bits with a sign
  Q8_0   32       34     q·d              −128 … 127
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from gguf import GGMLQuantizationType

from qat_lora.errors import UserError
from qat_lora.export.gguf_blocks import (
    pack_eight,
    pack_sixteen,
    pack_tq1,
    planes,
    unpack_eight,
    unpack_sixteen,
    unpack_tq1,
    unplanes,
)
from qat_lora.models import gguf_q2
from qat_lora.quant.linear import StoredWeight, each
from qat_lora.quant.spec import QuantSpec


@dataclass(frozen=True)
class BlockType:
    """A type's number in a GGUF file, the file type of a model that uses it, and the weights and bytes of a block; of a
    k-quant also the bits of a code, the weights of a group, and the bits of its scale."""

    number: int
    file_type: int
    weights: int
    bytes: int
    bits: int = 0
    group: int = 0
    narrow: int = 0
    offset: bool = False


TYPES = {  # by bits per weight
    "TQ1_0": BlockType(34, 36, 256, 54),
    "TQ2_0": BlockType(35, 37, 256, 66),
    "Q2_0": BlockType(gguf_q2.NUMBER, 41, gguf_q2.WEIGHTS, gguf_q2.BYTES),
    "Q2_K": BlockType(10, 10, 256, 84, 2, 16, 4, True),
    "Q3_K": BlockType(11, 12, 256, 110, 3, 16, 6),
    "Q4_0": BlockType(2, 2, 32, 18),
    "Q4_K": BlockType(12, 14, 256, 144, 4, 32, 6, True),
    "Q4_1": BlockType(3, 3, 32, 20),
    "Q5_0": BlockType(6, 8, 32, 22),
    "Q5_K": BlockType(13, 16, 256, 176, 5, 32, 6, True),
    "Q5_1": BlockType(7, 9, 32, 24),
    "Q6_K": BlockType(14, 18, 256, 210, 6, 16, 8),
    "Q8_0": BlockType(8, 7, 32, 34),
    "F16": BlockType(1, 1, 1, 2),
    "F32": BlockType(0, 0, 1, 4),
}
SHIFTED = {"Q4_1": 16, "Q5_1": 32}  # flat types with an offset, and their integers
QUANTISED = tuple(kind for kind in TYPES if kind not in ("F16", "F32"))


def library_type(kind: str) -> GGMLQuantizationType:
    """The gguf library's enum member for a type."""
    return GGMLQuantizationType(TYPES[kind].number)


@dataclass(frozen=True)
class Coding:
    """How a flat type stores level[code] · scale + offset: integer q = turn·code + shift, d = factor·scale and, if the
    type has an offset, m = offset + lowest·scale rounded to fp16 (d is exact: factor is ±1 or 1/2, and fp16 holds half
    of a scale)."""

    turn: int
    shift: int
    factor: float
    lowest: float | None = None


def coding(spec: QuantSpec, kind: str) -> Coding | None:
    """How a flat type stores the codes and scales of a quantiser, or None if it cannot represent its levels."""
    if spec.codebook == "uniform" or spec.scale == "lowrank" or spec.narrow or spec.zero:
        return None
    if spec.offset and kind not in SHIFTED:
        return None
    if kind in ("TQ1_0", "TQ2_0"):
        return Coding(1, 0, 1.0) if spec.codebook == "ternary" else None
    if kind == "Q2_0":  # levels −1 … 2 are the codebook −2 … 1 mirrored
        mirrored = Coding(-1, 3, -1.0) if (spec.codebook, spec.bits) == ("int", 2) else None
        return Coding(1, 0, 1.0) if spec.codebook == "ternary" else mirrored
    if kind in SHIFTED:
        return Coding(1, 0, 1.0, spec.lowest) if spec.levels <= SHIFTED[kind] else None
    zero, half = {"Q4_0": (8, 8), "Q5_0": (16, 16), "Q8_0": (0, 128)}[kind]
    turn = 2 if spec.codebook == "balanced" else 1  # in units of half a step, ±1/2, ±3/2, … are odd integers
    lowest = round(turn * spec.lowest)
    highest = lowest + turn * (spec.levels - 1)
    return Coding(turn, lowest + zero, 1 / turn) if -half <= lowest and highest < half else None


def _misfit(spec: QuantSpec, in_features: int, kind: str) -> str | None:
    """Why a type cannot hold a weight with `in_features` columns exactly; None if it can."""
    there = TYPES[kind]
    if in_features % there.weights:
        return f"{in_features} inputs are not divisible by its block size {there.weights}"
    if spec.scale == "lowrank":
        return "it has one scale per block, not one per weight"
    group, block = spec.size if spec.scale == "group" else in_features, spec.block or in_features
    if not there.bits:
        if not coding(spec, kind):
            return (
                f"it cannot represent the levels of {spec.codebook}{spec.bits}"
                if not spec.narrow
                else "its scales are fp16"
            )
        return f"its blocks hold {there.weights} weights" if group % there.weights else None
    if spec.codebook != "int" or spec.bits > there.bits or spec.offset != there.offset:
        kinds = "with" if there.offset else "without"
        return f"it holds int codebooks of up to {there.bits} bits {kinds} an offset"
    if not 0 < spec.narrow <= there.narrow or group % there.group or block % there.weights:
        return f"its scales have {there.narrow} bits, for groups of {there.group} in blocks of {there.weights}"
    return None


def fitting(spec: QuantSpec, in_features: int) -> list[str]:
    """The types that store the exact codes of a weight with `in_features` columns, smallest first; F16, which rounds
    values, comes last."""
    return [*(kind for kind in QUANTISED if _misfit(spec, in_features, kind) is None), "F16"]


def choose(name: str, spec: QuantSpec, in_features: int, wanted: str) -> str:
    """The type for a weight: the smallest that fits for "auto", else `wanted`; raises UserError if it does not fit."""
    fits = fitting(spec, in_features)
    if wanted == "auto":
        return fits[0]
    if wanted not in fits:
        raise UserError(
            f"--gguf-type {wanted} cannot hold {name}, which is {spec} ({_misfit(spec, in_features, wanted)}); use "
            f"{', '.join(fits)}, or auto"
        )
    return wanted


def row_bytes(kind: str, in_features: int) -> int:
    """Bytes of a row of weights."""
    return in_features // TYPES[kind].weights * TYPES[kind].bytes


class Held(NamedTuple):
    """What a type holds of a weight [out, in]: codes uint8 [out, in]; scale and offset, if it has one, fp32
    [out, groups] for groups of the type's own size."""

    codes: np.ndarray
    scale: np.ndarray
    offset: np.ndarray | None


def held(kind: str, spec: QuantSpec, parts: StoredWeight) -> Held:
    """What `kind` holds of a weight: its codes, scales and offsets as they are, but a type with offsets rounds that of
    a codebook without to fp16."""
    there, columns = TYPES[kind], parts.codes.shape[1]
    groups = columns // (there.group or there.weights)
    scale, offset = each(parts.scale, groups), None if parts.offset is None else each(parts.offset, groups)
    how = None if there.bits else coding(spec, kind)
    if how and how.lowest is not None and offset is None:
        offset = (scale * np.float32(how.lowest)).astype(np.float16).astype(np.float32)
    return Held(parts.codes, scale, offset)


def encode(kind: str, spec: QuantSpec, parts: StoredWeight) -> np.ndarray:
    """A weight as bytes: uint8 [out, bytes of a row]. A scale is repeated in each block and group that it is for."""
    there, (rows, columns) = TYPES[kind], parts.codes.shape
    blocks = rows * columns // there.weights
    if there.bits:
        return _super_blocks(kind, spec, parts).reshape(rows, -1)
    how, part = coding(spec, kind), held(kind, spec, parts)
    heads = [part.scale * np.float32(how.factor), *([] if part.offset is None else [part.offset])]
    heads = [head.astype("<f2").reshape(blocks, 1).view(np.uint8) for head in heads]
    q = (how.turn * parts.codes.astype(np.int16) + how.shift).astype(np.int8).view(np.uint8).reshape(blocks, -1)
    body = _packed(kind, q)
    return np.concatenate([body, *heads] if kind.startswith("TQ") else [*heads, body], axis=1).reshape(rows, -1)


@np.errstate(invalid="ignore")
def decode(kind: str, spec: QuantSpec, data: np.ndarray) -> Held:
    """The inverse of `encode`, for bytes [out, bytes of a row]. Integers without a code give invalid codes."""
    there, rows = TYPES[kind], len(data)
    blocks = np.ascontiguousarray(data).reshape(-1, there.bytes)
    if there.bits:
        return Held(
            *(None if part is None else part.reshape(rows, -1) for part in _from_super_blocks(kind, spec, blocks))
        )
    how, count = coding(spec, kind), 4 if kind in SHIFTED else 2
    head, body = (
        (blocks[:, -count:], blocks[:, :-count]) if kind.startswith("TQ") else (blocks[:, :count], blocks[:, count:])
    )
    q = _unpacked(kind, body).view(np.int8).astype(np.int16)
    codes, odd = np.divmod(q - how.shift, how.turn)
    codes = np.where(odd == 0, codes, 255).astype(np.uint8).reshape(rows, -1)  # 255 marks integers that are no level
    head = np.ascontiguousarray(head).view("<f2").astype(np.float32)
    scale = (head[:, 0] / np.float32(how.factor)).reshape(rows, -1)
    return Held(codes, scale, head[:, 1].reshape(rows, -1) if how.lowest is not None else None)


PLANES = {"TQ2_0": (2, 32), "Q2_0": (2, 1), "Q4_0": (4, 16), "Q4_1": (4, 16), "Q8_0": (8, 1)}
FIFTHS = 4  # bytes before those of Q4_0, with the fifth bit of each weight


def _packed(kind: str, q: np.ndarray) -> np.ndarray:
    """The bodies of flat blocks: uint8 [blocks, weights] → [blocks, bytes]."""
    if kind in ("Q5_0", "Q5_1"):
        return np.concatenate([planes(q >> 4, 1, 1), _packed("Q4_0", q & 15)], axis=1)
    return pack_tq1(q) if kind == "TQ1_0" else planes(q, *PLANES[kind])


def _unpacked(kind: str, body: np.ndarray) -> np.ndarray:
    """The inverse of `_packed`."""
    if kind in ("Q5_0", "Q5_1"):
        return unplanes(body[:, :FIFTHS], 1, 1) << 4 | _unpacked("Q4_0", body[:, FIFTHS:])
    return unpack_tq1(body) if kind == "TQ1_0" else unplanes(np.ascontiguousarray(body), *PLANES[kind])


# -- k-quants --------------------------------------------------------------------------------------------------------
def _super_blocks(kind: str, spec: QuantSpec, parts: StoredWeight) -> np.ndarray:
    """The blocks [blocks, bytes] of a k-quant."""
    there, columns = TYPES[kind], parts.codes.shape[1]

    def whole(part: np.ndarray, size: int) -> np.ndarray:
        return each(part, columns // size).reshape(-1, there.weights // size)

    def factor(part: np.ndarray) -> np.ndarray:
        return whole(part, there.weights).astype("<f2").view(np.uint8)

    q = parts.codes.reshape(-1, there.weights) + np.uint8(_shift(kind, spec))
    scale, d = whole(parts.scale_integers, there.group), factor(parts.scale_factor)
    if kind == "Q3_K":
        high = np.packbits((q >> 2).reshape(-1, 8, 32), axis=1, bitorder="little")[:, 0]
        return np.concatenate([high, planes(q & 3, 2, 32), pack_sixteen((scale + 32).astype(np.uint8)), d], axis=1)
    if kind == "Q6_K":
        return np.concatenate(
            [planes(q & 15, 4, 64), planes(q >> 4, 2, 32), scale.astype(np.int8).view(np.uint8), d], axis=1
        )
    scale, offset = scale.astype(np.uint8), (-whole(parts.offset_integers, there.group)).astype(np.uint8)
    heads = [d, factor(parts.offset_factor)]
    if kind == "Q2_K":
        return np.concatenate([scale | offset << 4, planes(q, 2, 32), *heads], axis=1)
    heads.append(pack_eight(scale, offset))
    if kind == "Q5_K":
        heads.append(np.packbits((q >> 4).reshape(-1, 8, 32), axis=1, bitorder="little")[:, 0])
    return np.concatenate([*heads, planes(q & 15, 4, 32)], axis=1)


def _from_super_blocks(kind: str, spec: QuantSpec, data: np.ndarray) -> tuple:
    """Codes [blocks, 256], and scales and offsets [blocks, groups] in fp32, of the blocks of a k-quant."""

    def bits(part: np.ndarray) -> np.ndarray:
        return np.unpackbits(part[:, None], axis=1, bitorder="little").reshape(len(part), -1)

    (d, least), offset = factors(kind, data), None
    if kind == "Q3_K":
        q = unplanes(data[:, 32:96], 2, 32) | bits(data[:, :32]) << 2
        scale = unpack_sixteen(data[:, 96:108]).astype(np.float32) - 32
    elif kind == "Q6_K":
        q = unplanes(data[:, :128], 4, 64) | unplanes(data[:, 128:192], 2, 32) << 4
        scale = np.ascontiguousarray(data[:, 192:208]).view(np.int8)
    elif kind == "Q2_K":
        q, offset = unplanes(data[:, 16:80], 2, 32), least * (data[:, :16] >> 4)
        scale = data[:, :16] & 15
    else:
        scale, integers = unpack_eight(data[:, 4:16])
        offset, q = least * integers, unplanes(data[:, -128:], 4, 32)
        q = q | bits(data[:, 16:48]) << 4 if kind == "Q5_K" else q
    return q - np.uint8(_shift(kind, spec)), d * scale, None if offset is None else -offset


def factors(kind: str, data: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """d and, if there are offsets, m' of a k-quant's blocks [blocks, bytes]: fp32 [blocks, 1]."""
    places = {"Q2_K": (-4, -2), "Q3_K": (-2,), "Q6_K": (-2,)}.get(kind, (0, 2))
    found = [np.ascontiguousarray(data[:, p % data.shape[1] :][:, :2]).view("<f2").astype(np.float32) for p in places]
    return found[0], found[1] if len(found) > 1 else None


def _shift(kind: str, spec: QuantSpec) -> int:
    """What is added to a code: the integer of the level 0 is in the middle if there is no offset."""
    return 0 if spec.offset else 2 ** (TYPES[kind].bits - 1) - 2 ** (spec.bits - 1)
