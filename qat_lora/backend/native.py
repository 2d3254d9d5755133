"""Chains of operations in one pass over memory on the CPU: native.c, compiled for this machine when it is first needed.

That takes half a second; torch.compile, which would fuse the same chains, takes ten to begin. Each function returns
None where there is no C compiler or the tensors are not of the kind it knows, and is then done with torch's operations:
the results are the same to the bit.
"""

import ctypes
import functools
import os
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from ctypes import Structure, c_float, c_long, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from qat_lora.backend.tiles import tiles

SOURCE = Path(__file__).with_name("native.c")
FLAGS = ["-O3", "-march=native", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
SMALLEST = 2**16  # elements for which starting a kernel is worth it, and compiling them
TYPES = {torch.float32: 0, torch.bfloat16: 1}


class _Scale(Structure):
    """Where each weight's scale is: strides are in elements, 0 where a value serves several."""

    _fields_ = (("data", c_void_p), ("row", c_long), ("group", c_long), ("element", c_long))

    @classmethod
    def of(cls, scale: Tensor, weight: Tensor) -> "_Scale":
        return cls(scale.data_ptr(), *scale.expand_as(weight).stride())


class _Levels(Structure):
    _fields_ = (("lowest", c_float), ("step", c_float), ("top", c_float))


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels; None where they cannot be compiled, with OpenMP and for this machine's own vectors."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "native.so"
        compiler = shlex.split(os.environ.get("CC", "cc"))
        command = [*compiler, *FLAGS, "-shared", "-fPIC", "-o", str(made), str(SOURCE), "-lm"]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            kernels = ctypes.CDLL(str(made))
        except (OSError, subprocess.SubprocessError):
            return None
    kernels.move_moments.restype = c_long
    return kernels


def quantised(
    weight: Tensor, scale: Tensor, lowest: float, step: float, levels: int, dtype: torch.dtype
) -> Tensor | None:
    """weight [O, G, g] as the nearest of `levels` levels, `step` apart from `lowest` on, times scale, in `dtype`."""
    if not _known(weight, scale) or dtype not in TYPES or not (kernels := library()):
        return None
    out, levels = torch.empty(weight.shape, dtype=dtype), _Levels(lowest, step, levels - 1)
    _run(kernels.quantise, weight.shape, weight, _Scale.of(scale, weight), out, TYPES[dtype], levels)
    return out


def gradients(
    weight: Tensor, scale: Tensor, grad: Tensor, lowest: float, step: float, levels: int
) -> tuple[Tensor, Tensor] | None:
    """(∂/∂weight, ∂/∂scale) for grad [O, G, g], as `FakeQuant` has them; the second is summed over the weights of a
    group where the scale is [O, G, 1], and of the weight's shape elsewhere."""
    if not _known(weight, scale) or grad.dtype not in TYPES or not (kernels := library()):
        return None
    grad, of_weight = grad.contiguous(), torch.empty_like(weight)
    one_each = scale.shape == (*weight.shape[:2], 1)
    # what is summed stays in cache until it is
    slices = tiles(len(weight), weight[0].numel(), weight.device) if one_each else [slice(None)]
    of_scale = torch.empty_like(scale if one_each else weight)
    room = torch.empty_like(weight[slices[0]]) if one_each else of_scale
    for rows in slices:
        w, g, products = weight[rows], grad[rows], room[: len(weight[rows])]
        there = _Scale.of(scale[rows] if len(scale) > 1 else scale, w), TYPES[grad.dtype]
        _run(kernels.gradients, w.shape, w, g, of_weight[rows], products, *there, _Levels(lowest, step, levels - 1))
        if one_each:
            torch.sum(products, 2, keepdim=True, out=of_scale[rows])
    return of_weight, of_scale


def move_moments(
    grad: Tensor, m: Tensor, v: Tensor, moves: Tensor, first: float, second: float, size: float, eps: float
) -> int | None:
    """Moves the moments m and v of a gradient on by the shares `first` and `second`, and puts into `moves` the steps
    −m/(√v · size + eps) that go against the gradient, 0 in the place of the others. How many do."""
    if not _known(grad, m, v, moves) or not (kernels := library()):
        return None
    numbers = [c_float(value) for value in (first, second, size, eps)]
    return _run(kernels.move_moments, (grad.numel(),), grad, m, v, moves, *numbers)


def _known(*tensors: Tensor) -> bool:
    """Whether these are what the kernels take: fp32 on the CPU, and enough of it."""
    first = tensors[0]
    if first.device.type != "cpu" or first.numel() < SMALLEST:
        return False
    return all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)


def _run(kernel: Callable, sizes: Iterable[int], *given: Tensor | Structure | int) -> int:
    """One call, on as many threads as torch takes; a tensor goes as its address."""
    values = [c_void_p(value.data_ptr()) if isinstance(value, Tensor) else value for value in given]
    return kernel(*values, *(c_long(size) for size in sizes), torch.get_num_threads())
