"""enable_hugepages.sh reports the setting, changes it if permitted, and otherwise says what to do."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "enable_hugepages.sh"
NOBODY = 65534
pytestmark = pytest.mark.skipif(not shutil.which("bash"), reason="bash is missing")


def run(*flags, **options):
    return subprocess.run(["bash", SCRIPT, *flags], capture_output=True, text=True, **options)


@pytest.fixture
def switch(tmp_path):
    file = tmp_path / "enabled"
    file.write_text("always [madvise] never\n")
    return file


def test_check_reports_and_changes_nothing(switch):
    done = run("--check", switch)
    assert done.returncode == 1 and switch.read_text() == "always [madvise] never\n"
    assert done.stdout.splitlines()[0] == "transparent hugepages: madvise"
    assert "sudo ./enable_hugepages.sh" in done.stdout
    assert os.access(SCRIPT, os.X_OK)


def test_already_on(switch):
    switch.write_text("[always] madvise never\n")
    for flags in ([], ["--check"]):
        done = run(*flags, switch)
        assert done.returncode == 0 and "already on" in done.stdout
    assert switch.read_text() == "[always] madvise never\n"


def test_it_turns_hugepages_on_and_reads_the_setting_back(switch):
    done = run(switch)
    assert done.returncode == 0 and switch.read_text() == "always\n"
    assert done.stdout.splitlines() == ["transparent hugepages: madvise", "turned on until the next boot: always"]


def test_without_write_permission():
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        switch = Path(folder, "enabled")
        switch.write_text("always [madvise] never\n")
        switch.chmod(0o444)
        command = ["bash", "-s", "--", switch]  # from stdin: the user "nobody" may not read the checkout
        user = NOBODY if os.geteuid() == 0 else None
        with open(SCRIPT) as script:
            done = subprocess.run(command, stdin=script, user=user, cwd="/", capture_output=True, text=True)
        assert switch.read_text() == "always [madvise] never\n"
    assert done.returncode == 1
    assert done.stderr.splitlines() == [f"no permission to write {switch}; run: sudo ./enable_hugepages.sh"]


def test_a_write_without_effect_a_missing_file_and_wrong_use_are_reported(tmp_path):
    done = run("/dev/null")
    assert done.returncode == 1 and "the kernel ignored the change" in done.stderr
    done = run(tmp_path / "absent")
    assert done.returncode == 1 and "not Linux, or a container" in done.stderr and done.stderr.count("\n") == 1
    assert run("--off").returncode == run("a", "b").returncode == 2
