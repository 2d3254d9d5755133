"""The optimiser of every stage."""

import math

import torch
from torch import Tensor

EPS = 1e-8
LEAST = 2.0**-10  # share of agreeing steps that the others are divided by


class CautiousAdamW(torch.optim.Optimizer):
    """AdamW without weight decay that leaves alone, in each update, the parameters whose step would go against their
    present gradient; the steps of the others grow by as much (arXiv 2411.16085).

    Its whole state exists before the first step, so that on XLA the second step compiles nothing.
    """

    def __init__(self, groups: list[dict], betas: tuple[float, float] = (0.9, 0.95)):
        super().__init__(groups, {"lr": groups[0]["lr"], "betas": betas, "step": 0})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            group["step"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    _update(p, p.grad, **self.state[p], **{key: group[key] for key in ("lr", "betas", "step")})


def _update(
    p: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, lr: float, betas: tuple[float, float], step: int
) -> None:
    first, second = betas
    exp_avg.lerp_(grad, 1 - first)
    exp_avg_sq.mul_(second).addcmul_(grad, grad, value=1 - second)
    agree = (exp_avg * grad > 0).to(p.dtype)
    correction = (1 - first**step) / math.sqrt(1 - second**step)  # one number: on XLA one that occurs twice, as
    size = (
        exp_avg_sq.sqrt().mul_(correction).add_(EPS * (1 - first**step))
    )  # 1 − first does in step 1, is another graph
    change = (exp_avg / size).mul_(agree)
    p.sub_(change.div_(agree.mean().clamp(min=LEAST)), alpha=lr)
