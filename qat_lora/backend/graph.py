"""Operations in the form that a TPU's compiler handles well."""

import torch
from torch import Tensor


def number_like(value: float, tensor: Tensor) -> Tensor:
    """A number as a tensor of this type and device. torch_xla compares with Python's floats in float64, which a TPU
    does not have."""
    return torch.full((), value, dtype=tensor.dtype, device=tensor.device)


def rounded_to(dtype: torch.dtype, values: Tensor) -> Tensor:
    """fp32 values, below 2^100, rounded to what `dtype`, fp32 or bf16, can hold. A compiler may leave out a conversion
    to bf16 and back, so the rounding is by Dekker's splitting (Numerische Mathematik 18, 1971), which leaves 8 bits."""
    if dtype != torch.bfloat16:
        return values
    large = values * (2**16 + 1)
    return large - (large - values)


def with_barrier(tensor: Tensor) -> Tensor:
    """Stop the compiler from moving a later cast to a wider type back to where this tensor is produced. For XLA only;
    in place; the tensor must not need a gradient."""
    import torch_xla.core.xla_model as xm

    xm.optimization_barrier_([tensor])
    return tensor


def spread(index: Tensor, values: Tensor, width: int) -> Tensor:
    """Σ_j values[:, j] at index[:, j], as [n, width], with index and values [n, J], in fp32.

    For XLA, in place of scatter_add: before a scatter, the TPU's compiler copies the whole matrix into another layout.
    Instead each index is split into a quotient and a remainder, and the product of their one-hot matrices is
    the result. A TPU rounds factors to bf16, so a value is the sum of two that bf16 can hold, and exact to 2⁻¹⁷.
    """
    if index.shape[1] == 1:
        return torch.where(torch.arange(width, device=index.device) == index, values, 0)
    low, high = 128, -(-width // 128)  # the width of a TPU's registers, so that the product needs no other layout
    rounded = rounded_to(torch.bfloat16, values)
    parts = torch.cat([rounded, values - rounded], 1).unsqueeze(2)
    row, column = (each.repeat(1, 2).unsqueeze(2) for each in (index // low, index % low))
    rows = (row == torch.arange(high, device=index.device)).float()
    columns = torch.where(column == torch.arange(low, device=index.device), parts, 0)
    return (rows.transpose(1, 2) @ columns).flatten(1)[:, :width]
