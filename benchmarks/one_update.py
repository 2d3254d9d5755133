"""One update outside a run, as benchmarks time it and tests check it."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from qat_lora.backend import TorchBackend
from qat_lora.train.loop import Plan


def update(
    model: nn.Module, stream: Iterator[dict], loss_of: Callable[[nn.Module, dict], Tensor],
    optimizer: torch.optim.Optimizer, plan: Plan, backend: TorchBackend,
) -> dict[str, Tensor]:  # fmt: skip
    """The update's loss and grad_norm, device scalars."""
    loss = 0
    for micro in range(plan.accumulation):
        if micro:
            backend.step_boundary()
        with backend.autocast():
            part = loss_of(model, next(stream))
        backend.backward(part)
        loss = loss + part.detach()
    return {"loss": loss, "grad_norm": backend.update(optimizer, plan.clip_grad_norm)}
