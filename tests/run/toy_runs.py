"""Runs of a toy script with four options."""

import json
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


def opened(facts: dict | None = None, **values) -> Run:
    return open_run("toy", config(**values), facts or {})


def resumed(facts: dict | None = None, **values) -> Run:
    return opened(facts, **{"resume": "auto"} | values)


def refusal(facts: dict | None = None, **values) -> str:
    """The error when a run is resumed with these facts and options."""
    with pytest.raises(UserError) as error:
        resumed(facts, **values)
    return str(error.value)


def manifest_of(run: Run, **changes) -> dict:
    """The content of manifest.json, after these changes to it; None removes an entry."""
    path = run.path / "manifest.json"
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))
    return content
