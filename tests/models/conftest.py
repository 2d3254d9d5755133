"""Fixtures for scripts that run on models of many types."""

import pytest

from qat_lora.run.command_line import parse


@pytest.fixture(scope="session")
def run(load_script):
    """run(script, *flags): main(parse(flags)), as the command line does."""

    def main(script: str, *flags) -> None:
        module = load_script(script)
        module.main(parse(module.Config, script, list(map(str, flags))))

    return main
