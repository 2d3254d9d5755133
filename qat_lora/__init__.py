"""Low-bit training from a cached teacher, LoRA recovery, and the experiments built on them.

Light to import: each public name loads its module on first use, and nothing here imports torch_xla.
"""

import importlib
import os

# transformers and accelerate import torch_xla by themselves where it is installed, and importing it patches torch.
# Only qat_lora.backend may import it, after the device is chosen.
os.environ["USE_TORCH_XLA"] = "0"

# When a worker dies, torch prints a C++ stack for every connection to it. torch reads this when it is imported.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

# How long threads look for each other before they sleep (GCC's OpenMP reads this when torch is imported). Its own
# choice takes milliseconds, which are lost on a busy machine, where the thread that they wait for does not run.
if not os.environ.keys() & {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"}:
    os.environ["GOMP_SPINCOUNT"] = "10000"

# Sequences of many lengths fragment a GPU's memory; segments that can grow reduce that. torch 2.9 reads only the second
# name for CUDA, and later versions warn if it stands alone.
_ALLOCATOR = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"
if not os.environ.keys() & set(_ALLOCATOR):
    os.environ.update(dict.fromkeys(_ALLOCATOR, "expandable_segments:True"))

_PUBLIC = {
    "KDCacheDataset": "qat_lora.kd.dataset",
    "QuantLinear": "qat_lora.quant.linear",
    "UserError": "qat_lora.errors",
    "is_xla_device": "qat_lora.backend",
    "kd_soft_ce": "qat_lora.kd.training",
    "load_model": "qat_lora.models.loading",
    "load_student": "qat_lora.quant.student",
    "open_backend": "qat_lora.backend",
    "xla_mark_step": "qat_lora.backend",
}
__all__ = sorted(_PUBLIC)


def __getattr__(name):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'qat_lora' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)
