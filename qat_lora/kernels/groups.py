"""Logits in groups of tokens, to find the most probable ones without a sort: plain functions and their C form."""

import torch
from torch import Tensor

from qat_lora.kernels import native
from qat_lora.kernels.tiles import TILE, tiles


def by_group(table: Tensor) -> tuple[Tensor, Tensor]:
    """For logits [n, members, groups], each group's largest logit and Σ e^(logit − the row's largest), both fp32."""
    rows, width, groups = table.shape
    largest, mass = (torch.empty(rows, groups, device=table.device) for _ in range(2))
    if native.suits(table, types=native.TYPES):
        native.run("by_group", table.shape, table, native.TYPES[table.dtype], largest, mass)
        return largest, mass
    for part in tiles(rows, width * groups, table.device, 2 * TILE):
        x = table[part].float()
        largest[part] = x.amax(1)
        mass[part] = (x - largest[part].amax(1)[:, None, None]).exp_().sum(1)
    return largest, mass


def pick_groups(table: Tensor, index: Tensor) -> Tensor:
    """The logits of the groups at index [n, J] in table [n, members, groups], as an fp32 copy [n, members, J]."""
    if not native.suits(table, types=native.TYPES):
        return table.gather(2, index.unsqueeze(1).expand(-1, table.shape[1], -1)).float()
    out, index = torch.empty(*table.shape[:2], index.shape[1]), index.contiguous()
    native.run("pick_groups", (*table.shape, index.shape[1]), table, native.TYPES[table.dtype], index, out)
    return out
