"""Records graphs for the TPU's compiler in a process of its own: torch_xla patches torch when it is imported."""

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def record(tiny_model_dir, tmp_path_factory):
    """record(precision, name, …): what aot_checks.py records under these names. The model has one layer of two heads:
    compiling takes as long as a graph is large."""
    folder = tmp_path_factory.mktemp("recorded")
    few = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    LlamaForCausalLM(LlamaConfig.from_pretrained(tiny_model_dir, **few)).save_pretrained(folder / "model")

    def run(precision: str, *names: str) -> dict:
        command = [sys.executable, HERE / "aot_checks.py", folder / "model", folder / precision, precision, *names]
        done = subprocess.run(command, env=os.environ | {"USE_TORCH_XLA": "0"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return pickle.loads((folder / precision).read_bytes())

    return run
