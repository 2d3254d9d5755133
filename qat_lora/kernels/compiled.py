"""Plain torch functions that become one kernel each on a GPU."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from qat_lora.errors import first_line
from qat_lora.hosts.relay import say

COMPILED = ["cuda"]  # types of device whose kernels torch.compile writes; for the CPU there is native.c


def fused(plain: Callable) -> Callable:
    """`plain`, which on a GPU runs as torch.compile translates it. If that fails there, it runs as it is, with one
    line that says so. Its first argument must be a tensor. What changes from step to step must be a tensor, too: the compiler
    takes a Python number for a constant. Untested on hardware; the check "kernels" compares the two."""

    @functools.cache
    def compiled() -> Callable:
        return torch.compile(plain)

    broken = []

    @functools.wraps(plain)
    def either(first: Tensor, *others):
        if first.device.type not in COMPILED or broken or torch.compiler.is_compiling():
            return plain(first, *others)
        try:
            return compiled()(first, *others)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever it is, the plain form still works
            broken.append(error)
            name = plain.__name__.replace("_", " ").strip()
            say(f"torch.compile fails here ({first_line(error)}); {name} will be slower")
            return plain(first, *others)

    return either
