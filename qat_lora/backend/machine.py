"""What this machine has: memory, with a check that refuses what cannot fit before the system kills the process, and a
folder for what is made once."""

import os
from pathlib import Path

from qat_lora.errors import UserError

PLENTY = 1e30  # bytes; the largest need that a message shows


def cache_folder() -> Path:
    """The user's folder for files that can be made again at any time; it may not exist yet."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path(os.path.expanduser("~/.cache"))) / "qat_lora"


def host_memory(root: Path = Path("/")) -> float:
    """The most bytes that this process can use: RAM and swap, or less if a control group (a container, a batch system)
    limits it; inf on a system without /proc/meminfo. root: the root of the file system, for tests."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        facts = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        ram, swap = facts["MemTotal"], facts.get("SwapTotal", 0)
    except (OSError, ValueError, KeyError, IndexError):
        return float("inf")
    return min([ram + swap, *_limits(root, swap)])


def _limits(root: Path, swap: int) -> list[float]:
    """The limits of this process's control groups (v1 and v2) and their parents, in bytes of RAM and swap."""
    try:
        groups = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
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
        return int(path.read_text())
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
