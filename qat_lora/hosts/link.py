"""A worker's connection to the relay of its job (relay.py), and the thread that watches the job through it."""

import json
import os
import queue
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from qat_lora.errors import UserError, to_stderr
from qat_lora.hosts.environment import AGAIN, Timeouts
from qat_lora.hosts.group import AnotherFailed
from qat_lora.hosts.relay import BEAT, GREETING, HEAD, PIECE, Ending, Kind, Member, as_json, died, frame, silent

REAPER = Path(__file__).with_name("reaper.py")


class Refused(UserError):
    """This worker does not belong to the job that it tried to join. again: whether a later try may succeed."""

    def __init__(self, line: str, again: bool = False):
        super().__init__(line)
        self.again = again


def this_member(rank: int) -> Member:
    """The `Member` that describes this process, or one of the workers in it."""
    machine = socket.gethostname()
    with suppress(OSError):  # a system without /proc
        machine += Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        machine += "".join(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "net"))
    terminal = machine
    with suppress(OSError):  # standard error is closed
        stderr = os.fstat(2)
        terminal += f" {stderr.st_dev} {stderr.st_ino} {stderr.st_rdev}"
    return Member(rank, socket.gethostname(), machine, terminal, os.getpid())


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
        self.over = threading.Event()  # the job has ended, or all workers have finished
        self.gone = threading.Event()  # the connection is closed
        self.waiting_since: float | None = None
        self.reporting = False  # the main thread is about to report why
        self.stopping = False  # all workers know of the SIGTERM and are saving
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._send(Kind.JOIN, as_json({"member": asdict(member), "world_size": world_size}))
        self.heard = time.monotonic()

    def enter(self) -> None:
        """Wait until all workers have joined. Raises UserError with the relay's reason if they do not, `Refused` if
        this one does not belong to the job, and ValueError if the other end is not a relay."""
        self.connection.settimeout(GREETING)
        kind, content = self._receive(most=2**16)
        if kind not in (Kind.ALIVE, Kind.WELCOME, Kind.REFUSED, Kind.ENDED):
            raise ValueError("it does not speak our protocol")
        self.connection.settimeout(self.timeouts.silence)
        try:
            while kind == Kind.ALIVE:
                kind, content = self._receive(most=2**32)
        except OSError as error:
            raise UserError(f"worker 0 ended before all workers had arrived; see its terminal, then {AGAIN}") from error
        found = json.loads(content)
        if kind == Kind.REFUSED:
            raise Refused(found["line"], found["again"])
        if kind == Kind.ENDED:
            # no worker is to blame if not all have joined
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
        """The values of all workers, in rank order. Raises AnotherFailed if the job has ended."""
        if not self.ending:
            with suppress(OSError):  # the watching thread notices it too, and knows more
                self._send(Kind.VALUE, value)
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
        """Tell the relay why this worker fails. Returns why the job ends, which may be for another reason."""
        self.reporting = True
        mine = Ending(line, self.member.rank, said=True)
        self._send_if_possible(Kind.FAIL, as_json(asdict(mine)))
        self.over.wait(patience)
        return self.ending or mine

    def leave(self) -> None:
        """Say that this worker needs nothing more from the others, and wait until they all say so. Raises AnotherFailed
        if the job ends before that."""
        self.stopping = True  # everything is saved by now, so SIGTERM does not shorten the wait
        with self.waiting():
            if not self.ending:
                with suppress(OSError):  # the thread notices it too
                    self._send(Kind.BYE)
            self.over.wait()
        if self.ending:
            raise AnotherFailed(self.ending.line)

    def disconnect(self) -> None:
        """Close the connection: this worker has failed and said why."""
        self.reporting = True
        self.gone.set()
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def speaks(self, ending: Ending) -> bool:
        """Whether this worker prints why the job ended, so that each terminal shows it once."""
        if ending.culprit is None or ending.culprit == self.member.rank or not self.members:
            return True
        terminal = self.members[self.member.rank].terminal
        if ending.said and self.members[ending.culprit].terminal == terminal:
            return False
        there = [m.rank for m in self.members if m.terminal == terminal and m.rank != ending.culprit]
        return self.member.rank == min(there)

    def _send(self, kind: Kind, content: bytes = b"") -> None:
        with self.sending:
            self.connection.sendall(frame(kind, content))

    def _send_if_possible(self, kind: Kind, content: bytes = b"", patience: float = 1) -> None:
        """Send a short frame, unless that would block: something large is being sent, or nothing gets through."""
        if not self.sending.acquire(timeout=patience):
            return
        try:
            with selectors.DefaultSelector() as selector, suppress(OSError):  # reading shows what is wrong
                selector.register(self.connection, selectors.EVENT_WRITE)
                if selector.select(patience):
                    self.connection.sendall(frame(kind, content))
        finally:
            self.sending.release()

    # -- the thread ----------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        try:
            self._watch_until_gone()
        except Exception as error:  # without the watching thread, this process could hang
            self._give_up(f"the connection to the other workers failed ({type(error).__name__}: {error}); {AGAIN}", 1)

    def _watch_until_gone(self) -> None:
        received, sent, last = bytearray(), 0.0, time.monotonic()
        with selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            while True:
                ready = time.sleep(BEAT / 2) if self.gone.is_set() else selector.select(BEAT / 2)
                now = time.monotonic()
                if now - last > 5 * BEAT:  # this process was held up, and could not hear the relay
                    self.heard = now
                last = now
                if ready:
                    self._take(received, now)
                if self.over.is_set() and not self.ending:  # all have finished
                    return self.connection.close()
                if now - sent >= BEAT:
                    sent = now
                    self._send_if_possible(Kind.ALIVE, patience=0)
                self._judge(now)

    def _take(self, received: bytearray, now: float) -> None:
        """Read the available bytes and handle complete frames."""
        try:
            piece = self.connection.recv(PIECE)
        except OSError:
            piece = b""
        if not piece:
            self.gone.set()
            return self._end(Ending(died(self.members[0]), 0))
        self.heard = now
        received += piece
        while len(received) >= HEAD.size:
            kind, length = HEAD.unpack_from(received)
            if len(received) < HEAD.size + length:
                break
            content = bytes(received[HEAD.size : HEAD.size + length])
            del received[: HEAD.size + length]
            if kind == Kind.VALUES:
                self.answers.put(content)
            elif kind == Kind.ENDED:
                self._end(Ending(**json.loads(content)))
            elif kind == Kind.BYE:
                self.over.set()

    def _end(self, ending: Ending) -> None:
        if not self.ending:
            self.ending, self.ended_at = ending, time.monotonic()
            self.answers.put(None)
            self.over.set()

    def _judge(self, now: float) -> None:
        waiting, stopped = self.waiting_since, self.stopped()
        if not self.ending and now - self.heard > self.timeouts.silence:
            self._end(Ending(silent(self.members[0], self.timeouts), 0))
        if self.reporting:
            return
        if self.ending and now - self.ended_at > self.timeouts.grace(waiting is not None):
            self._give_up(self.ending.line, 1, self.speaks(self.ending))
        if stopped and waiting and not self.stopping and now - max(stopped, waiting) > self.timeouts.stop:
            self._give_up(
                f"SIGTERM: the other workers did not finish this step within {self.timeouts.stop:g} s, so "
                f"nothing was saved; {AGAIN}",
                143,
            )

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
            self._send_if_possible(Kind.FAIL, as_json(asdict(mine)))
        if speaks:
            to_stderr(f"error: {line}")
        self.leave_reaper()
        os._exit(code)
