"""How much memory this machine has, and the refusal of what cannot fit, before the system kills the process."""

from pathlib import Path

from qat_lora.errors import UserError

PLENTY = 1e30  # bytes; more is not told apart


def host_memory(root: Path = Path("/")) -> float:
    """Bytes that this process can take at most: RAM and swap, or less where a control group (a container, a batch
    system) limits it; inf on a system that does not say."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        facts = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        ram, swap = facts["MemTotal"], facts.get("SwapTotal", 0)
    except (OSError, ValueError, KeyError, IndexError):
        return float("inf")
    return min([ram + swap, *_limits(root, swap)])


def _limits(root: Path, swap: int) -> list[float]:
    """What this process's control groups allow, of either version, those above them included."""
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
    """Of a limit's file; inf for "max", and where there is none."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return float("inf")


def check_memory(need: float, what: str, lower: str, available: float | None = None) -> None:
    """Raise UserError where `need` bytes are more than there are `available` (None: in this machine, `host_memory`).

    need: a lower bound, so that nothing is refused that would have run, against the total memory, whatever is free.
    what: the subject of the message; lower: the options to lower.
    """
    available = host_memory() if available is None else available
    if need > available:
        gb, there = (size / 1e9 for size in (min(need, PLENTY), available))
        raise UserError(f"{what} needs at least {gb:,.1f} GB of memory and there is {there:,.1f} GB; lower {lower}")
