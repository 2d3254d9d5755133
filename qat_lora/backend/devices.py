"""Questions about a tensor's device, for code that has tensors but no backend."""

import torch
from torch import Tensor


def on_host(tensor: Tensor) -> bool:
    """Whether reading values costs nothing and reusing memory for results pays off: true on the CPU."""
    return tensor.device.type == "cpu"


def is_xla_device(device: torch.device | str) -> bool:
    """True for a torch_xla device (torch.device or its name)."""
    return str(device).split(":")[0] == "xla"


def is_lazy(tensor: Tensor) -> bool:
    """Whether operations are recorded in a graph that is compiled later: true on XLA. A new shape or
    Python number then needs a new graph, and the compiler manages memory."""
    return is_xla_device(tensor.device)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The type in which a matrix product with this tensor is computed: autocast's on its device, else its own."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def without_autocast(tensor: Tensor):
    """A context without autocast on the tensor's device."""
    return torch.autocast(tensor.device.type, enabled=False)


def has_attention_kernel(tensor: Tensor) -> bool:
    """Whether fused attention is faster than two products at any length: true on CUDA."""
    return tensor.device.type == "cuda"
