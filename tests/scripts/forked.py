"""Scripts run in processes forked from a server that has done the imports, so that several workers and real kills are
cheap."""

import functools
import itertools
import multiprocessing
import os
import pkgutil
import runpy
import signal
import sys
from pathlib import Path

import pytest
import torch
from patience import PATIENCE
from ports import free_port

ROOT = Path(__file__).resolve().parents[2]
IMPORTS = [
    "forked", "qat_lora.lora.recovery", "qat_lora.layer_qat", "qat_lora.run.plots", "qat_lora.train.language_memory",
    "qat_lora.experiments.legal.evaluation", "qat_lora.experiments.stories.evaluation",
]  # fmt: skip


def kill(place: str, call: int, after: bool = False) -> tuple:
    """Death at the given call of a function, before or after it. place: where qat_lora looks it up, e.g.
    run.session.Session.record."""
    return place, call, signal.SIGKILL, after


def _deadly(place: str, call: int, sign: int, after: bool) -> None:
    """Make this process send itself the signal `sign` at the given call of a function."""
    path, _, leaf = place.rpartition(".")
    owner, calls = pkgutil.resolve_name(f"qat_lora.{path}"), itertools.count(1)
    function = getattr(owner, leaf)

    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        last = next(calls) == call
        if last and not after:
            os.kill(os.getpid(), sign)
        result = function(*args, **kwargs)
        if last:
            os.kill(os.getpid(), sign)
        return result

    setattr(owner, leaf, wrapper)


def play(script: str, argv: list[str], said: str, death: tuple | None, env: dict[str, str]) -> None:
    """In the child: run the script as `python scripts/<script>.py` would, with its output in the file `said`."""
    with open(said, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    torch.set_num_threads(1)
    os.environ.update(env)
    sys.argv = [f"{script}.py", *argv]
    if death:
        _deadly(*death)
    runpy.run_path(str(ROOT / "scripts" / f"{script}.py"), run_name="__main__")


class Forks:
    """Starts scripts in processes forked from the server. folder: for their outputs."""

    def __init__(self, folder: Path):
        self.env: dict[str, str] = {}  # more variables of every script
        self.folder, self.context = folder, multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(IMPORTS)

    def execute(self, script: str, *flags, expect: int = 0, death: tuple | None = None) -> str:
        """The output of a run that ends with the exit code `expect`, or is killed. death: place, call, signal and
        whether after the call."""
        expect = -signal.SIGKILL if death and death[2] == signal.SIGKILL else expect
        return self._end(*self._start(script, flags, death, {}), expect)

    def pair(self, script: str, *flags, expect: tuple = (0, 0), second: tuple = (), death: tuple | None = None) -> list:
        """The outputs of two workers, which the variables that torchrun sets bring together. expect: their exit codes;
        second: more flags for worker 1; death: of worker 1, as in `execute`."""
        return self.several(script, *flags, expect=expect, last=second, death=death)

    def several(self, script: str, *flags, expect: tuple, last: tuple = (), death: tuple | None = None) -> list:
        """Like `pair`, for as many workers as there are exit codes in `expect`; last, death: of the last one."""
        count = str(len(expect))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        place |= {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        *first, end = [place | {"RANK": rank, "LOCAL_RANK": rank} for rank in map(str, range(len(expect)))]
        started = [self._start(script, flags, None, rank) for rank in first]
        started.append(self._start(script, (*flags, *last), death, end))
        return [self._end(*process, code) for process, code in zip(started, expect)]

    def _start(self, script: str, flags: tuple, death: tuple | None, env: dict[str, str]) -> tuple:
        said = self.folder / f"{len(list(self.folder.iterdir()))}.txt"
        said.touch()
        arguments = script, list(map(str, flags)), str(said), death, self.env | env
        process = self.context.Process(target=play, args=arguments)
        process.start()
        return process, said

    def _end(self, process: multiprocessing.Process, said: Path, expect: int) -> str:
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
            pytest.fail(f"a script hangs: {said.read_text()[-2000:]}")
        assert process.exitcode == expect, said.read_text()[-3000:]
        return said.read_text()
