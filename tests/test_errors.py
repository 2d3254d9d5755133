"""How an error ends a program: its exit code and one line."""

import errno
import os
import subprocess
import sys

import pytest
import torch

from qat_lora.errors import UserError, report

UNEXPECTED = "unexpected error, rerun with --debug for the traceback"


class Mute(RuntimeError):
    def __str__(self):
        raise KeyError("no text")


@pytest.mark.parametrize(
    "error, code, line",
    [
        (UserError("--steps 0:\n use 1"), 2, "--steps 0: use 1"),
        (RuntimeError("odd\nsecond line"), 1, f"RuntimeError: odd; {UNEXPECTED}"),
        (Mute(), 1, f"Mute: Mute; {UNEXPECTED}"),
        (
            OSError(errno.ENOSPC, "No space left on device", "runs/a"),
            2,
            "runs/a: No space left on device; free some space and run the command again (training: with --resume auto)",
        ),
    ],
)
def test_errors_end_with_their_exit_code_and_one_line(error, code, line, capsys):
    assert report(error) == code
    assert capsys.readouterr().err == f"error: {line}\n"


def test_memory_that_torch_cannot_allocate_is_reported(capsys):
    with pytest.raises(RuntimeError) as error:
        torch.empty(2**55)
    assert report(error.value) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: out of memory (") and said.count("\n") == 1


def broken_pipe(stdout, several: bool = False) -> subprocess.CompletedProcess:
    """A program that ends with a BrokenPipeError."""
    broken = f"report(BrokenPipeError(32, 'Broken pipe'), with_traceback={several})"
    code = f"import sys\nfrom qat_lora.errors import report\nsys.exit({broken})"
    return subprocess.run([sys.executable, "-c", code], stdout=stdout, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("several", [False, True], ids=["one worker", "several"])
def test_a_closed_output_pipe_ends_the_program_silently(several):
    reader, writer = os.pipe()
    os.close(reader)
    done = broken_pipe(writer, several)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_any_other_broken_pipe_is_an_error():
    done = broken_pipe(subprocess.PIPE)
    assert done.returncode == 2 and done.stderr.startswith("error: a connection broke ([Errno 32] Broken pipe)")


def test_a_sigterm_during_shutdown_changes_nothing(tmp_path):
    """Shutting down the interpreter takes a while once torch is imported."""
    code = (
        "import atexit, os, signal\n"
        "from qat_lora.run.command_line import run_script\nfrom qat_lora.run.options import ScriptConfig\n"
        "atexit.register(lambda: os.kill(os.getpid(), signal.SIGTERM))\n"
        "run_script(lambda config: print('done'), ScriptConfig, 'smoke_test', '')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr
