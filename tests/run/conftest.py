"""Fixtures of the tests of run directories."""

import gc

import pytest

from qat_lora.run import rundir


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rundir, "git_state", lambda: ("abc1234", False))
    yield tmp_path
    gc.collect()  # frees the locks of refused runs now: in the next test, the warning would keep its own lock alive


@pytest.fixture
def clock(monkeypatch):
    """Each run starts a second after the one before, so that names sort by time."""
    ticks = iter(range(100))
    monkeypatch.setattr(rundir, "_stamp", lambda: f"20260101T0000{next(ticks):02d}Z")
