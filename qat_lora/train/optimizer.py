"""The optimiser of every stage."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from qat_lora.backend import TorchBackend, native
from qat_lora.backend.devices import is_lazy, on_host

FIRST, SECOND, EPS = 0.9, 0.95, 1e-8  # decays of the moments, unless a group has its own; keeps their ratio finite
LEAST = 2.0**-10  # share of agreeing steps that the others are divided by
PIECE = 2**20  # elements that the CPU updates at a time: more than a tile, since this has fewer operations to start
LAUNCH = 2**24  # elements that one launch of CUDA kernels updates at least: what they need in between is small


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
            trained = [p for p in group["params"] if p.grad is not None]
            if group["weight_decay"]:
                for p in trained:
                    p.mul_(1 - group["lr"] * group["weight_decay"])
            settings = group["betas"], group["lr"], group["step"]
            for way in {_way(p) for p in trained}:
                way([(p, p.grad, *self.state[p].values()) for p in trained if _way(p) is way], *settings)


def new_optimizer(groups: list[dict], backend: TorchBackend) -> CautiousAdamW:
    """The optimiser of groups of placed parameters, each with its "lr"."""
    optimizer = CautiousAdamW(groups)
    backend.prepare(optimizer)
    return optimizer


def _way(p: Tensor) -> Callable:
    """How a parameter is updated on its device."""
    return _in_tiles if on_host(p) else _as_graph if is_lazy(p) else _in_launches


def _as_graph(mine: Iterable[tuple[Tensor, ...]], betas: tuple[float, float], lr: float, step: int) -> None:
    """Updates of (parameter, gradient, first and second moment) in plain operations, for a compiler to fuse."""
    first, second = betas
    for p, grad, exp_avg, exp_avg_sq in mine:
        exp_avg.lerp_(grad, 1 - first)
        exp_avg_sq.mul_(second).addcmul_(grad, grad, value=1 - second)
        agree = (exp_avg * grad > 0).to(p.dtype)
        # Both corrections in one number: on XLA a number that occurs twice, as 1 − β₁ would in step 1, is another
        # graph.
        start = 1 - first**step
        size = exp_avg_sq.sqrt().mul_(start / math.sqrt(1 - second**step)).add_(start * EPS)
        change = (exp_avg / size).mul_(agree)
        p.sub_(change.div_(agree.mean().clamp(min=LEAST)), alpha=lr)


def _move(
    moves: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    betas: tuple[float, float], step: Tensor,
) -> None:  # fmt: skip
    """Moves the moments on and overwrites `moves`, any finite numbers, by −m̂/(√v̂ + ε): what torch's fused AdamW makes
    of a parameter at a rate of 1 that its weight decay has shrunk to zero before."""
    torch._fused_adamw_(
        moves, grads, exp_avgs, exp_avg_sqs, [], [step] * len(moves), lr=1.0, beta1=betas[0], beta2=betas[1],
        weight_decay=1.0, eps=EPS, amsgrad=False, maximize=False,
    )  # fmt: skip


def _in_tiles(mine: Iterable[tuple[Tensor, ...]], betas: tuple[float, float], lr: float, step: int) -> None:
    """The same in two passes over memory: what is needed in between stays in the CPU's cache."""
    count, room, (first, second) = torch.tensor(float(step)), {}, betas
    start = 1 - first**step
    size = start / math.sqrt(1 - second**step)
    for p, grad, *moments in sorted(mine, key=lambda one: -one[0].numel()):
        if not all(t.is_contiguous() for t in (p, *moments)):
            _as_graph([(p, grad, *moments)], betas, lr, step)
            continue
        if p.dtype not in room:  # the largest comes first
            room[p.dtype] = [torch.zeros(p.numel(), dtype=p.dtype) for _ in range(2)]
        moves, agree = (t[: p.numel()] for t in room[p.dtype])
        weights, *given = (t.reshape(-1) for t in (p, grad, *moments))
        agreeing = native.move_moments(*given, moves, 1 - first, 1 - second, size, start * EPS)
        if agreeing is not None:  # the moves are masked already
            weights.add_(moves, alpha=_rate(lr, agreeing, p))
            continue
        agreeing = 0
        for move, agrees, g, exp_avg, exp_avg_sq in zip(*(t.split(PIECE) for t in (moves, agree, *given))):
            _move([move], [g], [exp_avg], [exp_avg_sq], betas, count)
            # in their own type: bools take ten times as long
            agreeing += torch.mul(move, g, out=agrees).lt_(0).sum().item()
        weights.addcmul_(moves, agree, value=_rate(lr, agreeing, p))


def _rate(lr: float, agreeing: float, p: Tensor) -> float:
    """The learning rate, larger where fewer steps agree with their gradient, and a number of the parameter's type."""
    return min(lr / max(agreeing / p.numel(), LEAST), torch.finfo(p.dtype).max)


def _in_launches(mine: Iterable[tuple[Tensor, ...]], betas: tuple[float, float], lr: float, step: int) -> None:
    """The same with few kernels for many parameters. No value comes to the host."""
    mine, batch = list(mine), []
    count = torch.tensor(float(step), device=mine[0][0].device)
    while mine:
        batch.append(mine.pop())
        if mine and sum(p.numel() for p, *_ in batch) < LAUNCH:
            continue
        parameters, grads, *moments = (list(column) for column in zip(*batch))
        moves = [torch.zeros_like(p) for p in parameters]
        _move(moves, grads, *moments, betas, count)
        agree = torch._foreach_mul(moves, grads)
        torch._foreach_sign_(agree)
        torch._foreach_clamp_max_(agree, 0.0)  # −1 where a step agrees
        shares = torch.stack(torch._foreach_norm(agree, 1)) / count.new_tensor([p.numel() for p in parameters])
        torch._foreach_mul_(moves, agree)
        torch._foreach_mul_(moves, list((-lr / shares.clamp(min=LEAST)).unbind()))
        torch._foreach_add_(parameters, moves)
        batch = []
