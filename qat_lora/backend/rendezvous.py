"""Where the workers of a job meet: a store served by one process, on the loopback interface if they share a host."""

import errno
import socket
import threading
import time
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore

from qat_lora.backend import group
from qat_lora.backend.environment import LOOPBACK, Place
from qat_lora.backend.group import Group, say
from qat_lora.errors import UserError, first_line

GREETING = 20  # seconds within which a store answers; a server that takes longer is something else


def serve(port: int, one_host: bool) -> TCPStore:
    """A store served by this process; port 0 picks a free one. With one_host only this host can reach it.

    By default TCPStore listens on all interfaces, and values are pickled: whoever reaches the port can run code here.
    Raises UserError if the port is in use or may not be opened.
    """
    try:
        if one_host:
            listening = socket.create_server((LOOPBACK, port))
        elif socket.has_dualstack_ipv6():
            listening = socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        else:
            listening = socket.create_server(("", port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            fix = (
                "end the program that listens there (another job, or a second worker 0), or give all workers another "
                "MASTER_PORT"
            )
            raise UserError(f"MASTER_PORT={port} is in use on this host; {fix}") from error
        fix = "give all workers a MASTER_PORT from 1024 to 65535"
        raise UserError(f"MASTER_PORT={port} cannot be listened on ({error.strerror}); {fix}") from error
    port = listening.getsockname()[1]
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


def join(address: str, port: int, who: str) -> TCPStore:
    """A client of the store at address:port, which may not be up yet. who: the name of this worker in messages.

    Raises UserError if no store appears within RENDEZVOUS seconds, or if another kind of server answers.
    """
    started, told = time.monotonic(), False
    while True:
        try:
            socket.create_connection((address, port), timeout=5).close()
            break
        except OSError as error:
            waited = time.monotonic() - started
            if waited > group.RENDEZVOUS:
                raise UserError(
                    f"{who} found nothing at {address}:{port} within {group.RENDEZVOUS:g} s ({error.strerror or error})"
                    "; start worker 0 there (RANK=0), or correct MASTER_ADDR and MASTER_PORT"
                ) from error
            if waited > group.NOTICE and not told:
                told = True
                say(f"{who} is waiting for the job's store, which worker 0 opens at {address}:{port}")
            time.sleep(0.2)
    return _greeted(address, port)


def _greeted(address: str, port: int) -> TCPStore:
    """A client of the store at address:port. Connects in a thread, because another kind of server may never answer."""
    found: list = []

    def greet() -> None:
        try:
            found.append(TCPStore(address, port, is_master=False, timeout=timedelta(seconds=group.RENDEZVOUS)))
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=greet, daemon=True)
    thread.start()
    thread.join(GREETING)
    if not found or isinstance(found[0], RuntimeError):
        why = first_line(found[0]) if found else f"no answer within {GREETING} s"
        raise UserError(
            f"MASTER_PORT={port}: what listens at {address}:{port} is not worker 0 of a job ({why}); end that program, "
            "or give all workers another MASTER_PORT"
        )
    return found[0]


def join_at(place: Place) -> Group:
    """This worker's group; call `Group.meet` next. Raises UserError as `serve` and `join` do."""
    serves = place.rank == 0 and not place.agent_store
    if serves:
        store = serve(place.port, place.one_host)
    else:
        address = LOOPBACK if place.one_host and not place.agent_store else place.address
        store = join(address, place.port, f"worker {place.rank}")
    return Group(place.rank, place.world_size, PrefixStore(f"attempt {place.attempt}/host", store), serves)
