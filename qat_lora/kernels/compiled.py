"""Plain torch functions that become one kernel each on a GPU."""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from qat_lora.errors import first_line
from qat_lora.hosts.relay import say

COMPILED = ["cuda"]  # types of device whose kernels torch.compile writes; for the CPU there is native.c
FAILED: set[str] = set()  # functions that could not be compiled


def fused(plain: Callable) -> Callable:
    """`plain`, which on a GPU runs as torch.compile translates it. If that fails there, it runs as it is, and one line
    says so. Its first argument must be a tensor. What changes from step to step must be a tensor, too: the compiler
    takes a Python number for a constant. Untested on hardware; the check "kernels" compares the two."""
    compiled = functools.cache(lambda: torch.compile(plain))
    name = plain.__name__.replace("_", " ").strip()

    @functools.wraps(plain)
    def either(first: Tensor, *others):
        if first.device.type not in COMPILED or name in FAILED or torch.compiler.is_compiling():
            return plain(first, *others)
        try:
            return compiled()(first, *others)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever it is, the plain form still works
            FAILED.add(name)
            say(f"torch.compile fails here ({first_line(error)}); {name} will be slower")
            return plain(first, *others)

    return either
