"""The notebooks as they are stored, and their execution with a small model."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pydoc_data.topics import topics

import nbformat
import pytest
import torch
from nbclient import NotebookClient
from packaged import gguf_bytes
from transformers import LlamaConfig, LlamaForCausalLM

from qat_lora.backend import tpu_chips
from qat_lora.errors import ROOT
from qat_lora.hardware import tiny
from qat_lora.models.packaged import EMBEDDED, PACKAGED

DISTILLATION, LAW = "TPU_LoRA_KD_WikiText1024", "training-cot-sft-tpu-v5e"
MINIATURE = pytest.mark.skipif(bool(tpu_chips()), reason="with a TPU the notebooks train full-size models for hours")


def path(name: str) -> Path:
    return ROOT / "notebooks" / f"{name}.ipynb"


def stored(name: str) -> nbformat.NotebookNode:
    return nbformat.read(path(name), as_version=nbformat.NO_CONVERT)


def source(name: str, id: str) -> str:
    return next(cell.source for cell in stored(name).cells if cell.id == id)


def in_checkout() -> list[tuple[Path, int]]:
    """Files from the notebooks in the checkout's own folders, and when they were written."""
    files = [path for folder in ("runs", "caches", "data") for path in (ROOT / folder).glob("notebook*/**/*")]
    return sorted((path, path.stat().st_mtime_ns) for path in files)


def small_model(site: Path) -> None:
    """Write a package with a random model of two layers, in place of the embedded one, into `site`."""
    package, whole = site / PACKAGED[EMBEDDED].package, site / "model"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    tokenizer = tiny.tokenizer().train_new_from_iterator(topics.values(), 2048)
    changes = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.1}
    config = LlamaConfig.from_dict(tiny.model(tokenizer).config.to_dict() | changes)
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(whole)
    tokenizer.save_pretrained(whole)
    gguf_bytes(whole, package / "model.gguf")


@contextmanager
def executed(name: str, folder: Path) -> Iterator[tuple[nbformat.NotebookNode, Path]]:
    """(the notebook, executed with a small model, and its output folder). Nothing is written into the checkout."""
    before, notebook, out = in_checkout(), stored(name), folder / "out"
    small_model(folder / "site")
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR"):
            patch.setenv(variable, str(folder))  # keeps out the user's own kernels and start-up files
        patch.setenv("QAT_LORA_NOTEBOOK_OUT", str(out))
        patch.setenv("PYTHONPATH", f"{folder / 'site'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
        NotebookClient(notebook, timeout=None, resources={"metadata": {"path": str(path(name).parent)}}).execute()
    assert in_checkout() == before, "the notebook wrote into the checkout"
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    yield notebook, out
    shutil.rmtree(folder)


def outputs(notebook: nbformat.NotebookNode, kind: str) -> list:
    """The outputs of one MIME type of all cells, in order."""
    shown = [output.get("data", {}) for cell in notebook.cells for output in cell.get("outputs", [])]
    return [data[kind] for data in shown if kind in data]
