"""Left behind by a worker that ends because another host is lost: python reaper.py WORKER LAUNCHER SECONDS.

torchrun asks its store for news ten times a second, and never returns from that where the store's host gives no answer:
then it neither sees its worker end nor hears SIGTERM. A worker that nobody has waited for within so many seconds is
taken as the sign, and the launcher is ended.
"""

import os
import signal
import sys
import time


def is_unnoticed(worker: int, launcher: int) -> bool:
    """Whether a process has ended, and this parent of it has not looked yet."""
    try:
        with open(f"/proc/{worker}/stat") as file:
            state, parent = file.read().rpartition(")")[2].split()[:2]
    except OSError:
        return False
    return state in "ZX" and int(parent) == launcher


def main(worker: int, launcher: int, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        time.sleep(0.2)
        if not os.path.exists(f"/proc/{worker}"):
            return
    if is_unnoticed(worker, launcher):
        print(f"error: torchrun (process {launcher}) waits for a host that is lost, and was ended", file=sys.stderr)
        os.kill(launcher, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
