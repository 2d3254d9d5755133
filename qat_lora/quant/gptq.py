"""Error compensation: what rounding one column loses, the columns after it make up for (GPTQ, arXiv 2210.17323)."""

import torch
from torch import Tensor

from qat_lora.quant.linear import nearest_level
from qat_lora.quant.spec import QuantSpec

DAMPING = 0.01  # of the mean diagonal, added to it: inputs that hardly occur must not blow up the inverse
BLOCK = 128  # columns whose errors reach the columns after them in one product


@torch.no_grad()
def compensated(weight: Tensor, scale: Tensor, moment: Tensor, spec: QuantSpec) -> Tensor:
    """The weight [out, in], column by column as it stood just before rounding: its codes are GPTQ's.

    scale [out, in] is fixed beforehand; moment [in, in] is the second moment E[xxᵀ] of the layer's inputs. All on the
    CPU. Columns go in the order of falling E[x²], the ones with most to lose first. Minimises E‖(W − Q)x‖² greedily.
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
    """Upper triangular U with UᵀU the inverse of the damped moment."""
    h = moment.double()
    h = h + DAMPING * h.diagonal().mean().clamp(min=1e-12) * torch.eye(len(h), dtype=h.dtype)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(h))
    return torch.linalg.cholesky(inverse, upper=True).float()
