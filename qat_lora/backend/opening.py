"""Opens the backend of a device, in one worker or in every worker of a job, on one host or several."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from qat_lora.backend import detect
from qat_lora.backend.detect import count_workers, is_slice_host, take_chips
from qat_lora.backend.eager import TorchBackend
from qat_lora.errors import UserError
from qat_lora.hosts.environment import Timeouts, TorchrunPlace, read_place
from qat_lora.hosts.group import ALONE, Group


def launch(
    worker: Callable,
    args: tuple = (),
    device: str = "auto",
    precision: str = "auto",
    num_chips: int | None = None,
    debug: bool = False,
    timeouts: Timeouts = Timeouts(),  # noqa: B008 (it is frozen)
) -> None:
    """Call worker(backend, *args) in every worker of a job, and return when all are done.

    num_chips: TPU chips, GPUs or CPU processes of this host; None means one, 0 every available chip or GPU. A single
    worker runs in this process; several run in processes of their own (`worker` and `args` are pickled), which
    torch_xla.launch starts on TPU chips. On a TPU slice run the same command on every host. Under torchrun (RANK or
    WORLD_SIZE in the environment) this process is one of its workers. SIGTERM reaches every worker, and none outlives
    this process. The first worker to fail ends the job within seconds, with its exit code; a lost host ends it within
    timeouts.host. Raises UserError if more devices are requested than available, a chip is held by another process, or
    the environment contradicts itself.
    """
    kind, place = detect.resolve(device), read_place()
    if place:
        _check_torchrun(kind, num_chips, place)
    elif (count := count_workers(kind, num_chips)) == 1 and not is_slice_host(kind, num_chips):
        return worker(open_backend(device, precision), *args)
    from qat_lora.hosts.launch import Job, run_under_torchrun, spawn  # what only several workers need

    job = Job(partial(_work, worker, args, kind, precision), debug, timeouts)
    if place:
        run_under_torchrun(job, place)
    elif kind == "xla":
        from qat_lora.backend import xla

        xla.spawn(replace(job, work=partial(xla.work, worker, args, precision, count)), count)
    else:
        spawn(job, count)


def _work(worker: Callable, args: tuple, kind: str, precision: str, group: Group, local_rank: int) -> None:
    """What each of several CPU processes or GPUs runs: connect to the others, then call worker(backend, *args)."""
    from qat_lora.hosts.launch import be_silent, connect

    workers_here = len(group.neighbours)
    if group.rank:
        be_silent()
    if kind == "cuda":
        _check_devices(local_rank, workers_here)
        torch.cuda.set_device(local_rank)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, os.cpu_count() // workers_here))
    if group.world_size > 1:
        connect(group, "nccl" if kind == "cuda" else "gloo")
    backend = TorchBackend(kind, precision, group)
    backend.check_world(group.world_size)
    worker(backend, *args)


def _check_torchrun(kind: str, num_chips: int | None, place: TorchrunPlace) -> None:
    if kind == "xla":  # torch_xla 2.9 would train a separate model in each process
        raise UserError("torchrun does not start TPU workers; start the script itself, once on every host")
    if num_chips and num_chips != place.local_world_size:
        raise UserError(
            f"--num-chips {num_chips} contradicts torchrun's {place.local_world_size} workers; leave out --num-chips"
        )
    if kind == "cuda":
        _check_devices(place.local_rank, place.local_world_size)


def _check_devices(local_rank: int, workers: int) -> None:
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"torchrun started {workers} workers here, but this machine has {torch.cuda.device_count()} CUDA devices; "
            "lower --nproc-per-node"
        )


# -- a single worker -------------------------------------------------------------------------------------------------
def open_backend(requested: str = "auto", precision: str = "auto") -> TorchBackend:
    """The backend of a single worker on `requested` (auto, cpu, cuda, tpu, xla). precision: auto, fp32 or bf16
    autocast.

    torch_xla is imported here, and only if the device resolves to XLA.
    """
    kind = detect.resolve(requested)
    if kind != "xla":
        return TorchBackend(kind, precision)
    take_chips(1)
    from qat_lora.backend.xla import XlaBackend

    return XlaBackend(precision)


class Planned(TorchBackend):
    """The backend of a dry run for a TPU or GPU that this machine does not have: has its properties, and computes
    nothing."""

    shares_host_memory = False

    def __init__(self, kind: str, precision: str):
        self.kind, self.group, self.device = kind, ALONE, torch.device("meta")
        self.on_tpu = self.static_shapes = kind == "xla"
        self.can_share = not self.on_tpu
        self.bf16 = precision == "auto" or self._wants_bf16(precision)

    @property
    def name(self) -> str:
        return f"{'TPU' if self.on_tpu else 'GPU'} (planned; none on this machine)"

    def memory(self) -> None:
        return None


def open_planned(requested: str = "auto", precision: str = "auto") -> TorchBackend:
    """The backend of a dry run, which may plan for a TPU or a GPU on a machine without one."""
    if detect.plans_a_tpu(requested):
        return Planned("xla", precision)
    if requested == "cuda" and not torch.cuda.device_count():
        return Planned("cuda", precision)
    return open_backend(requested, precision)
