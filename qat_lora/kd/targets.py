"""Sparse targets from one teacher pass: exact top-K probabilities and draws from the tail, with static shapes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat_lora.backend import compute_dtype
from qat_lora.kernels import native
from qat_lora.kernels.tiles import TILE, tiles
from qat_lora.models.architecture import hidden_states
from qat_lora.quant.student import head_of

SEARCHED = 2**21  # logits searched at a time on the CPU, for a head that does more than one matrix product


@torch.no_grad()
def teacher_targets(teacher: nn.Module, tokens: Tensor, k: int, uniforms: Tensor) -> dict[str, Tensor]:
    """The teacher's targets for the cache at every position of tokens [B, L].

    uniforms [B, L, N] in [0, 1) determine the N tail draws. Returns, all [B, L, …]:
      index, prob [K]  the K most probable tokens and their exact probabilities, most probable first
      tail [N]         tokens drawn from the teacher with the top K removed; a draw may repeat
      entropy []       −Σ t̂ log t over these targets, so that cross-entropy − entropy estimates KL without bias
    """
    hidden = hidden_states(teacher, tokens).flatten(0, 1)
    head, uniforms = head_of(teacher).cast(compute_dtype(hidden)), uniforms.flatten(0, 1)
    parts = []
    for block, product in head.products(hidden):
        mine = uniforms[block]
        if head.is_plain:  # a plain product keeps its dtype
            parts.append(_targets(product, k, mine))
            continue
        for rows in tiles(len(product), len(head.weight), product.device, SEARCHED):
            parts.append(_targets(head.finish(product[rows]), k, mine[rows]))
    names = ("index", "prob", "tail", "entropy")
    return {n: torch.cat(values).unflatten(0, tokens.shape) for n, values in zip(names, zip(*parts))}


def _targets(logits: Tensor, k: int, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two-level search over √V strided groups: the top K lie in the K groups with the largest maxima, and a draw
    selects its group, then its member, by inverting cumulative sums. No sort over the vocabulary, no host fallback on
    XLA. Overwrites logits [n, V]."""
    rows, vocab = logits.shape
    width = _members(vocab)
    groups = -(-vocab // width)
    if groups * width != vocab:
        logits = F.pad(logits, (0, groups * width - vocab), value=float("-inf"))
    table = logits.view(rows, width, groups)  # token = member · groups + group
    largest, group_mass = by_group(table)

    nearest = largest.topk(min(k, groups), dim=1).indices
    members = pick_groups(table, nearest)
    top, place = members.flatten(1).topk(k, dim=1)
    index = place // nearest.shape[1] * groups + nearest.gather(1, place % nearest.shape[1])

    peak = top[:, :1]
    top_mass = (top - peak).exp_()
    others = members.flatten(1).sub_(peak).exp_().scatter_(1, place, 0.0).view(members.shape).sum(1)
    group_mass.scatter_(1, nearest, others)
    each = torch.arange(rows, device=logits.device).unsqueeze(1)
    logits[each, index] = float("-inf")  # scatter_ in bf16 converts all of them to fp32 and back
    below = group_mass.cumsum(1)
    z = below[:, -1:] + top_mass.sum(1, keepdim=True)

    sought = uniforms * below[:, -1:]
    group = (below.unsqueeze(1) <= sought.unsqueeze(2)).sum(2).clamp(max=groups - 1)
    rest = sought - (below - group_mass).gather(1, group)
    inside = pick_groups(table, group).sub_(peak.unsqueeze(2)).exp_()
    member = (inside.cumsum(1) <= rest.unsqueeze(1)).sum(1).clamp(max=width - 1)
    tail = member * groups + group

    prob = top_mass / z
    drawn = inside.gather(1, member.unsqueeze(1)).squeeze(1) / z
    # A draw that hits no mass (an empty tail, or rounding at the end of a sum) is replaced by the top token.
    void = drawn == 0
    tail = torch.where(void, index[:, :1], tail)
    drawn = torch.where(void, prob[:, :1], drawn)
    tiny = torch.finfo(torch.float32).tiny
    tail_mass = below[:, -1] / z.squeeze(1)
    entropy = -(prob * prob.clamp(min=tiny).log()).sum(1) - tail_mass * drawn.clamp(min=tiny).log().mean(1)
    return index, prob, tail, entropy


def _members(vocab: int) -> int:
    """The number of members of a group: about √V, and a divisor of V if one is near, so that no padding is needed.
    Fewer members are better than more, because that many values are gathered for each of the K + N groups."""
    wanted = 2 ** (vocab.bit_length() // 2)
    near = [d for d in range(wanted // 4, 4 * wanted) if d and vocab % d == 0]
    return wanted if vocab % wanted == 0 else min(near, key=lambda d: 4 * d / wanted + wanted / d, default=wanted)


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
