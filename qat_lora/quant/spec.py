"""The specification of a quantiser: bits, codebook and kind of scale."""

import re
from dataclasses import dataclass

from qat_lora.errors import UserError

CODEBOOKS = ("balanced", "int", "uniform")
BITS = (2, 3, 4, 8)
SCOPES = ("all", "mlp", "attn", "weights")  # which parameters of a student are trained
LOWRANK_INIT_GROUP = 32  # a low-rank scale is initialised from the truncated SVD of group scales of this size


@dataclass(frozen=True)
class QuantSpec:
    """One kind of quantised weight: W_eff = level[code] · S.

    codebook, as levels for b bits:
      balanced  {±1/2, ±3/2, …}, symmetric, no zero
      int       {−2^(b−1), …, 2^(b−1)−1}; a negative scale mirrors it
      uniform   2^b levels evenly spaced in [−1, 1]; "lut" is its earlier name
    scale: "group" (one per `size` weights of a row), "lowrank" (S = (A·diag(g))·B of rank `size`), "tensor" (one).
    """

    codebook: str
    bits: int
    scale: str
    size: int = 0

    def __post_init__(self):
        object.__setattr__(self, "codebook", {"lut": "uniform"}.get(self.codebook, self.codebook))
        if self.codebook not in CODEBOOKS or self.bits not in BITS or self.scale not in ("group", "lowrank", "tensor"):
            raise UserError(
                f"{self!r} is invalid; use one of codebooks {CODEBOOKS}, bits {BITS}, scales group, lowrank, tensor"
            )

    @classmethod
    def parse(cls, text: str) -> "QuantSpec | None":
        """Parse "balanced2/g32" (group), "uniform4/r32" (low rank) or "balanced2/tensor"; "none" gives None."""
        if text == "none":
            return None
        match = re.fullmatch(r"(balanced|int|uniform|lut)([2348])/(?:g([1-9]\d*)|r([1-9]\d*)|(tensor))", text)
        if not match:
            raise UserError(
                f"quantiser {text!r} is not of the form CODEBOOKbits/SCALE; use codebook balanced, int or uniform, "
                "bits 2, 3, 4 or 8, and scale g32 (groups of 32), r8 (rank 8) or tensor, e.g. balanced2/g32, or none"
            )
        codebook, bits, group, rank, _ = match.groups()
        scale = "group" if group else "lowrank" if rank else "tensor"
        return cls(codebook, int(bits), scale, int(group or rank or 0))

    def __str__(self):
        size = {"group": f"g{self.size}", "lowrank": f"r{self.size}", "tensor": "tensor"}[self.scale]
        return f"{self.codebook}{self.bits}/{size}"

    @property
    def levels(self) -> int:
        return 2**self.bits

    @property
    def step(self) -> float:
        """Distance between neighbouring levels."""
        return 2.0 / (self.levels - 1) if self.codebook == "uniform" else 1.0

    @property
    def lowest(self) -> float:
        """The lowest level."""
        return {"balanced": -(self.levels - 1) / 2, "int": -self.levels / 2, "uniform": -1.0}[self.codebook]

    @property
    def largest(self) -> float:
        """The largest magnitude of a level (Q_max)."""
        return -self.lowest

    def check(self, name: str, out_features: int, in_features: int) -> None:
        """Raise UserError if this quantiser does not fit a weight [out, in]."""
        if self.scale == "group" and in_features % self.size:
            fits = [g for g in range(2, min(in_features, 256) + 1) if in_features % g == 0]
            raise UserError(f"{name}: {in_features} inputs are not divisible by group {self.size}; use one of {fits}")
        if self.scale == "lowrank" and self.size > min(out_features, in_features):
            raise UserError(
                f"{name}: rank {self.size} exceeds the weight's {min(out_features, in_features)}; use a lower rank"
            )
        if self.scale == "lowrank" and in_features % LOWRANK_INIT_GROUP:
            raise UserError(
                f"{name}: {in_features} inputs are not divisible by {LOWRANK_INIT_GROUP}; use a group scale"
            )

    def scale_values(self, out_features: int, in_features: int) -> int:
        """The number of values in the scale of a weight [out, in]."""
        if self.scale == "group":
            return out_features * in_features // self.size
        return self.size * (out_features + in_features + 1) if self.scale == "lowrank" else 1
