"""The optimiser of all training stages, cautious AdamW, and one step of it for a parameter."""

import math
from ctypes import c_float

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qat_lora.backend import TorchBackend
from qat_lora.backend.devices import is_shard, local, numbers_on
from qat_lora.kernels import native

FIRST, SECOND, EPS = 0.9, 0.95, 1e-8  # default decays of the moments; EPS keeps their ratio finite
LEAST = 2.0**-10  # lower bound for the share of agreeing elements, by which steps are divided


def corrections(betas: tuple[float, float], eps: float, step: int) -> tuple[float, float]:
    """(size, eps) that make m / (√v · size + eps) the quotient of the bias-corrected moments in step `step`."""
    start = 1 - betas[0] ** step
    return start / math.sqrt(1 - betas[1] ** step), start * eps


@native.fused
def plain_step(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, numbers: Tensor, first: float, second: float) -> None:
    """m ← first·m + (1 − first)·grad; v ← second·v + (1 − second)·grad²; p ← keep·p − lr·agree·move / share, where
    move = m / (√v · size + eps), agree = 1 where move · grad > 0, share = mean(agree), but at least `LEAST`.

    numbers [4]: lr, keep, size and eps, on the parameter's device; see `corrections`. keep: 1 − lr · weight decay.
    """
    lr, keep, size, eps = numbers.unbind()
    m.lerp_(grad, 1 - first)
    v.mul_(second).addcmul_(grad, grad, value=1 - second)
    move = m / (v.sqrt() * size + eps)
    agree = (move * grad > 0).to(p.dtype)
    p.mul_(keep).sub_((move * agree).mul_(lr / agree.mean().clamp(min=LEAST)))  # a NaN reaches the parameter


def step_in_c(
    p: Tensor, grad: Tensor, m: Tensor, v: Tensor, room: Tensor, numbers: tuple[float, ...], betas: tuple[float, float]
) -> None:
    """`plain_step` for tensors on the CPU that `native.suits`. room: scratch memory of at least their size."""
    lr, keep, size, eps = numbers
    if keep != 1:
        p.mul_(keep)
    moves = room[: p.numel()].view(p.shape)
    numbers = [c_float(value) for value in (1 - betas[0], 1 - betas[1], size, eps)]
    agreeing = native.run("move_moments", (p.numel(),), grad, m, v, moves, *numbers)  # moves: 0 where they disagree
    rate = lr / max(agreeing / p.numel(), LEAST)
    p.add_(moves, alpha=min(rate, torch.finfo(p.dtype).max))


def shards_step(trained: list[tuple[Tensor, ...]], numbers: tuple[float, ...], betas: tuple[float, float]) -> None:
    """`plain_step` for parameters of which each worker has a shard: (p, grad, m, v), of which grad is overwritten. The
    share of agreeing elements is that of the whole parameter."""
    (lr, keep, size, eps), agreeing = numbers, []
    parts = [[local(tensor) for tensor in each] for each in trained]
    for p, grad, m, v in parts:
        if native.suits(p, grad, m, v, smallest=1):
            factors = [c_float(value) for value in (1 - betas[0], 1 - betas[1], size, eps)]
            found = native.run("move_moments", (p.numel(),), grad, m, v, grad, *factors)
            agreeing.append(torch.tensor(float(found)))
            continue
        m.lerp_(grad, 1 - betas[0])
        v.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
        move = m / (v.sqrt() * size + eps)
        agree = (move * grad > 0).to(p.dtype)
        agreeing.append(agree.sum(dtype=torch.float32))
        grad.copy_(-move * agree)
    shares = torch.stack(agreeing)
    dist.all_reduce(shares)
    shares /= numbers_on(shares, *(p.numel() for p, *_ in trained))
    for (p, moves, *_), rate in zip(parts, lr / shares.clamp(min=LEAST)):
        p.mul_(keep).add_(moves.mul_(rate))


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
            if any(is_shard(p) for p, *_ in trained):
                shards_step(trained, numbers, betas)
                continue
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


def new_optimizer(
    model: nn.Module, learning_rate: float, backend: TorchBackend, shares: dict[nn.Parameter, float] | None = None,
    **settings,
) -> CautiousAdamW:  # fmt: skip
    """The optimiser for the trainable parameters of a placed model. shares: of the learning rate, for parameters that
    do not get all of it. settings: its betas and weight_decay."""
    groups: dict[float, list[nn.Parameter]] = {}
    for p in model.parameters():
        if p.requires_grad:
            groups.setdefault((shares or {}).get(p, 1.0), []).append(p)
    groups = dict(sorted(groups.items(), reverse=True))
    optimizer = CautiousAdamW([{"params": ps, "lr": learning_rate * s, **settings} for s, ps in groups.items()])
    backend.prepare(optimizer)
    return optimizer
