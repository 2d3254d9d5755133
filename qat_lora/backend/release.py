"""Started by a worker that has saved on SIGTERM: python -P release.py LAUNCHER JOB COMMAND….

On SIGTERM torchrun exits without telling the other hosts, and torchrun on those hosts waits for it at an exit barrier
for five minutes. Once it is gone, this process opens that barrier in its place (torch 2.9: SimpleElasticAgent
._exit_barrier, StaticTCPRendezvous; if another version uses another key, the others wait as before).
"""

import sys
import time
from contextlib import suppress
from datetime import timedelta

PATIENCE = 60  # seconds; torchrun kills workers that are not done after 30
ROUNDS = 100  # each restart of a job is another round, with a key of its own
PORT = 29400  # if torchrun's endpoint names none


def endpoint(words: list[str]) -> tuple[str, int]:
    """The rendezvous endpoint of a torchrun with this command line."""
    from torch.distributed.run import get_rdzv_endpoint, parse_args

    at = next(number for number, word in enumerate(words) if word.endswith(("torchrun", "torch.distributed.run")))
    host, _, port = get_rdzv_endpoint(parse_args(words[at + 1 :])).rpartition(":")
    return (host, int(port)) if host else (port, PORT)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"  # a zombie has exited
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
    dynamic = [f"torch.rendezvous.{job}.{number}" for number in range(ROUNDS)]
    for prefix in [job, *dynamic]:  # the first key is used with --node-rank and --master-addr
        store.set(f"{prefix}/torchelastic/agent/terminal_state/last_member", "")


if __name__ == "__main__":
    # the store is already gone, or the launcher is not torchrun: there is nobody to tell
    with suppress(RuntimeError, OSError, ValueError, StopIteration, SystemExit):
        main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
