"""Closed-form readouts: ridge from streamed moments equals the direct solution, RLS equals ridge."""

import pytest
import torch

from qat_lora.errors import UserError
from qat_lora.experiments.stories.ridge import RecursiveLeastSquares, RidgeMoments

VOCAB, FEATURES = 7, 12


@pytest.fixture
def data():
    random = torch.Generator().manual_seed(0)
    return torch.randn(200, FEATURES, generator=random), torch.randint(VOCAB, (200,), generator=random)


def direct(x: torch.Tensor, targets: torch.Tensor, alpha: float, weight: float | torch.Tensor = 1.0) -> torch.Tensor:
    """The ridge solution for samples weighted by `weight` [N, 1]."""
    x, y = x.double(), torch.nn.functional.one_hot(targets, VOCAB).double()
    return torch.linalg.solve(x.T @ (weight * x) + alpha * torch.eye(FEATURES).double(), x.T @ (weight * y)).T


def test_ridge_solves_several_alphas_from_one_pass(data):
    moments = RidgeMoments(FEATURES, VOCAB)
    for part in zip(*(t.split(64) for t in data)):
        moments.add(*part)
    alphas = [1e-3, 1.0, 100.0]
    for alpha, found in zip(alphas, moments.solve(alphas)):
        torch.testing.assert_close(found, direct(*data, alpha), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [1, 16, 200])
def test_recursive_least_squares_equal_ridge(data, size):
    rls = RecursiveLeastSquares(FEATURES, VOCAB, alpha=0.5)
    for part in zip(*(t.split(size) for t in data)):
        rls.add(*part)
    torch.testing.assert_close(rls.weight, direct(*data, 0.5), rtol=1e-8, atol=1e-9)


def test_forgetting_weights_samples_by_age(data):
    x, targets = data[0][:30], data[1][:30]
    rls = RecursiveLeastSquares(FEATURES, VOCAB, alpha=0.5, forgetting=0.9)
    for at in range(30):
        rls.add(x[at : at + 1], targets[at : at + 1])
    wanted = direct(x, targets, 0.5 * 0.9**30, 0.9 ** torch.arange(29, -1, -1).double()[:, None])
    torch.testing.assert_close(rls.weight, wanted, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan")])
def test_an_alpha_that_is_not_positive_is_refused(alpha):
    with pytest.raises(UserError, match=f"α {alpha}"):
        RidgeMoments(FEATURES, VOCAB).solve([1.0, alpha])
    with pytest.raises(UserError, match=f"α {alpha}"):
        RecursiveLeastSquares(FEATURES, VOCAB, alpha)
