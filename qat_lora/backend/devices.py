"""What tensor code may ask of the device that a tensor is on, where no backend is at hand."""

import torch
from torch import Tensor


def on_host(tensor: Tensor) -> bool:
    """Whether its values can be looked at for nothing, and memory for results is worth reusing: on the CPU."""
    return tensor.device.type == "cpu"


def is_xla_device(device: torch.device | str) -> bool:
    """True for a torch_xla device (torch.device or its name)."""
    return str(device).split(":")[0] == "xla"


def is_lazy(tensor: Tensor) -> bool:
    """Whether its operations are recorded as a graph that is compiled later: on XLA. A shape or a number that changes
    is then another graph, and memory is the compiler's."""
    return is_xla_device(tensor.device)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """What a matrix product with this tensor is computed in: autocast's type on its device, else its own."""
    kind = tensor.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else tensor.dtype


def without_autocast(tensor: Tensor):
    """A context without autocast on the tensor's device."""
    return torch.autocast(tensor.device.type, enabled=False)


def has_attention_kernel(tensor: Tensor) -> bool:
    """Whether fused attention is faster than two products at any length: on CUDA."""
    return tensor.device.type == "cuda"
