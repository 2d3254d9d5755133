"""A student whose quantisers, scales and offsets are those of a low-bit model: a folder of packed codes (models.packed)
or a .gguf file."""

from collections import Counter

import numpy as np
import torch
from torch import Tensor, nn

from qat_lora.errors import UserError
from qat_lora.export.gguf_file import from_gguf_rows, tensor_names, turned_heads
from qat_lora.export.gguf_types import QUANTISED, TYPES, decode, factors
from qat_lora.models.architecture import decoder_layers, matrices
from qat_lora.models.loading import empty_model, gguf_reader, load_model, plain_state
from qat_lora.models.packed import PackedWeight, packing, unpacked
from qat_lora.models.source import model_source, weight_files
from qat_lora.quant.linear import Quantizer, quantized_layers
from qat_lora.quant.spec import NAMES
from qat_lora.quant.student import StudentSpec, quantize

PLAIN = ("F32", "F16", "BF16")


def own_spec(name: str, *given: str) -> StudentSpec:
    """The quantisers of a low-bit model's layers. given: options that would set them otherwise. Raises UserError if
    there are any, and for a model whose layers are not quantised so that a student can be."""
    if given:
        option = given[0].replace("_", "-")
        raise UserError(f"--init own takes the quantisers and scales of --model; leave out --{option}, or --init own")
    model = empty_model(name)
    kinds, head = _kinds(name, model), model.get_output_embeddings()
    names = {id(module): path for path, module in model.named_modules()}
    own = {
        f"{number}.{f'{matrix.path}.{matrix.name}'.removesuffix('.weight')}": kinds.get(
            names[id(matrix.module)], "none"
        )
        for number, block in enumerate(decoder_layers(model))
        for matrix in matrices(block)
    }
    if {*own.values()} <= {"none"}:
        raise UserError(f"--init own: {name} has no quantised layers in its blocks; use --init mse or gptq")
    tables = (head, model.get_input_embeddings()) if head.weight is model.get_input_embeddings().weight else (head,)
    kept = next((kind for table in tables if (kind := kinds.get(names[id(table)]))), "none")
    usual = Counter(own.values()).most_common(1)[0][0]
    return StudentSpec(usual, usual, kept, ",".join(f"{key}={kind}" for key, kind in own.items() if kind != usual))


def _kinds(name: str, model: nn.Module) -> dict[str, str]:
    """The quantiser of each quantised layer, by its name."""
    if packing(name):
        packed = unpacked(name)[0]  # zero points in one layer are zero points in all, as GPTQ's and AWQ's folders say
        zero = "+zero" * any(weight.offset is None and not _mirrored(weight) for weight in packed.values())
        return {layer: _grid(weight) + ("+offset" if weight.zero is None else zero) for layer, weight in packed.items()}
    found = {}
    for layer, tensor in _gguf_tensors(name, model).items() if "gguf_file" in model_source(name) else ():
        kind = tensor.tensor_type.name
        if kind not in (*QUANTISED, *PLAIN):
            raise UserError(f"--init own: {name} stores {layer} as {kind}; use one of {', '.join(QUANTISED)}")
        if kind in QUANTISED:
            found[layer] = NAMES[kind.lower()]
    return found


def _grid(weight: PackedWeight) -> str:
    return f"int{weight.bits}/g{weight.codes.shape[1] // weight.scale.shape[1]}"


def _mirrored(weight: PackedWeight) -> int:
    """1 if a weight's codes are those of a grid without zero points, −1 if of a mirrored one (levels −1 … 2 are −2 … 1
    times a negative scale), else 0."""
    zero, edge = int(weight.zero.flat[0]), 2 ** (weight.bits - 1)
    return {edge: 1, edge - 1: -1}.get(zero, 0) if (weight.zero == zero).all() else 0


def _gguf_tensors(name: str, model: nn.Module) -> dict:
    """The tensors of a .gguf file that are matrices of the model, by the name of their layer."""
    there = {tensor.name: tensor for tensor in gguf_reader(weight_files(name)[0]).tensors}
    names = tensor_names(name, [key for key, value in plain_state(model).items() if value.ndim > 1])
    return {key.removesuffix(".weight"): there[own] for key, own in names.items() if own in there}


@torch.no_grad()
def own_student(name: str, spec: StudentSpec) -> nn.Module:
    """The student of a low-bit model with its codes, scales and offsets. spec: the result of `own_spec`."""
    student = quantize(load_model(name), spec)
    layers, paths = quantized_layers(student), {id(module): path for path, module in student.named_modules()}
    packed = unpacked(name)[0] if packing(name) else None
    tensors = None if packed else _gguf_tensors(name, student)
    embedding = student.get_input_embeddings()
    for path, layer in layers.items():
        tied = layer.weight is embedding.weight
        stored = path if path in (packed or tensors) or not tied else paths[id(embedding)]
        quantizer, weight = layer.quantizer, layer.weight
        if packed:
            held = packed[stored]
            sign = 1 if quantizer.spec.offset else _mirrored(held)
            quantizer.scale.copy_(sign * _column(held.scale))
            if quantizer.spec.offset:
                quantizer.offset.copy_(_column(-(held.zero * held.scale) if quantizer.spec.zero else held.offset))
        else:
            _take_blocks(quantizer, tensors[stored], turned_heads(name, path))
        value = quantizer.decode(quantizer.encode(weight))
        if not torch.allclose(value, weight, rtol=1e-5, atol=1e-7 * float(weight.abs().max())):
            raise UserError(
                f"--init own: {name} has scales in {path} that {quantizer.spec} does not hold in fp16; use --init mse"
            )
        weight.copy_(value)
    return student


def _column(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).unsqueeze(2)


def _take_blocks(quantizer: Quantizer, tensor, heads: int) -> None:
    """Set scales and offsets from a tensor of a .gguf file."""
    kind, spec, rows = tensor.tensor_type.name, quantizer.spec, quantizer.shape[0]
    held = decode(kind, spec, tensor.data)
    found = {"scale": held.scale, "offset": held.offset}
    if spec.narrow:
        d, least = factors(kind, tensor.data.reshape(-1, TYPES[kind].bytes))
        found["reach"] = d * np.float32(spec.scale_levels.largest)
        if least is not None:
            found["offset_reach"] = least * np.float32(spec.offset_levels.largest)
    for part, value in found.items():
        if value is not None:
            getattr(quantizer, part).copy_(_column(from_gguf_rows(value.reshape(rows, -1), heads)))
