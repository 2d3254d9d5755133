"""Run by test_xla_workers.py: N workers on N of torch_xla's CPU devices, started as `launch` starts those of TPU chips.

PJRT_DEVICE=CPU CPU_NUM_DEVICES=N python tests/backend/xla_workers.py N qat|failing|athena MODEL CACHE OUT

torch_xla runs CPU devices as threads of one process. Threads that reach a graph at the same time each compile an
executable of their own, and the collectives of different executables never meet. Here the threads enter the step marker
one after another: each as soon as the previous one has its executable, since that one may stay in the marker until the
others' collectives arrive. For tests only: it replaces a private function.
"""

import sys
import threading
import time
from functools import partial
from pathlib import Path

import athena_workers
import torch_xla
import torch_xla.debug.metrics as met
import worker_checks
import worker_training

from qat_lora.backend import xla
from qat_lora.hosts.environment import Timeouts
from qat_lora.hosts.launch import Job

COUNT, MODE, MODEL, CACHE, OUT = int(sys.argv[1]), *sys.argv[2:5], Path(sys.argv[5])
_marker, _turn, _everyone = torch_xla._XLAC._xla_step_marker, threading.Lock(), threading.Barrier(COUNT)


def _step_marker(device, devices, wait=False, reset_scope=True):
    _turn.acquire()
    returned = threading.Event()
    threading.Thread(target=_pass_on, args=(_executables(), returned)).start()
    _marker(device, devices, wait=False, reset_scope=reset_scope)
    returned.set()
    _everyone.wait()


def _pass_on(before: int, returned: threading.Event) -> None:
    while _executables() == before and not returned.wait(0.01):
        pass
    time.sleep(0.05)  # an executable is counted before it is cached for the others
    _turn.release()


def _executables() -> int:
    compiled = met.metric_data("CompileTime")
    return (met.counter_value("CachedCompile") or 0) + (compiled[0] if compiled else 0)


torch_xla._XLAC._xla_step_marker = _step_marker


def train(backend, out: Path) -> None:
    graphs: list[str] = []

    def watch(gradients) -> None:
        graphs.append(torch_xla._XLAC._get_xla_tensors_hlo(gradients))

    worker_training.train(backend, MODEL, CACHE, out, watch)
    (out / f"graphs{backend.rank}.txt").write_text("\n---\n".join(graphs))


if __name__ == "__main__":
    does = {"qat": train, "failing": worker_checks.fail_first, "athena": athena_workers.train}
    xla.spawn(Job(partial(xla.work, does[MODE], (OUT,), "fp32", COUNT), False, Timeouts()), COUNT)
