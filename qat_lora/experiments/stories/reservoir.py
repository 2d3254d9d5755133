"""Reservoirs (random recurrent networks that are never trained), and the language-model block that uses them as memory.

Leaky echo-state units (Jaeger 2001; Lukoševičius 2012): h_t = (1 − a)·h_{t−1} + a·tanh(W_in x_t + W h_{t−1}).
Diagonal linear units (ParalESN, arXiv 2601.22296): h_t = (1 − τ)·h_{t−1} + τ·(Λ h_{t−1} + W_in x_t), computed by a
parallel scan.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qat_lora.backend.devices import without_autocast
from qat_lora.backend.machine import check_memory
from qat_lora.errors import UserError
from qat_lora.experiments.stories.scan import DiagonalScan
from qat_lora.kernels.lazy import loop


@dataclass(frozen=True)
class ReservoirSpec:
    """The distribution that a reservoir is drawn from. kind: "esn" or "diagonal". radius: spectral radius of W, or the
    largest |Λ|. density: share of non-zero entries in W (esn). leak: range of a or τ, spaced logarithmically over the
    units. scaling: root mean square of the norms of W_in's rows. Raises UserError for impossible values."""

    units: int
    kind: str = "diagonal"
    radius: float = 1.0
    density: float = 0.1
    leak: tuple[float, float] = (1.0, 1.0)
    scaling: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if self.kind not in ("esn", "diagonal"):
            raise UserError(f"reservoir kind {self.kind!r} is not one of esn, diagonal")
        if self.units < 1:
            raise UserError(f"a reservoir of {self.units} units is empty; use 1 or more")
        if self.kind == "diagonal" and self.radius > 1:
            raise UserError(f"spectral radius {self.radius} makes a linear reservoir diverge; use 1 or less")
        if not 0 < self.leak[0] <= self.leak[1] <= 1:
            low, high = self.leak
            raise UserError(f"--leak-min {low} and --leak-max {high} must be 0 < min ≤ max ≤ 1; use e.g. 0.05 and 1")
        square = self.kind == "esn"  # drawn in fp64 and copied to compute its eigenvalues
        need = 16 * self.units * (self.units if square else 2)
        check_memory(need, f"a reservoir of {self.units} {self.kind} units", "its units (--reservoirs)")

    @property
    def features(self) -> int:
        """Real numbers per state: a diagonal unit is complex and has two."""
        return self.units if self.kind == "esn" else 2 * self.units

    def leaks(self) -> Tensor:
        low, high = (torch.tensor(edge, dtype=torch.float64).log() for edge in self.leak)
        return torch.lerp(low, high, torch.linspace(0, 1, self.units, dtype=torch.float64)).exp()


def recurrent_matrix(spec: ReservoirSpec, random: torch.Generator) -> Tensor:
    """W [N, N] with the spec's density, scaled to its spectral radius; fp64, on the CPU."""
    weight = torch.randn(spec.units, spec.units, generator=random, dtype=torch.float64)
    weight *= torch.rand(weight.shape, generator=random) < spec.density
    largest = torch.linalg.eigvals(weight).abs().max()
    if not largest > 1e-12:
        raise UserError(f"density {spec.density} leaves {spec.units} units without a cycle; raise either")
    return weight * (spec.radius / largest)


def input_matrix(spec: ReservoirSpec, inputs: int, rows: int, random: torch.Generator) -> Tensor:
    return torch.randn(rows, inputs, generator=random, dtype=torch.float64) * (spec.scaling / inputs**0.5)


class EchoState(nn.Module):
    """A leaky tanh reservoir: buffers w [N, N], w_in [N, D], leak [N]; no trained parameters."""

    def __init__(self, spec: ReservoirSpec, inputs: int):
        super().__init__()
        self.features, self.units = spec.features, spec.units
        random = torch.Generator().manual_seed(spec.seed)
        self.register_buffer("w", recurrent_matrix(spec, random).float())
        self.register_buffer("w_in", input_matrix(spec, inputs, spec.units, random).float())
        self.register_buffer("leak", spec.leaks().float())

    def begin(self, rows: int) -> Tensor:
        return self.w.new_zeros(rows, self.units)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """States [B, T, N] for inputs [B, T, D] that follow `state` [B, N], and the last state."""
        with without_autocast(x):
            drive = x.to(self.w_in.dtype) @ self.w_in.T
            carry, states = loop(_leaky, (state, self.w.T, self.leak), drive.transpose(0, 1))
            return states.transpose(0, 1), carry[0]


def _leaky(carry: tuple[Tensor, Tensor, Tensor], drive: Tensor) -> tuple[tuple, Tensor]:
    state, w, leak = carry
    state = torch.lerp(state, torch.addmm(drive, state, w).tanh(), leak)
    return (state, w, leak), state


class DiagonalReservoir(nn.Module):
    """A diagonal linear reservoir: buffers decay [N, 2], (1 − τ) + τΛ, and w_in [2N, D], τ·W_in; no trained parameters.
    A state is the real and imaginary part of each unit, 2N features.

    Angles are uniform in [0, π] (conjugates would add no information), and radii are uniform in area up to the spec's
    radius. W_in's rows are scaled so that white noise gives every unit the same variance, whatever its decay (as in
    LRU, arXiv 2303.06349); slow and fast units then affect a readout equally strongly.
    """

    def __init__(self, spec: ReservoirSpec, inputs: int):
        super().__init__()
        self.features, self.units = spec.features, spec.units
        random = torch.Generator().manual_seed(spec.seed)
        size, turn = torch.rand(2, spec.units, generator=random, dtype=torch.float64)
        eigenvalues = torch.polar(spec.radius * size.sqrt(), torch.pi * turn)
        leak = spec.leaks()
        decay = (1 - leak) + leak * eigenvalues
        gain = (1 - decay.abs().square()).clamp(min=1e-6).sqrt()
        w_in = input_matrix(spec, inputs, 2 * spec.units, random).view(spec.units, 2, inputs)
        self.register_buffer("decay", torch.view_as_real(decay).float())
        self.register_buffer("w_in", (w_in * gain[:, None, None]).flatten(0, 1).float())
        self.scan = DiagonalScan(torch.view_as_real(decay))

    def begin(self, rows: int) -> Tensor:
        return self.decay.new_zeros(rows, self.units, 2)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Features [B, T, 2N] for inputs [B, T, D] that follow `state` [B, N, 2], and the last state."""
        drive = (self.w_in @ x.to(self.w_in.dtype).flatten(0, 1).T).view(self.units, 2, *x.shape[:2])
        states = self.scan(drive.permute(2, 3, 0, 1), state)
        return states.flatten(2), states[:, -1]


def reservoir(spec: ReservoirSpec, inputs: int) -> nn.Module:
    return (EchoState if spec.kind == "esn" else DiagonalReservoir)(spec, inputs)


class ReservoirBlock(nn.Module):
    """y = g ⊙ x + (1 − g) ⊙ u for an input x [B, T, D]. u is a trained mix (norm and one hidden layer) of the states of
    the block's reservoirs; g is a trained gate on x."""

    def __init__(self, width: int, hidden: int, specs: tuple[ReservoirSpec, ...], dropout: float):
        super().__init__()
        self.reservoirs = nn.ModuleList(reservoir(spec, width) for spec in specs)
        features = sum(each.features for each in self.reservoirs)
        self.before, self.norm = nn.LayerNorm(width), nn.LayerNorm(features)
        self.mix = nn.Sequential(
            nn.Linear(features, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, width), nn.Dropout(dropout)
        )
        self.gate = nn.Linear(width, width)

    def begin(self, rows: int) -> list[Tensor]:
        return [each.begin(rows) for each in self.reservoirs]

    def forward(self, x: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        heard = self.before(x)
        features, after = zip(*(each(heard, own) for each, own in zip(self.reservoirs, state)))
        mixed, gate = self.mix(self.norm(torch.cat(features, -1))), self.gate(heard).sigmoid()
        return gate * x + (1 - gate) * mixed, list(after)
