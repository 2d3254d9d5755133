"""Each use of a model type has the outcome listed in docs/models.md; windows, soft caps and experts work on XLA."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
import zoo
import zoo_uses
from zoo_table import QUICK, TABLE, read_page, shortened
from zoo_uses import CPU, ON_XLA, USES, outcomes

REQUIREMENTS = Path(__file__).parents[2] / "requirements.txt"
HERE = ["mistral"]
SOME = "bert cohere2 gemma3_text gemma4_text gpt2 gpt_oss llama mamba2 mixtral mpt qwen3_5_text whisper"
XLA = ["mistral", "gemma2", "gemma3_text", "gpt_oss", "mixtral", "qwen3_moe"]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in HERE else pytest.mark.zoo) for name in [*HERE, *SOME.split()]]
)
def test_the_table_matches_the_outcomes(name):
    found = {use: shortened(outcome) for use, outcome in outcomes(name, CPU, USES).items()}
    assert read_page(TABLE.read_text())[name] | {"GGUF": found["GGUF"]} == found


@pytest.mark.skipif(
    f"transformers=={transformers.__version__}" not in REQUIREMENTS.read_text(),
    reason="the table is of another version",
)
def test_the_table_lists_every_model_type():
    assert read_page(TABLE.read_text()).keys() == set(zoo.names())


def on_xla(uses: list[str], names: list[str]) -> dict[str, dict[str, str]]:
    command = [sys.executable, zoo_uses.__file__, "xla", ";".join(uses), *names]
    environment = os.environ | {"PJRT_DEVICE": "CPU", "XLA_FLAGS": QUICK}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return {(line := json.loads(text)).pop("name"): line for text in done.stdout.splitlines()}


@pytest.mark.deep
@pytest.mark.xla
def test_windows_soft_caps_and_experts_on_xla_equal_the_cpu():
    uses, names = ["cache, perplexity", "SFT"], ["gemma2", "gpt_oss"]
    assert on_xla(uses, names) == {name: dict.fromkeys(uses, "yes") for name in names}


@pytest.mark.zoo
@pytest.mark.xla
@pytest.mark.parametrize("name", XLA)
def test_every_use_on_xla_equals_the_cpu(name):
    assert on_xla(list(ON_XLA), [name]) == {name: dict.fromkeys(ON_XLA, "yes")}
