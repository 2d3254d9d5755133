"""The backend on torch_xla: TPU chips, or torch_xla's CPU device. Imported only when the device resolves to XLA.

All of the project's calls into torch_xla are in this file, in ahead/recording.py and in kernels/lazy.py.
"""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from functools import partial

import torch
import torch_xla
import torch_xla.backends
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met
import torch_xla.runtime as xr
from torch_xla.utils.checkpoint import checkpoint as xla_checkpoint

from qat_lora.backend import detect
from qat_lora.backend.detect import take_chips
from qat_lora.backend.eager import TorchBackend
from qat_lora.hosts.environment import LOOPBACK, Timeouts, master_port
from qat_lora.hosts.group import ALONE, Group, notice_sigterm
from qat_lora.hosts.launch import GRACE, Job, be_silent, end_with, end_with_parent, run_worker, sigterm_forwarded
from qat_lora.hosts.relay import Relay
from qat_lora.hosts.rendezvous import join, serve

_SERVING = threading.Lock()
_served: list[Relay] = []  # the relay that this process serves


def connect(timeouts: Timeouts) -> Group:
    """This worker's place in a job that torch_xla.launch started; the first host serves the relay.

    MASTER_PORT (default 29500) is the relay's port. In a job on one host, no other host can reach the relay. Raises
    UserError if the port is bad or in use, or if not all workers arrive.
    """
    one_host, port = hosts() == 1, master_port()
    host = LOOPBACK if one_host else _addresses()[0].rsplit(":", 1)[0]
    rank, relay = xr.global_ordinal(), None
    if os.environ.get("CLOUD_TPU_TASK_ID", "0") == "0":
        with _SERVING:  # a process may run several workers, each in a thread
            if not _served:
                _served.append(serve(port, one_host, xr.world_size(), timeouts, f"{host}:{port}", tensors=False))
        relay = _served[0]
    link = join(lambda: (host, port), rank, xr.world_size(), timeouts, f"{host}:{port}")
    return Group(rank, xr.world_size(), link, relay)


def hosts() -> int:
    """The number of hosts in the slice, as found by torch_xla.launch."""
    return len({address.rsplit(":", 1)[0] for address in _addresses()})


def _addresses() -> list[str]:
    return os.environ.get("TPU_PROCESS_ADDRESSES", "localhost:0").split(",")


class XlaBackend(TorchBackend):
    """One worker on one XLA device. Tested on torch_xla's CPU device, untested on hardware."""

    can_share, static_shapes = False, True

    def __init__(self, precision: str = "auto", group: Group = ALONE):
        self.kind, self.group = "xla", group
        self.device = torch_xla.device()
        self.bf16 = self._wants_bf16(precision)

    @property
    def on_tpu(self) -> bool:
        """Whether the device is a TPU chip, not torch_xla's CPU device."""
        return os.environ.get("PJRT_DEVICE") == "TPU"

    @property
    def shares_host_memory(self) -> bool:
        return not self.on_tpu

    def memory(self) -> float | None:
        return None if self.on_tpu else super().memory()

    def _wants_bf16(self, precision: str) -> bool:
        if precision == "auto":  # torch_xla's CPU device emulates bf16 slowly
            precision = "bf16" if self.on_tpu else "fp32"
        return super()._wants_bf16(precision)

    @property
    def name(self) -> str:
        return f"{self.device} on {os.environ.get('PJRT_DEVICE')}"

    @staticmethod
    def exact_products() -> None:
        """Compute products of fp32 matrices in fp32. By default a TPU rounds their factors to bf16."""
        torch_xla.backends.set_mat_mul_precision("highest")

    @staticmethod
    def checkpoint(function, *args):
        return xla_checkpoint(function, *args)

    def compiles(self, choice: str, auto: bool | None = None) -> bool:
        return False  # XLA compiles anyway

    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p)  # the first step then adds to a gradient as every later one does
        self.step_boundary()  # otherwise the zeros would be part of the first step's graph

    def step_boundary(self) -> None:
        torch_xla.sync()

    def fetch(self, *tensors: torch.Tensor) -> list[float]:
        torch_xla.sync()  # then each value is computed, and reading it needs no new graph
        with self.group.waiting():
            return [float(t.detach().cpu()) for t in tensors]

    def seed(self, seed: int) -> None:
        super().seed(seed)
        torch_xla.manual_seed(seed)

    def rng_state(self) -> dict:
        return super().rng_state() | {"xla": xm.get_rng_state(str(self.device))}

    def set_rng_state(self, state: dict) -> None:
        super().set_rng_state(state)
        if "xla" in state:
            xm.set_rng_state(state["xla"], str(self.device))

    def reduce(self, tensors: list[torch.Tensor]) -> None:
        if self.world_size > 1:
            xm.all_reduce(xm.REDUCE_SUM, tensors)  # a list: one collective for all of them

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        if self.world_size == 1:
            return
        self.step_boundary()  # turns everything into data, so that all workers run the same graph
        xm.collective_broadcast(tensors)
        self.step_boundary()

    def counters(self) -> dict[str, int]:
        """compiles: graphs compiled so far; fallbacks: calls of operators that XLA ran on the host."""
        return {
            "compiles": int(met.counter_value("UncachedCompile") or 0),
            "fallbacks": int(sum(met.counter_value(name) for name in fallback_names())),
        }

    def peak_memory_mb(self) -> float:
        if self.on_tpu:
            return xm.get_memory_info(self.device)["peak_bytes_used"] / 2**20
        return super().peak_memory_mb()


def fallback_names() -> list[str]:
    """The counters of operators that XLA ran on the host: all `aten::` names."""
    return sorted(name for name in met.counter_names() if name.startswith("aten::"))


# -- TPU chips -------------------------------------------------------------------------------------------------------
class XlaWorker:
    """The callable that torch_xla.launch runs in a thread of each process. It is unpickled in the process's main
    thread, the only one in which Python can handle SIGTERM."""

    def __init__(self, job: Job):
        self.job = job

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        notice_sigterm()
        end_with_parent()
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # the main thread only waits for the worker thread

    def __call__(self, _: int) -> None:
        run_worker(self.job, partial(connect, self.job.timeouts), 0)


def work(worker: Callable, args: tuple, precision: str, count: int, group: Group, _: int) -> None:
    """What each worker of a job on `count` chips a host runs: worker(backend, *args)."""
    cores = detect.cores_per_chip()
    if group.rank >= cores and detect.tpu_chips():  # on CPU devices all workers are threads of one process
        be_silent()
    backend = XlaBackend(precision, group)
    backend.check_world(count * hosts() * cores)
    worker(backend, *args)


def spawn(job: Job, count: int) -> None:
    """Run a job, whose work is `work`, on `count` chips of this host."""
    take_chips(count)
    master_port()
    codes: list[int] = []
    done = threading.Event()
    watch = threading.Thread(target=_end_survivors, args=(codes, done), daemon=True)
    watch.start()
    with sigterm_forwarded():
        try:
            torch_xla.launch(XlaWorker(job))
        except BrokenProcessPool:
            watch.join(GRACE / 2)
            # workers that the pool itself ended with SIGTERM are not the cause
            end_with("a worker", next((code for code in codes if code != -signal.SIGTERM), 1))
        finally:
            done.set()


def _end_survivors(codes: list[int], done: threading.Event) -> None:
    """Once a child process has failed, note the exit codes and kill the others, which may wait for it forever."""
    children: set = set()
    while not codes:
        if done.wait(0.5):
            return
        children |= set(multiprocessing.active_children())
        codes += [child.exitcode for child in children if child.exitcode]
    done.wait(GRACE)
    for child in children:
        if child.is_alive():
            child.kill()
