"""The specification of a quantiser: its levels, and a scale and an offset for each group, with how these are stored."""

import re
from dataclasses import dataclass
from typing import NamedTuple

from qat_lora.errors import UserError

CODEBOOKS = ("balanced", "int", "ternary", "uniform")
SCALES = ("group", "rows", "lowrank", "tensor")
NAMES = {  # of grids of llama.cpp's files
    "q2_0": "int2/g64",
    "q4_0": "int4/g32",
    "q4_1": "int4/g32+offset",
    "q5_0": "int5/g32",
    "q5_1": "int5/g32+offset",
    "q8_0": "int8/g32",
    "tq1_0": "ternary/g256",
    "tq2_0": "ternary/g256",
    "q2_k": "int2/g16+offset/s4x256",
    "q3_k": "int3/g16/s6x256",
    "q4_k": "int4/g32+offset/s6x256",
    "q5_k": "int5/g32+offset/s6x256",
    "q6_k": "int6/g16/s8x256",
}
FORM = re.compile(
    r"(?:(balanced|int|uniform|lut)([2-8])|(ternary))"
    r"/(?:g([1-9]\d*)|rows([1-9]\d*)|r([1-9]\d*)|(tensor))(\+offset|\+zero)?(?:/s([4-8])(?:x([1-9]\d*))?)?"
)
LOWRANK_INIT_GROUP = 32  # a low-rank scale is initialised from the truncated SVD of group scales of this size


class Levels(NamedTuple):
    """Evenly spaced levels: `lowest`, `lowest` + `step`, …, `levels` of them."""

    lowest: float
    step: float
    levels: int

    @property
    def largest(self) -> float:
        """The largest magnitude of a level."""
        return max(-self.lowest, self.lowest + self.step * (self.levels - 1))


@dataclass(frozen=True)
class QuantSpec:
    """One kind of quantised weight: W_eff = level[code] · S, or level[code] · S + M with an offset.

    codebook, as levels for b bits:
      balanced  {±1/2, ±3/2, …}, symmetric, no zero
      int       {−2^(b−1), …, 2^(b−1)−1}; a negative scale mirrors it; with an offset {0, …, 2^b−1}
      ternary   {−1, 0, 1}
      uniform   2^b levels evenly spaced in [−1, 1]; "lut" is its earlier name
    scale: "group" (one per `size` weights of a row), "rows" (one per `size` rows), "lowrank" (S = (A·diag(g))·B of rank
      `size`), "tensor" (one).
    offset: whether a group has an offset M, too; it is the value of the level 0.
    zero: whether the offset is −Z·S with an integer Z of `bits` bits, the group's zero point.
    narrow: scales and offsets are integers of this many bits times an fp16 factor for each `block` weights of a row (0:
      for each row); 0: they are fp16 numbers themselves. The scales of a group with an offset are positive and its
      offset is not, as in llama.cpp's k-quants.
    """

    codebook: str
    bits: int
    scale: str
    size: int = 0
    offset: bool = False
    narrow: int = 0
    block: int = 0
    zero: bool = False

    def __post_init__(self):
        object.__setattr__(self, "codebook", {"lut": "uniform"}.get(self.codebook, self.codebook))
        if self.codebook not in CODEBOOKS or not 2 <= self.bits <= 8 or self.scale not in SCALES:
            raise UserError(f"{self!r} is invalid; use one of codebooks {CODEBOOKS}, bits 2 to 8, scales {SCALES}")
        if self.offset and (self.codebook != "int" or self.scale != "group"):
            kind = "a zero point; leave out +zero" if self.zero else "an offset; leave out +offset"
            raise UserError(f"quantiser {self}: only int codebooks with group scales have {kind}")
        if self.narrow and self.zero:
            raise UserError(f"quantiser {self}: scales beside a zero point are fp16; leave out /s…, or use +offset")
        if self.narrow and self.scale != "group":
            raise UserError(f"quantiser {self}: only group scales are stored in {self.narrow} bits; leave out /s…")
        if self.block and self.block % self.size:
            raise UserError(
                f"quantiser {self}: a block of {self.block} weights is not a whole number of groups of {self.size}; "
                f"use e.g. x{8 * self.size}"
            )

    @classmethod
    def parse(cls, text: str) -> "QuantSpec | None":
        """Parse "balanced2/g32" (group), "int4/rows8" (rows), "uniform4/r32" (low rank) or "balanced2/tensor", with
        "+offset" or "+zero" and the storage of scales, "int2/g16+offset/s4x256", or a name of NAMES; "none" gives
        None."""
        if text == "none":
            return None
        match = FORM.fullmatch(NAMES.get(text.lower(), text))
        if not match:
            raise UserError(
                f"quantiser {text!r} is not of the form CODEBOOKbits/SCALE; use codebook balanced, int or uniform with "
                "2 to 8 bits, or ternary, and scale g32 (groups of 32), rows8 (8 rows), r8 (rank 8) or tensor, e.g. "
                "balanced2/g32; int4/g32+offset; int4/g128+zero (zero points); int2/g32/s8 (8-bit scales); one of "
                f"{', '.join(NAMES)}; or none"
            )
        codebook, bits, ternary, group, rows, rank, _, offset, narrow, block = match.groups()
        scale = "group" if group else "rows" if rows else "lowrank" if rank else "tensor"
        size = int(group or rows or rank or 0)
        return cls(
            codebook or ternary, int(bits or 2), scale, size, bool(offset), int(narrow or 0), int(block or 0),
            offset == "+zero",
        )  # fmt: skip

    @classmethod
    def alternatives(cls, text: str) -> "list[QuantSpec]":
        """Parse "q2_k|int2/g64": a layer gets the first that fits its shape. "none" gives none."""
        return [spec for part in text.split("|") if (spec := cls.parse(part))]

    def __str__(self):
        codebook = self.codebook if self.codebook == "ternary" else f"{self.codebook}{self.bits}"
        mark = {"group": "g", "rows": "rows", "lowrank": "r"}.get(self.scale)
        narrow = f"/s{self.narrow}" + (f"x{self.block}" if self.block else "") if self.narrow else ""
        offset = "+zero" if self.zero else "+offset" if self.offset else ""
        return f"{codebook}/{f'{mark}{self.size}' if mark else 'tensor'}{offset}{narrow}"

    @property
    def levels(self) -> int:
        return 3 if self.codebook == "ternary" else 2**self.bits

    @property
    def step(self) -> float:
        """Distance between neighbouring levels."""
        return 2.0 / (self.levels - 1) if self.codebook == "uniform" else 1.0

    @property
    def lowest(self) -> float:
        """The lowest level."""
        if self.offset:
            return 0.0
        return {
            "balanced": -(self.levels - 1) / 2, "int": -self.levels / 2, "ternary": -1.0, "uniform": -1.0
        }[self.codebook]  # fmt: skip

    @property
    def largest(self) -> float:
        """The largest magnitude of a level (Q_max)."""
        return -self.lowest or float(self.levels - 1)

    @property
    def scale_levels(self) -> Levels:
        """The integers that narrow scales are; 0, which is among them if there is no offset, is never used."""
        top = 2**self.narrow - 1
        return Levels(1, 1, top) if self.offset else Levels(-(top + 1) // 2, 1, top + 1)

    @property
    def offset_levels(self) -> Levels:
        """The integers that narrow offsets are, or −Z of a zero point Z."""
        count = 2 ** (self.narrow or self.bits)
        return Levels(1 - count, 1, count)

    def check(self, name: str, out_features: int, in_features: int) -> None:
        """Raise UserError if this quantiser does not fit a weight [out, in]."""
        if self.scale == "group" and in_features % self.size:
            fits = [g for g in range(2, min(in_features, 256) + 1) if in_features % g == 0]
            raise UserError(f"{name}: {in_features} inputs are not divisible by group {self.size}; use one of {fits}")
        if self.block and in_features % self.block:
            raise UserError(
                f"{name}: {in_features} inputs are not divisible by {self.block}, the block of {self}; use another "
                "quantiser for this part, e.g. int4/g32"
            )
        if self.scale == "rows" and out_features % self.size:
            fits = [n for n in range(1, min(out_features, 64) + 1) if out_features % n == 0]
            raise UserError(f"{name}: {out_features} outputs are not divisible by {self.size} rows; use one of {fits}")
        if self.scale == "lowrank" and self.size > min(out_features, in_features):
            raise UserError(
                f"{name}: rank {self.size} exceeds the weight's {min(out_features, in_features)}; use a lower rank"
            )
        if self.scale == "lowrank" and in_features % LOWRANK_INIT_GROUP:
            raise UserError(
                f"{name}: {in_features} inputs are not divisible by {LOWRANK_INIT_GROUP}; use a group scale"
            )

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, int]:
        """(rows, groups) of the scales of a weight [out, in]; not for low rank."""
        if self.scale == "group":
            return out_features, in_features // self.size
        return (out_features // self.size, 1) if self.scale == "rows" else (1, 1)

    def scale_bits(self, out_features: int, in_features: int) -> int:
        """Bits that the scales and offsets of a weight [out, in] are stored in."""
        if self.scale == "lowrank":
            return 16 * self.size * (out_features + in_features + 1)
        rows, groups = self.scale_shape(out_features, in_features)
        blocks = in_features // (self.block or in_features) if self.narrow else 0
        if self.zero:
            return rows * groups * (16 + self.bits)
        return rows * (groups * (self.narrow or 16) + 16 * blocks) * (2 if self.offset else 1)

    def code_bits(self, weights: int) -> int:
        """Bits that the codes of `weights` weights are stored in; five ternary ones share a byte."""
        return 8 * -(-weights // 5) if self.codebook == "ternary" else weights * self.bits


def first_fitting(text: str, name: str, shape: tuple[int, ...]) -> QuantSpec | None:
    """The first of the alternatives in `text` that fits the weight `name` of a shape [..., out, in]; None for "none".
    Raises UserError if none fits."""
    error = None
    for spec in QuantSpec.alternatives(text):
        try:
            spec.check(name, *shape[-2:])
            return spec
        except UserError as found:
            error = found
    if error:
        raise error
    return None
