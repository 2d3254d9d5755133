"""How the workers of a job talk to each other on the host, and notice when one is lost.

Every worker holds one TCP connection to a relay, served by worker 0 or by the process that started them all. The relay
passes values on, tells all workers at once when one dies, and within `Timeouts.host` when a host goes silent.

A frame is a kind (one byte), the length of its content (eight bytes) and the content. The relay never unpickles values.
"""

import asyncio
import atexit
import json
import queue
import secrets
import socket
import struct
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from enum import Enum
from typing import Any

from qat_lora.errors import to_stderr
from qat_lora.hosts.environment import AGAIN, Timeouts

BEAT = 1  # seconds between two heartbeats
GREETING = 10  # seconds within which a relay answers; a server that takes longer is something else
NOTICE = 20  # seconds of waiting for workers before a line is printed
PIECE = 2**20  # bytes read at a time
STRANGERS = 64  # connections beyond those of the workers that may stay open until they say who they are
HEAD = struct.Struct("!cQ")


LOOPS: weakref.WeakSet[asyncio.AbstractEventLoop] = weakref.WeakSet()


@atexit.register
def _close_loops() -> None:
    """Close the event loops while their sockets still exist: the interpreter's own clean-up may close those first and
    then print a traceback."""
    for loop in list(LOOPS):
        with suppress(RuntimeError):  # still running
            loop.close()


class Kind(bytes, Enum):
    """What a frame holds."""

    JOIN, VALUE, FAIL = b"J", b"V", b"F"  # from a worker: who it is, a value, a failure
    WELCOME, REFUSED, VALUES, ENDED = b"W", b"R", b"A", b"E"  # from the relay
    ALIVE, BYE = b"B", b"Q"  # from both: a heartbeat; a worker has finished, all have finished


@dataclass(frozen=True)
class Member:
    """One worker, as the others know it.

    host: the name of its host. machine: the same for workers that see each other's processes. terminal: the same for
    workers that share standard error. address: as the relay sees it.
    """

    rank: int
    host: str
    machine: str
    terminal: str
    pid: int
    address: str = ""

    def __str__(self):
        return f"worker {self.rank} on {self.host}"


@dataclass(frozen=True)
class Ending:
    """Why a job ends. culprit: the worker to blame, if there is one. said: whether the culprit or its launcher has
    already printed the error."""

    line: str
    culprit: int | None = None
    said: bool = False


def frame(kind: Kind, content: bytes = b"") -> bytes:
    return HEAD.pack(kind, len(content)) + content


def as_json(content) -> bytes:
    return json.dumps(content).encode()


def died(member: Member) -> str:
    return f"{member} (process {member.pid}) died (killed? out of memory?); see its terminal, then {AGAIN}"


def silent(member: Member, timeouts: Timeouts) -> str:
    return (
        f"no heartbeat from {member} for {timeouts.silence:g} s; check that the host and its network are up, then "
        f"{AGAIN}"
    )


class Relay:
    """Serves the workers of one job from a thread of this process, on a socket that already listens.

    where: its address, for messages. store: the process group's, kept alive by the relay; all workers are told its
    port. reports_deaths: whether this process started the workers and itself reports which of them died. Values are
    pickled, so anyone who reaches the port can run code in the workers.
    """

    def __init__(
        self, listening: socket.socket, world_size: int, timeouts: Timeouts, where: str, store: Any = None,
        reports_deaths: bool = False,
    ):  # fmt: skip
        self.world_size, self.timeouts, self.where = world_size, timeouts, where
        self.store, self.reports_deaths = store, reports_deaths
        self.port = listening.getsockname()[1]
        self.nonce = secrets.token_hex(8)
        self.members: dict[int, Member] = {}
        self.writers: dict[int, asyncio.StreamWriter] = {}  # of connected workers
        self.finished: set[int] = set()
        self.strangers = 0  # connections that have not yet said who they are
        self.heard: dict[int, float] = {}
        self.values: dict[int, bytes] = {}
        self.complete, self.ending = False, None
        self.died: int | None = None  # the worker whose connection closed without a goodbye
        self.empty = threading.Event()  # every worker has left
        self.loop = asyncio.new_event_loop()
        LOOPS.add(self.loop)
        ready = threading.Event()
        threading.Thread(target=self._run, args=(listening, ready), daemon=True).start()
        ready.wait()

    def end(self, line: str, culprit: int | None = None, said: bool = True) -> bool:
        """End the job for all workers, unless it has already ended; returns whether it had already ended."""
        done: queue.SimpleQueue = queue.SimpleQueue()

        def end() -> None:
            done.put(self.ending is not None)
            self._end(Ending(line, culprit, said))

        self.loop.call_soon_threadsafe(end)
        return done.get()

    def close(self) -> None:
        """Stop serving; for a process that goes on to other work."""
        self.loop.call_soon_threadsafe(self.serving.cancel)

    def _run(self, listening: socket.socket, ready: threading.Event) -> None:
        asyncio.set_event_loop(self.loop)
        self.serving = self.loop.create_task(self._serve(listening, ready))
        with suppress(asyncio.CancelledError):
            self.loop.run_until_complete(self.serving)
        self.loop.set_exception_handler(lambda *_: None)  # connections that are still open are dropped silently

    async def _serve(self, listening: socket.socket, ready: threading.Event) -> None:
        server = await asyncio.start_server(self._talk, sock=listening, limit=PIECE)
        ready.set()
        async with server:
            opened = last = time.monotonic()
            told = False
            while True:
                await asyncio.sleep(BEAT)
                now = time.monotonic()
                if now - last > 5 * BEAT:  # this process was held up, and could not hear the others
                    self.heard = dict.fromkeys(self.heard, now)
                last = now
                for writer in self.writers.values():
                    self._send(writer, Kind.ALIVE)
                for rank, heard in list(self.heard.items()) if self.complete else ():  # until then workers send nothing
                    if now - heard > self.timeouts.silence:
                        self._lose(rank)
                waited = now - opened
                if not self.complete and not self.ending and waited > self.timeouts.join:
                    self._end(Ending(self._missing()))
                elif not self.complete and not self.ending and waited > NOTICE and not told:
                    told = True
                    to_stderr(f"waiting for {self._late()} of {self.world_size} at {self.where}")

    def _late(self) -> str:
        late = [str(rank) for rank in range(self.world_size) if rank not in self.members]
        return f"worker{'s' * (len(late) > 1)} {', '.join(late)}"

    def _missing(self) -> str:
        came = ", ".join(f"{self.members[rank]}" for rank in sorted(self.members)) or "none"
        return (
            f"{self._late()} of {self.world_size} did not arrive at {self.where} within {self.timeouts.join:g} s "
            f"(arrived: {came}); start every RANK from 0 to {self.world_size - 1} with the same MASTER_ADDR and "
            "MASTER_PORT, or raise --join-timeout if hosts start slowly"
        )

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it closes."""
        rank = await self._greet(reader, writer)
        with suppress(OSError, EOFError, ValueError, TypeError):  # the other end is gone, or is not a worker
            while rank is not None:
                kind, content = await self._receive(reader, rank)
                if kind == Kind.VALUE:
                    self._pass_on(rank, content)
                elif kind == Kind.FAIL:
                    self._end(Ending(**json.loads(content)))
                elif kind == Kind.BYE:
                    self._finish(rank)
        if rank is not None and self.writers.get(rank) is writer:
            self._leave(rank)
            if not self.complete:
                del self.members[rank]  # another may take its place
            elif rank not in self.finished:
                self.died = rank if self.ending is None else self.died
                self._end(Ending(died(self.members[rank]), rank, self.reports_deaths))
        with suppress(OSError):
            writer.close()

    async def _greet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int | None:
        """The rank of the worker at the other end, once it has identified itself; None if it does not belong here."""
        if self.strangers >= self.world_size + STRANGERS:
            return None
        self.strangers += 1
        try:
            kind, content = await asyncio.wait_for(self._receive(reader, None, most=2**16), GREETING)
            return self._admit(kind, content, writer)
        except (OSError, EOFError, ValueError, KeyError, TypeError, RecursionError):
            return None
        finally:
            self.strangers -= 1

    async def _receive(self, reader: asyncio.StreamReader, rank: int | None, most: int = 2**63) -> tuple[bytes, bytes]:
        kind, length = HEAD.unpack(await reader.readexactly(HEAD.size))
        if length > most:
            raise ValueError("it does not speak our protocol")
        pieces = []
        while length:
            pieces.append(await reader.readexactly(min(length, PIECE)))
            length -= len(pieces[-1])
            if rank is not None:
                self.heard[rank] = time.monotonic()
        if rank is not None:
            self.heard[rank] = time.monotonic()
        return kind, b"".join(pieces)

    def _admit(self, kind: Kind, content: bytes, writer: asyncio.StreamWriter) -> int | None:
        """The rank of a worker that belongs here, or None after telling it why it does not."""
        if kind != Kind.JOIN:
            raise ValueError("it does not speak our protocol")
        asked = json.loads(content)
        member = Member(**asked["member"])
        known = all(type(getattr(member, field.name)) is field.type for field in fields(member))
        if not known or not 0 <= member.rank < asked["world_size"]:
            raise ValueError("it is not a worker")
        member = replace(member, address=writer.get_extra_info("peername")[0].removeprefix("::ffff:"))
        if self.ending and not self.complete:
            self._send(writer, Kind.ENDED, as_json(asdict(self.ending)))
            return None
        if self.ending:
            return self._refuse(writer, f"the job that was at {self.where} is ending", again=True)
        taken = self.members.get(member.rank)
        if asked["world_size"] != self.world_size:
            fault = f"WORLD_SIZE={asked['world_size']} contradicts the WORLD_SIZE={self.world_size} of worker 0"
            self._refuse(writer, f"{fault} at {self.where}; give every worker the same", member)
        elif taken:
            fault = f"RANK={member.rank} is taken by {taken} (process {taken.pid})"
            self._refuse(
                writer,
                f"{fault} at {self.where}; give each worker its own RANK and each job its own MASTER_PORT",
                member,
            )
        else:
            self.members[member.rank], self.writers[member.rank] = member, writer
            self.heard[member.rank] = time.monotonic()
            self._send(writer, Kind.ALIVE)
            if len(self.members) == self.world_size:
                self._welcome()
            return member.rank
        return None

    def _refuse(self, writer, line: str, member: Member | None = None, again: bool = False) -> None:
        self._send(writer, Kind.REFUSED, as_json({"line": line, "again": again}))
        if member and not self.complete:  # the worker that should have joined in its place is missing
            self._end(Ending(f"a worker on {member.host} does not belong to this job: {line}"))

    def _welcome(self) -> None:
        self.complete, ranks = True, range(self.world_size)
        self.heard = dict.fromkeys(ranks, time.monotonic())
        names: dict[str, set[str]] = {}  # hosts may share a name ("localhost")
        for member in self.members.values():
            names.setdefault(member.host, set()).add(member.machine)
        self.members = {
            m.rank: replace(m, host=f"{m.host} ({m.address})") if len(names[m.host]) > 1 else m
            for m in self.members.values()
        }
        members = [asdict(self.members[rank]) for rank in ranks]
        store_port = self.store.port if self.store else 0
        content = as_json({"members": members, "nonce": self.nonce, "store_port": store_port})
        for rank in ranks:
            self._send(self.writers[rank], Kind.WELCOME, content)

    def _pass_on(self, rank: int, value: bytes) -> None:
        self.values[rank] = value
        self._check_calls()
        if len(self.values) == self.world_size:
            parts = [self.values[rank] for rank in range(self.world_size)]
            content = b"".join(len(part).to_bytes(8) + part for part in parts)
            self.values = {}
            for writer in self.writers.values():
                self._send(writer, Kind.VALUES, content)

    def _check_calls(self) -> None:
        """End the job if a worker waits for the value of one that has finished: it would wait forever."""
        if self.values and self.finished:
            first = min(self.finished)
            self._end(Ending(f"{self.members[first]} finished before the others; {AGAIN}", first))

    def _finish(self, rank: int) -> None:
        """Note that a worker needs nothing more from the others. It stays until all are done, to hear if one fails."""
        self.finished.add(rank)
        self._check_calls()
        if len(self.finished) == self.world_size:
            for writer in self.writers.values():
                self._send(writer, Kind.BYE)

    def _lose(self, rank: int) -> None:
        writer = self.writers[rank]
        if rank not in self.finished:
            self._end(Ending(silent(self.members[rank], self.timeouts), rank))
        self._leave(rank)
        writer.close()  # once it can be reached again, it reads the reason

    def _leave(self, rank: int) -> None:
        self.writers.pop(rank, None)
        self.heard.pop(rank, None)
        if not self.writers and (self.complete or self.ending):
            self.empty.set()

    def _end(self, ending: Ending) -> None:
        if not self.ending:
            self.ending = ending
            for writer in self.writers.values():
                self._send(writer, Kind.ENDED, as_json(asdict(ending)))

    def _send(self, writer: asyncio.StreamWriter, kind: Kind, content: bytes = b"") -> None:
        if not writer.is_closing():
            with suppress(OSError):
                writer.write(frame(kind, content))
