"""A small package like gemma3-270m's: a .gguf file in two parts, each in its own package."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from gguf import GGUFWriter

from qat_lora.export.gguf_file import model_writer, tensor_names, to_gguf_rows, turned_heads
from qat_lora.models.loading import load_model
from qat_lora.models.packaged import PACKAGED

NAME = "gemma3-270m"
MODULE = PACKAGED[NAME].package
CODE = """
import importlib
from pathlib import Path

MODEL_NAME, EXPECTED_SHA256 = "model.gguf", {sha256!r}


def chunk_paths():
    modules = [importlib.import_module(f"{{__name__}}_part{{number}}") for number in (1, 2)]
    return [Path(module.__file__).with_name("part") for module in modules]
"""


def make_package(site: Path, data: bytes) -> Path:
    """Write the packages into `site`; returns the folder of the first."""
    whole, *parts = (site / name for name in (MODULE, f"{MODULE}_part1", f"{MODULE}_part2"))
    for folder in (whole, *parts):
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()
    (whole / "__init__.py").write_text(CODE.format(sha256=hashlib.sha256(data).hexdigest()))
    half = len(data) // 2
    for folder, part in zip(parts, (data[:half], data[half:])):
        (folder / "part").write_bytes(part)
    return whole


def gguf_bytes(model_dir: Path, path: Path, store: Callable | None = None) -> bytes:
    """A model folder as a .gguf file, written to `path`: in fp32, or with the data and type of each tensor that
    store(parameter's name, rows, heads) returns."""
    name = str(model_dir)
    parameters = {key: p.detach().numpy() for key, p in load_model(name).named_parameters()}
    writer, _ = model_writer(name, 0)
    for key, there in tensor_names(name, list(parameters)).items():
        heads = turned_heads(name, key.rpartition(".")[0])
        rows = np.ascontiguousarray(to_gguf_rows(parameters[key], heads))
        data, kind = store(key, rows, heads) if store else (rows, None)
        writer.add_tensor(there, data, raw_dtype=kind)
    finish(writer, path)
    return path.read_bytes()


def finish(writer: GGUFWriter, path: Path) -> None:
    """Write the file of a writer that has all its tensors."""
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
