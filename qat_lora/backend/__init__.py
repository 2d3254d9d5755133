"""The only door to devices. A training loop calls one Backend and never asks which device it is on."""

import os
import sys

from qat_lora.backend.detect import has_static_shapes, resolve, tpu_chips
from qat_lora.backend.devices import compute_dtype, is_xla_device
from qat_lora.backend.launch import launch, open_alone, open_backend
from qat_lora.backend.torch import TorchBackend, loop
from qat_lora.backend.workers import count_workers, planned_workers

__all__ = [
    "TorchBackend", "compute_dtype", "count_workers", "has_static_shapes", "is_xla_device", "launch", "loop",
    "open_alone", "open_backend", "planned_workers", "resolve", "tpu_chips", "xla_mark_step",
]  # fmt: skip


def xla_mark_step() -> None:
    """Compile and run what XLA has recorded so far; nothing on CPU and CUDA, or before an XLA backend is open."""
    if "torch_xla" in sys.modules and os.environ.get("PJRT_DEVICE"):
        from qat_lora.backend.xla import mark_step

        mark_step()
