"""What this machine has: memory, with a check that refuses what cannot fit before the system kills the process, and a
folder for what is made once; and how much freed memory glibc keeps in the process. Other C libraries are left alone."""

import ctypes
import functools
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import Structure, c_int, c_size_t
from pathlib import Path

from qat_lora.errors import UserError

PLENTY = 1e30  # bytes; the largest need that a message shows
# Bytes of freed memory that a process may hold while blocks are recomputed. Returning memory and taking it again costs
# time, so a lower limit makes a step slower.
PIECES = 2**30
BETWEEN = 2**28  # the same before an evaluation
MAPPED = 2**17  # bytes from which a block gets its own mapping and the heap's top is trimmed: glibc's initial values
RESIDENT = Path("/proc/self/statm")
_keeps = False  # whether `keep_freed_memory` has been called


def cache_folder() -> Path:
    """The user's folder for files that can be made again at any time; it may not exist yet."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path(os.path.expanduser("~/.cache"))) / "qat_lora"


def host_memory(root: Path = Path("/")) -> float:
    """The most bytes that this process can use: RAM and swap, or less if a control group (a container, a batch system)
    limits it; inf on a system without /proc/meminfo. root: the root of the file system, for tests."""
    try:
        lines = (root / "proc/meminfo").read_text(encoding="utf-8").splitlines()
        facts = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        ram, swap = facts["MemTotal"], facts.get("SwapTotal", 0)
    except (OSError, ValueError, KeyError, IndexError):
        return float("inf")
    return min([ram + swap, *_limits(root, swap)])


def _limits(root: Path, swap: int) -> list[float]:
    """The limits of this process's control groups (v1 and v2) and their parents, in bytes of RAM and swap."""
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()]
    except OSError:
        groups = []
    found = []
    for _, controllers, path in (group for group in groups if len(group) == 3):
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        for folder in (top / path.lstrip("/"), *(top / path.lstrip("/")).parents):
            if not folder.is_relative_to(top):
                break
            if controllers:
                found += [_number(folder / "memory.limit_in_bytes") + swap]
                found += [_number(folder / "memory.memsw.limit_in_bytes")]
            else:
                found += [_number(folder / "memory.max") + min(swap, _number(folder / "memory.swap.max"))]
    return found


def _number(path: Path) -> float:
    """The number in a limit file; inf for "max" or a missing file."""
    try:
        return int(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return float("inf")


def check_memory(need: float, what: str, lower: str, available: float | None = None) -> None:
    """Raise UserError if `need` exceeds `available`, both in bytes (None: this machine's `host_memory`).

    `need` is a lower bound and `available` the total memory, not what is free now, so nothing that could run is
    refused. what: the subject of the message; lower: the options to lower.
    """
    available = host_memory() if available is None else available
    if need > available:
        gb, there = (size / 1e9 for size in (min(need, PLENTY), available))
        raise UserError(
            f"{what} needs at least {gb:,.1f} GB of memory, but there is only {there:,.1f} GB; lower {lower}"
        )


# -- freed memory ---------------------------------------------------------------------------------------------------
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
    """Return the freed memory that glibc keeps to the kernel."""
    if libc := _libc():
        libc.malloc_trim(c_size_t(0))


def keep_freed_memory() -> None:
    """Make glibc keep the memory that training frees and takes again every step, instead of returning it to the kernel.

    A step of SmolLM2-135M (4×256 tokens, two cores) went from 5.5 to 3.9 s, at the same peak memory. Call it once the
    weights are loaded: otherwise the memory that loading frees stays in pieces that nothing later fits.
    """
    global _keeps
    _keeps = True
    _set(mappings=0, trim=-1)  # large blocks get no mapping of their own; the heap's top is never trimmed


def return_freed_memory() -> None:
    """Make glibc return large blocks to the kernel when they are freed, as those of a gathered part of a model are."""
    hand_back_memory()
    _set(mappings=65536, trim=MAPPED)


@contextmanager
def giving_memory_back() -> Iterator[None]:
    """Use this to load weights, also while or after others are trained: it returns free memory before and after.

    In a process that keeps its freed memory, a large block that fits no freed piece of the heap gets its own mapping
    within this context, which is returned when the block is freed. A block that fits stays in the heap to the end.
    """
    hand_back_memory()
    if _keeps:
        _set(mappings=65536, trim=MAPPED)
    try:
        yield
    finally:
        if _keeps:
            _set(mappings=0, trim=-1)
        hand_back_memory()


def _set(mappings: int, trim: int) -> None:
    if libc := _libc():
        libc.mallopt(c_int(-4), c_int(mappings))  # M_MMAP_MAX
        libc.mallopt(c_int(-1), c_int(trim))  # M_TRIM_THRESHOLD
        libc.mallopt(c_int(-3), c_int(MAPPED))  # M_MMAP_THRESHOLD: glibc has raised it if a large block was freed


def tidier() -> Callable[[int], None]:
    """Return tidy(most), which returns freed memory to the kernel if the process holds more than `most` bytes of it.
    Create it once the weights are loaded; call it before an evaluation, and before and after a block is recomputed.

    Otherwise each step reuses what the previous one freed. Recomputed blocks cannot: small objects of the graph that
    stay alive are cut from the freed pieces, and the rest of a piece is too small for a tensor of the old size.
    """
    libc = _libc()
    if not libc or not hasattr(libc, "mallinfo2") or not RESIDENT.exists():  # before glibc 2.33
        return lambda most: None
    libc.mallinfo2.restype = _Use
    beside = _not_in_use(libc)  # mostly libraries

    def tidy(most: int) -> None:
        nonlocal beside
        if _not_in_use(libc) - beside > most:
            hand_back_memory()
            beside = _not_in_use(libc)

    return tidy


def _not_in_use(libc: ctypes.CDLL) -> int:
    """Bytes that the process holds beyond what was allocated from glibc."""
    use = libc.mallinfo2()
    return int(RESIDENT.read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGESIZE") - use.uordblks - use.hblkhd
