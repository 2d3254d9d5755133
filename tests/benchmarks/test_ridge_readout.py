"""The closed-form readout from streamed moments equals the direct solution."""

import torch

VOCAB, FEATURES = 7, 12


def test_ridge_solves_several_alphas_from_one_pass(load_script):
    random = torch.Generator().manual_seed(0)
    x, targets = torch.randn(200, FEATURES, generator=random), torch.randint(VOCAB, (200,), generator=random)
    moments = load_script("ridge_readout").RidgeMoments(FEATURES, VOCAB)
    for part in zip(x.split(64), targets.split(64)):
        moments.add(*part)
    x, y, alphas = x.double(), torch.nn.functional.one_hot(targets, VOCAB).double(), [1e-3, 1.0, 100.0]
    for alpha, found in zip(alphas, moments.solve(alphas)):
        wanted = torch.linalg.solve(x.T @ x + alpha * torch.eye(FEATURES).double(), x.T @ y).T
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
