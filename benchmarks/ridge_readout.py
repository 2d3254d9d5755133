"""A linear readout in closed form: ridge regression from streamed moments."""

import torch
from torch import Tensor


class RidgeMoments:
    """XᵀX [F, F] and YᵀX [V, F] of features X and next-token targets Y, in fp64, summed batch by batch.

    The one-hot Y is never formed: each feature row is added to the row of its target.
    """

    def __init__(self, features: int, vocab: int):
        self.xx = torch.zeros(features, features, dtype=torch.float64)
        self.yx = torch.zeros(vocab, features, dtype=torch.float64)

    def add(self, features: Tensor, targets: Tensor) -> None:
        """features [M, F], targets [M]."""
        x = features.double().cpu()
        self.xx += x.T @ x
        self.yx.index_add_(0, targets.cpu(), x)

    def solve(self, alphas: list[float]) -> list[Tensor]:
        """The readout W [V, F] that minimises Σ‖Wx − y‖² + α‖W‖², for each α, from one decomposition."""
        values, vectors = torch.linalg.eigh(self.xx)
        turned = self.yx @ vectors
        return [(turned / (values.clamp(min=0) + alpha)) @ vectors.T for alpha in alphas]
