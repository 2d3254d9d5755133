"""Chains of operations in one pass over memory on the CPU: native.c, compiled for this machine when it is first needed.

That takes a second; torch.compile, which would fuse the same chains, takes ten to begin. Each function returns None or
False where there is no C compiler or the tensors are not of the kind it knows, and its caller then does the same with
torch's operations: quantised weights and their gradients are equal to the bit, the rest to rounding.
"""

import ctypes
import functools
import os
import platform
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
if platform.machine() == "x86_64":
    FLAGS.append("-mprefer-vector-width=512")  # where there are such vectors: a fifth off the LM head's exponentials
SMALLEST = 2**16  # elements for which starting a kernel is worth it, and compiling them
TYPES = {torch.float32: 0, torch.bfloat16: 1}


class _Scale(Structure):
    """Where each weight's scale is: strides are in elements, 0 where a value serves several."""

    _fields_ = (("data", c_void_p), ("row", c_long), ("group", c_long), ("element", c_long))

    @classmethod
    def of(cls, scale: Tensor, weight: Tensor) -> "_Scale":
        return cls(scale.data_ptr(), *scale.expand_as(weight).stride())


class _Places(Structure):
    """The index [n, J] that rows are asked for, counted from `start` on."""

    _fields_ = (("index", c_void_p), ("start", c_long), ("count", c_long))

    @classmethod
    def of(cls, index: Tensor, start: int) -> "_Places":
        return cls(index.data_ptr(), start, index.shape[-1])


class _Finish(Structure):
    _fields_ = (("bias", c_void_p), ("factor", c_float), ("temperature", c_float))


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
    kernels.move_moments.restype = kernels.add_rows.restype = c_long
    return kernels


def quantised(
    weight: Tensor, scale: Tensor, lowest: float, step: float, levels: int, dtype: torch.dtype
) -> Tensor | None:
    """weight [O, G, g] as the nearest of `levels` levels, `step` apart from `lowest` on, times scale, in `dtype`."""
    if not _known(weight, weight, scale) or dtype not in TYPES or not (kernels := library()):
        return None
    out, levels = torch.empty(weight.shape, dtype=dtype), _Levels(lowest, step, levels - 1)
    _run(kernels.quantise, weight.shape, weight, _Scale.of(scale, weight), out, TYPES[dtype], levels)
    return out


def gradients(
    weight: Tensor, scale: Tensor, grad: Tensor, lowest: float, step: float, levels: int
) -> tuple[Tensor, Tensor] | None:
    """(∂/∂weight, ∂/∂scale) for grad [O, G, g], as `FakeQuant` has them; the second is summed over the weights of a
    group where the scale is [O, G, 1], and of the weight's shape elsewhere."""
    if not _known(weight, weight, scale) or grad.dtype not in TYPES or not (kernels := library()):
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


def stored(scale: Tensor, least: float) -> Tensor | None:
    """A scale with its magnitudes at `least` or above, a normal number of fp16, rounded to fp16 and back."""
    if not least or not _known(scale, scale, share=32) or not (kernels := library()):
        return None
    out = torch.empty_like(scale)
    _run(kernels.store_scales, (scale.numel(),), scale, out, c_float(least))
    return out


def move_moments(
    grad: Tensor, m: Tensor, v: Tensor, moves: Tensor, first: float, second: float, size: float, eps: float
) -> int | None:
    """Moves the moments m and v of a gradient on by the shares `first` and `second`, and puts into `moves` the steps
    −m/(√v · size + eps) that go against the gradient, 0 in the place of the others. How many do."""
    if not _known(grad, grad, m, v, moves) or not (kernels := library()):
        return None
    numbers = [c_float(value) for value in (first, second, size, eps)]
    return _run(kernels.move_moments, (grad.numel(),), grad, m, v, moves, *numbers)


Finishing = tuple[Tensor | None, float, float] | None  # bias, factor and temperature of logits


def normalise(
    products: Tensor, finish: Finishing, first: bool, peaks: Tensor, sums: Tensor, index: Tensor, start: int,
    chosen: Tensor,
) -> bool:  # fmt: skip
    """With logits (product · factor + bias) / temperature of products [n, V]: puts Σ e^(logit − peak) into sums [n, 1],
    and into chosen [n, J] logit − peak at the index, which counts from `start` on, 0 where that is elsewhere.

    first: peaks [n, 1] become the largest logits. False: nothing was done; so where `finish` is None.
    """
    return _over_logits("normalise", products, finish, (first, peaks, sums), index, start, chosen)


def exponentiate(
    products: Tensor, finish: Finishing, first: bool, peaks: Tensor, sums: Tensor, index: Tensor, start: int,
    chosen: Tensor,
) -> bool:  # fmt: skip
    """As `normalise`, and the products become factor · e^(logit − peak), 0 at the index."""
    return _over_logits("exponentiate", products, finish, (first, peaks, sums), index, start, chosen)


def softmax(
    products: Tensor, finish: Finishing, peaks: Tensor, mass: Tensor, index: Tensor, start: int, taken: Tensor
) -> bool:
    """The products, see `normalise`, become factor · (mass · e^(logit − peak) + taken), with mass [n, 1], and
    taken [n, J] at the index."""
    return _over_logits("softmax", products, finish, (peaks, mass), index, start, taken)


def _over_logits(
    kernel: str, products: Tensor, finish: Finishing, each: tuple[Tensor | bool, ...], index: Tensor, start: int,
    asked: Tensor,
) -> bool:  # fmt: skip
    """Whether a kernel has gone over products [n, V], with what it needs of each row, [n, 1], and at the index."""
    tensors = [value for value in (*each, asked) if isinstance(value, Tensor)]
    if finish is None or not _known(products, *tensors) or not (kernels := library()):
        return False
    bias, *numbers = finish
    form = _Finish(None if bias is None else bias.data_ptr(), *numbers)
    given = TYPES[products.dtype], form, *each, _Places.of(index, start), asked
    _run(getattr(kernels, kernel), products.shape, products, *given)
    return True


def add_rows(sums: Tensor, table: Tensor, index: Tensor, weights: Tensor) -> bool:
    """sums [n, H] += Σ_j weights [n, J] · the rows of table [V, H] at index [n, J]. False: nothing was done. Raises
    IndexError where a row is not in the table."""
    if not _known(table, sums, weights) or not (kernels := library()):
        return False
    places = _Places.of(index.contiguous(), 0)
    if _run(kernels.add_rows, (len(sums), *table.shape), sums, table, TYPES[table.dtype], places, weights):
        raise IndexError(f"an index from {index.min()} to {index.max()} in a table of {len(table)} rows")
    return True


def by_group(table: Tensor, largest: Tensor, mass: Tensor) -> bool:
    """Of logits [n, members, groups]: puts each group's largest, and its Σ e^(logit − the row's largest), into largest
    and mass [n, groups]. False: nothing was done."""
    if not _known(table, largest, mass) or not (kernels := library()):
        return False
    _run(kernels.by_group, table.shape, table, TYPES[table.dtype], largest, mass)
    return True


def pick_groups(table: Tensor, index: Tensor) -> Tensor | None:
    """Logits [n, members, groups] of the groups at index [n, J], in fp32: [n, members, J]."""
    if not _known(table) or not (kernels := library()):
        return None
    out = torch.empty(*table.shape[:2], index.shape[1])
    _run(kernels.pick_groups, (*table.shape, index.shape[1]), table, TYPES[table.dtype], index.contiguous(), out)
    return out


def takes(*tensors: Tensor) -> bool:
    """Whether fp32 kernels take these: on the CPU, in one piece each, the first large enough to be worth it."""
    return _known(tensors[0], *tensors) and library() is not None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, r) of x [..., H] and a weight [H], see `takes`: y = x·r·weight with r [N] = 1/√(mean x² + eps)."""
    y, width = torch.empty_like(x), x.shape[-1]
    r = x.new_empty(x.numel() // width)
    _run(library().rms_norm, (len(r), width), x, weight, y, r, c_float(eps))
    return y, r


def rms_norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, r: Tensor, of_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x and, where it is wanted, of the weight, from that of y; see `rms_norm`."""
    of_x, width, threads = torch.empty_like(x), len(weight), torch.get_num_threads()
    found = torch.empty_like(weight) if of_weight else None
    sums = x.new_zeros(threads, width if of_weight else 0)
    there = c_void_p(None) if found is None else found
    _run(library().rms_norm_back, (len(r), width), grad.contiguous(), x, weight, r, of_x, there, sums)
    return of_x, found


def _known(large: Tensor, *others: Tensor, share: int = 1) -> bool:
    """Whether these are what the kernels take: on the CPU, and enough of it, each in one piece; the others in fp32.
    share: how many weights each of the elements stands for."""
    if large.device.type != "cpu" or large.numel() * share < SMALLEST or not large.is_contiguous():
        return False
    return large.dtype in TYPES and all(t.dtype == torch.float32 and t.is_contiguous() for t in others)


def _run(kernel: Callable, sizes: Iterable[int], *given: Tensor | Structure | int) -> int:
    """One call, on as many threads as torch takes; a tensor goes as its address."""
    values = [c_void_p(value.data_ptr()) if isinstance(value, Tensor) else value for value in given]
    return kernel(*values, *(c_long(size) for size in sizes), torch.get_num_threads())
