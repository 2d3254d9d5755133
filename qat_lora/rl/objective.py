"""Group-relative policy optimisation: advantages within a group, and the clipped loss.

GRPO: arXiv 2402.03300. dr_grpo, without length and spread bias: 2503.20783. dapo, averaged over all tokens of the
batch, with a higher upper clip: 2503.14476. Loss and gradient equal TRL's (tests/peers/test_trl.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qat_lora.errors import UserError
from qat_lora.kernels.lazy import number_like
from qat_lora.rl import REDUCTIONS, SCALES

EPS = 1e-4  # added to a standard deviation, as in TRL


@dataclass(frozen=True)
class Objective:
    """The settings of the GRPO loss.

    reduction: how token losses are averaged, see `token_weights`. The ratio to the sampling policy is clipped to
    [1 − clip_low, 1 + clip_high]. beta: weight of the KL to the reference; 0 needs no reference.
    """

    reduction: str = "dapo"
    clip_low: float = 0.2
    clip_high: float = 0.28
    beta: float = 0.02

    def __post_init__(self):
        if self.reduction not in REDUCTIONS:
            raise UserError(f"--loss-type {self.reduction!r} is not one of {', '.join(REDUCTIONS)}")
        if not 0 <= self.beta <= 1e6:
            raise UserError(f"--beta {self.beta} must be from 0 to 1e6")
        if not 0 < self.clip_low < 1 or self.clip_high <= 0:
            raise UserError(f"clip_low {self.clip_low} must be within (0, 1) and clip_high {self.clip_high} above 0")


def group_advantages(rewards: Tensor, scale: str = "group") -> tuple[Tensor, Tensor]:
    """Advantages [P, G]: rewards [P, G] minus their prompt's mean; and which prompts [P] have differing rewards.

    scale: divide by the group's unbiased standard deviation ("group"), by that of the whole batch ("batch") or not at
    all ("none"). Nothing can be learned from a group with equal rewards: its advantages are 0, and it should be left
    out. Raises UserError for fewer than two answers per prompt.
    """
    if scale not in SCALES:
        raise UserError(f"--scale-rewards {scale!r} is not one of {', '.join(SCALES)}")
    if rewards.shape[1] < 2:
        raise UserError(f"{rewards.shape[1]} answer for a prompt cannot be compared with any other; use 2 or more")
    centred = rewards - rewards.mean(1, keepdim=True)
    informative = rewards.amax(1) > rewards.amin(1)
    if scale == "group":
        centred = centred / (rewards.std(1, keepdim=True) + EPS)
    elif scale == "batch":
        centred = centred / (rewards.std() + EPS)
    return centred * informative.unsqueeze(1), informative


def token_weights(
    mask: Tensor, reduction: str, sequences: int, tokens: Tensor, longest: int, micro_batches: int = 1
) -> Tensor:
    """The weight of each token's loss, [B, T], such that the losses of micro-batches add up to that of an update.

    mask [B, T]: 1. at a completion's tokens, including its end. sequences, tokens: how many of them the whole update of
    `micro_batches` has, counting masked rows as sequences; longest: the maximum number of tokens in a completion. grpo:
    the mean over sequences of each sequence's mean. bnpo: the mean over micro-batches of the mean over their tokens.
    dapo: the mean over the tokens of the update. dr_grpo: the sum divided by sequences · longest.
    """
    if reduction == "grpo":
        return mask / mask.sum(1, keepdim=True).clamp(min=1) / sequences
    if reduction == "bnpo":
        return mask / mask.sum().clamp(min=1) / micro_batches
    if reduction == "dr_grpo":
        return mask / (sequences * longest)
    return mask / tokens.clamp(min=1)


def grpo_loss(
    logp: Tensor, old: Tensor, reference: Tensor | None, advantages: Tensor, weights: Tensor, objective: Objective
) -> Tensor:
    """−min(ρA, clip(ρ)A) + β·KL of every token, ρ = e^(logp − old), weighted and summed.

    logp, old, reference [B, T]: log-probabilities of the sampled tokens under the policy, the policy that sampled them
    (logp.detach() if it is the same one) and the reference (None if beta is 0); advantages [B]; weights [B, T] from
    `token_weights`.
    """
    advantages, ratio = advantages.unsqueeze(1), (logp - old).exp()
    bounded = ratio.clamp(*(number_like(edge, ratio) for edge in (1 - objective.clip_low, 1 + objective.clip_high)))
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    if reference is not None:
        loss = loss + objective.beta * k3(logp, reference)
    return (loss * weights).sum()


def k3(logp: Tensor, reference: Tensor) -> Tensor:
    """e^(reference − logp) − (reference − logp) − 1: for tokens drawn from the policy, an unbiased and non-negative
    estimate of KL(policy‖reference) (Schulman 2020)."""
    gap = reference - logp
    return gap.exp() - gap - 1
