"""Left behind by a worker that has saved on SIGTERM: python -P release.py LAUNCHER JOB COMMAND….

torchrun ends at once when it is asked to, and tells nobody: those of the other hosts wait for it for five minutes
before they end. Once it has gone, this says so in its place, in the store where they wait (torch 2.9:
SimpleElasticAgent._exit_barrier; should another version wait for another key, they wait as before).
"""

import sys
import time
from contextlib import suppress
from datetime import timedelta

PATIENCE = 60  # seconds; torchrun kills workers that are not done after 30
ROUNDS = 100  # each restart of a job is another round, with a key of its own
PORT = 29400  # where torchrun's endpoint names none


def endpoint(words: list[str]) -> tuple[str, int]:
    """Where the torchrun with this command line meets those of the other hosts."""
    from torch.distributed.run import parse_args

    at = next(number for number, word in enumerate(words) if word.endswith(("torchrun", "torch.distributed.run")))
    host, _, port = parse_args(words[at + 1 :]).rdzv_endpoint.rpartition(":")
    return (host, int(port)) if host else (port, PORT)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"  # whoever started it may not have looked yet
    except OSError:
        return False


def main(launcher: int, job: str, words: list[str]) -> None:
    from torch.distributed import TCPStore

    host, port = endpoint(words)
    store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=5))
    ends = time.monotonic() + PATIENCE
    while is_running(launcher):
        if time.monotonic() > ends:
            return
        time.sleep(0.2)
    for number in range(ROUNDS):
        store.set(f"torch.rendezvous.{job}.{number}/torchelastic/agent/terminal_state/last_member", "")


if __name__ == "__main__":
    # the launcher or its store has gone already, or is none of torchrun's: there is nobody to tell
    with suppress(RuntimeError, OSError, ValueError, StopIteration, SystemExit):
        main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
