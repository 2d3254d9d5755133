"""What glibc does with freed memory, which decides how much a process holds. Other C libraries are left alone."""

import ctypes
import functools
import os
import platform
from collections.abc import Callable
from ctypes import Structure, c_int, c_size_t
from pathlib import Path

# Bytes of freed memory that may lie about. Blocks that are recomputed, SmolLM2 with a LoRA of rank 32, 4,000 tokens:
# 4.5 GB at the peak without a limit; 2.7 GB and 11% more time with this one, 2.2 GB and 18% with half of it.
PIECES = 2**30
BETWEEN = 2**28  # and from one phase to the next, such as from training to drawing answers
RESIDENT = Path("/proc/self/statm")


class _Use(Structure):
    """glibc's struct mallinfo2: hblkhd and uordblks are the bytes in use, in mappings of their own and in the heap."""

    _fields_ = (
        *((name, c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    )


@functools.cache
def _libc() -> ctypes.CDLL | None:
    return ctypes.CDLL(None) if platform.libc_ver()[0] == "glibc" else None


def hand_back_memory() -> None:
    """Return to the kernel what glibc keeps of freed memory."""
    if libc := _libc():
        libc.malloc_trim(c_size_t(0))


def keep_freed_memory() -> None:
    """Have glibc keep what training frees and takes again every step, instead of handing pages back to the kernel.

    A step of SmolLM2-135M (4×256 tokens, two cores) went from 5.5 to 3.9 s, at the same peak memory. Called once the
    weights are there: what loading them frees would stay in pieces that nothing later fits.
    """
    if libc := _libc():
        libc.mallopt(c_int(-4), c_int(0))  # M_MMAP_MAX: no separate mapping for a large block
        libc.mallopt(c_int(-1), c_int(-1))  # M_TRIM_THRESHOLD: never give the heap's top back


def give_freed_memory_back() -> None:
    """The end of `keep_freed_memory`, before weights are loaded beside or after those that were trained: what is free
    goes back at once, and large blocks get mappings of their own, which go back when they are freed."""
    if libc := _libc():
        libc.mallopt(c_int(-4), c_int(65536))  # as glibc begins
        libc.mallopt(c_int(-1), c_int(128 * 1024))
        hand_back_memory()


def tidier() -> Callable[[int], None]:
    """A function that hands freed memory back to the kernel where more than so many bytes of it are about. To be made
    once the weights are there, and called between phases, and before and after a block is recomputed.

    What such a block frees is not taken again by the next one, as it is elsewhere: small objects of the graph, which
    stay alive, are cut off the freed pieces, and the rest no longer holds a tensor of the same size.
    """
    libc = _libc()
    if not libc or not hasattr(libc, "mallinfo2") or not RESIDENT.exists():  # before glibc 2.33
        return lambda most: None
    libc.mallinfo2.restype = _Use
    beside = _not_in_use(libc)  # libraries, above all

    def tidy(most: int) -> None:
        nonlocal beside
        if _not_in_use(libc) - beside > most:
            hand_back_memory()
            beside = _not_in_use(libc)

    return tidy


def _not_in_use(libc: ctypes.CDLL) -> int:
    """Bytes that the process holds beyond what was allocated from glibc."""
    use = libc.mallinfo2()
    return int(RESIDENT.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") - use.uordblks - use.hblkhd
