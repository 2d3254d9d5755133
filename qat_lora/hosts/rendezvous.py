"""Where the workers of a job meet: at a relay that worker 0 serves, on the loopback interface if they share a host."""

import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import psutil
from torch.distributed import PrefixStore, Store, TCPStore

from qat_lora.errors import UserError, first_line, to_stderr
from qat_lora.hosts.environment import AGAIN, LOOPBACK, Timeouts, TorchrunPlace
from qat_lora.hosts.group import Group, stopped_at
from qat_lora.hosts.link import Link, Refused, this_member
from qat_lora.hosts.relay import NOTICE, Relay

START_AGAIN = f"check that its host and network are up, then {AGAIN}"
MEETING = "qat_lora/relay"  # key of the relay's address in torchrun's store, written anew after each restart
EXIT_BARRIER = 20  # seconds; torchrun kills workers that are not done after 30
ROUNDS = 100  # of one job's rendezvous, among which its exit barrier is looked for
UNREACHABLE = errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ETIMEDOUT  # maybe reported only on first use
RDZV_PORT = 29400  # if torchrun's endpoint names none


def listen(port: int, one_host: bool) -> socket.socket:
    """A socket that listens on a port (0: a free one). With one_host only this host can reach it.

    Raises UserError if the port is in use or cannot be opened.
    """
    try:
        if one_host:
            return socket.create_server((LOOPBACK, port))
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            fix = (
                "end the program that listens there (another job, or a second worker 0), or give all workers another "
                "MASTER_PORT"
            )
            raise UserError(f"MASTER_PORT={port} is in use on {socket.gethostname()}; {fix}") from error
        fix = "give all workers a MASTER_PORT from 1024 to 65535"
        raise UserError(f"MASTER_PORT={port} cannot be opened ({error.strerror}); {fix}") from error


def serve(
    port: int, one_host: bool, world_size: int, timeouts: Timeouts, where: str = "", tensors: bool = True,
    reports_deaths: bool = False,
) -> Relay:  # fmt: skip
    """Start a job's relay in this process (see `Relay`). tensors: add a store for torch's process group, which carries
    tensors. where: the address shown in messages."""
    listening, store = listen(port, one_host), None
    if tensors:
        other = listen(0, one_host)
        at = other.getsockname()[1]
        store = TCPStore(LOOPBACK, at, is_master=True, wait_for_workers=False, master_listen_fd=other.detach())
    where = where or f"{LOOPBACK}:{listening.getsockname()[1]}"
    return Relay(listening, world_size, timeouts, where, store, reports_deaths)


def join(
    address: Callable[[], tuple[str, int] | None], rank: int, world_size: int, timeouts: Timeouts, where: str,
    again: bool = False,
) -> Link:  # fmt: skip
    """This worker's link to the relay, once all workers have joined.

    address(): the relay's address, or None if it is not known yet; called before each attempt. again: retry if a relay
    refuses this worker, since that relay may belong to an earlier attempt. Raises UserError after timeouts.join at the
    latest, saying what was found instead.
    """
    started, told = time.monotonic(), False
    while True:
        at = address()
        try:
            if at is None:
                raise OSError(0, "worker 0 has not opened it yet")
            connection = socket.create_connection(at, timeout=5)
            try:
                link = Link(connection, this_member(rank), world_size, timeouts, stopped_at)
                link.enter()
                return link
            except Refused as refused:
                if not (again or refused.again):
                    raise
                why = str(refused)
            except (ValueError, OSError) as error:
                if isinstance(error, UserError):
                    raise
                why = first_line(error)
                if not (again or getattr(error, "errno", None) in UNREACHABLE):
                    raise UserError(
                        f"MASTER_PORT={at[1]}: the program at {where} is not worker 0 of a job ({why}); end it, or "
                        "give all workers another MASTER_PORT"
                    ) from error
            connection.close()
        except OSError as error:
            why = error.strerror or first_line(error)
        waited = time.monotonic() - started
        if waited > timeouts.join:
            raise UserError(
                f"worker {rank} on {socket.gethostname()} found no worker 0 at {where} within {timeouts.join:g} s "
                f"({why}); start worker 0 there (RANK=0), correct MASTER_ADDR or MASTER_PORT, or raise --join-timeout "
                "if hosts start slowly"
            )
        if waited > NOTICE and not told:
            told = True
            to_stderr(f"worker {rank} is waiting for worker 0 at {where} ({why})")
        time.sleep(0.2)


def join_at(place: TorchrunPlace, timeouts: Timeouts) -> Group:
    """This worker's group in a job that torchrun or another launcher has started. Raises UserError as `serve` and
    `join` do."""
    if place.agent_store:
        return _join_under_torchrun(place, timeouts)
    relay, where = None, f"{place.address}:{place.port}"
    if place.rank == 0:
        relay = serve(place.port, place.one_host, place.world_size, timeouts, where)
    # worker 0 also connects to MASTER_ADDR: a second worker 0, or one on another host, finds the first one there
    at = (LOOPBACK if place.one_host else place.address), place.port
    link = join(lambda: at, place.rank, place.world_size, timeouts, where)
    return Group(place.rank, place.world_size, link, relay)


def _join_under_torchrun(place: TorchrunPlace, timeouts: Timeouts) -> Group:
    """torchrun's MASTER_PORT belongs to its agent's store, which outlives restarts, so worker 0 serves a relay on a
    free port and puts its address in the store."""
    at, relay = f"{place.address}:{place.port}", None
    where = f"{at} (torchrun's store)"

    def answered(function: Callable):
        """function(); if the store's host does not answer, end this process, since the call would wait forever."""
        overdue = threading.Timer(timeouts.join, _give_up, [f"torchrun's store at {at} does not answer"])
        overdue.daemon = True
        overdue.start()
        try:
            return function()
        except RuntimeError as error:
            raise UserError(f"torchrun's store at {at} does not answer ({first_line(error)}); {START_AGAIN}") from error
        finally:
            overdue.cancel()

    def address() -> tuple[str, int] | None:
        if relay:
            return LOOPBACK, relay.port
        found = answered(lambda: store.get("address") if store.check(["address"]) else None)
        return found and tuple(json.loads(found))

    client = answered(lambda: TCPStore(place.address, place.port, timeout=timedelta(seconds=timeouts.join)))
    store = PrefixStore(f"{MEETING}/{place.job}", client)
    if place.rank == 0:
        relay = serve(0, place.one_host, place.world_size, timeouts, where)
        mine = LOOPBACK if place.one_host else route_to(place.address)
        if mine.startswith("127.") and not place.one_host:  # the store is on this host, and the others can reach it
            mine = place.address
        answered(lambda: store.set("address", json.dumps([mine, relay.port])))
    link = join(address, place.rank, place.world_size, timeouts, where, again=True)
    return Group(place.rank, place.world_size, link, relay)


def _give_up(line: str) -> None:
    to_stderr(f"error: {line}; {START_AGAIN}")
    os._exit(1)


def pass_exit_barrier(place: TorchrunPlace) -> None:
    """Wait at torchrun's exit barrier in the place of this host's torchrun; at most EXIT_BARRIER seconds.

    On SIGTERM torchrun exits without going there. On the other hosts it would wait for five minutes, or fail if its
    store was on this host and their workers have not quite ended. (torch 2.9: SimpleElasticAgent._exit_barrier; if
    another version uses other keys, all that is lost are these seconds.)
    """
    hosts, ends = int(os.environ["GROUP_WORLD_SIZE"]), time.monotonic() + EXIT_BARRIER
    # the first is used with --node-rank and --master-addr; otherwise each restart of a job is another round
    jobs = [place.job, *(f"torch.rendezvous.{place.job}.{number}" for number in range(ROUNDS))]
    barriers = [f"{job}/torchelastic/agent/terminal_state" for job in jobs]
    with suppress(RuntimeError, OSError, ValueError, StopIteration, SystemExit):  # nobody waits, or it is not torchrun
        store = TCPStore(*_torchruns_endpoint(), timeout=timedelta(seconds=5))
        for barrier in barriers:
            if store.add(f"{barrier}/num_members", 1) == hosts:
                store.set(f"{barrier}/last_member", "")
        while not any(store.check([f"{barrier}/last_member"]) for barrier in barriers) and time.monotonic() < ends:
            time.sleep(0.1)


def _torchruns_endpoint() -> tuple[str, int]:
    """Where the torchruns of this job meet, according to the command line of this host's."""
    from torch.distributed.run import get_rdzv_endpoint, parse_args

    words = Path(f"/proc/{os.getppid()}/cmdline").read_text(encoding="utf-8").split("\0")[:-1]
    at = next(number for number, word in enumerate(words) if word.endswith(("torchrun", "torch.distributed.run")))
    host, _, port = get_rdzv_endpoint(parse_args(words[at + 1 :])).rpartition(":")
    return (host, int(port)) if host else (port, RDZV_PORT)


# -- the route to the other workers ----------------------------------------------------------------------------------
def route_to(address: str) -> str:
    """This host's source address for packets to `address`; nothing is sent."""
    family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(target)
        return probe.getsockname()[0]


def interface(group: Group) -> str | None:
    """The network interface by which this worker reaches the others; None if it is unknown."""
    members = group.link.members
    mine = members[group.rank].machine
    others = [member.address for member in members if member.machine != mine]
    if others:
        with_relay = members[0].machine == mine
        address = route_to(others[0]) if with_relay else group.link.connection.getsockname()[0]
    else:
        address = LOOPBACK
    address = address.removeprefix("::ffff:").split("%")[0]
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.split("%")[0] == address for entry in entries):
            return name
    return None


def tensor_store(group: Group) -> Store:
    """The store where torch's process group meets, served next to the relay and used by this attempt only."""
    host = group.link.connection.getpeername()[0]
    store = TCPStore(host, group.link.store_port, is_master=False, timeout=timedelta(seconds=group.link.timeouts.join))
    return PrefixStore(group.link.nonce, store)
