"""Workers started by a launcher, as real processes: how they meet, listen, stop, and notice that others died."""

import errno
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from patience import PATIENCE
from ports import free_port

from qat_lora.errors import UserError
from qat_lora.hosts.environment import LAUNCH, Timeouts
from qat_lora.hosts.rendezvous import join

SCRIPT = Path(__file__).with_name("signal_worker.py")


def start(what: str, folder: Path, chips: int | None = None, **env) -> subprocess.Popen:
    clean = {name: value for name, value in os.environ.items() if name not in LAUNCH} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, SCRIPT, what, folder, *([str(chips)] if chips else [])]
    folder.mkdir(exist_ok=True)
    pipes = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, env=clean | {k: str(v) for k, v in env.items()}, text=True, **pipes)


def pair(what: str, folder: Path) -> list[subprocess.Popen]:
    place = {"WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return [start(what, folder, **place, RANK=rank) for rank in range(2)]


def ends(jobs: list[subprocess.Popen]) -> list[tuple[int, str]]:
    """Exit code and stderr of each process."""
    try:
        said = [job.communicate()[1] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    return [(job.returncode, err) for job, err in zip(jobs, said)]


def listening_addresses(pids: list[int]) -> set[str]:
    """The hexadecimal addresses on which these processes listen, as in /proc/net/tcp."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            inodes |= set(re.findall(r"socket:\[(\d+)\]", os.readlink(link)))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            columns = line.split()
            if columns[3] == "0A" and columns[9] in inodes:
                found.add(columns[1].split(":")[0])
    return found


def pids_of(folder: Path) -> list[int]:
    files = [folder / f"pid{rank}" for rank in range(2)]
    until = time.monotonic() + PATIENCE
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < until
        time.sleep(0.05)
    return [int(file.read_text()) for file in files]


def test_workers_of_one_host_listen_only_on_the_loopback_interface(tmp_path):
    spawned, env = tmp_path / "spawned", tmp_path / "env"
    jobs = [start("wait", spawned, 2), *pair("wait", env)]
    assert listening_addresses([jobs[0].pid, *pids_of(spawned), *pids_of(env)]) == {"0100007F"}
    for folder in (spawned, env):
        (folder / "end").touch()
    assert [code for code, _ in ends(jobs)] == [0, 0, 0]


def test_survivors_of_a_killed_worker_print_one_line(tmp_path):
    """In every phase; test_launch.py tests more cases."""
    jobs = [start("killed loading 0", tmp_path, 2), *pair("killed collective 0", tmp_path)]
    jobs += pair("killed loading 1", tmp_path)
    notice = re.compile(r"^(waiting for|worker \d is waiting for) .*\n", re.M)  # of a slow machine
    spawned, *by_env = [(code, notice.sub("", err)) for code, err in ends(jobs)]
    said = "error: worker 0 was killed (SIGKILL); the others were ended; resume with --resume auto\n"
    assert spawned == (137, said)
    assert by_env[0] == by_env[3] == (-9, "")
    for (code, err), killed in ((by_env[1], 0), (by_env[2], 1)):
        assert code == 1 and err.count("\n") == 1, err
        assert re.match(rf"error: worker {killed} on \S+ \(process \d+\) died \(killed", err), err
        assert "--resume auto" in err


def test_repeated_sigterms_are_harmless_until_the_process_has_ended(tmp_path):
    folders = one, spawned, env, final = [tmp_path / name for name in ("one", "spawned", "env", "final")]
    jobs = [start("stopped", one), start("stopped", spawned, 2), *pair("stopped", env), start("final", final)]
    assert [code for code, _ in ends(jobs)] == [0, 0, 0, 0, 0]
    for folder in (one, spawned, env):
        assert "preempted" in (folder / "run" / "summary.json").read_text()
    assert all((folder / "written0").exists() for folder in folders)


def test_workers_that_cannot_join_say_why(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        place = {"MASTER_ADDR": "localhost", "WORLD_SIZE": 2}
        busy = {**place, "MASTER_PORT": other.getsockname()[1]}
        alone, nobody = {**place, "MASTER_PORT": free_port()}, {**place, "MASTER_PORT": free_port()}
        places = (busy, 0), (busy, 1), (alone, 0), (nobody, 1)
        found = ends([start("impatient", tmp_path, **env, RANK=rank) for env, rank in places])
    codes, said = zip(*found)
    assert codes == (2, 2, 2, 2)
    port, host = busy["MASTER_PORT"], socket.gethostname()
    assert said[0].startswith(f"error: MASTER_PORT={port} is in use on {host}; end the program that listens there")
    assert f"the program at localhost:{port} is not worker 0 of a job (timed out); end it, or" in said[1]
    at = f"localhost:{alone['MASTER_PORT']}"
    assert said[2].startswith(
        f"waiting for worker 1 of 2 at {at}\nerror: worker 1 of 2 did not arrive at {at} within 2 s (arrived: worker 0"
    )
    at = f"localhost:{nobody['MASTER_PORT']}"
    assert said[3].startswith(f"worker 1 is waiting for worker 0 at {at} (Connection refused)\n")
    assert f"error: worker 1 on {host} found no worker 0 at {at} within 2 s (Connection refused); start" in said[3]
    assert all(err.count("error:") == 1 and "Traceback" not in err for err in said)


def test_an_address_that_turns_out_to_be_unreachable_is_tried_again(monkeypatch):
    """Linux may report it on the connection's first use."""

    class Unreachable(socket.socket):
        def sendall(self, *data):
            raise OSError(errno.EHOSTUNREACH, "No route to host")

    tried = []

    def connection(at, timeout):
        tried.append(at)
        return Unreachable()

    monkeypatch.setattr(socket, "create_connection", connection)
    with pytest.raises(UserError, match=r"found no worker 0 at hostb:1 within 0.5 s \(.*No route to host\)"):
        join(lambda: ("hostb", 1), 1, 2, Timeouts(join=0.5), "hostb:1")
    assert len(tried) > 1
