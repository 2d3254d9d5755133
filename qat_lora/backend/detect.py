"""Chooses a run's device, and how many workers a host runs on which chips, without initialising any runtime."""

import importlib.util
import os
from pathlib import Path

from qat_lora.errors import UserError
from qat_lora.hosts.environment import read_place, slice_hosts, whole_number

GOOGLE_PCI_VENDOR = "0x1ae0"
# The vendor also makes network and storage devices, so the device ID decides. IDs as torch_xla 2.9 lists them.
TPU_PCI_DEVICES = {
    "0x0027": "v2/v3",
    "0x005e": "v4",
    "0x0063": "v5e",
    "0x0062": "v5p",
    "0x0056": "v4i",
    "0x006f": "v6e",
    "0x0076": "v7x",
}
PJRT_DEVICES = ("TPU", "CPU", "CUDA")
DEVICES = ("auto", "cpu", "cuda", "tpu", "xla")


def tpu_chips(pci: Path = Path("/sys/bus/pci/devices")) -> list[str]:
    """The kinds of the TPU chips on this machine's PCI bus, e.g. ["v6e"]; [] without a chip."""
    chips = []
    for device in sorted(pci.glob("*")) if pci.is_dir() else []:
        try:
            vendor, kind = ((device / f).read_text(encoding="utf-8").strip() for f in ("vendor", "device"))
        except OSError:
            continue
        if vendor == GOOGLE_PCI_VENDOR and kind in TPU_PCI_DEVICES:
            chips.append(TPU_PCI_DEVICES[kind])
    return chips


def cores_per_chip() -> int:
    """XLA devices per chip: 2 on v2, v3 and v7x, otherwise 1."""
    return 2 if set(tpu_chips()) & {"v2/v3", "v7x"} else 1


def check_free(chips: list[str], dev: Path = Path("/dev"), proc: Path = Path("/proc")) -> None:
    """Raise UserError, naming the process, if a process that this user may see has the device file of one of these TPU
    chips open."""
    files = {str(dev / name) for chip in chips for name in (f"accel{chip}", f"vfio/{chip}")}
    for link in proc.glob("[0-9]*/fd/*"):
        try:
            held = os.readlink(link)
            pid = link.parts[-3]
            if held not in files or int(pid) == os.getpid():
                continue
            command = (proc / pid / "cmdline").read_text(encoding="utf-8").replace("\0", " ").strip()
        except OSError:  # the process has ended, or belongs to another user
            continue
        raise UserError(f"{held} is in use by process {pid} ({command[:100]}); end it, or wait for it")


def xla_cpu_devices() -> int:
    """How many CPU devices torch_xla creates on a machine without TPU chips: CPU_NUM_DEVICES, 1 by default. Raises
    UserError if that is not a whole number of at least 1."""
    return whole_number("CPU_NUM_DEVICES", 1, default=1)


def _pjrt_device() -> str | None:
    """PJRT_DEVICE in the upper case that torch_xla expects, also written back to the environment; None if it is unset
    or empty. Raises UserError for a device that torch_xla does not have."""
    value = os.environ.pop("PJRT_DEVICE", "")
    device = value.strip().upper()
    if not device:
        return None
    os.environ["PJRT_DEVICE"] = device
    if device not in PJRT_DEVICES:
        os.environ["PJRT_DEVICE"] = value
        raise UserError(f"PJRT_DEVICE={value} is not one of {', '.join(PJRT_DEVICES)}; correct it, or unset it")
    return device


def resolve(requested: str = "auto") -> str:
    """The backend for a requested device: "cpu", "cuda" or "xla".

    auto means TPU chips, then CUDA, then CPU; PJRT_DEVICE=TPU in the environment turns auto into tpu. xla takes TPU
    chips if there are any, and torch_xla's CPU device otherwise (PJRT_DEVICE is set accordingly). Raises UserError if
    an explicit device is absent, saying what was looked for.
    """
    if requested not in DEVICES:
        raise UserError(f"device={requested!r} is not one of {', '.join(DEVICES)}")
    instead = "use --device auto"
    if requested == "auto" and _pjrt_device() == "TPU":
        requested, instead = "tpu", "unset PJRT_DEVICE"
    if requested == "xla":
        _pjrt_device()
        xla_cpu_devices()
    chips = tpu_chips() if requested in ("auto", "tpu", "xla") else []
    has_xla = importlib.util.find_spec("torch_xla") is not None
    if requested == "tpu" and not chips:
        raise UserError(
            f"device=tpu: no TPU chip on the PCI bus (vendor {GOOGLE_PCI_VENDOR}); "
            f"{instead}, --dry-run to plan, or PJRT_DEVICE=CPU with --device xla to try the XLA path without a chip"
        )
    if (requested in ("tpu", "xla") or (requested == "auto" and chips)) and not has_xla:
        raise UserError(
            f"device={requested}: the package torch_xla is not installed; pip install -r requirements-tpu.txt"
        )
    if chips:
        if requested == "tpu" or "PJRT_DEVICE" not in os.environ:
            os.environ["PJRT_DEVICE"] = "TPU"
        return "xla"
    if requested == "xla":
        os.environ["PJRT_DEVICE"] = "CPU"
        return "xla"
    import torch  # after the checks of the request, since it takes a second

    if requested == "cuda" and not torch.cuda.device_count():
        raise UserError(f"device=cuda: torch {torch.__version__} sees no CUDA device; use --device cpu")
    return "cuda" if requested in ("auto", "cuda") and torch.cuda.device_count() else "cpu"


def plans_a_tpu(requested: str = "auto") -> bool:
    """Whether a TPU is requested on a machine without one, so that a dry run can only plan for it."""
    return (requested == "tpu" or (requested == "auto" and _pjrt_device() == "TPU")) and not tpu_chips()


def has_static_shapes(requested: str = "auto") -> bool:
    """Whether a requested device compiles a graph for each shape, so that batches should share one: true on XLA."""
    return plans_a_tpu(requested) or resolve(requested) == "xla"


# The process bounds that torch_xla reads for part of a host's chips, taken from number 0 on. Untested on hardware.
PROCESS_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}


def count_workers(kind: str, num_chips: int | None) -> int:
    """How many workers this host starts on a resolved backend. Raises UserError if it has fewer devices than that."""
    chips = len(tpu_chips()) if kind == "xla" else 0
    if kind == "cpu":
        there, what = os.cpu_count(), "CPU cores"
    elif kind == "cuda":
        import torch

        there, what = torch.cuda.device_count(), "CUDA devices"
    else:
        there, what = (chips, "TPU chips") if chips else (xla_cpu_devices(), "XLA CPU devices")
    if num_chips is None:
        return 1
    flag = f"--num-chips {num_chips}"
    if num_chips == 0:
        limit = whole_number("TPU_NUM_DEVICES", 0) if chips else None
        num_chips = limit or (1 if kind == "cpu" else there)
        flag = f"TPU_NUM_DEVICES={limit}" if limit else flag
    if not there:  # a dry run plans for GPUs that this machine lacks
        raise UserError(f"{flag}: this machine has no {what}; give the number to plan for")
    if not 1 <= num_chips <= there:
        raise UserError(f"{flag}: this machine has {there} {what}; use 1 to {there}")
    if num_chips > 1 and kind != "cuda" and not chips and xla_cpu_devices() > 1:
        raise UserError(
            f"CPU_NUM_DEVICES={xla_cpu_devices()}: torch_xla's CPU devices cannot train together (they wait for each "
            f"other until torch_xla aborts); unset it, and give --device cpu --num-chips {num_chips}"
        )
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
    chips = len(tpu_chips())
    if hosts == 1 or (chips and num_chips in (0, chips)):
        return hosts > 1
    name = said.partition("=")[0]
    fix = f"give --num-chips 0 on every host, or unset {name}" if chips else f"unset {name}"
    raise UserError(f"{said} means a slice of at least {hosts} hosts, but this process would train alone; {fix}")


def take_chips(count: int) -> None:
    """Limit the TPU runtime to `count` chips of this host: torch_xla 2.9 itself does not read TPU_NUM_DEVICES.

    With several workers torch_xla gives chip k to worker k. For all chips of a host it finds the bounds by itself.
    """
    chips = tpu_chips()
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
    check_free(numbers)
