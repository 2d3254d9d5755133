"""Runs commands as forked children of one process that has imported everything, so that they start in milliseconds.

A child runs the script as `python scripts/X.py …` would, with its own working directory, arguments and output. It is a
separate process: when killed, it leaves behind what any killed process does. The parent only imports and waits. It
never computes anything, so that no child inherits a lock held by another thread.
"""

import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

os.environ |= {"USE_TORCH_XLA": "0", "PJRT_DEVICE": "CPU", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

ROOT = Path(__file__).resolve().parents[2]
LONGEST = 120  # seconds that a command may take before it counts as hung
POLL = 0.001
PICTURE = b"\x89PNG" + bytes(30_000)
MODULES = """
    matplotlib.backends.backend_agg peft qat_lora.experiments.athena.evaluation qat_lora.experiments.athena.training
    qat_lora.experiments.legal.evaluation qat_lora.experiments.musclebob.validation
    qat_lora.experiments.stories.evaluation qat_lora.export.gguf qat_lora.layer_qat qat_lora.lora.recovery
    qat_lora.rl.grpo
"""


def preload() -> None:
    """Import everything that the scripts import, including what transformers and PEFT import lazily."""
    for name in MODULES.split():
        import_module(name)
    if find_spec("datasets"):  # no trial needs it
        import_module("datasets")
    import torch
    from matplotlib.figure import Figure
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: F401

    torch.set_num_threads(1)
    # Drawing would take half the time of every trial, so pictures are replaced with placeholder bytes.
    Figure.tight_layout = lambda *_, **__: None
    Figure.savefig = lambda _, path, **__: Path(path).write_bytes(PICTURE)


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code, as a shell would give it, and what it printed."""

    code: int
    out: str
    err: str
    seconds: float


class Process:
    """A running command."""

    def __init__(self, pid: int, log: Path):
        self.pid, self.log, self.started, self.status = pid, log, time.monotonic(), None

    def alive(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = status if pid else None
        return self.status is None

    def send(self, number: int) -> None:
        if self.alive():
            os.kill(self.pid, number)

    def until(self, moment: Callable[[], bool]) -> bool:
        """Wait for a moment; False if the command ends first."""
        while self.alive():
            if moment():
                return True
            time.sleep(POLL)
        return False

    def wait(self) -> Ended:
        """Wait for the command to end. One that takes longer than LONGEST is killed and gets exit code 124."""
        hung = False
        while self.alive():
            if time.monotonic() - self.started > LONGEST and not hung:
                hung = True
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(POLL)
        code = os.waitstatus_to_exitcode(self.status)
        code = 124 if hung else code if code >= 0 else 128 - code
        out, err = (Path(f"{self.log}.{end}").read_text(errors="replace") for end in ("out", "err"))
        return Ended(code, out, err, time.monotonic() - self.started)


def start(folder: Path, script: str, *argv: str, log: str = "log") -> Process:
    """Start scripts/<script>.py in `folder`; its output goes to <folder>.<log>.*, beside the folder."""

    def command() -> None:
        sys.argv = [f"scripts/{script}.py", *argv]
        runpy.run_path(str(ROOT / "scripts" / f"{script}.py"), run_name="__main__")

    return fork(folder, command, log)


def spawn(folder: Path, script: str, *argv: str, log: str = "log") -> Process:
    """Like `start`, but in a new interpreter, which takes ten times as long to start: for what happens when the
    interpreter ends, and for several workers."""
    command = [sys.executable, str(ROOT / "scripts" / f"{script}.py"), *argv]
    return fork(folder, lambda: os.execve(command[0], command, os.environ | {"PYTHONPATH": str(ROOT)}), log)


def fork(folder: Path, function: Callable[[], object], log: str = "log") -> Process:
    """A child that calls function() in `folder` and ends as a Python program would."""
    log = folder.with_name(f"{folder.name}.{log}")
    pid = os.fork()
    if pid:
        return Process(pid, log)
    code = 1
    try:
        for name in (signal.SIGTERM, signal.SIGINT):
            signal.signal(name, signal.SIG_DFL)
        os.chdir(folder)
        _redirect(log)
        code = _exit_code(function)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(log: Path) -> None:
    """Standard input is empty; standard output and error go to files, as for a command in a shell."""
    opened = [os.open(os.devnull, os.O_RDONLY)]
    opened += [os.open(f"{log}.{end}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for end in ("out", "err")]
    for number, file in enumerate(opened):
        os.dup2(file, number)
        os.close(file)
    sys.stdin, sys.stdout, sys.stderr = (open(n, m, closefd=False) for n, m in enumerate("rww"))  # noqa: SIM115


def _exit_code(function: Callable[[], object]) -> int:
    try:
        function()
        return 0
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return stop.code or 0
        print(stop.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    return 1
