"""How an error ends a program: the code, and one line."""

import pytest
import torch

from qat_lora.errors import UserError, report


def too_much():
    torch.empty(2**55)


def bad():
    raise UserError("--steps 0:\n use 1")


def unexpected():
    raise RuntimeError("odd\nsecond line")


@pytest.mark.parametrize(
    "function, code, line",
    [
        (too_much, 2, "error: out of memory ("), (bad, 2, "error: --steps 0: use 1\n"),
        (unexpected, 1, "error: RuntimeError: odd; unexpected error, rerun with --debug for the traceback\n"),
    ],
)  # fmt: skip
def test_the_code_and_the_line(function, code, line, capsys):
    try:
        function()
    except Exception as error:
        assert report(error) == code
    said = capsys.readouterr().err
    assert said.startswith(line) and said.count("\n") == 1
