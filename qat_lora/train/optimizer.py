"""The optimiser of all training stages."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from qat_lora.backend import TorchBackend, native
from qat_lora.backend.devices import is_lazy, on_host

FIRST, SECOND, EPS = 0.9, 0.95, 1e-8  # default decays of the moments; EPS keeps their ratio finite
LEAST = 2.0**-10  # lower bound for the share of agreeing elements, by which steps are divided
PIECE = 2**20  # elements that the CPU updates at a time: more than a tile, to launch fewer operations
LAUNCH = 2**24  # elements to collect before launching CUDA kernels; keeps temporary tensors small


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
            trained = [p for p in group["params"] if p.grad is not None]
            if decay := group["lr"] * group["weight_decay"]:
                for p in trained:
                    p.sub_(p, alpha=decay) if is_lazy(p) else p.mul_(1 - decay)  # see _as_graph
            settings = group["betas"], group["lr"], group["step"]
            for way in {_way(p) for p in trained}:
                way([(p, p.grad, *self.state[p].values()) for p in trained if _way(p) is way], *settings)


def new_optimizer(groups: list[dict], backend: TorchBackend) -> CautiousAdamW:
    """The optimiser for groups of placed parameters, each with its "lr"."""
    optimizer = CautiousAdamW(groups)
    backend.prepare(optimizer)
    return optimizer


def _way(p: Tensor) -> Callable:
    """The update function for a parameter's device."""
    return _in_tiles if on_host(p) else _as_graph if is_lazy(p) else _in_launches


def _as_graph(mine: Iterable[tuple[Tensor, ...]], betas: tuple[float, float], lr: float, step: int) -> None:
    """Update (parameter, gradient, first and second moment) tuples with plain operations, which a compiler can fuse.

    On XLA a constant that rounds to 1 changes the graph. The bias correction of the root tends to 1, so the denominator
    and the learning rate are both doubled, which changes no bit of the result.
    """
    first, second = betas
    for p, grad, exp_avg, exp_avg_sq in mine:
        exp_avg.lerp_(grad, 1 - first)
        exp_avg_sq.mul_(second).addcmul_(grad, grad, value=1 - second)
        agree = (exp_avg * grad > 0).to(p.dtype)
        # Both bias corrections are folded into one number: on XLA a constant that occurs twice, as 1 − β₁ would in
        # step 1, gives another graph.
        start = 1 - first**step
        size = exp_avg_sq.sqrt().mul_(2 * start / math.sqrt(1 - second**step)).add_(2 * start * EPS)
        change = (exp_avg / size).mul_(agree)
        p.sub_(change.div_(agree.mean().clamp(min=LEAST)), alpha=2 * lr)


def _move(
    moves: list[Tensor], grads: list[Tensor], exp_avgs: list[Tensor], exp_avg_sqs: list[Tensor],
    betas: tuple[float, float], step: Tensor,
) -> None:  # fmt: skip
    """Update the moments and overwrite `moves`, which may hold any finite numbers, with −m̂/(√v̂ + ε). torch's fused
    AdamW computes exactly that at learning rate 1 and weight decay 1: the decay first sets the parameter to zero."""
    torch._fused_adamw_(
        moves, grads, exp_avgs, exp_avg_sqs, [], [step] * len(moves), lr=1.0, beta1=betas[0], beta2=betas[1],
        weight_decay=1.0, eps=EPS, amsgrad=False, maximize=False,
    )  # fmt: skip


def _in_tiles(mine: Iterable[tuple[Tensor, ...]], betas: tuple[float, float], lr: float, step: int) -> None:
    """Like `_as_graph`, in two passes over memory: intermediate results stay in the CPU's cache."""
    count, room, (first, second) = torch.tensor(float(step)), {}, betas
    start = 1 - first**step
    size = start / math.sqrt(1 - second**step)
    for p, grad, *moments in sorted(mine, key=lambda one: -one[0].numel()):
        if not all(t.is_contiguous() for t in (p, *moments)):
            _as_graph([(p, grad, *moments)], betas, lr, step)
            continue
        if p.dtype not in room:  # the largest parameter comes first
            room[p.dtype] = [torch.zeros(p.numel(), dtype=p.dtype) for _ in range(2)]
        moves, agree = (t[: p.numel()] for t in room[p.dtype])
        weights, *given = (t.reshape(-1) for t in (p, grad, *moments))
        agreeing = native.move_moments(*given, moves, 1 - first, 1 - second, size, start * EPS)
        if agreeing is not None:  # the kernel has already masked the moves
            weights.add_(moves, alpha=_rate(lr, agreeing, p))
            continue
        agreeing = 0
        for move, agrees, g, exp_avg, exp_avg_sq in zip(*(t.split(PIECE) for t in (moves, agree, *given))):
            _move([move], [g], [exp_avg], [exp_avg_sq], betas, count)
            # `agrees` has the dtype of the moves, because bools take ten times as long
            agreeing += torch.mul(move, g, out=agrees).lt_(0).sum().item()
        weights.addcmul_(moves, agree, value=_rate(lr, agreeing, p))


def _rate(lr: float, agreeing: float, p: Tensor) -> float:
    """The learning rate divided by the share of agreeing steps, limited to what the parameter's type can hold."""
    return min(lr / max(agreeing / p.numel(), LEAST), torch.finfo(p.dtype).max)


def _in_launches(mine: Iterable[tuple[Tensor, ...]], betas: tuple[float, float], lr: float, step: int) -> None:
    """Like `_as_graph`, without a host sync: native kernels for each large parameter, if there are any, and few kernels
    for all others."""
    first, second = betas
    start = 1 - first**step
    factors = 1 - first, 1 - second, start / math.sqrt(1 - second**step), start * EPS
    mine, batch = native.cautious_steps(list(mine), *factors, lr, LEAST), []
    if not mine:
        return
    count = torch.full((), float(step), device=mine[0][0].device)  # torch.tensor would wait for a copy
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
        rates = list(torch._foreach_norm(agree, 1, dtype=torch.float32))
        torch._foreach_div_(rates, [p.numel() for p in parameters])
        torch._foreach_clamp_min_(rates, LEAST)
        torch._foreach_reciprocal_(rates)
        torch._foreach_mul_(rates, -lr)
        torch._foreach_mul_(moves, agree)
        torch._foreach_mul_(moves, rates)
        torch._foreach_add_(parameters, moves)
        batch = []
