"""The notebooks as they are stored, and their execution with a small model."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from packaged import gguf_bytes

from qat_lora.backend import tpu_chips
from qat_lora.errors import ROOT
from qat_lora.models.loading import load_model, load_tokenizer
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


def first_layers(site: Path) -> None:
    """Write a package with the first two layers of the embedded model, in place of all thirty, into `site`."""
    package, whole = site / PACKAGED[EMBEDDED].package, site / "model"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    model = load_model(EMBEDDED)
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:2], 2
    model.save_pretrained(whole)
    load_tokenizer(EMBEDDED).save_pretrained(whole)
    gguf_bytes(whole, package / "model.gguf")


@contextmanager
def executed(name: str, folder: Path) -> Iterator[tuple[nbformat.NotebookNode, Path]]:
    """(the notebook, executed with a small model, and its output folder). Nothing is written into the checkout."""
    before, notebook, out = in_checkout(), stored(name), folder / "out"
    first_layers(folder / "site")
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
