"""A few trials of `make test-faults` on its cheapest subject, so that its harness keeps working. It runs in a separate
process, since it forks and must not have started threads."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("fault_table.py")


def run(base, only: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(PROGRAM), "--jobs", "1", "--base", str(base), "--subject", "teacher cache"]
    return subprocess.run([*command, "--only", only], capture_output=True, text=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


@pytest.mark.parametrize("only", ["kill -9/.*(while saving|after the last step)", "damaged file, resumed/.*manifest.*"])
def test_trials_of_the_cheapest_subject(base, only):
    done = run(base, only)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "**all**" in done.stdout and " 0 trials" not in done.stdout
