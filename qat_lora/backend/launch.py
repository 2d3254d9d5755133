"""One call that runs a worker on every chip, GPU or CPU process of a job, on one host or several."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from torch.multiprocessing import ProcessExitedException, start_processes

from qat_lora.backend import detect
from qat_lora.backend.group import PATIENCE, Group, notice_sigterm
from qat_lora.backend.torch import TorchBackend
from qat_lora.errors import UserError, report

GRACE = 4  # seconds that the other workers get after one has died, twice: to end by themselves, and after SIGTERM
# What torch_xla reads of a part of a host's chips, which are taken from number 0 on. Untested on hardware.
PROCESS_BOUNDS = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}


def launch(
    worker: Callable,
    args: tuple = (),
    device: str = "auto",
    precision: str = "auto",
    num_chips: int | None = None,
    debug: bool = False,
) -> None:
    """Call worker(backend, *args) in every worker of a job, and come back when all are done.

    num_chips: TPU chips, GPUs or CPU processes of this host; None is one, 0 every chip or GPU there is. One is called
    here, in this process; more are processes of their own (`worker` and `args` are pickled), TPU chips by
    torch_xla.launch. On a TPU slice give the same command on every host. Under torchrun (RANK in the environment) this
    process is one worker of those. SIGTERM reaches every worker, and none outlives this process. The first worker to
    fail ends the job within seconds, with its exit code. Raises UserError where more is asked than there is, or a chip
    is held by another process.
    """
    kind = detect.resolve(device)
    if "RANK" in os.environ:
        return _run_under_torchrun(worker, args, kind, precision, num_chips, debug)
    count = count_workers(kind, num_chips)
    if count == 1:
        worker(open_backend(device, precision), *args)
    elif kind == "xla":
        _spawn_xla(worker, args, precision, count, debug)
    else:
        _spawn(worker, args, kind, precision, count, debug)


def open_backend(requested: str = "auto", precision: str = "auto") -> TorchBackend:
    """The backend of one worker alone on `requested` (auto, cpu, cuda, tpu, xla). precision: auto, fp32 or bf16
    autocast.

    torch_xla is imported here, and only when the device resolved to XLA.
    """
    kind = detect.resolve(requested)
    if kind != "xla":
        return TorchBackend(kind, precision)
    _take_chips(1)
    from qat_lora.backend.xla import XlaBackend

    return XlaBackend(precision)


def count_workers(kind: str, num_chips: int | None) -> int:
    """How many workers of a resolved backend this host starts. Raises UserError where it has not that many."""
    chips = len(detect.tpu_chips()) if kind == "xla" else 0
    if kind == "cpu":
        there, what = os.cpu_count(), "CPU cores"
    elif kind == "cuda":
        there, what = torch.cuda.device_count(), "CUDA devices"
    else:
        there, what = (chips, "TPU chips") if chips else (int(os.environ.get("CPU_NUM_DEVICES", 1)), "XLA CPU devices")
    if num_chips is None:
        return 1
    flag = f"--num-chips {num_chips}"
    if num_chips == 0:
        limit = os.environ.get("TPU_NUM_DEVICES") if chips else None
        if limit is not None and not limit.isdecimal():
            raise UserError(f"TPU_NUM_DEVICES={limit} is not a number of chips; unset it or give --num-chips")
        num_chips = int(limit or 0) or (1 if kind == "cpu" else there)
        flag = f"TPU_NUM_DEVICES={limit}" if limit else flag
    if not 1 <= num_chips <= there:
        raise UserError(f"{flag}: this machine has {there} {what}; ask for 1 to {there}")
    if chips and num_chips != chips and num_chips not in PROCESS_BOUNDS:
        raise UserError(f"{flag}: a part of a host's chips is 1, 2, 4 or 8 of them")
    return num_chips


def planned_workers(kind: str, num_chips: int | None) -> int:
    """The workers of a dry run, which may be planned on another machine than it is for."""
    return num_chips if (num_chips or 0) > 0 else count_workers(kind, num_chips)


def _take_chips(count: int) -> None:
    """Limit the TPU runtime to `count` chips of this host: torch_xla 2.9 itself does not read TPU_NUM_DEVICES.

    torch_xla gives worker k of several the chip k, and knows the bounds of a whole host.
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
    detect.check_free(taken.split(","))


# -- one worker ------------------------------------------------------------------------------------------------------
def run_worker(worker: Callable, args: tuple, open_backend: Callable, debug: bool) -> None:
    """worker(open_backend(), *args); a failure is reported once in the job and ends the process with its exit code.

    What is no UserError shows its traceback. The process is ended hard: another thread may be waiting for a worker.
    """
    backend = None
    try:
        backend = open_backend()
        try:
            worker(backend, *args)
        except SystemExit as stop:  # preempted, or nothing to do
            if stop.code:
                raise
        backend.group.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    except BaseException as error:
        if backend is None or backend.group.is_first_to_fail():
            code = report(error, with_traceback=debug or not isinstance(error, UserError | KeyboardInterrupt))
        else:
            code = 2 if isinstance(error, UserError) else 1
            time.sleep(1)  # the first one's exit code is the job's
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def check_world(backend: TorchBackend, wanted: int) -> TorchBackend:
    """The backend, once a sum over all workers has shown that they found each other.

    Raises UserError where they did not: each would train a model of its own, the commonest silent failure.
    """
    one = torch.ones((), device=backend.device)
    backend.reduce([one])
    backend.step_boundary()
    found = int(backend.fetch(one)[0])
    if found != wanted:
        raise UserError(f"{wanted} workers were started and {found} found each other; the job is stopped")
    return backend


def end_with_parent() -> None:
    """End this process hard once the one that started it is gone: killed, that had no time to end its workers, and
    they may be waiting for each other."""
    parent = multiprocessing.parent_process()
    if parent:
        threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def be_silent() -> None:
    """Worker 0 speaks for all; errors still reach stderr."""
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115


# -- CPU processes and GPUs ------------------------------------------------------------------------------------------
def _spawn(worker, args, kind: str, precision: str, count: int, debug: bool) -> None:
    # The store lives here, where no worker's end can close it.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    job = (worker, args, kind, precision, count, store.port, debug)
    context = start_processes(_spawned, job, nprocs=count, join=False, start_method="spawn")
    with sigterm_forwarded():
        try:
            while not context.join(grace_period=GRACE):
                pass
        except ProcessExitedException as end:
            _end_with(end.error_index, end.exit_code)


def _spawned(rank: int, worker, args, kind: str, precision: str, count: int, port: int, debug: bool) -> None:
    def open_backend():
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        return _connect(kind, precision, Group(rank, count, dist.PrefixStore("host", store)), store, rank, count)

    notice_sigterm()
    end_with_parent()
    run_worker(worker, args, open_backend, debug)


def _run_under_torchrun(worker, args, kind: str, precision: str, num_chips: int | None, debug: bool) -> None:
    if kind == "xla":  # torch_xla 2.9 would train a model in each process, and none would know of the others
        raise UserError("torchrun does not start TPU workers; start the script itself, once on every host")
    local = {name: int(os.environ.get(name, default)) for name, default in
             (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1), ("WORLD_SIZE", 1))}  # fmt: skip
    if num_chips and num_chips != local["LOCAL_WORLD_SIZE"]:
        raise UserError(f"--num-chips {num_chips} and torchrun's {local['LOCAL_WORLD_SIZE']} workers; leave one out")
    if kind == "cuda" and local["LOCAL_RANK"] >= torch.cuda.device_count():
        raise UserError(
            f"torchrun started {local['LOCAL_WORLD_SIZE']} workers here, this machine has "
            f"{torch.cuda.device_count()} CUDA devices; lower --nproc-per-node"
        )

    def open_backend():
        store, rank, world_size = next(rendezvous("env://"))
        serves = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
        group = Group(rank, world_size, dist.PrefixStore("host", store), serves)
        return _connect(kind, precision, group, store, local["LOCAL_RANK"], local["LOCAL_WORLD_SIZE"])

    notice_sigterm()
    run_worker(worker, args, open_backend, debug)


def _connect(kind: str, precision: str, group: Group, store, local_rank: int, local_count: int) -> TorchBackend:
    """The backend of one of several workers, with torch.distributed's process group behind it."""
    if group.rank:
        be_silent()
    if kind == "cuda":
        torch.cuda.set_device(local_rank)
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, os.cpu_count() // local_count))
    dist.init_process_group(
        "nccl" if kind == "cuda" else "gloo", store=dist.PrefixStore("tensors", store), rank=group.rank,
        world_size=group.world_size, timeout=timedelta(seconds=PATIENCE),
    )  # fmt: skip
    return check_world(TorchBackend(kind, precision, group), group.world_size)


# -- TPU chips -------------------------------------------------------------------------------------------------------
class XlaWorker:
    """What torch_xla.launch calls in a thread of each process. Unpickled in that process's main thread, the only one
    in which Python lets SIGTERM be caught."""

    def __init__(self, worker: Callable, args: tuple, precision: str, count: int, debug: bool):
        self.job = worker, args, precision, count, debug

    def __setstate__(self, state: dict) -> None:
        vars(self).update(state)
        notice_sigterm()
        end_with_parent()
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # the main thread only waits for the worker's

    def __call__(self, _: int) -> None:
        from qat_lora.backend import xla

        worker, args, precision, count, debug = self.job

        def open_backend():
            group = xla.connect()
            cores = detect.cores_per_chip()
            if group.rank >= cores and detect.tpu_chips():  # on CPU devices all workers are threads of one process
                be_silent()
            return check_world(xla.XlaBackend(precision, group), count * xla.hosts() * cores)

        run_worker(worker, args, open_backend, debug)


def _spawn_xla(worker, args, precision: str, count: int, debug: bool) -> None:
    import torch_xla

    _take_chips(count)
    codes: list[int] = []
    done = threading.Event()
    watch = threading.Thread(target=_end_survivors, args=(codes, done), daemon=True)
    watch.start()
    with sigterm_forwarded():
        try:
            torch_xla.launch(XlaWorker(worker, args, precision, count, debug))
        except BrokenProcessPool:
            watch.join(GRACE)
            # those that the pool itself has ended by SIGTERM come second
            _end_with(None, next((code for code in codes if code != -signal.SIGTERM), 1))
        finally:
            done.set()


def _end_survivors(codes: list[int], done: threading.Event) -> None:
    """Once a child process has failed, note the exit codes and kill the others, which may wait for it for ever."""
    children: set = set()
    while not codes:
        if done.wait(0.5):
            return
        children |= set(multiprocessing.active_children())
        codes += [child.exitcode for child in children if child.exitcode]
    done.wait(2 * GRACE)
    for child in children:
        if child.is_alive():
            child.kill()


# -- the process that started them -----------------------------------------------------------------------------------
@contextmanager
def sigterm_forwarded():
    """Within this context SIGTERM goes to the child processes: they save, and this one waits for them."""

    def forward(*_):
        for child in multiprocessing.active_children():
            child.terminate()

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, forward)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end_with(rank: int | None, code: int) -> None:
    """End this process as the first failed worker ended; one that was killed had no say of its own."""
    if code < 0:
        who = "a worker" if rank is None else f"worker {rank}"
        print(
            f"error: {who} was killed ({signal.Signals(-code).name}); the others were ended; --resume auto goes on",
            file=sys.stderr,
        )
        code = 128 - code
    sys.exit(code)
