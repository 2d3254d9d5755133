"""How many workers a host runs, and on which TPU chips."""

import os

import torch

from qat_lora.backend import detect
from qat_lora.errors import UserError
from qat_lora.hosts.environment import read_place, slice_hosts, whole_number

# The process bounds that torch_xla reads for part of a host's chips, taken from number 0 on. Untested on hardware.
PROCESS_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}


def count_workers(kind: str, num_chips: int | None) -> int:
    """How many workers this host starts on a resolved backend. Raises UserError if it has fewer devices than that."""
    chips = len(detect.tpu_chips()) if kind == "xla" else 0
    if kind == "cpu":
        there, what = os.cpu_count(), "CPU cores"
    elif kind == "cuda":
        there, what = torch.cuda.device_count(), "CUDA devices"
    else:
        there, what = (chips, "TPU chips") if chips else (detect.xla_cpu_devices(), "XLA CPU devices")
    if num_chips is None:
        return 1
    flag = f"--num-chips {num_chips}"
    if num_chips == 0:
        limit = whole_number("TPU_NUM_DEVICES", 0) if chips else None
        num_chips = limit or (1 if kind == "cpu" else there)
        flag = f"TPU_NUM_DEVICES={limit}" if limit else flag
    if not 1 <= num_chips <= there:
        raise UserError(f"{flag}: this machine has {there} {what}; use 1 to {there}")
    if chips and num_chips != chips and num_chips not in PROCESS_BOUNDS:
        raise UserError(f"{flag}: a job can use 1, 2, 4, 8 or all of a host's chips; choose one of these")
    return num_chips


def parallel_num_chips(kind: str) -> int:
    """The value of --num-chips for several workers: 0 (every chip or GPU), or 2 CPU processes (1 on a single core)."""
    return min(2, os.cpu_count() or 1) if kind == "cpu" else 0


def planned_workers(kind: str, num_chips: int | None) -> int:
    """The number of workers for a dry run, which may plan for a different machine: as requested, or as torchrun
    would start them."""
    if place := read_place():
        return place.world_size
    return num_chips if (num_chips or 0) > 0 else count_workers(kind, num_chips)


def is_slice_host(kind: str, num_chips: int | None) -> bool:
    """Whether this process starts the workers of one host of a TPU slice with several hosts.

    Raises UserError if the environment names several hosts and this process would train its own model apart from them:
    on torch_xla's CPU device, or on part of this host's chips.
    """
    hosts, said = slice_hosts() if kind == "xla" else (1, "")
    chips = len(detect.tpu_chips())
    if hosts == 1 or (chips and num_chips in (0, chips)):
        return hosts > 1
    name = said.partition("=")[0]
    fix = f"give --num-chips 0 on every host, or unset {name}" if chips else f"unset {name}"
    raise UserError(f"{said} means a slice of at least {hosts} hosts, but this process would train alone; {fix}")


def take_chips(count: int) -> None:
    """Limit the TPU runtime to `count` chips of this host: torch_xla 2.9 itself does not read TPU_NUM_DEVICES.

    With several workers torch_xla gives chip k to worker k. For all chips of a host it finds the bounds by itself.
    """
    chips = detect.tpu_chips()
    if not chips:
        return
    if count == 1:
        os.environ.setdefault("TPU_VISIBLE_CHIPS", "0")
        os.environ.setdefault("TPU_CHIPS_PER_PROCESS_BOUNDS", "1,1,1")
    if count == 1 or count < len(chips):
        os.environ.setdefault("TPU_PROCESS_BOUNDS", PROCESS_BOUNDS[count])
    taken = os.environ.get("TPU_VISIBLE_CHIPS") or ",".join(map(str, range(count)))
    known = {str(chip) for chip in range(len(chips))}
    if not set(numbers := taken.split(",")) <= known or len(set(numbers)) < len(numbers):
        raise UserError(
            f"TPU_VISIBLE_CHIPS={taken} does not name chips of this host; set it to numbers from 0 to {len(chips) - 1} "
            "with commas between them, or unset it"
        )
    detect.check_free(numbers)
