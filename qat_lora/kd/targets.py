"""Sparse targets of one teacher pass: exact top-K probabilities and draws from the tail, at fixed shapes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat_lora.backend import compute_dtype
from qat_lora.backend.tiles import tiles
from qat_lora.models.architecture import hidden_states
from qat_lora.quant.student import head_of

SEARCHED = 2**21  # logits searched at a time on the CPU: more than a tile, since a search has many operations to start


@torch.no_grad()
def teacher_targets(teacher: nn.Module, tokens: Tensor, k: int, uniforms: Tensor) -> dict[str, Tensor]:
    """What the cache keeps of the teacher at every position of tokens [B, L].

    uniforms [B, L, N] in [0, 1) decide the N tail draws. Returns, all [B, L, …]:
      index, prob [K]  the K most probable tokens and their exact probabilities, most probable first
      tail [N]         tokens drawn from the teacher with the top K removed; a draw may repeat
      entropy []       −Σ t̂ log t over these targets, so that cross-entropy − entropy estimates KL without bias
    """
    hidden = hidden_states(teacher, tokens).flatten(0, 1)
    head, uniforms = head_of(teacher).cast(compute_dtype(hidden)), uniforms.flatten(0, 1)
    parts = []
    for block, product in head.products(hidden):
        for rows in tiles(len(product), len(head.weight), product.device, SEARCHED):
            # a product alone is left in its own type
            logits = product[rows] if head.is_plain else head.finish(product[rows])
            parts.append(_targets(logits, k, uniforms[block.start + rows.start : block.start + rows.stop]))
    names = ("index", "prob", "tail", "entropy")
    return {n: torch.cat(values).unflatten(0, tokens.shape) for n, values in zip(names, zip(*parts))}


def _targets(logits: Tensor, k: int, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Two-level search over √V strided groups: the top K lie in the K groups of largest maxima, and a draw finds its
    group, then its member, by inverse cumulative sums. No sort over the vocabulary, no host fallback on XLA."""
    rows, vocab = logits.shape
    width = 2 ** round(vocab.bit_length() / 2)
    groups = -(-vocab // width)
    if groups * width != vocab:
        logits = F.pad(logits, (0, groups * width - vocab), value=float("-inf"))
    table = logits.view(rows, width, groups)  # token = member · groups + group

    nearest = table.amax(1).topk(min(k, groups), dim=1).indices
    members = table.gather(2, nearest.unsqueeze(1).expand(-1, width, -1))
    top, place = members.flatten(1).topk(k, dim=1)
    index = place // nearest.shape[1] * groups + nearest.gather(1, place % nearest.shape[1])

    peak = top[:, :1].float()
    mass = logits.float().sub_(peak).exp_()
    top_mass = mass.gather(1, index)
    mass.scatter_(1, index, 0.0)
    table = mass.view(rows, width, groups)
    group_mass = table.sum(1)
    below = group_mass.cumsum(1)
    z = below[:, -1:] + top_mass.sum(1, keepdim=True)

    sought = uniforms * below[:, -1:]
    group = (below.unsqueeze(1) <= sought.unsqueeze(2)).sum(2).clamp(max=groups - 1)
    rest = sought - (below - group_mass).gather(1, group)
    inside = table.gather(2, group.unsqueeze(1).expand(-1, width, -1))
    member = (inside.cumsum(1) <= rest.unsqueeze(1)).sum(1).clamp(max=width - 1)
    tail = member * groups + group

    prob = top_mass / z
    drawn = inside.gather(1, member.unsqueeze(1)).squeeze(1) / z
    # No mass where a draw fell (an empty tail, or rounding at the end of a sum): it falls to the top token instead.
    void = drawn == 0
    tail = torch.where(void, index[:, :1], tail)
    drawn = torch.where(void, prob[:, :1], drawn)
    tiny = torch.finfo(torch.float32).tiny
    tail_mass = below[:, -1] / z.squeeze(1)
    entropy = -(prob * prob.clamp(min=tiny).log()).sum(1) - tail_mass * drawn.clamp(min=tiny).log().mean(1)
    return index, prob, tail, entropy
