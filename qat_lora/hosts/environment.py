"""Environment variables set by the shell, a launcher or a scheduler, checked before they are used, and a job's time
limits."""

import os
import re
import socket
from dataclasses import dataclass
from ipaddress import ip_address

from qat_lora.errors import UserError

LARGEST = 2**31 - 1
MOST_WORKERS = 2**16
AGAIN = "restart the job with --resume auto"
LOOPBACK = "127.0.0.1"
MEANING = {
    "RANK": "this worker's number, from 0 to WORLD_SIZE - 1",
    "WORLD_SIZE": "the number of workers of the job",
    "LOCAL_RANK": "this worker's number on its host, from 0 to LOCAL_WORLD_SIZE - 1",
    "LOCAL_WORLD_SIZE": "the number of workers on this host",
    "MASTER_ADDR": "the name or address of worker 0's host",
    "MASTER_PORT": "a free port of worker 0's host, from 1 to 65535",
    "TPU_NUM_DEVICES": "the number of TPU chips to use (0 for all of them)",
    "CPU_NUM_DEVICES": "the number of torch_xla's CPU devices",
}
REQUIRED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")  # torchrun sets them; so do most schedulers
STARTED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")  # only a launcher sets any of these
LAUNCH = (*REQUIRED, "LOCAL_RANK", "LOCAL_WORLD_SIZE")


def whole_number(name: str, least: int, most: int = LARGEST, default: int | None = None) -> int | None:
    """An environment variable as an integer from `least` to `most`, or `default` if it is not set.

    Raises UserError naming the variable, its value and what it should be.
    """
    text = os.environ.get(name)
    if text is None:
        return default
    text = text.strip()
    if not re.fullmatch("-?[0-9]{1,18}", text) or not least <= int(text) <= most:
        span = f"from {least} to {most}" if most < LARGEST else f"of at least {least}"
        raise bad_value(name, f"is not a whole number {span}" if text else "is empty")
    return int(text)


def bad_value(name: str, what: str) -> UserError:
    """The error for an environment variable that is set to a bad value; what: the fault, as in "is empty"."""
    launched = name in LAUNCH and any(other in os.environ for other in STARTED)
    way_out = _without_launcher(name) if launched else f"unset {name}"
    return UserError(f"{name}={os.environ[name]} {what}; set it to {MEANING[name]}, or {way_out}")


def _without_launcher(*bad: str) -> str:
    """How to start without torchrun: unset what a launcher has set, and the variables that are bad anyway."""
    *names, last = dict.fromkeys([*(name for name in STARTED if name in os.environ), *bad])
    return f"unset {', '.join(names)}{' and ' if names else ''}{last} to start without torchrun"


@dataclass(frozen=True)
class TorchrunPlace:
    """One worker's place in a job that torchrun or a similar launcher has started.

    address, port: where the workers meet. agent_store: whether torchrun's agent serves a store there, which may outlive
    many attempts of several jobs; job: the name of this job.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    address: str
    port: int
    agent_store: bool
    job: str

    @property
    def one_host(self) -> bool:
        return self.local_world_size == self.world_size


def read_place() -> TorchrunPlace | None:
    """This worker's place according to RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
    None if no launcher was used: RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE are not set. MASTER_ADDR and
    MASTER_PORT, which shells and images may set, are then ignored, but a MASTER_PORT that is not a port is refused.

    Without LOCAL_WORLD_SIZE the job is on one host if MASTER_ADDR is a loopback address; otherwise one worker per host
    is assumed until the workers have met. Without LOCAL_RANK workers are numbered host by host. Raises UserError for a
    variable that is missing, is not a number or contradicts another.
    """
    if not any(name in os.environ for name in STARTED):
        whole_number("MASTER_PORT", 1, 65535)
        return None
    world_size = whole_number("WORLD_SIZE", 1, MOST_WORKERS)
    rank = whole_number("RANK", 0)
    port = whole_number("MASTER_PORT", 1, 65535)
    if missing := [name for name in REQUIRED if name not in os.environ]:
        there = ", ".join(f"{name}={os.environ[name]}" for name in LAUNCH if name in os.environ)
        raise UserError(
            f"the environment has {there} but no {', '.join(missing)}; start with torchrun, which sets all of them, or "
            f"{_without_launcher()}"
        )
    _check_below("RANK", rank, "WORLD_SIZE", world_size)
    loopback = _is_loopback(port)
    local_rank = whole_number("LOCAL_RANK", 0)
    _check_below("LOCAL_RANK", local_rank or 0, "WORLD_SIZE", world_size)
    local_world_size = whole_number("LOCAL_WORLD_SIZE", 1, default=world_size if loopback else (local_rank or 0) + 1)
    if local_world_size > world_size:
        raise bad_value("LOCAL_WORLD_SIZE", f"is more than WORLD_SIZE={world_size}")
    if local_rank is None:
        local_rank = rank % local_world_size
    _check_below("LOCAL_RANK", local_rank, "LOCAL_WORLD_SIZE", local_world_size)
    if not 0 <= rank - local_rank <= world_size - local_world_size:
        raise UserError(
            f"LOCAL_RANK={local_rank} of LOCAL_WORLD_SIZE={local_world_size} contradicts RANK={rank} of "
            f"WORLD_SIZE={world_size}; start with torchrun, which sets all of them, or {_without_launcher()}"
        )
    return TorchrunPlace(
        rank, world_size, local_rank, local_world_size, os.environ["MASTER_ADDR"].strip(), port,
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True", os.environ.get("TORCHELASTIC_RUN_ID", ""),
    )  # fmt: skip


def _check_below(name: str, value: int, limit_name: str, limit: int) -> None:
    if value >= limit:
        raise bad_value(name, f"is not below {limit_name}={limit}")


def _is_loopback(port: int) -> bool:
    """Whether MASTER_ADDR itself says that all workers are on this host. A host name does not count, even if it
    resolves to a loopback address, as on Debian. Raises UserError if it does not resolve."""
    address = os.environ["MASTER_ADDR"].strip()
    if not address:
        raise bad_value("MASTER_ADDR", "is empty")
    try:
        socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise bad_value("MASTER_ADDR", f"cannot be resolved ({getattr(error, 'strerror', None) or error})") from error
    try:
        return ip_address(address).is_loopback
    except ValueError:  # a name
        return address == "localhost"


def master_port() -> int:
    """The port of worker 0's store on a TPU slice: MASTER_PORT, 29500 unless set."""
    return whole_number("MASTER_PORT", 1, 65535, default=29500)


def slice_hosts() -> tuple[int, str]:
    """How many hosts a TPU slice has according to the environment, and the variable that says so, for messages; (1, "")
    if none does. A worker number above 0 implies that many other hosts."""
    for name in ("TPU_PROCESS_ADDRESSES", "TPU_WORKER_HOSTNAMES"):
        hosts = {entry.strip().rsplit(":", 1)[0] for entry in os.environ.get(name, "").split(",") if entry.strip()}
        if len(hosts) > 1:
            return len(hosts), f"{name}={os.environ[name]}"
    for name in ("CLOUD_TPU_TASK_ID", "TPU_WORKER_ID"):
        number = os.environ.get(name, "").strip()
        if number.isdecimal() and int(number) > 0:
            return int(number) + 1, f"{name}={number}"
    return 1, ""


@dataclass(frozen=True)
class Timeouts:
    """Seconds. host: how soon the other hosts end after one is lost. join: how long to wait for all workers."""

    host: float = 60
    join: float = 60

    @property
    def silence(self) -> float:
        """How long a worker may be silent before it counts as lost; the rest of `host` is for ending the job."""
        return 0.55 * self.host

    def grace(self, waiting: bool) -> float:
        """How long the main thread has to notice by itself that the job has ended, and to report it: longer if it is
        not waiting for others, since it may be writing a checkpoint."""
        return (0.1 if waiting else 0.25) * self.host

    @property
    def stop(self) -> float:
        """How long after SIGTERM a worker still waits for the others to finish the step."""
        return 0.9 * self.host

    @property
    def reaping(self) -> float:
        """How long a launcher has to notice that its worker has ended."""
        return 0.15 * self.host
