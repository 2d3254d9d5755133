"""Linear recurrences over time: by a few matrix products, in log2(T) shifts for minGRU, and by a reference loop.

Complex numbers are pairs of real numbers (re, im) in the last dimension, because XLA on TPU has no complex type.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat_lora.backend.devices import without_autocast


def times(a: Tensor, b: Tensor) -> Tensor:
    """Product of complex numbers given as pairs, [..., 2] each."""
    (ar, ai), (br, bi) = a.unbind(-1), b.unbind(-1)
    return torch.stack([ar * br - ai * bi, ar * bi + ai * br], -1)


def sequential_scan(decay: Tensor, drive: Tensor, state: Tensor) -> Tensor:
    """h_t = decay·h_{t−1} + drive_t, one step at a time: [B, T, N, 2], from decay [N, 2], drive [B, T, N, 2] and the
    initial state [B, N, 2]. The reference for `DiagonalScan`."""
    states = []
    for now in drive.unbind(1):
        state = times(decay, state) + now
        states.append(state)
    return torch.stack(states, 1)


CHUNK, LEVELS = 16, 4  # steps per product, and levels of nesting


class DiagonalScan(nn.Module):
    """`sequential_scan` for a fixed decay, computed in chunks.

    Within a chunk of C steps, the states are the drive times a triangular matrix of powers of the decay: a batched
    matrix product. The last states of the chunks are such a recurrence too, with decay^C over T/C steps;
    another product adds what each chunk passes on to the next. L levels reach C^L steps, and the number of operations
    depends only on the number of levels.

    decay [N, 2], |decay| ≤ 1.
    """

    def __init__(self, decay: Tensor, chunk: int = CHUNK, levels: int = LEVELS):
        super().__init__()
        self.chunk, self.levels = chunk, levels
        decay = torch.view_as_complex(decay.double().contiguous())
        steps = torch.arange(chunk)
        back = steps[None, :] - steps[:, None]
        for level in range(levels):
            once = _power(decay, chunk**level)[:, None]
            within = torch.where(back >= 0, _power(once[:, None], back.clamp(min=0)), 0)  # [N, C (from), C (to)]
            real, imaginary = _products(within)
            self.register_buffer(f"real{level}", real.float(), persistent=False)
            self.register_buffer(f"imaginary{level}", imaginary.float(), persistent=False)
            carried = torch.stack(_products(_power(once, steps + 1)), 1)
            self.register_buffer(f"carried{level}", carried.float(), persistent=False)

    def forward(self, drive: Tensor, state: Tensor) -> Tensor:
        """States [B, T, N, 2] from a drive [B, T, N, 2] and the initial state [B, N, 2]. A drive that is laid out in
        memory as [N, 2, B, T] is not copied."""
        if drive.shape[1] > self.chunk**self.levels:
            raise ValueError(f"{drive.shape[1]} steps are more than {self.levels} levels of {self.chunk} reach")
        with without_autocast(drive):
            return self._scan(drive.float().permute(2, 3, 0, 1), state.float().transpose(0, 1), 0).permute(2, 3, 0, 1)

    def _scan(self, drive: Tensor, state: Tensor, level: int) -> Tensor:
        """[N, 2, B, T] from drive [N, 2, B, T] and state [N, B, 2]."""
        units, _, rows, steps = drive.shape
        count = -(-steps // self.chunk)
        if steps % self.chunk:
            drive = F.pad(drive, (0, count * self.chunk - steps))
        drive = drive.reshape(units, 2, rows * count, self.chunk)
        real, imaginary, carried = (getattr(self, f"{name}{level}") for name in ("real", "imaginary", "carried"))
        states = torch.bmm(drive[:, 0], real).baddbmm_(drive[:, 1], imaginary)  # [N, B·T/C, 2C]
        before = state.unsqueeze(2)  # [N, B, T/C, 2]
        if count > 1:
            ends = states.view(units, rows, count, 2, self.chunk)[..., -1].permute(0, 3, 1, 2).contiguous()
            after = self._scan(ends, state, level + 1)
            before = torch.cat([before, after[..., :-1].permute(0, 2, 3, 1)], 2)
        states = states.baddbmm_(before.flatten(1, 2), carried)
        states = states.view(units, rows, count, 2, self.chunk).permute(0, 3, 1, 2, 4)
        return states.reshape(units, 2, rows, count * self.chunk)[..., :steps]


def _power(z: Tensor, exponent: int | Tensor) -> Tensor:
    """z^exponent, also for a z that has underflowed to 0, where the complex power gives NaN for 0^0."""
    return torch.polar(z.abs() ** exponent, z.angle() * exponent)


def _products(z: Tensor) -> tuple[Tensor, Tensor]:
    """Real matrices [..., 2C] for a complex product with z [..., C]: the left factor's real part times the first, plus
    its imaginary part times the second, is (re, im) of the product."""
    return torch.cat([z.real, z.imag], -1), torch.cat([-z.imag, z.real], -1)


def gated_scan(keep: Tensor, drive: Tensor, state: Tensor) -> Tensor:
    """h_t = keep_t·h_{t−1} + drive_t in log2(T) doublings (Hillis and Steele 1986): [B, T, N], from keep and drive
    [B, T, N] and the initial state [B, N]."""
    drive = torch.cat([drive[:, :1] + keep[:, :1] * state.unsqueeze(1), drive[:, 1:]], 1)
    for power in range(math.ceil(math.log2(max(1, drive.shape[1])))):
        shift = 2**power
        drive = torch.cat([drive[:, :shift], drive[:, shift:] + keep[:, shift:] * drive[:, :-shift]], 1)
        keep = torch.cat([keep[:, :shift], keep[:, shift:] * keep[:, :-shift]], 1)
    return drive
