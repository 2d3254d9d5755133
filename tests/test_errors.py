"""How an error ends a program: its exit code and one line."""

import errno
import os
import subprocess
import sys

import pytest
import torch

from qat_lora.errors import UserError, report


def too_much():
    torch.empty(2**55)


def bad():
    raise UserError("--steps 0:\n use 1")


def unexpected():
    raise RuntimeError("odd\nsecond line")


class Mute(RuntimeError):
    def __str__(self):
        raise KeyError("no text")


def mute():
    raise Mute


@pytest.mark.parametrize(
    "function, code, line",
    [
        (too_much, 2, "error: out of memory ("),
        (bad, 2, "error: --steps 0: use 1\n"),
        (unexpected, 1, "error: RuntimeError: odd; unexpected error, rerun with --debug for the traceback\n"),
        (mute, 1, "error: Mute: Mute; unexpected error, rerun with --debug for the traceback\n"),
    ],
)
def test_errors_end_with_their_exit_code_and_one_line(function, code, line, capsys):
    try:
        function()
    except Exception as error:
        assert report(error) == code
    said = capsys.readouterr().err
    assert said.startswith(line) and said.count("\n") == 1


BROKEN = """
import sys
from qat_lora.errors import report
sys.exit(report(BrokenPipeError(32, "Broken pipe"), with_traceback="--traceback" in sys.argv))
"""


def broken_pipe(stdout, *flags: str) -> subprocess.CompletedProcess:
    """A program that ends with a BrokenPipeError."""
    return subprocess.run([sys.executable, "-c", BROKEN, *flags], stdout=stdout, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("flags", [(), ("--traceback",)], ids=["one worker", "several"])
def test_a_closed_output_pipe_ends_the_program_silently(flags):
    reader, writer = os.pipe()
    os.close(reader)
    done = broken_pipe(writer, *flags)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_any_other_broken_pipe_is_an_error():
    done = broken_pipe(subprocess.PIPE)
    assert done.returncode == 2 and done.stderr.startswith("error: a connection broke ([Errno 32] Broken pipe)")


def test_a_full_disk_is_reported(capsys):
    assert report(OSError(errno.ENOSPC, "No space left on device", "runs/a")) == 2
    assert capsys.readouterr().err == (
        "error: runs/a: No space left on device; free some space and run the command again (training: with "
        "--resume auto)\n"
    )


def test_a_sigterm_during_shutdown_changes_nothing(tmp_path):
    """Shutting down the interpreter takes a while once torch is imported."""
    code = (
        "import atexit, os, signal\n"
        "from dataclasses import dataclass\n"
        "from qat_lora.run.command_line import run_script\nfrom qat_lora.run.options import ScriptConfig\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
        "run_script(lambda config: print('done'), ScriptConfig, 'smoke_test', '')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
