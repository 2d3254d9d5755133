"""The only door to devices. A training loop calls one Backend and never asks which device it is on."""

import os
import sys

from qat_lora.backend.detect import resolve, tpu_chips
from qat_lora.backend.launch import count_workers, launch, open_alone, open_backend, planned_workers
from qat_lora.backend.torch import TorchBackend, compute_dtype, loop

__all__ = [
    "TorchBackend", "compute_dtype", "count_workers", "is_xla_device", "launch", "loop", "open_alone",
    "open_backend", "planned_workers", "resolve", "tpu_chips", "xla_mark_step",
]  # fmt: skip


def is_xla_device(device) -> bool:
    """True for a torch_xla device (torch.device or its name)."""
    return str(device).split(":")[0] == "xla"


def xla_mark_step() -> None:
    """Compile and run what XLA has recorded so far; nothing on CPU and CUDA, or before an XLA backend is open."""
    if "torch_xla" in sys.modules and os.environ.get("PJRT_DEVICE"):
        import torch_xla

        torch_xla.sync()
