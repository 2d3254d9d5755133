"""Linear readouts in closed form: ridge regression from streamed moments, and equivalent recursive least squares."""

import torch
from torch import Tensor

from qat_lora.errors import UserError


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
        _check(*alphas)
        values, vectors = torch.linalg.eigh(self.xx)
        turned = self.yx @ vectors
        return [(turned / (values.clamp(min=0) + alpha)) @ vectors.T for alpha in alphas]


class RecursiveLeastSquares:
    """Updates the readout sample by sample; with `forgetting` 1 and P₀ = I/α it equals the ridge readout.

    In fp64: weight [V, F] and p [F, F], which is (XᵀX + αI)⁻¹ without forgetting (Haykin 2014, ch. 10; batches use the
    Woodbury identity).
    """

    def __init__(self, features: int, vocab: int, alpha: float, forgetting: float = 1.0):
        _check(alpha)
        if not 0 < forgetting <= 1:
            raise UserError(f"forgetting {forgetting} is outside (0, 1]; use e.g. 1, which forgets nothing")
        self.forgetting = forgetting
        self.p = torch.eye(features, dtype=torch.float64) / alpha
        self.weight = torch.zeros(vocab, features, dtype=torch.float64)

    def add(self, features: Tensor, targets: Tensor) -> None:
        """features [M, F], targets [M]: M samples at once; forgetting counts them as one step."""
        x = features.double()
        px = self.p @ x.T
        small = self.forgetting * torch.eye(len(x), dtype=torch.float64) + x @ px
        gain = torch.linalg.solve(small, px.T)  # [M, F]
        error = -(x @ self.weight.T)
        error[torch.arange(len(x)), targets] += 1
        self.weight += error.T @ gain
        self.p = (self.p - px @ gain) / self.forgetting


def _check(*alphas: float) -> None:
    for alpha in alphas:
        if not alpha > 0:
            raise UserError(f"ridge α {alpha} must be above 0; use e.g. 1e-3")
