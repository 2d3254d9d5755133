"""Two hosts on one machine: network namespaces with a link that can be cut. Needs root and `ip`."""

import ctypes
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from qat_lora.hosts.environment import LAUNCH

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000  # <sched.h>

# Sets up a host before its command runs: its own name and /etc/hosts, and bind mounts over some folders.
ENTER = (
    'hostname "$1"; mount --bind "$2" /etc/hosts; '
    'for each in $3; do mount --bind ${each%%:*} ${each#*:}; done; shift 3; exec "$@"'
)


def missing() -> str | None:
    """What this machine lacks to run two hosts; None if nothing."""
    if os.geteuid() != 0:
        return "root is needed to make network namespaces"
    absent = [tool for tool in ("ip", "unshare", "mount") if not shutil.which(tool)]
    if absent:
        return f"{', '.join(absent)} is not installed"
    tried = subprocess.run(["ip", "netns", "add", "qatprobe"], capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", "qatprobe"], capture_output=True)
    return tried.stderr.strip() or None


class Fork:
    """A process of multiprocessing with the methods of subprocess.Popen that the tests use."""

    def __init__(self, process: multiprocessing.Process):
        self.process = process

    def poll(self) -> int | None:
        return self.process.exitcode

    returncode = property(poll)

    def wait(self, timeout: float) -> int:
        self.process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("a forked script", timeout)
        return self.poll()


def _play(space: str, host: str, binds: dict, words: list[str], env: dict, out: Path, err: Path) -> None:
    """In a forked child: enter a host, as ENTER does, and run a script as `python SCRIPT …` would."""
    import torch

    os.setsid()
    for path, number in ((out, 1), (err, 2)):
        with open(path, "wb") as file:
            os.dup2(file.fileno(), number)
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{space}") as file:
        entered = libc.setns(file.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWNS | CLONE_NEWUTS)
    if entered:
        raise OSError(ctypes.get_errno(), f"cannot enter {space}")
    socket.sethostname(host)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    for source, target in binds.items():
        subprocess.run(["mount", "--bind", source, target], check=True)
    torch.set_num_threads(1)
    for name in LAUNCH:
        os.environ.pop(name, None)
    os.environ.update(env)
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


class Job:
    """A process on one of the hosts, with its own session."""

    def __init__(self, process: subprocess.Popen | Fork | None, folder: Path, name: str):
        self.process, self.out, self.err = process, folder / f"{name}.out", folder / f"{name}.err"

    def lines(self) -> list[str]:
        """Its error lines."""
        return [line for line in self.err.read_text(errors="replace").splitlines() if line.startswith("error: ")]

    def said(self) -> str:
        return self.out.read_text(errors="replace") + self.err.read_text(errors="replace")

    def waits_for(self, word: str) -> None:
        """Wait until it has printed `word`."""
        end = time.monotonic() + PATIENCE
        while word not in self.said():
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"no {word!r} in:\n{self.said()[-3000:]}")
            time.sleep(0.02)


PY = sys.executable
TORCHRUN = Path(sys.executable).with_name("torchrun")
SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
# Seconds to wait for something that must happen, however busy the machine. Without our help torchrun would wait for the
# others for 300 s, and gloo for 1800 s.
PATIENCE = 240


class Pair:
    """Hosts "a" (10.77.N.1, hosta) and "b" (10.77.N.2, hostb); use it as a context. number: N, from 0 to 99."""

    def __init__(self, number: int = 0):
        self.number, self.link = number, f"qatv{number}"
        self.folder = Path(tempfile.mkdtemp(prefix="two-hosts-"))
        self.count = 0

    def space(self, host: str) -> str:
        return f"qat{host}{self.number}"

    def address(self, host: str) -> str:
        return f"10.77.{self.number}.{'ab'.index(host) + 1}"

    def __enter__(self) -> "Pair":
        self._remove()
        for host in "ab":
            self._ip("netns", "add", self.space(host))
            self._ip("-n", self.space(host), "link", "set", "lo", "up")
        a, b = self.space("a"), self.space("b")
        self._ip("link", "add", self.link, "netns", a, "type", "veth", "peer", "name", self.link, "netns", b)
        for host in "ab":
            self._ip("-n", self.space(host), "addr", "add", f"{self.address(host)}/24", "dev", self.link)
            self._ip("-n", self.space(host), "link", "set", self.link, "up")
        return self

    def __exit__(self, *_) -> None:
        self._remove()
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self, host: str, *command, binds: dict | None = None, hosts: str | None = None, **env) -> Job:
        """Start a command on a host. binds: {source: folder to mount it over}. hosts: its /etc/hosts."""
        table, job = self._job(host, hosts)
        bound = " ".join(f"{source}:{target}" for source, target in (binds or {}).items())
        clean = {key: value for key, value in os.environ.items() if key not in LAUNCH}
        with open(job.out, "w") as out, open(job.err, "w") as err:
            job.process = subprocess.Popen(
                ["ip", "netns", "exec", self.space(host), "unshare", "--mount", "--uts", "bash", "-c", ENTER, "_",
                 f"host{host}", str(table), bound, *map(str, command)],
                env=clean | {"OMP_NUM_THREADS": "1", "USE_TORCH_XLA": "0"} | {k: str(v) for k, v in env.items()},
                stdout=out, stderr=err, stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
        return job

    def fork(self, host: str, *command, binds: dict | None = None, hosts: str | None = None, **env) -> Job:
        """Start a script on a host, in a process forked from one that has imported everything. Its modules are those
        of this machine, so what `binds` puts over an imported file is seen only by a process that is started."""
        table, job = self._job(host, hosts)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["pair", "qat_lora.lora.recovery", "qat_lora.run.plots"])
        env = {name: str(value) for name, value in env.items()}
        words, bound = list(map(str, command)), {str(table): "/etc/hosts"} | (binds or {})
        process = context.Process(
            target=_play, args=(self.space(host), f"host{host}", bound, words, env, job.out, job.err)
        )
        process.start()
        job.process = Fork(process)
        return job

    def _job(self, host: str, hosts: str | None) -> tuple[Path, Job]:
        """A job without a process yet, and the /etc/hosts of its host."""
        self.count += 1
        name = f"{self.count}{host}"
        table, job = self.folder / f"{name}.hosts", Job(None, self.folder, name)
        known = "".join(f"{self.address(other)} host{other}\n" for other in "ab")
        table.write_text("127.0.0.1 localhost\n::1 localhost\n" + (known if hosts is None else hosts))
        for path in (job.out, job.err):
            path.touch()
        return table, job

    def by_hand(self, *command, address: str = "hosta", port: int = 29500, of: str = "ab", **more) -> list[Job]:
        """One worker on each host, started with RANK and WORLD_SIZE."""
        place = {"WORLD_SIZE": 2, "MASTER_ADDR": address, "MASTER_PORT": port}
        return [self.fork(host, *command, **place | {"RANK": "ab".index(host)} | more) for host in of]

    def by_torchrun(
        self, *command, options: tuple = (), nodes: str = "2", of: str = "ab", static: bool = False, **more
    ) -> list[Job]:
        """One torchrun on each host, with one worker. static: each gets its rank as an option."""
        options = ("--nnodes", nodes, "--nproc-per-node", 1, *options)
        meeting = ("--master-addr", "hosta", "--master-port", 29500, "--node-rank")
        places = {host: (*meeting, "ab".index(host)) for host in of}
        if not static:
            places = dict.fromkeys(of, ("--rdzv-backend", "c10d", "--rdzv-endpoint", "hosta:29500"))
        return [self.start(host, TORCHRUN, *options, *places[host], *command, **more) for host in of]

    def pids(self, host: str) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.space(host)], capture_output=True, text=True).stdout
        return list(map(int, found.split()))

    def signal(self, host: str, number: int) -> None:
        """Send a signal to everything that runs on a host: SIGKILL loses it, SIGSTOP freezes it."""
        for pid in self.pids(host):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def lose(self, what: str, host: str, jobs: list[Job]) -> dict[str, Job]:
        """kill or freeze a host, or cut the link. Returns the jobs that must notice, by the name of the lost host."""
        if what == "cut":
            self._ip("-n", self.space("b"), "link", "set", self.link, "down")
        else:
            self.signal(host, signal.SIGSTOP if what == "freeze" else signal.SIGKILL)
        return {lost: jobs["ba".index(lost)] for lost in ("ab" if what == "cut" else host)}

    def received(self, host: str) -> int:
        """Bytes that a host has received over the link so far."""
        path = f"/sys/class/net/{self.link}/statistics/rx_bytes"
        return int(subprocess.run(["ip", "netns", "exec", self.space(host), "cat", path], capture_output=True).stdout)

    def clear(self) -> None:
        """Kill everything that still runs on the hosts, and restore the link."""
        for host in "ab":
            for _ in range(50):
                if not self.pids(host):
                    break
                self.signal(host, signal.SIGKILL)
                time.sleep(0.05)
        self._ip("-n", self.space("b"), "link", "set", self.link, "up")

    def _ip(self, *arguments) -> None:
        done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
        if done.returncode:
            raise OSError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")

    def _remove(self) -> None:
        for host in "ab":
            if self.pids(host):
                self.signal(host, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", self.space(host)], capture_output=True)
