"""Started by a worker that ends because another host is lost: python -SP reaper.py WORKER LAUNCHER SECONDS.

torchrun polls its store ten times a second. If the store's host does not answer, the call never returns, and torchrun
neither sees its worker end nor reacts to SIGTERM. So if the worker is still a zombie after SECONDS, kill the launcher.
"""

import os
import signal
import sys
import time


def is_unnoticed(worker: int, launcher: int) -> bool:
    """Whether the worker is a zombie that this launcher has not collected yet."""
    try:
        with open(f"/proc/{worker}/stat", encoding="utf-8") as file:
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
        print(f"error: torchrun (process {launcher}) hung on a lost host and was killed", file=sys.stderr)
        os.kill(launcher, signal.SIGKILL)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
