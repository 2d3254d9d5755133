"""How the workers of a job talk to each other on the host, and notice that one is gone.

Every worker holds one TCP connection to a relay, served by worker 0 or by the process that started them all. The relay
passes values on, tells everybody at once when a worker dies, and within `Timeouts.host` when a host goes silent.

A frame is a kind (one byte), the length of its content (eight bytes) and the content. The relay never unpickles values.
"""

import asyncio
import json
import os
import queue
import secrets
import selectors
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from qat_lora.errors import UserError

BEAT = 1  # seconds between two signs of life
GREETING = 10  # seconds within which a relay answers; a server that takes longer is something else
NOTICE = 20  # seconds of waiting for workers before a line is printed
REAPER = Path(__file__).with_name("reaper.py")
PIECE = 2**20  # bytes read at a time
HEAD = struct.Struct("!cQ")
# worker → relay: who it is, a value, a failure, a normal end; relay → worker: its answers; both: a sign of life
JOIN, VALUE, FAIL, BYE, WELCOME, REFUSED, VALUES, ENDED, ALIVE = (bytes([byte]) for byte in b"JVFQWRAEB")
AGAIN = "restart the job with --resume auto"


@dataclass(frozen=True)
class Timeouts:
    """Seconds. host: how soon the other hosts end after one is lost. join: how long to wait for all workers."""

    host: float = 60
    join: float = 60

    @property
    def silence(self) -> float:
        """How long a worker may be silent before it counts as lost; the rest of the time is for ending."""
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


@dataclass(frozen=True)
class Member:
    """One worker, as the others know it.

    host: the name of its host. machine: the same for workers that see each other's processes. terminal: the same for
    workers whose output appears in one place. address: as the relay sees it.
    """

    rank: int
    host: str
    machine: str
    terminal: str
    pid: int
    address: str = ""

    def __str__(self):
        return f"worker {self.rank} on {self.host}"


def this_member(rank: int) -> Member:
    """This process, or one of the workers in it."""
    machine = socket.gethostname()
    with suppress(OSError):  # a system without /proc
        machine += Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine += "".join(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))
    return Member(rank, socket.gethostname(), machine, f"{machine} {os.getppid()}", os.getpid())


@dataclass(frozen=True)
class Ending:
    """Why a job ends. culprit: the worker to blame, if there is one. said: whether the culprit or its launcher has
    already printed the error."""

    line: str
    culprit: int | None = None
    said: bool = False


class AnotherFailed(UserError):
    """The job has ended because of another worker; the message says which and why."""


class Refused(UserError):
    """This worker does not belong to the job that it tried to join. again: whether a later try may succeed."""

    def __init__(self, line: str, again: bool = False):
        super().__init__(line)
        self.again = again


def _frame(kind: bytes, content: bytes = b"") -> bytes:
    return HEAD.pack(kind, len(content)) + content


def _as_json(content) -> bytes:
    return json.dumps(content).encode()


def _died(member: Member) -> str:
    return f"{member} (process {member.pid}) died (killed? out of memory?); see its terminal, then {AGAIN}"


def _silent(member: Member, timeouts: Timeouts) -> str:
    return (
        f"no sign of life from {member} for {timeouts.silence:g} s; check that the host and its network are up, then "
        f"{AGAIN}"
    )


def _print(line: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # standard error is closed
        print(line, file=sys.stderr, flush=True)


# -- the relay ---------------------------------------------------------------------------------------------------------
class Relay:
    """Serves the workers of one job from a thread of this process, on a socket that already listens.

    where: its address, for messages. store_port: where the process group's store listens; all workers are told.
    reports_deaths: whether this process started the workers, and itself reports which of them died. Values are pickled:
    whoever reaches the port can run code in the workers.
    """

    def __init__(
        self, listening: socket.socket, world_size: int, timeouts: Timeouts, where: str, store_port: int = 0,
        reports_deaths: bool = False,
    ):  # fmt: skip
        self.world_size, self.timeouts, self.where = world_size, timeouts, where
        self.store_port, self.reports_deaths = store_port, reports_deaths
        self.port = listening.getsockname()[1]
        self.nonce = secrets.token_hex(8)
        self.members: dict[int, Member] = {}
        self.writers: dict[int, asyncio.StreamWriter] = {}  # of those that are connected
        self.heard: dict[int, float] = {}
        self.values: dict[int, bytes] = {}
        self.complete, self.ending = False, None
        self.died: int | None = None  # the worker whose connection closed without a goodbye
        self.empty = threading.Event()  # every worker has left
        self.loop = asyncio.new_event_loop()
        ready = threading.Event()
        threading.Thread(target=self._run, args=(listening, ready), daemon=True).start()
        ready.wait()

    def end(self, line: str, culprit: int | None = None, said: bool = True) -> bool:
        """End the job for all workers, unless it has ended; returns whether it had."""
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
        self.loop.set_exception_handler(lambda *_: None)  # connections that are still open are dropped, without a word

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
                    self._send(writer, ALIVE)
                for rank, heard in list(self.heard.items()) if self.complete else ():  # before, workers send nothing
                    if now - heard > self.timeouts.silence:
                        self._lose(rank)
                waited = now - opened
                if not self.complete and not self.ending and waited > self.timeouts.join:
                    self._end(Ending(self._missing()))
                elif not self.complete and not self.ending and waited > NOTICE and not told:
                    told = True
                    _print(f"waiting for {self._late()} of {self.world_size} at {self.where}")

    def _late(self) -> str:
        late = [str(rank) for rank in range(self.world_size) if rank not in self.members]
        return f"worker{'s' * (len(late) > 1)} {', '.join(late)}"

    def _missing(self) -> str:
        came = ", ".join(f"{self.members[rank]}" for rank in sorted(self.members)) or "nobody"
        return (
            f"{self._late()} of {self.world_size} did not arrive at {self.where} within {self.timeouts.join:g} s "
            f"(arrived: {came}); start every RANK from 0 to {self.world_size - 1} with the same MASTER_ADDR and "
            "MASTER_PORT, or raise --join-timeout if hosts start slowly"
        )

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until it closes."""
        rank = None
        try:
            kind, content = await asyncio.wait_for(self._receive(reader, None, most=2**16), GREETING)
            rank = self._admit(kind, content, writer)
            while rank is not None:
                kind, content = await self._receive(reader, rank)
                if kind == VALUE:
                    self._pass_on(rank, content)
                elif kind == FAIL:
                    self._end(Ending(**json.loads(content)))
                elif kind == BYE:
                    self._leave(rank)
                    self._check_calls()
                    rank = None
        except (OSError, EOFError, ValueError, KeyError, TypeError):
            pass  # gone, or not one of our workers
        if rank is not None and self.writers.get(rank) is writer:
            self._leave(rank)
            if self.complete:
                self.died = rank if self.ending is None else self.died
                self._end(Ending(_died(self.members[rank]), rank, self.reports_deaths))
            else:
                del self.members[rank]  # another may come in its place
        with suppress(OSError):
            writer.close()

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

    def _admit(self, kind: bytes, content: bytes, writer: asyncio.StreamWriter) -> int | None:
        """The rank of a worker that belongs here; any other is told why it does not."""
        if kind != JOIN:
            raise ValueError("it does not speak our protocol")
        asked = json.loads(content)
        member = Member(**asked["member"])
        member = replace(member, address=writer.get_extra_info("peername")[0].removeprefix("::ffff:"))
        if self.ending and not self.complete:
            self._send(writer, ENDED, _as_json(asdict(self.ending)))
            return None
        if self.ending:
            return self._refuse(writer, f"the job that was at {self.where} is ending", again=True)
        taken = self.members.get(member.rank)
        if asked["world_size"] != self.world_size:
            fault = f"WORLD_SIZE={asked['world_size']} contradicts the WORLD_SIZE={self.world_size} of worker 0"
            self._refuse(writer, f"{fault} at {self.where}; give every worker the same", member)
        elif taken:
            fault = f"RANK={member.rank} is taken by {taken} (process {taken.pid})"
            self._refuse(writer, f"{fault} at {self.where}; give each worker its own RANK and each job its own "
                         "MASTER_PORT", member)  # fmt: skip
        else:
            self.members[member.rank], self.writers[member.rank] = member, writer
            self.heard[member.rank] = time.monotonic()
            self._send(writer, ALIVE)
            if len(self.members) == self.world_size:
                self._welcome()
            return member.rank
        return None

    def _refuse(self, writer, line: str, member: Member | None = None, again: bool = False) -> None:
        self._send(writer, REFUSED, _as_json({"line": line, "again": again}))
        if member and not self.complete:  # the worker that should have come in its place is missing
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
        content = _as_json({"members": members, "nonce": self.nonce, "store_port": self.store_port})
        for rank in ranks:
            self._send(self.writers[rank], WELCOME, content)

    def _pass_on(self, rank: int, value: bytes) -> None:
        self.values[rank] = value
        self._check_calls()
        if len(self.values) == self.world_size:
            parts = [self.values[rank] for rank in range(self.world_size)]
            content = b"".join(len(part).to_bytes(8) + part for part in parts)
            self.values = {}
            for writer in self.writers.values():
                self._send(writer, VALUES, content)

    def _check_calls(self) -> None:
        """End the job if somebody waits for the value of a worker that has left: it would wait forever."""
        left = [rank for rank in range(self.world_size) if rank not in self.writers]
        if self.values and left:
            self._end(Ending(f"{self.members[left[0]]} finished before the others; {AGAIN}", left[0]))

    def _lose(self, rank: int) -> None:
        writer = self.writers[rank]
        self._end(Ending(_silent(self.members[rank], self.timeouts), rank))
        self._leave(rank)
        writer.close()  # once it can be reached again it reads why

    def _leave(self, rank: int) -> None:
        self.writers.pop(rank, None)
        self.heard.pop(rank, None)
        if not self.writers and (self.complete or self.ending):
            self.empty.set()

    def _end(self, ending: Ending) -> None:
        if not self.ending:
            self.ending = ending
            for writer in self.writers.values():
                self._send(writer, ENDED, _as_json(asdict(ending)))

    def _send(self, writer: asyncio.StreamWriter, kind: bytes, content: bytes = b"") -> None:
        if not writer.is_closing():
            with suppress(OSError):
                writer.write(_frame(kind, content))


# -- a worker's connection to it -------------------------------------------------------------------------------------
class Link:
    """One worker's connection to the relay. Its thread watches the job: if the main thread cannot notice that the job
    has ended, because it is inside a library waiting for another worker, this thread reports it and ends the process.

    stopped: returns when this process was asked to stop (time.monotonic()), or None.
    """

    def __init__(
        self, connection: socket.socket, member: Member, world_size: int, timeouts: Timeouts,
        stopped: Callable[[], float | None] = lambda: None,
    ):  # fmt: skip
        self.connection, self.timeouts, self.stopped = connection, timeouts, stopped
        self.member, self.world_size = member, world_size
        self.members: list[Member] = []
        self.nonce, self.store_port = "", 0
        self.sending = threading.Lock()
        self.answers: queue.SimpleQueue = queue.SimpleQueue()
        self.ending: Ending | None = None
        self.ended_at = 0.0
        self.ended, self.gone = threading.Event(), threading.Event()
        self.waiting_since: float | None = None
        self.reporting = self.closed = False  # the main thread is about to say why; has said goodbye
        self.stopping = False  # all workers know of SIGTERM and save
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._send(JOIN, _as_json({"member": asdict(member), "world_size": world_size}))
        self.heard = time.monotonic()

    def enter(self) -> None:
        """Wait until all workers have come. Raises UserError with the relay's reason if they do not, `Refused` if
        this one does not belong to them, and ValueError if no relay answers here."""
        self.connection.settimeout(GREETING)
        kind, content = self._receive(most=2**16)
        if kind not in (ALIVE, WELCOME, REFUSED, ENDED):
            raise ValueError("it does not speak our protocol")
        self.connection.settimeout(self.timeouts.silence)
        try:
            while kind == ALIVE:
                kind, content = self._receive(most=2**32)
        except OSError as error:
            raise UserError(f"worker 0 ended before all workers had arrived; see its terminal, then {AGAIN}") from error
        found = json.loads(content)
        if kind == REFUSED:
            raise Refused(found["line"], found["again"])
        if kind == ENDED:
            # nobody is to blame where not all have come
            raise (UserError if found["culprit"] is None else AnotherFailed)(found["line"])
        self.members = [Member(**each) for each in found["members"]]
        self.nonce, self.store_port = found["nonce"], found["store_port"]
        self.connection.settimeout(None)
        self.heard = time.monotonic()
        threading.Thread(target=self._watch, daemon=True).start()

    def _receive(self, most: int) -> tuple[bytes, bytes]:
        kind, length = HEAD.unpack(self._read(HEAD.size))
        if length > most:
            raise ValueError("it does not speak our protocol")
        return kind, self._read(length)

    def _read(self, length: int) -> bytes:
        content = b""
        while len(content) < length:
            piece = self.connection.recv(length - len(content))
            if not piece:
                raise ConnectionError("it closed the connection")
            content += piece
        return content

    def exchange(self, value: bytes) -> list[bytes]:
        """What each worker gave, in the order of ranks. Raises AnotherFailed once the job has ended."""
        if not self.ending:
            with suppress(OSError):  # the thread sees it, too, and knows more
                self._send(VALUE, value)
        content = self.answers.get()
        if content is None:
            self.answers.put(None)  # for the next call
            raise AnotherFailed(self.ending.line)
        values, at = [], 0
        while at < len(content):
            length = int.from_bytes(content[at : at + 8])
            values.append(content[at + 8 : at + 8 + length])
            at += 8 + length
        return values

    @contextmanager
    def waiting(self):
        """Within this context this worker waits for others: it does no work of its own."""
        before, self.waiting_since = self.waiting_since, time.monotonic()
        try:
            yield
        finally:
            self.waiting_since = before

    def fail(self, line: str, patience: float) -> Ending:
        """Tell the relay that this worker fails, and why; returns why the job ends, which may be another reason."""
        self.reporting = True
        mine = Ending(line, self.member.rank, said=True)
        self._send_if_possible(FAIL, _as_json(asdict(mine)))
        self.ended.wait(patience)
        return self.ending or mine

    def leave(self) -> None:
        """Say goodbye: this worker needs nothing more from the others. Returns once the relay has heard it."""
        self.closed = True
        with suppress(OSError):
            self._send(BYE)
        self.gone.wait(GREETING)

    def speaks(self, ending: Ending) -> bool:
        """Whether this worker prints why the job ended, so that each terminal shows it once."""
        if ending.culprit is None or ending.culprit == self.member.rank or not self.members:
            return True
        terminal = self.members[self.member.rank].terminal
        if ending.said and self.members[ending.culprit].terminal == terminal:
            return False
        there = [m.rank for m in self.members if m.terminal == terminal and m.rank != ending.culprit]
        return self.member.rank == min(there)

    def _send(self, kind: bytes, content: bytes = b"") -> None:
        with self.sending:
            self.connection.sendall(_frame(kind, content))

    def _send_if_possible(self, kind: bytes, content: bytes = b"", patience: float = 1) -> None:
        """Send a short frame, unless that would block: something large is being sent, or nothing gets through."""
        if not self.sending.acquire(timeout=patience):
            return
        try:
            with selectors.DefaultSelector() as selector, suppress(OSError):  # reading tells what is wrong
                selector.register(self.connection, selectors.EVENT_WRITE)
                if selector.select(patience):
                    self.connection.sendall(_frame(kind, content))
        finally:
            self.sending.release()

    # -- the thread ----------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        try:
            self._watch_until_gone()
        except Exception as error:  # unwatched, this process could hang
            self._give_up(f"the connection to the other workers failed ({type(error).__name__}: {error}); {AGAIN}", 1)

    def _watch_until_gone(self) -> None:
        received, sent, last = bytearray(), 0.0, time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            while not (self.closed and self.gone.is_set()):
                ready = time.sleep(BEAT / 2) if self.gone.is_set() else selector.select(BEAT / 2)
                now = time.monotonic()
                if now - last > 5 * BEAT:  # this process was held up, and could not hear the relay
                    self.heard = now
                last = now
                if ready:
                    self._take(received, now)
                if now - sent >= BEAT:
                    sent = now
                    self._send_if_possible(ALIVE, patience=0)
                self._judge(now)

    def _take(self, received: bytearray, now: float) -> None:
        """Read what there is and handle whole frames."""
        try:
            piece = self.connection.recv(PIECE)
        except OSError:
            piece = b""
        if not piece:
            self.gone.set()
            if not self.closed:  # else the relay has heard our goodbye
                self._end(Ending(_died(self.members[0]), 0))
            return
        self.heard = now
        received += piece
        while len(received) >= HEAD.size:
            kind, length = HEAD.unpack_from(received)
            if len(received) < HEAD.size + length:
                break
            content = bytes(received[HEAD.size : HEAD.size + length])
            del received[: HEAD.size + length]
            if kind == VALUES:
                self.answers.put(content)
            elif kind == ENDED:
                self._end(Ending(**json.loads(content)))

    def _end(self, ending: Ending) -> None:
        if not self.ending:
            self.ending, self.ended_at = ending, time.monotonic()
            self.answers.put(None)
            self.ended.set()

    def _judge(self, now: float) -> None:
        waiting, stopped = self.waiting_since, self.stopped()
        if not self.ending and now - self.heard > self.timeouts.silence:
            self._end(Ending(_silent(self.members[0], self.timeouts), 0))
        if self.closed or self.reporting:
            return
        if self.ending and now - self.ended_at > self.timeouts.grace(waiting is not None):
            self._give_up(self.ending.line, 1, self.speaks(self.ending))
        if stopped and waiting and not self.stopping and now - max(stopped, waiting) > self.timeouts.stop:
            self._give_up(f"SIGTERM: the other workers did not finish this step within {self.timeouts.stop:g} s, so "
                          f"nothing was saved; {AGAIN}", 143)  # fmt: skip

    def leave_reaper(self) -> None:
        """Call this before exiting with an error. torchrun may wait forever for a lost host; see reaper.py."""
        under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and self.members and self.ending
        culprit = self.members[self.ending.culprit] if under_torchrun and self.ending.culprit is not None else None
        mine = [member for member in self.members if member.machine == self.member.machine]
        lost = culprit and not self.ending.said and culprit.machine != self.member.machine
        if lost and mine[0].rank == self.member.rank:
            words = [str(os.getpid()), str(os.getppid()), str(self.timeouts.reaping)]
            with suppress(OSError):
                subprocess.Popen([sys.executable, "-SP", REAPER, *words], stdin=subprocess.DEVNULL,
                                 stdout=subprocess.DEVNULL, start_new_session=True)  # fmt: skip

    def _give_up(self, line: str, code: int, speaks: bool = True) -> None:
        """End this process because its main thread is stuck."""
        if not self.ending:
            mine = Ending(f"{self.member} failed: {line}", self.member.rank, said=True)
            self._send_if_possible(FAIL, _as_json(asdict(mine)))
        if speaks:
            _print(f"error: {line}")
        self.leave_reaper()
        os._exit(code)
