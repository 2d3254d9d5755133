"""Export of a frozen student, alone or with its adapter, to GGUF files for llama.cpp, which are read back and checked.

GGUF stores the codes and scales themselves, in the block types of gguf_types.py.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, GGUFWriter
from torch import Tensor

from qat_lora.errors import UserError, first_line
from qat_lora.export.gguf_file import (
    adapter_writer,
    check_architecture,
    file_bytes,
    metadata,
    model_writer,
    tensor_names,
    to_gguf_rows,
    turned_heads,
)
from qat_lora.export.gguf_types import QUANTISED, SHIFTED, TYPES, choose, decode, encode, held, library_type, row_bytes
from qat_lora.export.source import Source, weight_of
from qat_lora.models.gguf_settings import frequency_factors, norm_change
from qat_lora.models.loading import empty_model, load_config, model_source, plain_state
from qat_lora.models.writing import differs
from qat_lora.quant.linear import Quantizer, StoredWeight, quantized_layers
from qat_lora.quant.spec import QuantSpec
from qat_lora.run.files import writing

MODEL_FILE, ADAPTER_FILE = "model.gguf", "adapter.gguf"


@dataclass(frozen=True)
class Entry:
    """One tensor of a GGUF file: its name and type in the file, and its source in the student.

    change: (a, b) if the file stores (w + a)·b for a weight w. factors: the values of a tensor that is not a parameter.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    parameter: str = ""
    quantizer: Quantizer | None = None
    heads: int = 0
    merged: bool = False
    change: tuple[float, float] = (0.0, 1.0)
    factors: tuple[float, ...] = ()

    @property
    def bytes(self) -> int:
        return self.shape[0] * row_bytes(self.kind, self.shape[1]) if len(self.shape) > 1 else 4 * self.shape[0]

    @property
    def spec(self) -> QuantSpec | None:
        return self.quantizer.spec if self.quantizer else None


@dataclass
class GGUFPlan:
    """A GGUF export: tensors and metadata of the model, and of its adapter if that is a separate file."""

    entries: list[Entry]
    writer: GGUFWriter
    notes: list[str]
    adapter: dict[str, Tensor] = field(default_factory=dict)
    adapter_writer: GGUFWriter | None = None

    @property
    def model_bytes(self) -> int:
        return file_bytes(self.writer, [(e.name, len(e.shape), e.bytes) for e in self.entries])

    @property
    def adapter_bytes(self) -> int:
        tensors = [(name, 2, 4 * value.numel()) for name, value in self.adapter.items()]
        return file_bytes(self.adapter_writer, tensors) if self.adapter_writer else 0


def plan_gguf(source: Source, wanted: str = "auto", merged: bool = False) -> GGUFPlan:
    """The type of each tensor, chosen according to `wanted` (see gguf_types.choose), and all metadata. `merged`: the
    adapted layers are written as F16 with the adapter added; otherwise the adapter is a separate file.

    Raises UserError for an architecture, a tokenizer or a layout that the format cannot represent.
    """
    check_architecture(source.name)
    config, parameters = load_config(source.name), plain_state(source.student)
    for name in source.updates.keys() - {f"{module}.weight" for module in source.loras}:
        raise UserError(f"adapter {source.adapter} changes {name}, which is not written to GGUF; use --format hf")
    layers = {id(layer.weight): layer.quantizer for layer in quantized_layers(source.student).values()}
    entries = []
    for parameter, name in tensor_names(source.name, list(parameters)).items():
        weight, module = source.student.get_parameter(parameter), parameter.rpartition(".")[0]
        quantizer, adapted = layers.get(id(weight)), merged and module in source.loras
        kind = "F16" if weight.ndim > 1 else "F32"
        if quantizer and not adapted:
            kind = choose(module, quantizer.spec, weight.shape[1], wanted)
        heads = turned_heads(source.name, module)
        change = norm_change(config, parameter)
        entries.append(Entry(name, kind, tuple(weight.shape), parameter, quantizer, heads, adapted, change))
    if factors := frequency_factors(config):
        entries.append(Entry("rope_freqs.weight", "F32", (len(factors),), factors=tuple(factors)))
    biggest = max(QUANTISED, key=lambda kind: sum(np.prod(e.shape) for e in entries if e.kind == kind))
    kind = biggest if any(e.kind == biggest for e in entries) else "F16"
    writer, notes = model_writer(source.name, TYPES[kind].file_type)
    plan = GGUFPlan(entries, writer, notes)
    if source.loras and not merged:
        plan.adapter_writer = adapter_writer(source.name, source.alpha)
        plan.adapter = dict(_adapter_tensors(source))
    return plan


def gguf_refusal(name: str) -> str | None:
    """Why students of a model cannot be written as GGUF; None if they can."""
    try:
        check_architecture(name)
        tensor_names(name, list(plain_state(empty_model(name))))
        if "gguf_file" not in model_source(name):  # a GGUF file's tokenizer is copied as it is
            model_writer(name, 0)
    except UserError as error:
        return str(error).removesuffix("; use --format hf")
    return None


def export_formats(name: str) -> str:
    """The formats in which export_model.py can write a student of this model, for the plan of a run."""
    reason = gguf_refusal(name)
    return f"export: hf; no GGUF: {reason}" if reason else "export: hf, gguf"


def _adapter_tensors(source: Source) -> Iterator[tuple[str, Tensor]]:
    """The adapter's tensors for llama.cpp, which multiplies by alpha / rank; any other factor is folded into b."""
    names = tensor_names(source.name, [f"{module}.weight" for module in source.loras])
    for module, lora in source.loras.items():
        name, share = names[f"{module}.weight"], lora.factor * len(lora.a) / source.alpha
        b = to_gguf_rows(lora.b.numpy(), turned_heads(source.name, module))
        yield f"{name}.lora_a", lora.a
        yield f"{name}.lora_b", torch.from_numpy(np.ascontiguousarray(b)) * share


def write_gguf(source: Source, plan: GGUFPlan, folder: Path, shown: Path) -> None:
    """Write and check model.gguf and, if planned, adapter.gguf. `shown`: the folder's final name, for messages."""
    payloads = ((entry, _payload(source, entry)) for entry in plan.entries)
    infos = [(e.name, e.shape, e.kind, e.bytes) for e in plan.entries]
    with writing(shown):
        _write(plan.writer, folder / MODEL_FILE, infos, (data for _, data in payloads))
        if plan.adapter_writer:
            infos = [(name, tuple(v.shape), "F32", 4 * v.numel()) for name, v in plan.adapter.items()]
            _write(plan.adapter_writer, folder / ADAPTER_FILE, infos, (v.numpy() for v in plan.adapter.values()))
    check_gguf(source, plan, folder, shown)


def _write(writer: GGUFWriter, path: Path, infos: list, payloads: Iterator[np.ndarray]) -> None:
    for name, shape, kind, size in infos:
        writer.add_tensor_info(name, shape, np.dtype(np.void), size, raw_dtype=library_type(kind))
    writer.write_header_to_file(path)
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for data in payloads:
        writer.write_tensor_data(data)
    writer.close()


def _plain(source: Source, entry: Entry) -> np.ndarray:
    """A tensor that is not stored in blocks, in fp16 or fp32."""
    if entry.factors:
        return np.array(entry.factors, np.float32)
    weight, (plus, times) = weight_of(source, entry.parameter, entry.merged), entry.change
    if (plus, times) != (0, 1):
        weight = (weight + plus) * times
    value = to_gguf_rows(weight.numpy(), entry.heads)
    value = torch.from_numpy(np.ascontiguousarray(value)).to(torch.float16 if entry.kind == "F16" else torch.float32)
    if not value.isfinite().all():
        raise UserError(f"{entry.parameter} holds values beyond 65504, fp16's largest; use --format hf")
    return value.numpy()


def _payload(source: Source, entry: Entry) -> np.ndarray:
    if entry.kind not in QUANTISED:
        return _plain(source, entry)
    return encode(entry.kind, entry.spec, _parts(entry))


def _parts(entry: Entry) -> StoredWeight:
    """What the file stores of a quantised tensor, its rows in the file's order."""
    return StoredWeight(
        *(None if part is None else to_gguf_rows(part, entry.heads) for part in entry.quantizer.parts())
    )


def check_gguf(source: Source, plan: GGUFPlan, folder: Path, shown: Path) -> None:
    """Read the files back and compare: every code, scale, offset and plain value, bit for bit, and all metadata."""
    tensors = _read(plan.writer, folder / MODEL_FILE, shown)
    if tensors.keys() != {entry.name for entry in plan.entries}:
        raise differs(shown / MODEL_FILE, "the list of tensors")
    for entry in plan.entries:
        if not _same(source, entry, tensors[entry.name]):
            raise differs(shown / MODEL_FILE, entry.name)
    if plan.adapter_writer:
        tensors = _read(plan.adapter_writer, folder / ADAPTER_FILE, shown)
        for name in sorted(tensors.keys() | plan.adapter.keys()):
            there, here = tensors.get(name), plan.adapter.get(name)
            if there is None or here is None or not np.array_equal(there.data, here.numpy()):
                raise differs(shown / ADAPTER_FILE, name)


def _read(writer: GGUFWriter, path: Path, shown: Path) -> dict:
    """The tensors of a file, after comparing its metadata with the writer's."""
    try:
        reader = GGUFReader(path)
    except (ValueError, KeyError, IndexError, OSError) as error:
        raise differs(shown / path.name, first_line(error)) from error
    for key, value in metadata(writer).items():
        there = reader.fields[key].contents() if key in reader.fields else None
        if there != (float(np.float32(value)) if isinstance(value, float) else value):
            raise differs(shown / path.name, key)
    return {tensor.name: tensor for tensor in reader.tensors}


def _same(source: Source, entry: Entry, tensor) -> bool:
    if tensor.tensor_type != library_type(entry.kind) or tuple(reversed(tensor.shape.tolist())) != entry.shape:
        return False
    if entry.kind not in QUANTISED:
        there, here = (values.reshape(-1).view(np.uint8) for values in (tensor.data, _plain(source, entry)))
        return np.array_equal(there, here)
    there, here = decode(entry.kind, entry.spec, tensor.data), held(entry.kind, entry.spec, _parts(entry))
    return all(a is b is None or np.array_equal(a, b) for a, b in zip(there, here))


# -- description -----------------------------------------------------------------------------------------------------
def summary(source: Source, plan: GGUFPlan) -> list[dict]:
    """One line for each class of tensors: class, quantiser, type, tensors, bytes, note."""
    base, lines = source.student, {}
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    tied = head.weight is embedding.weight
    for entry in plan.entries:
        weight = base.get_parameter(entry.parameter) if entry.parameter else None
        if weight is None:
            name = "rotation"
        elif weight is embedding.weight:
            name = "embedding, head" if tied else "embedding"
        elif weight is head.weight:
            name = "head"
        elif weight.ndim == 1:
            name = "norms, biases"
        else:
            name = "mlp" if ".mlp." in entry.parameter else "attention"
        key = (name, str(entry.spec or "—"), entry.kind, _note(entry))
        count, size = lines.get(key, (0, 0))
        lines[key] = (count + 1, size + entry.bytes)
    keys = ("class", "quantiser", "type", "note")
    return [dict(zip(keys, key)) | {"tensors": n, "bytes": size} for key, (n, size) in lines.items()]


def _note(entry: Entry) -> str:
    if entry.kind == "F32":
        return "exact" if entry.change[1] == 1 else "multiplied by the scale of q"
    if entry.merged:
        return "adapter added, rounded to fp16"
    if entry.kind == "F16":
        return "level·scale rounded to fp16" if entry.spec else "rounded to fp16"
    if entry.kind in SHIFTED and entry.spec.codebook == "balanced":
        return f"codes and scales exact, offset {entry.spec.lowest}·scale rounded to fp16"
    return "codes, scales and offsets exact" if entry.spec.offset else "codes and scales exact"


def stored_bits(plan: GGUFPlan) -> float:
    """Bits per quantised weight in the file, including those that became F16; of all matrices if none is quantised."""
    mine = [e for e in plan.entries if e.quantizer] or [e for e in plan.entries if len(e.shape) > 1]
    return 8 * sum(entry.bytes for entry in mine) / sum(entry.shape[0] * entry.shape[1] for entry in mine)


def inexact(source: Source, plan: GGUFPlan) -> str:
    """What a GGUF export of a student rounds, for the user."""
    notes = {f"{line['class']} {line['quantiser']}": line["note"] for line in summary(source, plan)}
    rounded = [f"{what}: {note}" for what, note in notes.items() if "rounded" in note]
    return "; ".join(rounded) if rounded else "everything exact"
