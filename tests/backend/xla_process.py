"""What the checks in xla_*.py share: a process in which torch_xla runs on its CPU device, and its results.

PYTHONPATH=tests:tests/backend PJRT_DEVICE=CPU python -c "import xla_process; xla_process.main()" MODEL OUT CHECK …

CHECK: a module and a function of it, such as xla_qat.qat.
"""

import importlib
import json
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met

import qat_lora
from qat_lora.backend import TorchBackend, open_backend
from qat_lora.backend.xla import XlaWorker
from qat_lora.hosts.environment import Timeouts
from qat_lora.hosts.group import SIGTERM
from qat_lora.hosts.launch import Job
from qat_lora.run.rundir import Run
from qat_lora.run.session import Every, Session

MODEL, OUT = sys.argv[1], Path(sys.argv[2])
XLA = open_backend("xla", "fp32")  # before any backward on the CPU, which would break XLA's in this process
CPU = TorchBackend("cpu", "fp32")


def open_session(name: str, backend: TorchBackend, every: Every) -> Session:
    (OUT / name).mkdir()
    return Session(Run(OUT / name, resumed=False), backend, every)


def on_both(name: str, train: Callable[[TorchBackend, Session], None], every: Every, backends=(XLA, CPU)) -> dict:
    """The metrics that train(backend, session) logs on XLA and on the CPU, and XLA's counters at its end."""
    found = {}
    for backend in backends:
        session = open_session(f"{name}-{backend.kind}", backend, every)
        backend.seed(0)
        train(backend, session)
        found[backend.kind] = session.run.metrics()
        if backend is XLA:
            found |= XLA.counters()
    return found


def graphs() -> int:
    """How many graphs XLA has been given so far, cached ones included."""
    return sum(met.counter_value(name) or 0 for name in ("CachedCompile", "UncachedCompile"))


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """Largest difference, relative to the largest magnitude."""
    return ((one.cpu() - other).abs().max() / other.abs().max().clamp(min=1e-12)).item()


def apart(ours: dict, theirs: dict) -> float:
    assert ours.keys() == theirs.keys() and ours, sorted(ours.keys() ^ theirs.keys())
    return max(difference(ours[name], theirs[name]) for name in theirs)


def mark_step() -> dict:
    """How many graphs `xla_mark_step` runs of a computation in somebody's own loop."""
    before, value = executed(), torch.ones(3, device=torch_xla.device()) + 1
    qat_lora.xla_mark_step()
    xm.wait_device_ops()  # it runs asynchronously; a busy machine may not have begun
    return {"executed": executed() - before, "sum": value.cpu().sum().item()}


def executed() -> int:
    return (met.metric_data("ExecuteTime") or [0])[0]


def sigterm() -> dict:
    """Whether a process that unpickles a TPU worker notices SIGTERM in its main thread."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pickle.loads(pickle.dumps(XlaWorker(Job(print, False, Timeouts()))))
    os.kill(os.getpid(), signal.SIGTERM)
    return {"noticed": SIGTERM.is_set()}


def main() -> None:
    """Run the checks that the command line names, and write OUT/found.json: {check: its result, or its error}."""
    found = {}
    for name in sys.argv[3:]:
        module, function = name.split(".")
        started = time.monotonic()
        try:
            found[name] = getattr(importlib.import_module(module), function)()
        except Exception:
            found[name] = {"error": traceback.format_exc()[-3000:]}
        found[name]["seconds"] = round(time.monotonic() - started, 1)
    (OUT / "found.json").write_text(json.dumps(found))
