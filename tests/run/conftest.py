"""Fixtures of the tests of run directories."""

import pytest

from qat_lora.run import files, rundir


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty working directory; the runs in it are released at the end, as when their process ends."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rundir, "git_state", lambda: ("abc1234", False))
    yield tmp_path
    for held in files.HELD.values():
        held.close()
    files.HELD.clear()


@pytest.fixture
def clock(monkeypatch):
    """Each run starts a second after the one before, so that names sort by time."""
    ticks = iter(range(100))
    monkeypatch.setattr(rundir, "_stamp", lambda: f"20260101T0000{next(ticks):02d}Z")
