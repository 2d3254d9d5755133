"""docs/architecture.md names every file that an update passes through, and no other."""

import re

import pytest
from passes import COMMANDS, passed

from qat_lora.errors import ROOT
from qat_lora.kernels import native

SECTIONS = {"qat": "The path of one batch", "grpo": "The path of one prompt"}


@pytest.mark.parametrize("name", SECTIONS)
def test_the_path_in_the_docs_is_the_path_that_a_run_takes(name):
    if native.library() is None:
        pytest.skip("no C compiler with OpenMP")
    text = (ROOT / "docs" / "architecture.md").read_text()
    section = re.search(rf"## {SECTIONS[name]}\n(.*?)\n## ", text, re.DOTALL)[1]
    named = {path for path in re.findall(r"`((?:qat_lora|scripts)/[\w/]+\.py)`", section)}
    assert named == {f"scripts/{COMMANDS[name][0]}.py", *passed(name)}
