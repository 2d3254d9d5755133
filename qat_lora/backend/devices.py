"""Questions about a device, for code that has no backend: mostly about a tensor's."""

from contextlib import nullcontext

import torch
from torch import Tensor

from qat_lora.errors import UserError, first_line


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


def numbers_on(tensor: Tensor, *values: float) -> Tensor:
    """Numbers [n] on a tensor's device as data, so that no compiler takes them for constants; the host does not wait.
    In fp64 on the CPU, as Python has them, and in fp32 elsewhere."""
    numbers = torch.tensor(values, dtype=torch.float64 if on_host(tensor) else torch.float32)
    if tensor.device.type == "cuda":
        numbers = numbers.pin_memory()
    return numbers.to(tensor.device, non_blocking=True)


def compute_dtype(tensor: Tensor) -> torch.dtype:
    """The type in which a matrix product with this tensor is computed: autocast's on its device, else its own."""
    kind = tensor.device.type
    enabled = kind != "meta" and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if enabled else tensor.dtype


def without_autocast(tensor: Tensor):
    """A context without autocast on the tensor's device."""
    kind = tensor.device.type  # meta has no autocast
    return nullcontext() if kind == "meta" else torch.autocast(kind, enabled=False)


def has_attention_kernel(tensor: Tensor) -> bool:
    """Whether fused attention is faster than two products at any length: true on CUDA."""
    return tensor.device.type == "cuda"


def cpu_has_bf16() -> bool:
    """Whether this CPU multiplies bf16 natively (avx512_bf16 or AMX); elsewhere bf16 autocast is slower than fp32."""
    return torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def check_usable(device: torch.device) -> None:
    """Raise UserError for a GPU that does not answer, such as one in exclusive mode that another process holds."""
    try:
        torch.zeros((), device=device)
    except RuntimeError as error:
        raise UserError(
            f"{device} cannot be used ({first_line(error)}); end the process that nvidia-smi lists there, or wait"
        ) from error


def is_shard(tensor: Tensor) -> bool:
    """Whether a tensor is this worker's part of a parameter, or of what belongs to it (backend/sharding.py)."""
    return hasattr(tensor, "to_local")


def local(tensor: Tensor) -> Tensor:
    """This worker's part of a tensor that may be shared out."""
    return tensor.to_local() if is_shard(tensor) else tensor
