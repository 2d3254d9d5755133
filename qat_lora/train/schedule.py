"""Learning-rate schedules, counted in optimiser steps."""

import math


def cosine(step: int, total: int, warmup: int = 0) -> float:
    """Factor on the peak learning rate for update `step` (0-based) of `total`: linear warm-up, then a half cosine
    towards 0, which it never reaches: on XLA a learning rate of exactly 0 is another graph."""
    if step < warmup:
        return (step + 1) / (warmup + 1)
    progress = min(1.0, (step - warmup) / max(1, total - warmup))
    return max(1e-6, 0.5 * (1 + math.cos(math.pi * progress)))


def set_learning_rates(optimizer, factor: float) -> None:
    """Set every group's lr to its peak (`initial_lr`, kept at the first call) times `factor`."""
    for group in optimizer.param_groups:
        group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor
