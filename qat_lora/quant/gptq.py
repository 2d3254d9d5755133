"""Codes and scales that minimise the error of a layer's outputs: GPTQ, then coordinate descent.

GPTQ (arXiv 2210.17323) rounds column after column, and later columns make up for the error of earlier ones. Descent
then rounds each weight again given all others, which never raises the error, in turns with least-squares scales.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from qat_lora.kernels import native
from qat_lora.kernels.fake_quant import Levels, nearest_level
from qat_lora.quant.linear import Quantizer
from qat_lora.quant.spec import QuantSpec

DAMPING = 0.01  # fraction of the mean diagonal added to the diagonal, so that rare inputs do not blow up the inverse
BLOCK = 128  # columns whose errors are applied to the other columns in one product
ROUNDS = 3  # of descent and least squares
ROOM = 2**24  # values of a least-squares problem held at a time


class Inputs(NamedTuple):
    """What is known of a layer's inputs: their second moment E[xxᵀ] [in, in], damped; the order of the columns, the
    largest E[x²] first; and in that order an upper triangular root U such that UᵀU is the inverse of the moment."""

    moment: Tensor
    order: Tensor
    root: Tensor

    @classmethod
    def of(cls, moment: Tensor) -> "Inputs":
        moment = moment + DAMPING * moment.diagonal().mean().clamp(min=1e-12) * torch.eye(len(moment))
        order = moment.diagonal().argsort(descending=True, stable=True)
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(moment[order][:, order].double()))
        return cls(moment, order, torch.linalg.cholesky(inverse, upper=True).float())


@torch.no_grad()
def solve(weight: Tensor, quantizer: Quantizer, inputs: Inputs) -> Tensor:
    """A latent weight [out, in] whose rounding nearly minimises E‖(W − Q)x‖². Group scales and offsets that are fp16
    numbers are fitted, too; the others stay as they are. Everything is on the CPU."""
    moment = inputs.moment
    scale, offset = _expanded(quantizer)
    latent = compensated(weight - offset, scale, inputs, quantizer.spec) + offset
    for _ in range(ROUNDS):
        latent = _descended(weight - offset, latent - offset, scale, moment, quantizer.spec) + offset
        if quantizer.spec.scale == "group" and not quantizer.spec.narrow:
            ratio = (latent - offset) / scale
            _fit(weight, quantizer, ratio, moment)
            scale, offset = _expanded(quantizer)
            latent = ratio * scale + offset
    return latent


def _expanded(quantizer: Quantizer) -> tuple[Tensor, Tensor]:
    """Scale and offset of each weight."""
    offset = quantizer.offset_matrix()
    offset = torch.zeros(()) if offset is None else quantizer.expanded(offset)
    return quantizer.expanded(quantizer.scale_matrix()), offset


@torch.no_grad()
def compensated(weight: Tensor, scale: Tensor, inputs: Inputs, spec: QuantSpec) -> Tensor:
    """The compensated weight [out, in]: rounding it to the nearest level gives GPTQ's codes, which greedily minimise
    E‖(W − Q)x‖². scale [out, in] is fixed."""
    order, u = inputs.order, inputs.root
    w, scale, back = weight[:, order], scale[:, order], order.argsort()
    if native.suits(w, scale, u):
        native.run("compensate", w.shape, w, scale, u, Levels.of(spec))
        return w[:, back]
    for start in range(0, w.shape[1], BLOCK):
        end = min(start + BLOCK, w.shape[1])
        errors = torch.empty_like(w[:, start:end])
        for j in range(start, end):
            level = nearest_level(w[:, j] / scale[:, j], spec)
            errors[:, j - start] = (w[:, j] - level * scale[:, j]) / u[j, j]
            w[:, j + 1 : end] -= errors[:, j - start, None] * u[j, j + 1 : end]
        w[:, end:] -= errors @ u[start:end, end:]
    return w[:, back]


def _descended(weight: Tensor, latent: Tensor, scale: Tensor, moment: Tensor, spec: QuantSpec) -> Tensor:
    """The latent weight after one sweep: column after column gets the best unrounded values given the rounded others.
    All are without offsets."""
    rounded, size = nearest_level(latent / scale, spec) * scale, moment.diagonal()
    pull = (weight - rounded) @ moment  # −½ the gradient of the error in the rounded weights
    latent = torch.empty_like(weight)
    if native.suits(weight, scale, moment):
        native.run("descend", weight.shape, scale, moment, rounded, pull, latent, Levels.of(spec))
        return latent
    for start in range(0, weight.shape[1], BLOCK):
        end = min(start + BLOCK, weight.shape[1])
        near, moved = pull[:, start:end].clone(), torch.empty_like(weight[:, start:end])
        for j in range(start, end):
            latent[:, j] = rounded[:, j] + near[:, j - start] / size[j]
            moved[:, j - start] = nearest_level(latent[:, j] / scale[:, j], spec) * scale[:, j] - rounded[:, j]
            near -= moved[:, j - start, None] * moment[j, start:end]
        pull -= moved @ moment[start:end]
    return latent


def _fit(weight: Tensor, quantizer: Quantizer, ratio: Tensor, moment: Tensor) -> None:
    """Set the group scales and offsets that minimise the error of the codes of ratio [out, in]."""
    groups, size = quantizer.scale.shape[1], quantizer.spec.size
    zero = (quantizer.offset_matrix() / quantizer.scale_matrix()).round() if quantizer.spec.zero else None  # −Z stays
    count = 1 + (quantizer.spec.offset and zero is None)
    strips, width = moment.view(groups, size, -1).repeat(count, 1, 1), weight.shape[1]
    for rows in torch.arange(len(weight)).split(max(1, ROOM // (count * groups * width))):
        level = nearest_level(ratio[rows], quantizer.spec).view(len(rows), groups, size)
        if zero is not None:
            level = level + zero[rows]
        basis = [level, torch.ones_like(level)][:count]
        spread = torch.cat(basis, 1).transpose(0, 1) @ strips  # [K, rows, in]
        found = spread.view(*spread.shape[:2], groups, size)
        normal = torch.cat([(found * part).sum(-1) for part in basis], 2).transpose(0, 1).double()  # [rows, K, K]
        wanted = (spread * weight[rows]).sum(-1).T  # [rows, K]
        normal.diagonal(dim1=1, dim2=2).mul_(1 + 1e-6).add_(1e-12)
        solved = torch.linalg.solve(normal, wanted.double()).float()
        scale, *offset = solved.unsqueeze(2).split(groups, 1)
        before = quantizer.scale.data[rows]
        # a group whose codes are nearly all 0 keeps its scale
        quantizer.scale.data[rows] = torch.where(scale.abs() < before.abs() / 8, before, scale)
        if offset:
            quantizer.offset.data[rows] = offset[0]
    if zero is not None:
        quantizer.offset.data.copy_(zero * quantizer.scale_matrix())
