"""The parallel forms of linear recurrences equal the loop over time."""

import pytest
import torch

from qat_lora.experiments.stories.scan import DiagonalScan, gated_scan, sequential_scan


def decays(units: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(0)
    size, turn = torch.rand(2, units, generator=random, dtype=torch.float64)
    return torch.view_as_real(torch.polar(0.5 + 0.5 * size.sqrt(), 3 * turn))


@pytest.mark.parametrize("steps", [1, 7, 8, 9, 63, 64, 65, 200, 512])
def test_the_chunked_scan_equals_the_loop(steps):
    """One chunk, whole and partial chunks, and chunks of chunks."""
    decay = decays(6)
    random = torch.Generator().manual_seed(1)
    drive, state = torch.randn(3, steps, 6, 2, generator=random), torch.randn(3, 6, 2, generator=random)
    wanted = sequential_scan(decay, drive.double(), state.double())
    found = DiagonalScan(decay, chunk=8)(drive, state)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-4)


def test_a_decay_that_underflows_in_the_upper_levels():
    decay, state = torch.tensor([[1e-3, 0.0], [0.0, 0.0], [-1.0, 0.0]]), torch.ones(1, 3, 2)
    drive = torch.randn(1, 70, 3, 2, generator=torch.Generator().manual_seed(6))
    wanted = sequential_scan(decay, drive, state)
    torch.testing.assert_close(DiagonalScan(decay, chunk=4)(drive, state), wanted, rtol=1e-4, atol=1e-4)


def test_gradients_equal_those_of_the_loop():
    decay = decays(3)
    drive = torch.randn(2, 20, 3, 2, generator=torch.Generator().manual_seed(3), requires_grad=True)
    state = torch.randn(2, 3, 2, generator=torch.Generator().manual_seed(4), requires_grad=True)
    grads = []
    for run in (DiagonalScan(decay, chunk=4), lambda d, s: sequential_scan(decay.float(), d, s)):
        run(drive, state).square().sum().backward()
        grads.append((drive.grad, state.grad))
        drive.grad = state.grad = None
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-4)


def test_more_steps_than_the_levels_reach_are_refused():
    with pytest.raises(ValueError, match="9 steps are more than 3 levels of 2 reach"):
        DiagonalScan(decays(2), chunk=2, levels=3)(torch.zeros(1, 9, 2, 2), torch.zeros(1, 2, 2))


@pytest.mark.parametrize("steps", [1, 2, 5, 16, 33])
def test_the_gated_scan_equals_the_loop(steps):
    random = torch.Generator().manual_seed(5)
    keep, drive = torch.rand(2, steps, 4, generator=random), torch.randn(2, steps, 4, generator=random)
    states = [torch.randn(2, 4, generator=random)]
    for at in range(steps):
        states.append(keep[:, at] * states[-1] + drive[:, at])
    torch.testing.assert_close(gated_scan(keep, drive, states[0]), torch.stack(states[1:], 1))
