"""The optimiser of all training stages."""

import torch

from qat_lora.backend import TorchBackend
from qat_lora.backend.devices import numbers_on
from qat_lora.kernels import native
from qat_lora.kernels.cautious import corrections, plain_step, step_in_c

FIRST, SECOND, EPS = 0.9, 0.95, 1e-8  # default decays of the moments; EPS keeps their ratio finite


class CautiousAdamW(torch.optim.Optimizer):
    """Cautious AdamW (arXiv 2411.16085): skips the elements whose step disagrees in sign with their current gradient,
    and scales the other steps up in proportion. A group may have its own betas, and a decoupled weight_decay (default
    0), which shrinks every parameter by lr · weight_decay.

    All state is created before the first step, so that on XLA the second step compiles nothing.
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
            lr, betas = group["lr"], group["betas"]
            numbers = lr, 1 - lr * group["weight_decay"], *corrections(betas, EPS, group["step"])
            trained = [(p, p.grad.contiguous(), *self.state[p].values()) for p in group["params"] if p.grad is not None]
            in_c, plain = [], []
            for each in trained:
                (in_c if native.suits(*each, smallest=1) else plain).append(each)
            room = torch.empty(max((p.numel() for p, *_ in in_c), default=0))
            for each in in_c:
                step_in_c(*each, room, numbers, betas)
            if plain:
                data = numbers_on(plain[0][0], *numbers)  # not constants, with which graphs would be compiled again
                for each in plain:
                    plain_step(*each, data, *betas)


def new_optimizer(groups: list[dict], backend: TorchBackend) -> CautiousAdamW:
    """The optimiser for groups of placed parameters, each with its "lr"."""
    optimizer = CautiousAdamW(groups)
    backend.prepare(optimizer)
    return optimizer
