"""The optimiser of every stage."""

import math

import torch
from torch import Tensor

FIRST, SECOND, EPS = 0.9, 0.95, 1e-8  # decays of the two moments; what keeps their ratio finite
LEAST = 2.0**-10  # share of agreeing steps that the others are divided by


class CautiousAdamW(torch.optim.Optimizer):
    """AdamW without weight decay that leaves alone, in each update, the parameters whose step would go against their
    present gradient; the steps of the others grow by as much (arXiv 2411.16085).

    Its whole state exists before the first step, so that on XLA the second step compiles nothing.
    """

    def __init__(self, groups: list[dict]):
        super().__init__(groups, {"lr": groups[0]["lr"], "step": 0})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    _update(p, p.grad, **self.state[p], lr=group["lr"], step=group["step"])


def _update(p: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, lr: float, step: int) -> None:
    exp_avg.lerp_(grad, 1 - FIRST)
    exp_avg_sq.mul_(SECOND).addcmul_(grad, grad, value=1 - SECOND)
    agree = (exp_avg * grad > 0).to(p.dtype)
    # Both corrections in one number: on XLA a number that occurs twice, as 1 − FIRST would in step 1, is another graph.
    start = 1 - FIRST**step
    size = exp_avg_sq.sqrt().mul_(start / math.sqrt(1 - SECOND**step)).add_(start * EPS)
    change = (exp_avg / size).mul_(agree)
    p.sub_(change.div_(agree.mean().clamp(min=LEAST)), alpha=lr)
