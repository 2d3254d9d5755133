"""How much memory a worker needs, computed from shapes: estimates to print, and lower bounds to check before a run
starts (`qat_lora.backend.machine.check_memory`). language_memory.py computes the parts for language models; this module
imports no transformers."""

from collections.abc import Callable

from qat_lora.backend import TorchBackend
from qat_lora.backend.machine import check_memory
from qat_lora.errors import UserError
from qat_lora.hosts.environment import read_place
from qat_lora.kernels.tiles import XLA_HEAD_BYTES
from qat_lora.run.console import say

ADAM = 16  # bytes per trained fp32 weight, with its gradient and two moments
PROGRAM = "interpreter and libraries"
FREED = "freed but still held"

Parts = dict[str, int]  # of one phase of a script, in bytes; the largest phase is its peak


def xla_room(bf16: bool) -> int:
    """The most bytes of logits that XLA holds at a time, see `tiles.rows_at_once`."""
    return XLA_HEAD_BYTES // 2 if bf16 else XLA_HEAD_BYTES


def logits_memory(positions: int, vocab: int, bf16: bool) -> int:
    """Bytes of the logits that XLA holds at a time."""
    return min(xla_room(bf16), positions * vocab * (2 if bf16 else 4))


def peak_phase(phases: dict[str, Parts], backend: TorchBackend) -> tuple[str, Parts]:
    """The phase that needs the most memory, and its parts. On the CPU they cover the whole process; on a GPU or TPU
    only device memory, without the interpreter and the host memory for loading."""
    if not backend.shares_host_memory:
        phases = {
            phase: {name: size for name, size in parts.items() if name not in (PROGRAM, FREED)}
            for phase, parts in phases.items()
            if not phase.startswith(("loading", "reading"))  # they use the host's memory
        }
    return max(phases.items(), key=lambda both: sum(both[1].values()))


def memory_line(phases: dict[str, Parts], backend: TorchBackend) -> str:
    """A line to print: a worker's memory in the phase that needs the most, in GB (1e9 bytes), see `peak_phase`."""
    phase, parts = peak_phase(phases, backend)
    where = "process" if backend.shares_host_memory else f"{backend.kind} device, without its host"
    shown = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in (parts | {"total": sum(parts.values())}).items())
    return f"memory of a worker's {where} (estimated; the peak is in {phase}): {shown}"


def check_fits(backend: TorchBackend, parts: dict[str, float], what: str, workers: int = 1) -> None:
    """Raise UserError if the sum of `parts` does not fit a worker's device: a GPU, or this machine's memory, which all
    its workers share. A TPU is not checked, because its memory is not known here.

    parts: {the options to lower: lower bound in bytes per worker}. what: the subject of the message. workers: how many
    share this machine, if LOCAL_WORLD_SIZE is not set.
    """
    if (available := backend.memory()) is not None:
        together = _workers_in_one_memory(backend, workers) * sum(parts.values())
        check_memory(together, what, max(parts, key=parts.__getitem__), available)


def shares_out(shard: str, backend: TorchBackend, workers: int, need: Callable[[int], int], instead: str = "") -> bool:
    """Whether the workers share the model out, by `--shard` (auto, on, off): auto does if the whole model cannot fit.
    If so, it is printed. need(n): least memory in bytes of a worker if n share it. Raises UserError where they cannot;
    instead: what else to do there."""
    if shard == "on" and not backend.can_share:
        raise UserError(f"--shard on works on CPUs and GPUs only; leave it out{instead}")
    if shard == "on" and workers == 1:
        raise UserError("--shard on needs several workers; give --num-chips, or leave it out")
    available = backend.memory()
    may = shard == "auto" and workers > 1 and backend.can_share and available is not None
    shared = shard == "on" or (may and _workers_in_one_memory(backend, workers) * need(1) > available)
    if shared:
        say(f"the {workers} workers share the model out: each holds a part of every weight")
    return shared


def _workers_in_one_memory(backend: TorchBackend, workers: int) -> int:
    place = read_place()
    if not backend.shares_host_memory:
        return 1
    return place.local_world_size if place else workers
