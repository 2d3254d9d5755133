"""What XLA needs besides the plain forms: barriers, values that are rounded once, scatters as products, loops."""

from collections.abc import Callable

import torch
from torch import Tensor

from qat_lora.backend.devices import is_lazy


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


def scattered(values: Tensor, index: Tensor, added: Tensor) -> Tensor:
    """values [n, V] with `added` [n, J] added at index [n, J]. Overwrites values, except on XLA."""
    return values + spread(index, added, values.shape[1]) if is_lazy(values) else values.scatter_add_(1, index, added)


def spread(index: Tensor, values: Tensor, width: int) -> Tensor:
    """Σ_j values[:, j] at index[:, j], as [n, width], with index and values [n, J], in fp32.

    In place of scatter_add, before which the TPU's compiler copies the whole matrix into another layout. Each index is
    split into a quotient and a remainder, and the product of their one-hot matrices is the result. A TPU rounds factors
    to bf16, so a value is the sum of two that bf16 can hold, and exact to 2⁻¹⁷.
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


def loop(step: Callable, carry: tuple, inputs: Tensor) -> tuple[tuple, Tensor]:
    """Run carry, output = step(carry, input) over inputs [T, …]; return the last carry and the outputs [T, …].

    On XLA this is one while loop, whose graph does not grow with T. There `step` must be a module-level function, whose
    trace is cached, and the carry must hold all tensors that it needs.
    """
    if is_lazy(inputs):
        from torch_xla.experimental.scan import scan

        return scan(step, carry, inputs)
    outputs = []
    for each in inputs.unbind(0):
        carry, output = step(carry, each)
        outputs.append(output)
    return carry, torch.stack(outputs)
