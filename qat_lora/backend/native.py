"""Kernels that fuse chains of operations into one pass over memory: native.c on the CPU, Triton on a GPU. Both are
compiled on first use.

Compiling native.c takes a second, once per machine; torch.compile, which would fuse the same chains, takes ten to
start. A function returns None or False if there is no C compiler or it does not support the tensors, and its caller
then uses torch's operations. Quantised weights and their gradients equal torch's bit for bit, except that with torch
2.9 a GPU's kernels take subnormal numbers for 0; gradients of scales on a GPU and everything else are equal up to
rounding.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from ctypes import Structure, c_float, c_long, c_void_p
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

from qat_lora.backend import machine
from qat_lora.backend.tiles import tiles
from qat_lora.errors import first_line

SOURCE = Path(__file__).with_name("native.c")
FLAGS = ["-O3", "-march=native", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
if platform.machine() == "x86_64":
    FLAGS.append("-mprefer-vector-width=512")  # where supported, the LM head's exponentials take a fifth less time
SMALLEST = 2**16  # number of elements from which a kernel is worth compiling and starting
LARGE = 2**20  # from this size on a GPU updates a parameter by itself; smaller ones share the launches of a batch
MOST = 2**31 - 2**20  # tensors of this many elements would overflow a GPU kernel's 32-bit indices
TYPES = {torch.float32: 0, torch.bfloat16: 1}
GPU = "cuda"  # the type of device that Triton compiles for


class _Scale(Structure):
    """Where each weight's scale is: strides are in elements, 0 where weights share a value."""

    _fields_ = (("data", c_void_p), ("row", c_long), ("group", c_long), ("element", c_long))

    @classmethod
    def of(cls, scale: Tensor, weight: Tensor) -> "_Scale":
        return cls(scale.data_ptr(), *scale.expand_as(weight).stride())


class _Places(Structure):
    """The index [n, J] of the wanted columns; `start` is the index of the first column."""

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
    """The compiled kernels; None if they cannot be compiled with OpenMP for this machine's vector instructions.

    They are kept in the user's cache folder under a name that depends on source, flags, compiler, CPU and content.
    """
    compiler = [*shlex.split(os.environ.get("CC", "cc")), *FLAGS]
    try:
        # -### only prints the commands to run, with the compiler's version and what -march=native means on this CPU
        plan = _output([*compiler, "-S", "-o", "native.s", "-###", SOURCE.name])
    except (OSError, subprocess.SubprocessError):
        return None
    folder, name = machine.cache_folder(), f"native-{_digest(SOURCE.read_bytes() + plan)}"
    for get in (_kept, partial(_compiled, compiler, folder), partial(_compiled, compiler, None)):
        with suppress(OSError, subprocess.SubprocessError):  # nothing kept; no room or no right to write
            kernels = get(folder, name)
            kernels.move_moments.restype = kernels.add_rows.restype = c_long
            return kernels
    return None


def _kept(folder: Path, name: str) -> ctypes.CDLL:
    """The kernels compiled earlier. Raises OSError if there are none or the file is damaged: loading it could crash."""
    for path in folder.glob(f"{name}-*.so"):
        if path.stem == f"{name}-{_digest(path.read_bytes())}":
            return ctypes.CDLL(str(path))
    raise FileNotFoundError(name)


def _compiled(compiler: list[str], place: Path | None, folder: Path, name: str) -> ctypes.CDLL:
    """Compile the kernels in `place` (None: where the system keeps temporary files), load them, and keep them in
    `folder` if possible. Several processes may do so at once: each renames a file of its own."""
    if place:
        place.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place) as own:
        made = Path(own) / "native.so"
        _output([*compiler, "-shared", "-fPIC", "-o", str(made), SOURCE.name, "-lm"])
        kernels, content = ctypes.CDLL(str(made)), made.read_bytes()
        with suppress(OSError):
            made.rename(folder / f"{name}-{_digest(content)}.so")
    return kernels


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:32]


def _output(command: list[str]) -> bytes:
    """What a compiler's command prints on standard error. Raises SubprocessError if it fails."""
    return subprocess.run(command, cwd=SOURCE.parent, check=True, capture_output=True, timeout=600).stderr


def try_gpu_kernels() -> ModuleType:
    """Load the Triton kernels and run one; raises whatever goes wrong."""
    from qat_lora.backend import triton_kernels

    weight, scale = torch.linspace(-2, 2, 64, device=GPU).view(2, 1, 32), torch.ones(2, 1, 1, device=GPU)
    if not torch.equal(triton_kernels.quantised(weight, scale, -8.0, 1.0, 16, torch.float32), weight.round()):
        raise RuntimeError("a Triton kernel has a wrong result")
    return triton_kernels


@functools.cache
def gpu_kernels() -> ModuleType | None:
    """The Triton kernels; None, with a warning, where Triton, its C compiler or support for the GPU is missing."""
    try:
        return try_gpu_kernels()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever it is, torch's operations still work
        warnings.warn(f"Triton does not work here ({first_line(error)}); updates will be slower", stacklevel=2)
        return None


def quantised(
    weight: Tensor, scale: Tensor, lowest: float, step: float, levels: int, dtype: torch.dtype
) -> Tensor | None:
    """weight [O, G, g] rounded to the nearest of `levels` levels (`lowest`, `lowest` + `step`, …), times scale, in
    `dtype`."""
    if dtype in TYPES and (fused := _on_gpu(weight, weight, scale)):
        return fused.quantised(weight, scale, lowest, step, levels, dtype)
    if not _known(weight, weight, scale) or dtype not in TYPES or not (kernels := library()):
        return None
    out, levels = torch.empty(weight.shape, dtype=dtype), _Levels(lowest, step, levels - 1)
    _run(kernels.quantise, weight.shape, weight, _Scale.of(scale, weight), out, TYPES[dtype], levels)
    return out


def gradients(
    weight: Tensor, scale: Tensor, grad: Tensor, lowest: float, step: float, levels: int
) -> tuple[Tensor, Tensor] | None:
    """(∂/∂weight, ∂/∂scale) for grad [O, G, g], as in `FakeQuant`. ∂/∂scale is summed over the weights of a group if
    the scale is [O, G, 1], and has the weight's shape otherwise."""
    if grad.dtype in TYPES and (fused := _on_gpu(weight, weight, scale)):
        return fused.gradients(weight, scale, grad, lowest, step, levels)
    if not _known(weight, weight, scale) or grad.dtype not in TYPES or not (kernels := library()):
        return None
    grad, of_weight = grad.contiguous(), torch.empty_like(weight)
    one_each = scale.shape == (*weight.shape[:2], 1)
    # tiles keep the products in cache until they are summed
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
    """A scale with magnitudes raised to at least `least`, a normal fp16 number, and rounded to fp16 and back."""
    if not least or not _known(scale, scale, share=32) or not (kernels := library()):
        return None
    out = torch.empty_like(scale)
    _run(kernels.store_scales, (scale.numel(),), scale, out, c_float(least))
    return out


def move_moments(
    grad: Tensor, m: Tensor, v: Tensor, moves: Tensor, first: float, second: float, size: float, eps: float
) -> int | None:
    """Update the moments m and v of a gradient with weights `first` and `second`, and write to `moves` each step
    −m/(√v · size + eps) that goes against its gradient, and 0 for the others. Returns how many go against it."""
    if not _known(grad, grad, m, v, moves) or not (kernels := library()):
        return None
    numbers = [c_float(value) for value in (first, second, size, eps)]
    return _run(kernels.move_moments, (grad.numel(),), grad, m, v, moves, *numbers)


def cautious_steps(
    mine: list[tuple[Tensor, ...]], first: float, second: float, size: float, eps: float, lr: float, least: float
) -> list[tuple[Tensor, ...]]:
    """On a GPU, one step of `CautiousAdamW` for each large parameter of (parameter, gradient, m, v) tuples: update the
    moments, see `move_moments`, and apply the steps that go against the gradient, times lr / max(their share, least).
    Returns the tuples for which nothing was done."""
    large = [each for each in mine if each[0].numel() >= LARGE and _on_gpu(each[0], *each)]
    if large:
        gpu_kernels().cautious_steps(large, first, second, size, eps, lr, least)
    done = {id(p) for p, *_ in large}
    return [each for each in mine if id(each[0]) not in done]


Finishing = tuple[Tensor | None, float, float] | None  # bias, factor and temperature of logits


def normalise(
    products: Tensor, finish: Finishing, first: bool, peaks: Tensor, sums: Tensor, index: Tensor, start: int,
    chosen: Tensor,
) -> bool:  # fmt: skip
    """For logits (product · factor + bias) / temperature of products [n, V], write Σ e^(logit − peak) to sums [n, 1],
    and logit − peak at the index to chosen [n, J]. `start` is the index of column 0; chosen is 0 outside the columns.

    first: set peaks [n, 1] to the largest logits. Returns False if nothing was done, as when `finish` is None.
    """
    return _over_logits("normalise", products, finish, (first, peaks, sums), index, start, chosen)


def exponentiate(
    products: Tensor, finish: Finishing, first: bool, peaks: Tensor, sums: Tensor, index: Tensor, start: int,
    chosen: Tensor,
) -> bool:  # fmt: skip
    """Like `normalise`, but also overwrites the products with factor · e^(logit − peak), 0 at the index."""
    return _over_logits("exponentiate", products, finish, (first, peaks, sums), index, start, chosen)


def softmax(
    products: Tensor, finish: Finishing, peaks: Tensor, mass: Tensor, index: Tensor, start: int, taken: Tensor
) -> bool:
    """Overwrite the products (see `normalise`) with factor · (mass · e^(logit − peak) + taken): mass is [n, 1], and
    taken [n, J] is added at the index."""
    return _over_logits("softmax", products, finish, (peaks, mass), index, start, taken)


def _over_logits(
    kernel: str, products: Tensor, finish: Finishing, each: tuple[Tensor | bool, ...], index: Tensor, start: int,
    asked: Tensor,
) -> bool:  # fmt: skip
    """Run a kernel over products [n, V], with its values for each row, [n, 1], and at the index; whether it ran."""
    tensors = [value for value in (*each, asked) if isinstance(value, Tensor)]
    if finish is None:
        return False
    bias, *numbers = finish
    if (fused := _on_gpu(products, *tensors)) and hasattr(fused, kernel):  # a GPU needs no `exponentiate`
        return getattr(fused, kernel)(products, finish, *each, index, start, asked)
    if not _known(products, *tensors) or not (kernels := library()):
        return False
    form = _Finish(None if bias is None else bias.data_ptr(), *numbers)
    given = TYPES[products.dtype], form, *each, _Places.of(index, start), asked
    _run(getattr(kernels, kernel), products.shape, products, *given)
    return True


def add_rows(sums: Tensor, table: Tensor, index: Tensor, weights: Tensor) -> bool:
    """sums [n, H] += Σ_j weights [n, J] · the rows of table [V, H] at index [n, J]. Returns False if nothing was done.
    Raises IndexError if an index is not in the table."""
    if not _known(table, sums, weights) or not (kernels := library()):
        return False
    places = _Places.of(index.contiguous(), 0)
    if _run(kernels.add_rows, (len(sums), *table.shape), sums, table, TYPES[table.dtype], places, weights):
        raise IndexError(f"indices from {index.min()} to {index.max()} exceed a table of {len(table)} rows")
    return True


def by_group(table: Tensor, largest: Tensor, mass: Tensor) -> bool:
    """For logits [n, members, groups], write each group's largest logit to largest [n, groups], and its
    Σ e^(logit − the row's largest) to mass [n, groups]. Returns False if nothing was done."""
    if not _known(table, largest, mass) or not (kernels := library()):
        return False
    _run(kernels.by_group, table.shape, table, TYPES[table.dtype], largest, mass)
    return True


def pick_groups(table: Tensor, index: Tensor) -> Tensor | None:
    """From logits [n, members, groups], those of the groups at index [n, J]: [n, members, J] in fp32."""
    if not _known(table) or not (kernels := library()):
        return None
    out = torch.empty(*table.shape[:2], index.shape[1])
    _run(kernels.pick_groups, (*table.shape, index.shape[1]), table, TYPES[table.dtype], index.contiguous(), out)
    return out


def takes(*tensors: Tensor) -> bool:
    """Whether the fp32 kernels support these tensors: on the CPU, contiguous, and the first large enough."""
    return _known(tensors[0], *tensors) and library() is not None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, r) of x [..., H] and a weight [H] that `takes` accepts: y = x·r·weight with r [N] = 1/√(mean x² + eps)."""
    y, width = torch.empty_like(x), x.shape[-1]
    r = x.new_empty(x.numel() // width)
    _run(library().rms_norm, (len(r), width), x, weight, y, r, c_float(eps))
    return y, r


def rms_norm_gradients(
    grad: Tensor, x: Tensor, weight: Tensor, r: Tensor, of_weight: bool
) -> tuple[Tensor, Tensor | None]:
    """The gradients of x and, if of_weight, of the weight, from the gradient of y; see `rms_norm`."""
    of_x, width, threads = torch.empty_like(x), len(weight), torch.get_num_threads()
    found = torch.empty_like(weight) if of_weight else None
    sums = x.new_zeros(threads, width if of_weight else 0)
    there = c_void_p(None) if found is None else found
    _run(library().rms_norm_back, (len(r), width), grad.contiguous(), x, weight, r, of_x, there, sums)
    return of_x, found


def _known(large: Tensor, *others: Tensor, share: int = 1) -> bool:
    """Whether the C kernels support these tensors: on the CPU, large enough, contiguous, the others in fp32. share: how
    many weights each element stands for."""
    return large.device.type == "cpu" and large.numel() * share >= SMALLEST and _suits(large, *others)


def _on_gpu(large: Tensor, *others: Tensor) -> ModuleType | None:
    """The Triton kernels if they support these tensors: on a GPU, and otherwise as for `_known`."""
    known = large.device.type == GPU and SMALLEST <= large.numel() < MOST and _suits(large, *others)
    return gpu_kernels() if known else None


def _suits(large: Tensor, *others: Tensor) -> bool:
    return (
        large.is_contiguous() and large.dtype in TYPES
        and all(t.dtype == torch.float32 and t.is_contiguous() for t in others)
    )  # fmt: skip


def _run(kernel: Callable, sizes: Iterable[int], *given: Tensor | Structure | int) -> int:
    """Call a kernel with as many threads as torch uses; tensors are passed as addresses."""
    values = [c_void_p(value.data_ptr()) if isinstance(value, Tensor) else value for value in given]
    return kernel(*values, *(c_long(size) for size in sizes), torch.get_num_threads())
