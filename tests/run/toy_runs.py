"""Runs of a toy script with four options."""

from dataclasses import dataclass

import pytest

from qat_lora.errors import UserError
from qat_lora.run.options import RunConfig, option
from qat_lora.run.rundir import Run, open_run


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    learning_rate: float = option(1e-5, "peak")
    max_steps: int = option(10, "updates")
    limit: int | None = option(None, "rows", identity="base")
    log_every: int = option(10, "updates between lines", identity=False)


def config(**values) -> Config:
    return Config(**{"output_dir": "run"} | values)


def ended(cfg: Config) -> Run:
    """A run whose process has ended."""
    run = open_run("toy", cfg, {})
    run.held.close()
    return run


def begun_with(**values) -> Run:
    return ended(config(**values))


def refusal(cfg: Config, facts: dict | None = None) -> str:
    with pytest.raises(UserError) as error:
        open_run("toy", cfg, facts or {})
    return str(error.value)
