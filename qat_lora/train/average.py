"""A moving average of a model in training, which is measured and kept in its place."""

import copy

import torch
from torch import nn


def average_of(student: nn.Module) -> nn.Module:
    """A copy of a student for its moving average; what is frozen is shared, not copied."""
    frozen = [value for value in (*student.parameters(), *student.buffers()) if not value.requires_grad]
    return copy.deepcopy(student, {id(value): value for value in frozen})


@torch.no_grad()
def follow(average: nn.Module, student: nn.Module, decay: float) -> None:
    """One step of an exponential moving average: average ← decay·average + (1 − decay)·student, for what is trained."""
    for p, q in zip(average.parameters(), student.parameters()):
        if q.requires_grad:
            p.lerp_(q, 1 - decay)
