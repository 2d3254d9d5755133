"""The student: a model with quantised linear layers, and the file `best.pt` that stores it in frozen form."""

import math
import zipfile
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from torch import nn

from qat_lora.backend.sharding import each_whole, shards_of, writes
from qat_lora.errors import UserError, first_line
from qat_lora.kernels.codes import pack_codes, pack_ternary, unpack_codes, unpack_ternary
from qat_lora.kernels.head import Head
from qat_lora.kernels.norms import norms_in_one_step
from qat_lora.models.architecture import decoder_layers, matrices, unwrap
from qat_lora.models.head_form import head_form
from qat_lora.models.identity import short
from qat_lora.models.loading import empty_model, load_model, model_fingerprint
from qat_lora.models.source import absolute_name
from qat_lora.quant.linear import (
    Quantizer,
    QuantLinear,
    Shown,
    effective_weight,
    freeze,
    hide_quantized,
    quantized_layers,
    rows_of,
    show_quantized,
)
from qat_lora.quant.spec import QuantSpec, first_fitting
from qat_lora.run.files import write_atomically

FORMAT = "qat_lora.student.3"
PARTS = {"model", "fingerprint", "spec", "info", "tensors"}


@dataclass(frozen=True)
class StudentSpec:
    """The quantiser of each kind of module, as QuantSpec texts, or alternatives "q2_k|int2/g64" of which a layer gets
    the first that fits its shape; "none" leaves it in full precision.

    layers: single layers that get another one, "0.*=int4/g64,29.mlp.down_proj=none": patterns of block and path, of
    which the first that matches counts.
    """

    mlp: str = "balanced2/g32"
    attn: str = "balanced2/g32"
    head: str = "none"
    layers: str = ""

    def __post_init__(self):
        parts = {name: _canonical(getattr(self, name)) for name in ("mlp", "attn", "head")}
        own = {pattern: _canonical(text) for pattern, text in self._own(self.layers)}
        for name, text in {**parts, "layers": ",".join(f"{key}={text}" for key, text in own.items())}.items():
            object.__setattr__(self, name, text)
        if {*parts.values(), *own.values()} == {"none"}:
            raise UserError("mlp, attn and head are all none, so nothing would be quantised; set at least one")

    def __str__(self):
        return f"mlp={self.mlp} attn={self.attn} head={self.head}" + (f" layers={self.layers}" if self.layers else "")

    @staticmethod
    def _own(layers: str) -> list[tuple[str, str]]:
        """(pattern, quantiser) for each part of `layers`."""
        found = [part.split("=") for part in layers.split(",") if part]
        if wrong := next((part for part in found if len(part) != 2), None):
            raise UserError(f"--layers {'='.join(wrong)!r} is not PATTERN=QUANTISER; use e.g. 0.*=int4/g64")
        return [tuple(part) for part in found]

    def of(self, part: str, path: str) -> str:
        """The quantiser, or the alternatives, of a layer. path: its block's number and its path in it."""
        own = (text for pattern, text in self._own(self.layers) if fnmatchcase(path, pattern))
        return next(own, self.mlp if part == "mlp" else self.attn)

    def check_patterns(self, paths: list[str]) -> None:
        """Raise UserError for a pattern of `layers` that matches none of the model's."""
        for pattern, _ in self._own(self.layers):
            if not any(fnmatchcase(path, pattern) for path in paths):
                raise UserError(f"--layers: {pattern!r} matches no layer; the first is {next(iter(paths), 'missing')}")


def _canonical(text: str) -> str:
    """One name for each quantiser."""
    return "|".join(map(str, QuantSpec.alternatives(text))) or "none"


def quantize(model: nn.Module, spec: StudentSpec) -> nn.Module:
    """Quantise the linear layers and experts of the decoder blocks, in place; the scales are not yet initialised.

    If the head is quantised and tied to the embedding, both share one set of codes. Embedding and head are trained only
    if they are quantised: training the full-precision table costs memory and time and left the student further from its
    teacher (docs/benchmarks.md). Raises UserError if nothing would be quantised.
    """
    paths: list[str] = []
    for number, block in enumerate(decoder_layers(model)):
        experts: dict[nn.Module, dict] = {}
        for matrix in list(matrices(block)):
            name = f"{matrix.path}.{matrix.name}".removesuffix(".weight")
            paths.append(f"{number}.{name}")
            kind = first_fitting(spec.of(matrix.part, paths[-1]), name, matrix.shape)
            if kind is None:
                continue
            if matrix.is_experts:
                experts.setdefault(matrix.module, {})[matrix.name] = (Quantizer(kind, *matrix.shape), matrix.transposed)
            else:
                block.set_submodule(matrix.path, QuantLinear(matrix.module, kind))
        for module, found in experts.items():
            quantizers = nn.ModuleDict({name: quantizer for name, (quantizer, _) in found.items()})
            show_quantized(module, quantizers, tuple(found), next(iter(found.values()))[1])
    spec.check_patterns(paths)
    _quantize_head(unwrap(model), spec.head)
    if not quantized_layers(model):
        raise UserError(
            f"{spec} quantises nothing: the blocks of model type {unwrap(model).config.model_type!r} hold no "
            "plain linear layers or experts of that kind; quantise another part, or another model"
        )
    norms_in_one_step(model)
    return freeze_plain_tables(model)


def _quantize_head(base: nn.Module, text: str) -> None:
    head, embedding = base.get_output_embeddings(), base.get_input_embeddings()
    kind = first_fitting(text, "lm_head", (head.out_features, head.in_features)) if text != "none" else None
    if kind is None:
        return
    tied, head = embedding.weight is head.weight, QuantLinear(head, kind)
    if tied:
        show_quantized(embedding, head.quantizer, ("weight",))
    base.set_output_embeddings(head)


def head_of(model: nn.Module) -> Head:
    """How a model's hidden states become logits, with the quantised weight if the head is quantised."""
    form, head = head_form(model), unwrap(model).get_output_embeddings()
    weight = effective_weight(head)
    if len(weight) != form.vocab:
        weight = weight[: form.vocab]
    bias = None if head.bias is None else head.bias[: form.vocab]
    return Head(weight, bias, form.before, form.after, form.cap)


def freeze_plain_tables(model: nn.Module) -> nn.Module:
    """Freeze the embedding and the head unless they are quantised; returns the model."""
    base = unwrap(model)
    for table in (base.get_input_embeddings(), base.get_output_embeddings()):
        table.weight.requires_grad_(hasattr(table, "quantizer"))
        if getattr(table, "bias", None) is not None:
            table.bias.requires_grad_(False)
    return model


def bits_per_weight(model: nn.Module, adapter_values: int = 0) -> float:
    """Stored bits per weight of the decoder blocks and of a quantised head: codes, plus scales, `adapter_values` and
    unquantised weights at 16 bits. Biases, norms and other vectors are not counted."""
    layers = quantized_layers(model)
    mine = {id(layer.weight) for layer in layers.values()}
    scales = {id(p) for layer in layers.values() for p in layer.quantizer.parameters()}
    quantised, bits = _quantised_bits(layers)
    plain = sum(
        p.numel()
        for block in decoder_layers(model)
        for name, p in block.named_parameters()
        if p.ndim > 1 and "lora_" not in name and id(p) not in mine | scales
    )
    return (bits + 16 * (plain + adapter_values)) / (quantised + plain)


def megabytes(model: nn.Module, adapter_values: int = 0) -> float:
    """Deployed size in MB (1e6 bytes): codes and scales of quantised weights, everything else at 16 bits.

    An adapter is counted only through `adapter_values`, whether or not one is attached to the model.
    """
    layers = quantized_layers(model)
    counted = {id(p) for layer in layers.values() for p in (layer.weight, *layer.quantizer.parameters())}
    rest = sum(p.numel() for name, p in model.named_parameters() if id(p) not in counted and "lora_" not in name)
    return (_quantised_bits(layers)[1] + 16 * (rest + adapter_values)) / 8 / 1e6


def _quantised_bits(layers: dict) -> tuple[int, int]:
    """The number of quantised weights, and the number of bits of their codes and scales."""
    quantizers = [layer.quantizer for layer in layers.values()]
    return sum(math.prod(q.shape) for q in quantizers), sum(quantizer.bits for quantizer in quantizers)


def save_student(path: str | Path, model: nn.Module, model_name: str, spec: StudentSpec, info: dict) -> None:
    """Write the frozen student to one file, atomically. The model itself may be in training and is not changed. `info`
    holds plain values about how it was made. If the model is shared out, every worker calls this and worker 0 writes.
    """
    if writes(model):
        write_student(path, student_content(model, model_name, spec, info))
    else:
        list(each_whole(model))


def write_student(path: str | Path, content: dict) -> None:
    """Write a `student_content` to a file, atomically."""
    write_atomically(Path(path), lambda file: torch.save(content, file))


def student_content(model: nn.Module, model_name: str, spec: StudentSpec, info: dict) -> dict:
    """The content of a student file: packed codes, scales in fp16, the rest in fp32, and the name and fingerprint of
    the base model, which `load_model` has loaded."""
    tensors, shared = {}, bool(shards_of(model))  # shards: what is gathered is soon given back
    for there in each_whole(model):
        layers = {name: layer for name, layer in quantized_layers(model).items() if id(layer.weight) in there}
        latent = {id(layer.weight) for layer in layers.values()}
        scales = {id(p): value for layer in layers.values() for p, value in layer.quantizer.stored()}
        for name, parameter in model.named_parameters():
            if id(parameter) in there - latent:
                tensors[name] = scales.get(id(parameter), parameter.detach()).to("cpu", copy=shared)
        for name, layer in layers.items():
            codes = layer.quantizer.codes
            codes = layer.quantizer.encode(rows_of(layer)) if codes is None else codes
            kind = layer.quantizer.spec
            tensors[f"{name}.codes"] = (
                pack_ternary(codes.cpu()) if kind.codebook == "ternary" else pack_codes(codes.cpu(), kind.bits)
            )
    return {
        "format": FORMAT,
        "model": absolute_name(model_name),
        "fingerprint": unwrap(model).fingerprint,
        "spec": dict(vars(spec)),
        "info": info,
        "tensors": tensors,
    }


def read_student(path: str | Path, model: str | None = None) -> dict:
    """The content of a student file, with its `model` set to where the base is now: `model`, or the name in the file.

    Raises UserError naming the file if it is missing, damaged or not a student file, and if the base is missing or is
    not the model that the student was made from.
    """
    content = _read(Path(path))
    made, name = content["model"], model or content["model"]
    try:
        here = model_fingerprint(name)
    except UserError as error:
        which = "which" if model is None else f"and --model {name!r}"
        raise UserError(
            f"checkpoint {path} was made from model {made!r}, {which} cannot be read ({error}); set --model to where "
            "it is now"
        ) from error
    content["model"] = name
    there = content["fingerprint"]
    if there != here:
        marks = f"fingerprint {short(there)} in the file, {short(here)} there"
        if absolute_name(name) == absolute_name(made):
            raise UserError(
                f"checkpoint {path} does not fit model {name!r}, which has changed since ({marks}); set --model to the "
                "one that it was made from"
            )
        raise UserError(f"checkpoint {path} was made from model {made!r}, not {name!r} ({marks}); change --model")
    return content


def _read(path: Path) -> dict:
    if not path.is_file():
        raise UserError(f"checkpoint {path}: no such file; train_qat.py writes best.pt into its run directory")
    try:
        with zipfile.ZipFile(path) as archive:  # torch.load does not verify the checksums that torch.save wrote
            if archive.testzip():
                raise ValueError("checksum")
        content = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
    except Exception as error:
        reason = first_line(error)[:120]
        raise UserError(
            f"checkpoint {path} is damaged or not a student file ({reason}); copy or train it again"
        ) from error
    found = content.get("format") if isinstance(content, dict) else None
    if found != FORMAT or not content.keys() >= PARTS:
        raise UserError(
            f"checkpoint {path} is not a student file of format {FORMAT} (its format: {found}); use a best.pt from "
            "train_qat.py"
        )
    return content


def load_student(path: str | Path, model: str | None = None, base: nn.Module | None = None) -> tuple[nn.Module, dict]:
    """The frozen student from a file, and the rest of the file's content as returned by `read_student`.

    model: where the base model is now. base: the base model already loaded, which becomes the student. Codes are read,
    never recomputed.
    """
    content = read_student(path, model) if base is None else _read(Path(path))
    base = load_model(content["model"]) if base is None else base
    student = quantize(base, StudentSpec(**content["spec"]))
    _fill(student, content, path)
    return student, {key: value for key, value in content.items() if key != "tensors"}


def _check_shapes(student: nn.Module, content: dict, path: str | Path) -> dict[str, nn.Parameter]:
    """The parameters that a file stores directly (all but latent weights); raises UserError unless names and shapes
    match the file's."""
    tensors, layers = content["tensors"], quantized_layers(student)
    latent = {id(layer.weight) for layer in layers.values()}
    wanted = {n: p for n, p in student.named_parameters() if id(p) not in latent}
    shapes = {name: tuple(p.shape) for name, p in wanted.items()}
    for name, layer in layers.items():
        shapes[f"{name}.codes"] = (-(-layer.quantizer.spec.code_bits(layer.weight.numel()) // 8),)
    for name in sorted(shapes.keys() | tensors.keys()):
        there = tuple(tensors[name].shape) if name in tensors else None
        if shapes.get(name) != there:
            raise UserError(
                f"checkpoint {path} does not fit model {content['model']!r}: {name} is {there} in the file, "
                f"{shapes.get(name)} in the model; set --model to the one that it was made from"
            )
    return wanted


def _fill(student: nn.Module, content: dict, path: str | Path) -> None:
    tensors, layers = content["tensors"], quantized_layers(student)
    for name, parameter in _check_shapes(student, content, path).items():
        parameter.detach().copy_(tensors[name])
    for name, layer in layers.items():
        layer.quantizer.from_stored()
        kind, packed, shape = layer.quantizer.spec, tensors[f"{name}.codes"], layer.quantizer.shape
        codes = unpack_ternary(packed, shape) if kind.codebook == "ternary" else unpack_codes(packed, kind.bits, shape)
        layer.quantizer.codes = codes.to(layer.weight.device)
    freeze(student)
    student.requires_grad_(False)


def empty_student(made: dict) -> nn.Module:
    """A frozen student without storage, from the `model` and `spec` of its file: for a worker that receives the values
    from another, and for the plan of a run."""
    student = quantize(empty_model(made["model"]), StudentSpec(**made["spec"]))
    freeze(student)
    return student.requires_grad_(False)


def plain_model(student: nn.Module) -> nn.Module:
    """Turn a frozen student, in place, into a plain model with the quantised weights."""
    for name, module in list(student.named_modules()):
        if isinstance(module, QuantLinear):
            plain = nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")
            plain.weight, plain.bias = module.weight, module.bias
            student.set_submodule(name, plain.train(module.training))
        elif isinstance(module, Shown):
            hide_quantized(module)
    return student.requires_grad_(True)


def thaw(student: nn.Module) -> nn.Module:
    """Make a frozen student trainable again, in place; its latent weights are the quantised ones."""
    for layer in quantized_layers(student).values():
        layer.quantizer.codes = None
    student.requires_grad_(True)
    return freeze_plain_tables(student)
