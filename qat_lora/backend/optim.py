"""The optimiser of every stage."""

import math

import torch
from torch import Tensor

FIRST, SECOND, EPS = 0.9, 0.95, 1e-8  # decays of the moments, unless a group has its own; keeps their ratio finite
LEAST = 2.0**-10  # share of agreeing steps that the others are divided by


class CautiousAdamW(torch.optim.Optimizer):
    """AdamW that leaves alone, in each update, the parameters whose step would go against their present gradient; the
    steps of the others grow by as much (arXiv 2411.16085). A group may have betas of its own, and a weight_decay, which
    is decoupled and shrinks every parameter by lr · weight_decay; there is none by default.

    Its whole state exists before the first step, so that on XLA the second step compiles nothing.
    """

    def __init__(self, groups: list[dict]):
        super().__init__(groups, {"lr": groups[0]["lr"], "betas": (FIRST, SECOND), "weight_decay": 0.0, "step": 0})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    if group["weight_decay"]:
                        p.mul_(1 - group["lr"] * group["weight_decay"])
                    _update(p, p.grad, **self.state[p], betas=group["betas"], lr=group["lr"], step=group["step"])


def _update(
    p: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, betas: tuple[float, float], lr: float, step: int
) -> None:
    first, second = betas
    exp_avg.lerp_(grad, 1 - first)
    exp_avg_sq.mul_(second).addcmul_(grad, grad, value=1 - second)
    agree = (exp_avg * grad > 0).to(p.dtype)
    # Both corrections in one number: on XLA a number that occurs twice, as 1 − β₁ would in step 1, is another graph.
    start = 1 - first**step
    size = exp_avg_sq.sqrt().mul_(start / math.sqrt(1 - second**step)).add_(start * EPS)
    change = (exp_avg / size).mul_(agree)
    p.sub_(change.div_(agree.mean().clamp(min=LEAST)), alpha=lr)
