"""Linear recurrences over time as a few matrix products, and minGRU's as log2(T) shifts; loops over time as oracles.

Complex numbers are pairs of real ones in the last dimension (re, im): XLA on TPU has no others.
"""

import math

import torch
from torch import Tensor, nn


def times(a: Tensor, b: Tensor) -> Tensor:
    """Product of complex numbers as pairs, [..., 2] each."""
    (ar, ai), (br, bi) = a.unbind(-1), b.unbind(-1)
    return torch.stack([ar * br - ai * bi, ar * bi + ai * br], -1)


def sequential_scan(decay: Tensor, drive: Tensor, state: Tensor) -> Tensor:
    """h_t = decay·h_{t−1} + drive_t, one step after another: [B, T, N, 2], from decay [N, 2], drive [B, T, N, 2] and
    the state before, [B, N, 2]. What `DiagonalScan` is compared with."""
    states = []
    for now in drive.unbind(1):
        state = times(decay, state) + now
        states.append(state)
    return torch.stack(states, 1)


class DiagonalScan(nn.Module):
    """The same with a decay that never changes, in chunks.

    Within a chunk of C steps the states are a lower triangular matrix of powers of the decay times the drive: one
    batched matrix product. The chunks' ends are such a recurrence themselves, with decay^C over T/C steps, and what
    they carry into the next chunk is added by a second product. L levels reach C^L steps, and the number of operations
    depends on the levels alone.

    decay [N, 2], |decay| ≤ 1.
    """

    def __init__(self, decay: Tensor, chunk: int = 64, levels: int = 3):
        super().__init__()
        self.chunk, self.levels = chunk, levels
        decay = torch.view_as_complex(decay.double().contiguous())
        back = torch.arange(chunk)[:, None] - torch.arange(chunk)[None, :]
        for level in range(levels):
            power = decay ** (chunk**level)
            within = torch.where(back >= 0, power[:, None, None] ** back.clamp(min=0), 0)  # [N, C, C]
            carried = power[:, None] ** torch.arange(1, chunk + 1)  # [N, C]
            self.register_buffer(
                f"within{level}", _rotations(within).flatten(3, 4).flatten(1, 2).float(), persistent=False
            )
            self.register_buffer(
                f"carried{level}", _rotations(carried[:, :, None]).flatten(3, 4).flatten(1, 2).float(), persistent=False
            )

    def forward(self, drive: Tensor, state: Tensor) -> Tensor:
        """States [B, T, N, 2] of a drive [B, T, N, 2] and the state before it, [B, N, 2]."""
        if drive.shape[1] > self.chunk**self.levels:
            raise ValueError(f"{drive.shape[1]} steps are more than {self.levels} levels of {self.chunk} reach")
        with torch.autocast(drive.device.type, enabled=False):
            columns = drive.float().permute(2, 1, 3, 0)  # [N, T, 2, B]
            return self._scan(columns, state.float().permute(1, 2, 0), 0).permute(3, 1, 0, 2)

    def _scan(self, drive: Tensor, state: Tensor, level: int) -> Tensor:
        """[N, T, 2, B] from drive [N, T, 2, B] and state [N, 2, B]."""
        units, steps, _, rows = drive.shape
        within, carried = getattr(self, f"within{level}"), getattr(self, f"carried{level}")
        if steps <= self.chunk:
            local = torch.bmm(within[:, : 2 * steps, : 2 * steps], drive.reshape(units, 2 * steps, rows))
            return torch.baddbmm(local, carried[:, : 2 * steps], state).view(units, steps, 2, rows)
        count = -(-steps // self.chunk)
        spare = count * self.chunk - steps
        if spare:
            drive = torch.cat([drive, drive.new_zeros(units, spare, 2, rows)], 1)
        chunks = drive.reshape(units, count, 2 * self.chunk, rows).transpose(1, 2).reshape(units, 2 * self.chunk, -1)
        local = torch.bmm(within, chunks)
        ends = local[:, -2:].reshape(units, 2, count, rows).transpose(1, 2)  # [N, count, 2, B]
        after = self._scan(ends, state, level + 1)
        before = torch.cat([state.unsqueeze(1), after[:, :-1]], 1).transpose(1, 2).reshape(units, 2, -1)
        whole = torch.baddbmm(local, carried, before).view(units, 2 * self.chunk, count, rows)
        return whole.transpose(1, 2).reshape(units, count * self.chunk, 2, rows)[:, :steps]


def _rotations(z: Tensor) -> Tensor:
    """Complex [N, I, J] as real matrices [N, I, 2, J, 2], each entry [[re, −im], [im, re]]."""
    rows = torch.stack([torch.stack([z.real, -z.imag], -1), torch.stack([z.imag, z.real], -1)], -2)  # [N, I, J, 2, 2]
    return rows.permute(0, 1, 3, 2, 4)


def gated_scan(keep: Tensor, drive: Tensor, state: Tensor) -> Tensor:
    """h_t = keep_t·h_{t−1} + drive_t in log2(T) doublings (Hillis and Steele 1986): [B, T, N] from keep and drive
    [B, T, N] and the state before, [B, N]."""
    drive = torch.cat([drive[:, :1] + keep[:, :1] * state.unsqueeze(1), drive[:, 1:]], 1)
    for power in range(math.ceil(math.log2(max(1, drive.shape[1])))):
        shift = 2**power
        drive = torch.cat([drive[:, :shift], drive[:, shift:] + keep[:, shift:] * drive[:, :-shift]], 1)
        keep = torch.cat([keep[:, :shift], keep[:, shift:] * keep[:, :-shift]], 1)
    return drive
