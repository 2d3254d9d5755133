"""Questions about a tensor's device, for code that has tensors but no backend."""

from contextlib import nullcontext

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
    enabled = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if enabled else tensor.dtype


def without_autocast(tensor: Tensor):
    """A context without autocast on the tensor's device."""
    kind = tensor.device.type  # meta has no autocast
    return torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext()


def has_attention_kernel(tensor: Tensor) -> bool:
    """Whether fused attention is faster than two products at any length: true on CUDA."""
    return tensor.device.type == "cuda"


def has_norm_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether torch has a fused RMS norm for x and this weight: on CUDA, with the weight in fp32."""
    return x.device.type == "cuda" and weight.dtype == torch.float32 and x.dtype in (torch.float32, torch.bfloat16)
