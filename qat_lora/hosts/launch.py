"""Starts the processes of a job on one host, or runs as one that torchrun has started; `backend.opening` says what
they do."""

import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from multiprocessing.connection import wait

import torch.distributed as dist

from qat_lora.errors import UserError, ignore_sigterm, nowhere, open_output, report, to_stderr
from qat_lora.hosts.environment import AGAIN, LOOPBACK, Timeouts, TorchrunPlace
from qat_lora.hosts.group import ALONE, SIGTERM, AnotherFailed, Group, WorkerLost, lost, notice_sigterm, stopped_at
from qat_lora.hosts.rendezvous import interface, join, join_at, pass_exit_barrier, serve, tensor_store
from qat_lora.hosts.revision import agree_on_code

GRACE = 8  # seconds that the other workers get to end by themselves after one has died
STARTING = 300  # seconds within which workers started by this process must join; a death is noticed sooner
FOREVER = timedelta(days=365)  # collectives have no time limit: the relay notices lost workers


@dataclass(frozen=True)
class Job:
    """What every worker runs, work(group, local_rank), and when it gives up on the others."""

    work: Callable[[Group, int], None]
    debug: bool
    timeouts: Timeouts


# -- one worker ------------------------------------------------------------------------------------------------------
def run_worker(job: Job, enter: Callable[[], Group], local_rank: Callable[[Group], int] | int) -> None:
    """Call job.work(enter(), local_rank). A failure is reported once per job and ends this process with its exit code.

    local_rank: this worker's number on its host, or how to tell it once the workers have met.

    Errors other than UserError show their traceback. The process ends with os._exit, since another thread may still be
    waiting for a worker.
    """
    group = ALONE
    open_output()
    try:
        group = enter()
        agree_on_code(group)
        try:
            job.work(group, local_rank if isinstance(local_rank, int) else local_rank(group))
        except SystemExit as stop:  # preempted, or nothing to do
            if stop.code:
                raise
        group.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    except BaseException as error:
        # FSDP's collectives run inside forward and backward passes
        if isinstance(error, RuntimeError) and re.search(r"/gloo/transport/|NCCL (error|communicator)", str(error)):
            error = lost(error)
        # another worker's failure before this one has joined is printed by the process that started both
        instead = None if group is ALONE and isinstance(error, AnotherFailed) else group.fail(error)
        if instead == "":
            code = report(error, with_traceback=job.debug or not isinstance(error, UserError | KeyboardInterrupt))
        else:
            code = 2 if isinstance(error, UserError) else 1
            if instead:
                to_stderr(f"error: {instead}")
        if isinstance(error, WorkerLost | AnotherFailed):  # the input is not at fault
            code = 1
        group.linger()
        if instead is None:
            time.sleep(1)  # the job ends with the exit code of the first worker to fail
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_with_parent() -> None:
    """End this process at once when its parent is gone. A killed parent cannot end its workers, which may be waiting
    for each other."""
    parent = multiprocessing.parent_process()
    if parent:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def be_silent() -> None:
    """Silence standard output, since worker 0 prints for all; errors still reach stderr."""
    sys.stdout = nowhere()


# -- processes of this host, and of torchrun ------------------------------------------------------------------------
def spawn(job: Job, count: int) -> None:
    """Run a job in `count` processes of this host."""
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
    run_worker(job, enter, rank)
    ignore_sigterm()


def run_under_torchrun(job: Job, place: TorchrunPlace) -> None:
    """Run a job's worker in this process, which torchrun has started."""

    def enter() -> Group:
        return join_at(place, job.timeouts) if place.world_size > 1 else ALONE

    def local_rank(group: Group) -> int:
        notice_sigterm()
        return place.local_rank if "LOCAL_RANK" in os.environ else group.neighbours.index(group.rank)

    run_worker(job, enter, local_rank)
    if place.agent_store and not place.one_host and not place.local_rank and stopped_at():
        pass_exit_barrier(place)


def connect(group: Group, carrier: str) -> None:
    """Connect this worker to the others by torch.distributed's process group. carrier: gloo or nccl."""
    if name := interface(group):  # otherwise they listen on whatever the host's name resolves to
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
    with group.losing_none():
        dist.init_process_group(
            carrier, store=tensor_store(group), rank=group.rank, world_size=group.world_size, timeout=FOREVER
        )


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
        to_stderr(
            f"error: {who} was killed ({signal.Signals(-code).name}); the others were ended; resume with --resume auto"
        )
        code = 128 - code
    elif not reported:
        to_stderr(f"error: {who} ended with exit code {code}; the others were ended; resume with --resume auto")
    sys.exit(code)
