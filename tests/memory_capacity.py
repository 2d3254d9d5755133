"""Memory capacity of a reservoir, for its tests on CPU and XLA."""

import torch

from qat_lora.experiments.stories.reservoir import ReservoirSpec

SPEC = ReservoirSpec(20, "esn", radius=0.95, density=1.0, scaling=0.1, seed=1)
INPUTS = torch.rand(6000, generator=torch.Generator().manual_seed(3)) - 0.5
MOST = 20 * 1.05  # 60 fits of 20 weights to 6,000 steps add a little noise


def memory_capacity(states: torch.Tensor, inputs: torch.Tensor, longest: int) -> float:
    """Σ over delays k of the R² with which a linear readout recovers the input k steps ago (Jaeger 2001)."""
    x = states.double() - states.double().mean(0)
    total = 0.0
    for delay in range(1, longest):
        y = inputs[longest - delay : len(inputs) - delay].double()
        y, seen = y - y.mean(), x[longest:]
        weights = torch.linalg.lstsq(seen, y).solution
        total += float(1 - (seen @ weights - y).square().sum() / y.square().sum())
    return total
