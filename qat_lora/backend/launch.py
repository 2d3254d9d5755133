"""One call that runs a worker on every chip, GPU or CPU process of a job, on one host or several."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

from qat_lora.backend import detect
from qat_lora.backend.environment import LOOPBACK, Place, read_place
from qat_lora.backend.group import ALONE, SIGTERM, Group, WorkerLost, notice_sigterm, stopped_at
from qat_lora.backend.link import AnotherFailed
from qat_lora.backend.relay import AGAIN, Timeouts, say
from qat_lora.backend.rendezvous import interface, join, join_at, pass_exit_barrier, serve, tensor_store
from qat_lora.backend.revision import agree_on_code
from qat_lora.backend.torch import TorchBackend
from qat_lora.backend.workers import count_workers, is_slice_host, take_chips
from qat_lora.errors import UserError, ignore_sigterm, nowhere, open_output, report

GRACE = 8  # seconds that the other workers get to end by themselves after one has died
STARTING = 300  # seconds within which workers started by this process must join; a death is noticed sooner
FOREVER = timedelta(days=365)  # collectives have no time limit: the relay notices lost workers


@dataclass(frozen=True)
class Job:
    """What every worker runs, worker(backend, *args), and on which device. kind: the result of `detect.resolve`."""

    worker: Callable
    args: tuple
    kind: str
    precision: str
    debug: bool
    timeouts: Timeouts


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
    kind = detect.resolve(device)
    job = Job(worker, args, kind, precision, debug, timeouts)
    if place := read_place():
        return _run_under_torchrun(job, num_chips, place)
    count, of_slice = count_workers(kind, num_chips), is_slice_host(kind, num_chips)
    if count == 1 and not of_slice:
        worker(open_backend(device, precision), *args)
    elif kind == "xla":
        from qat_lora.backend import xla

        xla.spawn(job, count)
    else:
        _spawn(job, count)


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


class PlannedTpu(TorchBackend):
    """The backend of a dry run for a TPU that this machine does not have: has its properties, and computes nothing."""

    on_tpu, static_shapes, shares_host_memory = True, True, False

    def __init__(self, precision: str):
        self.kind, self.group, self.device = "xla", ALONE, torch.device("meta")
        self.bf16 = precision == "auto" or self._wants_bf16(precision)

    @property
    def name(self) -> str:
        return "TPU (planned; none on this machine)"

    def memory(self) -> None:
        return None


def open_planned(requested: str = "auto", precision: str = "auto") -> TorchBackend:
    """The backend of a dry run, which may plan for a TPU on a machine without one."""
    return PlannedTpu(precision) if detect.plans_a_tpu(requested) else open_backend(requested, precision)


def open_alone(device: str = "auto", precision: str = "auto") -> TorchBackend:
    """`open_backend` for a script that trains on one device. Raises UserError if a launcher has started several
    workers, or a TPU slice has several hosts: each would train its own model."""
    place = read_place()
    if place and place.world_size > 1:
        raise UserError(
            f"WORLD_SIZE={place.world_size}: this script trains on one device; start it without torchrun, or unset "
            "RANK and WORLD_SIZE"
        )
    is_slice_host(detect.resolve(device), None)  # refuses one host of several: each would train its own model
    return open_backend(device, precision)


# -- one worker ------------------------------------------------------------------------------------------------------
def run_worker(job: Job, enter: Callable[[], Group], open_backend: Callable[[Group], TorchBackend]) -> None:
    """Call job.worker(open_backend(enter()), *job.args). A failure is reported once per job and ends this process with
    its exit code.

    Errors other than UserError show their traceback. The process ends with os._exit, since another thread may still be
    waiting for a worker.
    """
    group = ALONE
    open_output()
    try:
        group = enter()
        agree_on_code(group)
        try:
            job.worker(open_backend(group), *job.args)
        except SystemExit as stop:  # preempted, or nothing to do
            if stop.code:
                raise
        group.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    except BaseException as error:
        # another worker's failure before this one has joined is printed by the process that started both
        instead = None if group is ALONE and isinstance(error, AnotherFailed) else group.fail(error)
        if instead == "":
            code = report(error, with_traceback=job.debug or not isinstance(error, UserError | KeyboardInterrupt))
        else:
            code = 2 if isinstance(error, UserError) else 1
            if instead:
                say(f"error: {instead}")
        if isinstance(error, WorkerLost | AnotherFailed):  # the input is not at fault
            code = 1
        group.linger()
        if instead is None:
            time.sleep(1)  # the job ends with the exit code of the first worker to fail
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def check_world(backend: TorchBackend, wanted: int) -> TorchBackend:
    """Check with a sum over all workers that they found each other, and return the backend.

    Raises UserError if they did not: each would train its own model, the most common silent failure.
    """
    one = torch.ones((), device=backend.device)
    backend.reduce([one])
    backend.step_boundary()
    found = int(backend.fetch(one)[0])
    if found != wanted:
        raise UserError(
            f"{wanted} workers were started, but {found} found each other; start the script itself, with the same "
            "command on every host (docs/TPU.md)"
        )
    return backend


def end_with_parent() -> None:
    """End this process at once when its parent is gone. A killed parent cannot end its workers, which may be waiting
    for each other."""
    parent = multiprocessing.parent_process()
    if parent:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def be_silent() -> None:
    """Silence standard output, since worker 0 prints for all; errors still reach stderr."""
    sys.stdout = nowhere()


# -- CPU processes and GPUs ------------------------------------------------------------------------------------------
def _spawn(job: Job, count: int) -> None:
    # The relay runs in this process, so that it outlives every worker.
    job = replace(job, timeouts=replace(job.timeouts, join=max(job.timeouts.join, STARTING)))
    relay = serve(0, True, count, job.timeouts, reports_deaths=True)
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=_spawned, args=(job, rank, count, relay.port)) for rank in range(count)]
    try:
        for process in processes:
            process.start()
        with sigterm_forwarded():
            failed = _first_to_fail(processes)
            if failed is not None:
                reported = relay.end(f"worker {failed} has failed; {AGAIN}", failed)  # also tells the others
                died = relay.died == failed
                end_with(f"worker {failed}", processes[failed].exitcode, reported and not died)
    finally:
        relay.close()
        ends = time.monotonic() + GRACE
        for process in processes:
            if process.pid is not None:
                process.join(max(0, ends - time.monotonic()))
                process.kill()


def _first_to_fail(processes: list) -> int | None:
    """Wait until a process fails and return its number, or None once all have ended with exit code 0."""
    running = list(processes)
    while running:
        wait([process.sentinel for process in running])
        for process in [process for process in running if not process.is_alive()]:
            running.remove(process)
            if process.exitcode:
                return processes.index(process)
    return None


def _spawned(job: Job, rank: int, count: int, port: int) -> None:
    def enter() -> Group:
        at = LOOPBACK, port
        return Group(rank, count, join(lambda: at, rank, count, job.timeouts, f"{LOOPBACK}:{port}"))

    notice_sigterm()
    end_with_parent()
    run_worker(job, enter, lambda group: _connect(job, group, rank))
    ignore_sigterm()


def _run_under_torchrun(job: Job, num_chips: int | None, place: Place) -> None:
    if job.kind == "xla":  # torch_xla 2.9 would train a separate model in each process
        raise UserError("torchrun does not start TPU workers; start the script itself, once on every host")
    if num_chips and num_chips != place.local_world_size:
        raise UserError(
            f"--num-chips {num_chips} contradicts torchrun's {place.local_world_size} workers; leave out --num-chips"
        )
    if job.kind == "cuda":
        check_devices(place.local_rank, place.local_world_size)

    def enter() -> Group:
        return join_at(place, job.timeouts) if place.world_size > 1 else ALONE

    def open_backend(group: Group) -> TorchBackend:
        notice_sigterm()
        local_rank = place.local_rank if "LOCAL_RANK" in os.environ else group.neighbours.index(group.rank)
        if job.kind == "cuda":
            check_devices(local_rank, len(group.neighbours))
        return _connect(job, group, local_rank)

    run_worker(job, enter, open_backend)
    if place.agent_store and not place.one_host and not place.local_rank and stopped_at():
        pass_exit_barrier(place)


def check_devices(local_rank: int, workers: int) -> None:
    """Raise UserError if this host has no GPU for one of its workers."""
    if local_rank >= torch.cuda.device_count():
        raise UserError(
            f"torchrun started {workers} workers here, but this machine has {torch.cuda.device_count()} CUDA devices; "
            "lower --nproc-per-node"
        )


def _connect(job: Job, group: Group, local_rank: int) -> TorchBackend:
    """The backend of one of several workers, connected by torch.distributed's process group."""
    if group.rank:
        be_silent()
    if job.kind == "cuda":
        torch.cuda.set_device(local_rank)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, os.cpu_count() // len(group.neighbours)))
    if group.world_size == 1:
        return TorchBackend(job.kind, job.precision)
    if name := interface(group):  # otherwise they listen on whatever the host's name resolves to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    with group.losing_none():
        dist.init_process_group(
            "nccl" if job.kind == "cuda" else "gloo",
            store=tensor_store(group),
            rank=group.rank,
            world_size=group.world_size,
            timeout=FOREVER,
        )
    return check_world(TorchBackend(job.kind, job.precision, group), group.world_size)


# -- the process that started the workers ----------------------------------------------------------------------------
@contextmanager
def sigterm_forwarded():
    """Within this context every SIGTERM is passed on to the child processes, which save while this process waits for
    them. If one was passed on, those that arrive after the context are ignored."""

    def forward(*_):
        SIGTERM.set()
        for child in multiprocessing.active_children():
            child.terminate()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, forward)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN if SIGTERM.is_set() else before)


def end_with(who: str, code: int, reported: bool = True) -> None:
    """End this process with the exit code of the first worker that failed, and report it if that worker could not."""
    if code == -signal.SIGTERM and SIGTERM.is_set():  # stopped on request, before there was anything to save
        sys.exit(128 - code)
    if code < 0:
        say(f"error: {who} was killed ({signal.Signals(-code).name}); the others were ended; resume with --resume auto")
        code = 128 - code
    elif not reported:
        say(f"error: {who} ended with exit code {code}; the others were ended; resume with --resume auto")
    sys.exit(code)
