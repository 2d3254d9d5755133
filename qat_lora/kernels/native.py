"""Both forms of an operation beside its plain torch function: C on the CPU, and what torch.compile makes on a GPU.

native.c is compiled on first use, which takes a second, once per machine; torch.compile, which would fuse the same
chains on the CPU, takes ten to start. Quantised weights and their gradients equal the plain form's bit for bit;
everything else is equal up to rounding.
"""

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from ctypes import Structure, c_long, c_void_p
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from qat_lora.backend import machine
from qat_lora.errors import first_line, to_stderr

SOURCE = Path(__file__).with_name("native.c")
FLAGS = ["-O3", "-march=native", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"]
if platform.machine() == "x86_64":
    FLAGS.append("-mprefer-vector-width=512")  # where supported, the LM head's exponentials take a fifth less time
FAILURES = OSError, subprocess.SubprocessError
SMALLEST = 2**16  # number of elements from which a kernel is faster than the plain form
FP32 = (torch.float32,)
TYPES = {torch.float32: 0, torch.bfloat16: 1}  # as native.c numbers them
COMPILED = ["cuda"]  # types of device whose kernels torch.compile writes; for the CPU there is native.c
FAILED: set[str] = set()  # functions that could not be compiled


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled kernels. If they cannot be compiled with OpenMP for this machine's vector instructions, None, and a
    line says so.

    They are kept in the user's cache folder under a name that depends on source, flags, compiler, CPU and content.
    """
    compiler = [*shlex.split(os.environ.get("CC", "cc")), *FLAGS]
    # -### only prints the commands to run, with the compiler's version and what -march=native means on this CPU
    with suppress(*FAILURES):
        plan = _output([*compiler, "-S", "-o", "native.s", "-###", SOURCE.name])
        folder, name = machine.cache_folder(), f"native-{_digest(SOURCE.read_bytes() + plan)}"
        for get in (_kept, partial(_compiled, compiler, folder), partial(_compiled, compiler, None)):
            with suppress(*FAILURES):  # nothing kept; no room or no right to write
                kernels = get(folder, name)
                kernels.move_moments.restype = kernels.add_rows.restype = c_long
                return kernels
    to_stderr(
        f"{compiler[0]} does not compile C with OpenMP here; install gcc, or set CC: without one, quantisation, "
        "optimiser steps and the LM head are slower"
    )
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


def suits(large: Tensor, *others: Tensor, types: Iterable[torch.dtype] = FP32, smallest: int | None = None) -> bool:
    """Whether the kernels support these tensors: on the CPU, contiguous, the first large enough and of one of `types`,
    the others in fp32. smallest: the size from which the first is large enough, `SMALLEST` by default."""
    return (
        large.device.type == "cpu"
        and large.numel() >= (SMALLEST if smallest is None else smallest)
        and large.dtype in types
        and all(t.dtype == torch.float32 for t in others)
        and all(t.is_contiguous() for t in (large, *others))
        and not torch.compiler.is_compiling()
        and library() is not None
    )


def run(kernel: str, sizes: Iterable[int], *given: Tensor | Structure | int | None) -> int:
    """Call a kernel with as many threads as torch uses; tensors are passed as addresses."""
    values = [c_void_p(value.data_ptr()) if isinstance(value, Tensor) else value for value in given]
    return getattr(library(), kernel)(*values, *(c_long(size) for size in sizes), torch.get_num_threads())


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
            to_stderr(f"torch.compile fails here ({first_line(error)}); {name} will be slower")
            return plain(first, *others)

    return either
