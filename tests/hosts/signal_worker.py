"""Run by test_rendezvous.py: a script whose worker does what its argument says.

signal_worker.py WHAT FOLDER [NUM_CHIPS]
"""

import os
import signal
import sys
import time
from pathlib import Path

from qat_lora.backend.opening import launch
from qat_lora.errors import report
from qat_lora.hosts import relay, rendezvous
from qat_lora.hosts.environment import Timeouts

WHAT, FOLDER = sys.argv[1], Path(sys.argv[2])
PID = os.getpid()
CHIPS = int(sys.argv[3]) if len(sys.argv) > 3 else None
JOB = os.getppid() if CHIPS and __name__ != "__main__" else PID  # the process that a scheduler knows


def work(backend) -> None:
    import torch

    (FOLDER / f"pid{backend.rank}").write_text(str(os.getpid()))
    if WHAT == "wait":
        while not (FOLDER / "end").exists():
            time.sleep(0.05)
    if WHAT.startswith("killed"):
        place = WHAT.split()[1]
        if backend.rank == int(WHAT.split()[2]):
            time.sleep(0.5 * (place == "collective"))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(1.5 * (place == "step"))
        backend.group.gather(None) if place == "loading" else backend.reduce([torch.ones(3)])
    if WHAT in ("stopped", "final"):
        train(backend, torch)


def train(backend, torch) -> None:
    """Two steps; "stopped" sends the first SIGTERM in step 1, "final" after the last. Then more until the process
    ends."""
    from qat_lora.run.rundir import Run
    from qat_lora.run.session import Every, Session

    (FOLDER / "run").mkdir(exist_ok=True)
    session = Session(Run(FOLDER / "run", False, writes=backend.is_main), backend, Every(log=1))
    try:
        for _ in session.steps("qat", 2, lambda: ({"w": torch.ones(1)}, {}), lambda *_: None):
            if WHAT == "stopped":
                os.kill(JOB, signal.SIGTERM)
            session.record(loss=1.0, tokens=1)
    finally:
        bomb = Bomb()
        bomb.itself = bomb  # a cycle: collected only when the interpreter ends
        for _ in range(3):
            os.kill(JOB, signal.SIGTERM)
            os.kill(PID, signal.SIGTERM)
            time.sleep(0.05)
        (FOLDER / f"written{backend.rank}").touch()


class Bomb:
    def __del__(self, kill=os.kill, pid=PID, number=signal.SIGTERM):
        kill(pid, number)


if __name__ == "__main__":
    timeouts = Timeouts()
    if WHAT == "impatient":
        timeouts = Timeouts(join=2)
        relay.NOTICE = rendezvous.NOTICE = 0.5
        relay.GREETING = 1
    try:
        launch(work, (), "cpu", "fp32", CHIPS, timeouts=timeouts)
    except Exception as error:
        sys.exit(report(error))
    if CHIPS and WHAT == "stopped":
        bomb = Bomb()  # in the process that started the workers
        bomb.itself = bomb
