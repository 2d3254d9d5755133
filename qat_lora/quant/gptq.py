"""GPTQ error compensation: later columns make up for the rounding error of earlier ones (arXiv 2210.17323)."""

import torch
from torch import Tensor

from qat_lora.kernels.fake_quant import nearest_level
from qat_lora.quant.spec import QuantSpec

DAMPING = 0.01  # fraction of the mean diagonal added to the diagonal, so that rare inputs do not blow up the inverse
BLOCK = 128  # columns whose errors are applied to the later columns in one product


@torch.no_grad()
def compensated(weight: Tensor, scale: Tensor, moment: Tensor, spec: QuantSpec) -> Tensor:
    """The compensated weight [out, in]: rounding it to the nearest level gives GPTQ's codes.

    scale [out, in] is fixed beforehand; moment [in, in] is the second moment E[xxᵀ] of the layer's inputs; all are on
    the CPU. Columns are processed in order of decreasing E[x²], the most important first. Greedily minimises
    E‖(W − Q)x‖².
    """
    order = moment.diagonal().argsort(descending=True, stable=True)
    back = order.argsort()
    w, scale, u = weight[:, order], scale[:, order], _inverse_root(moment[order][:, order])
    for start in range(0, w.shape[1], BLOCK):
        end = min(start + BLOCK, w.shape[1])
        errors = torch.empty_like(w[:, start:end])
        for j in range(start, end):
            level = nearest_level(w[:, j] / scale[:, j], spec)
            errors[:, j - start] = (w[:, j] - level * scale[:, j]) / u[j, j]
            w[:, j + 1 : end] -= errors[:, j - start, None] * u[j, j + 1 : end]
        w[:, end:] -= errors @ u[start:end, end:]
    return w[:, back]


def _inverse_root(moment: Tensor) -> Tensor:
    """Upper triangular U such that UᵀU is the inverse of the damped moment."""
    h = moment.double()
    h = h + DAMPING * h.diagonal().mean().clamp(min=1e-12) * torch.eye(len(h), dtype=h.dtype)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    return torch.linalg.cholesky(inverse, upper=True).float()
