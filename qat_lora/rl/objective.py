"""Group-relative policy optimisation: what a reward is worth in its group, and the clipped loss that follows.

GRPO: arXiv 2402.03300. Without bias by length or spread: dr_grpo, 2503.20783. By tokens of the whole batch, with more
room above the clip: dapo, 2503.14476. Loss and gradient equal TRL's (tests/peers/test_trl.py).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qat_lora.errors import UserError
from qat_lora.rl import REDUCTIONS, SCALES

EPS = 1e-4  # added to a standard deviation, as TRL does


@dataclass(frozen=True)
class Objective:
    """What a policy's tokens are judged by.

    reduction: how token losses are put together, see `token_weights`. The ratio to the sampling policy is clipped to
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
    """Advantages [P, G] of rewards [P, G] over their prompt's mean, and which prompts [P] tell answers apart.

    scale: divide by the group's unbiased standard deviation ("group"), by that of the whole batch ("batch") or not at
    all ("none"). A group whose rewards are equal teaches nothing: its advantages are 0, and it is to be left out.
    Raises UserError for fewer than two answers a prompt.
    """
    if scale not in SCALES:
        raise UserError(f"--scale-rewards {scale!r} is not one of {', '.join(SCALES)}")
    if rewards.shape[1] < 2:
        raise UserError(f"{rewards.shape[1]} answer for a prompt has nothing to be compared with; use 2 or more")
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
    """What each token's loss counts for, [B, T], so that shares of micro-batches add up to the loss of an update.

    mask [B, T]: 1. at a completion's tokens, its end included. sequences, tokens: how many there are in the whole
    update of `micro_batches`, masked rows counted as sequences; longest: how many tokens a completion may have. grpo:
    the mean over sequences of each one's mean. bnpo: the mean over micro-batches of the mean over their tokens. dapo:
    the mean over the tokens of the update. dr_grpo: the sum over sequences · longest.
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
    (logp.detach() where it is the same one) and the reference (None where beta is 0); advantages [B]; weights [B, T] of
    `token_weights`.
    """
    advantages, ratio = advantages.unsqueeze(1), (logp - old).exp()
    bounded = ratio.clamp(1 - objective.clip_low, 1 + objective.clip_high)
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    if reference is not None:
        loss = loss + objective.beta * k3(logp, reference)
    return (loss * weights).sum()


def k3(logp: Tensor, reference: Tensor) -> Tensor:
    """e^(reference − logp) − (reference − logp) − 1: for tokens drawn from the policy an unbiased estimate of its
    KL(policy‖reference), never negative (Schulman 2020)."""
    gap = reference - logp
    return gap.exp() - gap - 1
