"""Fixtures for the checks that need torch_xla: it patches torch when imported, so they run in a separate process."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from xla_results import QUICK

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def one_layer_dir(sharp_model_dir, tmp_path_factory):
    """The model of `sharp_model_dir` with its first layer alone: XLA compiles twice as long for two."""
    from qat_lora.models.loading import load_model

    folder = tmp_path_factory.mktemp("xla") / "model"
    shutil.copytree(sharp_model_dir, folder)
    model = load_model(str(sharp_model_dir))
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def on_xla(one_layer_dir, tmp_path_factory):
    """on_xla(check, …): {check: its result}, from one process on torch_xla's CPU device; "folder": what it wrote.

    A check is a function of an xla_*.py in this folder, such as "xla_qat.qat".
    """

    def run(*checks: str) -> dict:
        folder = tmp_path_factory.mktemp("xla")
        command = [sys.executable, "-c", "import xla_process; xla_process.main()", one_layer_dir, folder, *checks]
        path = os.pathsep.join(filter(None, [str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PJRT_DEVICE": "CPU", "XLA_FLAGS": QUICK, "PYTHONPATH": path}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads((folder / "found.json").read_text()) | {"folder": folder}

    return run


@pytest.fixture
def found(checks, request):
    """The result of the check of this name, of those that the module's fixture `checks` has run."""
    check = checks[request.param]
    if "error" in check:
        pytest.fail(check["error"], pytrace=False)
    return check
