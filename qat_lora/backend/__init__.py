"""The only access to devices. A training loop calls one backend and never asks which device it is on.

Cheap to import: each name loads its module, and with it torch, on first use.
"""

import importlib
import os
import sys

_PUBLIC = {
    "TorchBackend": "eager",
    "compute_dtype": "devices",
    "count_workers": "detect",
    "has_static_shapes": "detect",
    "is_xla_device": "devices",
    "open_backend": "opening",
    "open_planned": "opening",
    "planned_workers": "detect",
    "resolve": "detect",
    "tpu_chips": "detect",
}
__all__ = sorted([*_PUBLIC, "xla_mark_step"])


def __getattr__(name):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'qat_lora.backend' has no attribute {name!r}")
    return getattr(importlib.import_module(f"qat_lora.backend.{_PUBLIC[name]}"), name)


def xla_mark_step() -> None:
    """Compile and run what XLA has recorded; does nothing on CPU and CUDA, or before an XLA backend is open."""
    if "torch_xla" in sys.modules and os.environ.get("PJRT_DEVICE"):
        from qat_lora.backend.xla import torch_xla

        torch_xla.sync()
