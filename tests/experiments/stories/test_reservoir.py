"""Reservoirs match their spec, forget their initial state, and respect the bound on memory capacity."""

from dataclasses import replace

import pytest
import torch
from memory_capacity import INPUTS, MOST, SPEC, memory_capacity

from qat_lora.errors import UserError
from qat_lora.experiments.stories.reservoir import DiagonalReservoir, EchoState, ReservoirSpec, reservoir

ESN = ReservoirSpec(60, "esn", radius=0.9, density=0.2, leak=(0.3, 0.8), scaling=0.7, seed=3)
DIAGONAL = ReservoirSpec(40, "diagonal", radius=0.95, leak=(0.5, 1.0), seed=4)


BOTH = pytest.mark.parametrize("spec", [ESN, DIAGONAL])


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_an_echo_state_network_matches_its_spec():
    cell = EchoState(ESN, 5)
    assert torch.linalg.eigvals(cell.w).abs().max().item() == pytest.approx(0.9, rel=1e-4)
    assert (cell.w != 0).float().mean().item() == pytest.approx(0.2, abs=0.02)
    assert cell.leak.min().item() == pytest.approx(0.3) and cell.leak.max().item() == pytest.approx(0.8)
    assert cell.w_in.std().item() == pytest.approx(0.7 / 5**0.5, rel=0.1)
    assert not list(cell.parameters()) and {"w", "w_in", "leak"} <= cell.state_dict().keys()


def test_a_diagonal_reservoir_matches_its_spec():
    cell, leak = DiagonalReservoir(DIAGONAL, 5), DIAGONAL.leaks()
    decay = torch.view_as_complex(cell.decay.double())
    eigenvalues = (decay - (1 - leak)) / leak
    assert not list(cell.parameters())
    assert 0.9 < eigenvalues.abs().max().item() <= 0.95 + 1e-6 and decay.abs().max() < 1


def test_leaky_units_follow_their_equation():
    cell = EchoState(ESN, 5)
    x, h = noise(2, 4, 5), torch.zeros(2, 60)
    states, last = cell(x, cell.begin(2))
    for t in range(4):
        h = (1 - cell.leak) * h + cell.leak * torch.tanh(x[:, t] @ cell.w_in.T + h @ cell.w.T)
        torch.testing.assert_close(states[:, t], h)
    torch.testing.assert_close(last, h)


def test_diagonal_units_follow_their_equation():
    cell, leak = DiagonalReservoir(DIAGONAL, 5), DIAGONAL.leaks()
    x = noise(2, 30, 5)
    states, last = cell(x, cell.begin(2))
    eigenvalues = (torch.view_as_complex(cell.decay.double()) - (1 - leak)) / leak
    drive = torch.view_as_complex((x.double() @ cell.w_in.double().T).view(2, 30, 40, 2)) / leak
    h = torch.zeros(2, 40, dtype=torch.complex128)
    for t in range(30):
        h = (1 - leak) * h + leak * (eigenvalues * h + drive[:, t])
    torch.testing.assert_close(last.double(), torch.view_as_real(h), rtol=1e-4, atol=1e-4)
    assert torch.equal(states[:, -1], last.flatten(1))


@BOTH
def test_states_from_different_starts_converge(spec):
    """The echo-state property: after enough of the same input, the initial state does not matter."""
    cell = reservoir(spec, 5)
    x = noise(1, 300, 5, seed=1)
    begin = cell.begin(1)
    here, _ = cell(x, begin)
    there, _ = cell(x, begin + noise(*begin.shape, seed=2))
    apart = (here - there).flatten(2).norm(dim=2)[0]
    assert apart[0] > 0.1 and apart[-1] < 1e-3 * apart[0]


def test_memory_capacity_is_at_most_the_number_of_units():
    cell = EchoState(SPEC, 1)
    states, _ = cell(INPUTS.view(1, -1, 1), cell.begin(1))
    assert 6 < memory_capacity(states[0], INPUTS, 60) <= MOST


@pytest.mark.parametrize("changes, part", [
    ({"leak": (0.0, 1.0)}, "leak"), ({"units": 0}, "0 units"),
    ({"units": 10**6}, "a reservoir of 1000000 esn units needs at least 16,000.0 GB"),
    ({"units": 10**12, "kind": "diagonal"}, "a reservoir of 1000000000000 diagonal units needs"),
    ({"kind": "lstm"}, "'lstm'"), ({"kind": "diagonal", "radius": 1.2}, "makes a linear reservoir diverge"),
])  # fmt: skip
def test_impossible_reservoirs_are_refused(changes, part):
    with pytest.raises(UserError, match=part):
        replace(ESN, **changes)
