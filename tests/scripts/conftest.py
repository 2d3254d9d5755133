"""Fixtures for runs on a tiny model that are refused or resumed."""

import gc

import pytest
from forked import Forks
from small import SMALL

from qat_lora.errors import UserError
from qat_lora.run.command_line import parse


@pytest.fixture(scope="module")
def run(load_script):
    """run(script, *flags): main(parse(flags)), as the command line does."""

    def main(script: str, *flags) -> None:
        module = load_script(script)
        module.main(parse(module.Config, script, list(map(str, flags))))

    return main


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    return Forks(tmp_path_factory.mktemp("said"))


@pytest.fixture(scope="module")
def cache(run, tiny_model_dir, tmp_path_factory):
    """A small valid cache. Do not write to it."""
    folder = tmp_path_factory.mktemp("bad") / "cache"
    flags = "--length 16 --max-rows 32 --heldout-fraction 0.25 --rows-per-shard 8 --device cpu --precision fp32"
    run("build_kd_cache", "--model", tiny_model_dir, "--cache-dir", folder, *flags.split())
    return folder


@pytest.fixture(scope="module")
def tiny_student(make_student, tiny_model_dir):
    return make_student(tiny_model_dir)


@pytest.fixture
def refuse(run):
    """refuse(script, *flags): the message of the UserError, checked to be one line."""

    def refused(script: str, *flags) -> str:
        with pytest.raises(UserError) as error:
            run(script, *flags)
        message = str(error.value)
        assert len(message.splitlines()) == 1, message
        del error
        gc.collect()  # the process would end here and release its run directory
        return message

    return refused


@pytest.fixture
def qat(tiny_model_dir, cache, tmp_path):
    """Flags for a small run of train_qat on the valid cache."""
    return ["--model", tiny_model_dir, "--cache-dir", cache, "--output-dir", tmp_path / "run", *SMALL]
