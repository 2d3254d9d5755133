"""A frozen student, alone or with its adapter, as files that other programs load; each is read back before it counts.

HF folders hold the baked weights level·scale in fp32: fp16 would round them. GGUF holds the codes and scales
themselves, in the block types of qat_lora.quant.gguf.
"""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import torch
from gguf import GGUFReader, GGUFWriter
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from qat_lora.errors import UserError, first_line
from qat_lora.models.adapter import BEYOND_PRODUCT, WEIGHT_FILES, load_adapter, write_origin
from qat_lora.models.gguf import (
    adapter_writer,
    check_architecture,
    file_bytes,
    from_gguf_rows,
    metadata,
    model_writer,
    tensor_names,
    to_gguf_rows,
    turned_heads,
)
from qat_lora.models.gguf_settings import frequency_factors, norm_change
from qat_lora.models.loading import empty_model, load_config, load_tokenizer, model_source, plain_state
from qat_lora.models.writing import check_logits, differs, logits_on_cpu, probe, write_model
from qat_lora.quant.gguf import QUANTISED, TYPES, choose, coding, decode, encode, library_type, row_bytes
from qat_lora.quant.linear import Quantizer, quantized_layers
from qat_lora.quant.spec import QuantSpec
from qat_lora.quant.student import load_student
from qat_lora.run.files import read_json, sha256, write_json, writing

MODEL_FILE, ADAPTER_FILE, ADAPTER_FOLDER = "model.gguf", "adapter.gguf", "adapter"


@dataclass(frozen=True)
class Lora:
    """One layer's share of an adapter: its weight gets factor · b @ a; a [r, in], b [out, r], fp32."""

    a: Tensor
    b: Tensor
    factor: float


@dataclass
class Source:
    """What is exported: a frozen student, the model it was made of, and the parts of its adapter.

    loras: those of linear layers, by module name. updates: what merging adds to a weight, by parameter name. adapted:
    the logits with the adapter, for `probe` of the student.
    """

    checkpoint: Path
    student: nn.Module
    made: dict
    adapter: Path | None = None
    alpha: float = 0.0
    loras: dict[str, Lora] = field(default_factory=dict)
    updates: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    adapted: Tensor | None = None

    @property
    def name(self) -> str:
        return self.made["model"]


def load_source(checkpoint: str, adapter: str | None = None, model: str | None = None) -> Source:
    """Read a student file and the adapter that was trained on it. model: where the student's base is now.

    Raises UserError for files that are missing, damaged or untrained, and for the adapter of another student.
    """
    student, made = load_student(checkpoint, model)
    if made["info"].get("trained") is False:
        raise UserError(
            f"checkpoint {checkpoint} is untrained: the best of its run was step 0, before any update; train it, or "
            "give the layerwise.pt of a run with --layer-steps"
        )
    for name, value in plain_state(student).items():
        if not value.isfinite().all():
            raise UserError(f"checkpoint {checkpoint} is damaged: {name} holds NaN or infinity; train it again")
    source = Source(Path(checkpoint), student, made)
    if adapter:
        _take_adapter(source, Path(adapter).expanduser())
    return source


def _take_adapter(source: Source, folder: Path) -> None:
    adapted = load_adapter(source.student, folder, source.checkpoint)
    config = adapted.peft_config["default"]
    for name in BEYOND_PRODUCT:
        if (value := getattr(config, name)) not in (False, "none"):
            raise UserError(f"adapter {folder} has {name}={value}, which cannot be exported; train a plain LoRA")
    for name, module in adapted.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            _take_layer(source, folder, name, module)
    source.adapted = logits_on_cpu(adapted, probe(source.student))
    source.student, source.adapter, source.alpha = adapted.unload(), folder, float(config.lora_alpha)


def _take_layer(source: Source, folder: Path, name: str, module: LoraLayer) -> None:
    a, b = (part["default"].weight.detach().float() for part in (module.lora_A, module.lora_B))
    if not (a.isfinite().all() and b.isfinite().all()):
        raise UserError(f"adapter {folder} is damaged: {name} holds NaN or infinity; train it again")
    if isinstance(module, ParamWrapper):  # experts: several parameters of one module are wrapped in one another
        parameter = f"{name.replace('.base_layer', '')}.{module.parameter_name}"
    elif isinstance(module.get_base_layer(), nn.Linear):
        parameter = f"{name}.weight"
        source.loras[name] = Lora(a, b, float(module.scaling["default"]))
    else:
        raise UserError(f"adapter {folder} changes {name}, which is no linear layer; train one without it")
    source.updates[parameter] = partial(module.get_delta_weight, "default")


@torch.no_grad()
def _weight(source: Source, parameter: str, merged: bool) -> Tensor:
    """A parameter in fp32, with the adapter added where it is merged."""
    weight, update = source.student.get_parameter(parameter).detach(), source.updates.get(parameter)
    return weight + update() if merged and update else weight


# -- HF --------------------------------------------------------------------------------------------------------------
def hf_bytes(source: Source, merged: bool) -> int:
    """Bytes of the weights of an HF export, adapter included, without the few kB of names."""
    beside = _weight_file(source.adapter).stat().st_size if source.adapter and not merged else 0
    return beside + sum(value.numel() * value.element_size() for value in plain_state(source.student).values())


def write_hf(source: Source, folder: Path, shown: Path, merged: bool) -> None:
    """Model, tokenizer and generation config in HF's format; the adapter merged into the weights or beside them.

    shown: the folder's later name, which the adapter names as its base model.
    """
    student, tokenizer = source.student, load_tokenizer(source.name)
    if merged:
        state = plain_state(student) | {name: _weight(source, name, True) for name in source.updates}
        write_model(student, tokenizer, folder, shown, state, source.adapted)
        return
    back = write_model(student, tokenizer, folder, shown)
    if source.adapter:
        _write_adapter(source, folder / ADAPTER_FOLDER, shown)
        _check_adapter(source, back, folder / ADAPTER_FOLDER, shown / ADAPTER_FOLDER)


def _weight_file(folder: Path) -> Path:
    return next(folder / name for name in WEIGHT_FILES if (folder / name).is_file())


def _write_adapter(source: Source, folder: Path, base: Path) -> None:
    folder.mkdir()
    file = _weight_file(source.adapter)
    (folder / file.name).write_bytes(file.read_bytes())
    config = read_json(source.adapter / "adapter_config.json")
    write_json(folder / "adapter_config.json", config | {"base_model_name_or_path": str(base.absolute())})
    write_origin(folder, sha256(source.checkpoint), source.student)


def _check_adapter(source: Source, back: nn.Module, folder: Path, shown: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers for an attribute it has renamed
        adapted = PeftModel.from_pretrained(back, str(folder), torch_device="cpu")
    check_logits(adapted, probe(back), source.adapted, shown)


# -- GGUF ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Entry:
    """One tensor of a GGUF file: its name and type there, and what it is made of here.

    change: (a, b) where the file has (w + a)·b for a weight w. factors: the values of one that is no parameter here.
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
    """A GGUF export: tensors and metadata of the model, and of its adapter where that is a file of its own."""

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
    """The type of each tensor, by `wanted` (see quant.gguf.choose), and all metadata. `merged`: the adapted layers
    become F16 with the adapter added; else the adapter is a file of its own.

    Raises UserError for an architecture, a tokenizer or a layout that the format cannot hold.
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
    """Why no student of a model can be written as GGUF; None where it can be."""
    try:
        check_architecture(name)
        tensor_names(name, list(plain_state(empty_model(name))))
        if "gguf_file" not in model_source(name):  # a GGUF file's tokenizer is copied as it is
            model_writer(name, 0)
    except UserError as error:
        return str(error).removesuffix("; use --format hf")
    return None


def export_formats(name: str) -> str:
    """What export_model.py will write of a student of this model, for the plan of a run."""
    reason = gguf_refusal(name)
    return f"export: hf; no GGUF: {reason}" if reason else "export: hf, gguf"


def _adapter_tensors(source: Source) -> Iterator[tuple[str, Tensor]]:
    """The adapter's tensors as llama.cpp has them: it multiplies by alpha / rank, what else there is goes into b."""
    names = tensor_names(source.name, [f"{module}.weight" for module in source.loras])
    for module, lora in source.loras.items():
        name, share = names[f"{module}.weight"], lora.factor * len(lora.a) / source.alpha
        b = to_gguf_rows(lora.b.numpy(), turned_heads(source.name, module))
        yield f"{name}.lora_a", lora.a
        yield f"{name}.lora_b", torch.from_numpy(np.ascontiguousarray(b)) * share


def write_gguf(source: Source, plan: GGUFPlan, folder: Path, shown: Path) -> None:
    """model.gguf and, where the plan has one, adapter.gguf. `shown`: the folder's later name, for messages."""
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


def _codes_and_scale(entry: Entry) -> tuple[np.ndarray, np.ndarray]:
    """The student's codes [out, in] and scales [out, groups], rows in GGUF's order."""
    scale = entry.quantizer.scale_matrix().detach().squeeze(2)
    scale = scale.expand(entry.shape[0], scale.shape[1]).numpy()
    return to_gguf_rows(entry.quantizer.codes.numpy(), entry.heads), to_gguf_rows(scale, entry.heads)


def _plain(source: Source, entry: Entry) -> np.ndarray:
    """A tensor that is not in blocks, in fp16 or fp32."""
    if entry.factors:
        return np.array(entry.factors, np.float32)
    weight, (plus, times) = _weight(source, entry.parameter, entry.merged), entry.change
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
    return encode(entry.kind, entry.spec, *_codes_and_scale(entry))


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
    """The tensors of a file, after its metadata has been compared with what the writer was given."""
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
    codes, scale, offset = decode(entry.kind, entry.spec, tensor.data)
    wanted = entry.quantizer.scale_matrix().detach().squeeze(2)
    wanted = wanted.expand(entry.shape[0], wanted.shape[1]).repeat_interleave(scale.shape[1] // wanted.shape[1], dim=1)
    codes, scale = (torch.from_numpy(from_gguf_rows(part, entry.heads)) for part in (codes, scale))
    if not torch.equal(codes, entry.quantizer.codes) or not torch.equal(scale.float(), wanted):
        return False
    if offset is None:
        return True
    rounded = (wanted * coding(entry.spec, entry.kind).offset).half()
    return torch.equal(torch.from_numpy(from_gguf_rows(offset, entry.heads)), rounded)


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
        return "exact" if entry.change[1] == 1 else "exact, or times the scale of q"
    if entry.merged:
        return "adapter added, rounded to fp16"
    if entry.kind == "F16":
        return "level·scale rounded to fp16" if entry.spec else "rounded to fp16"
    how = coding(entry.spec, entry.kind)
    rounded = how.offset is not None and entry.spec.codebook == "balanced"
    return f"codes and scales exact, offset {how.offset}·scale rounded to fp16" if rounded else "codes and scales exact"


def provenance(source: Source) -> dict:
    """What an export was made of, for its export.json."""
    made, adapter = source.made, source.adapter
    return {
        "model": made["model"], "quantisers": made["spec"], "info": made["info"],
        "student": sha256(source.checkpoint), "adapter": sha256(_weight_file(adapter)) if adapter else None,
    }  # fmt: skip
