"""A model whose linear layers are quantised once and frozen, for an adapter to be trained on."""

import dataclasses

from torch import nn

from qat_lora.models.loading import empty_model, load_model
from qat_lora.quant.init import initialise
from qat_lora.quant.linear import freeze, quantized_layers
from qat_lora.quant.spec import QuantSpec
from qat_lora.quant.student import StudentSpec, empty_student, quantize, student_content


def load_base(name: str, quantizer: str, whole: bool) -> nn.Module:
    """The model, its linear layers quantised if asked for and frozen; without values where not `whole`."""
    if not QuantSpec.parse(quantizer):
        return load_model(name) if whole else empty_model(name)
    spec = base_spec(quantizer)
    if not whole:
        return empty_student({"model": name, "spec": dataclasses.asdict(spec)})
    student = quantize(load_model(name), spec)
    initialise(student)
    freeze(student)
    return student


def base_spec(quantizer: str) -> StudentSpec:
    return StudentSpec(mlp=quantizer, attn=quantizer)


def base_content(base: nn.Module, name: str, quantizer: str) -> dict | None:
    """What a quantised base's file holds, the student that an adapter on it belongs to; to be taken before there is
    an adapter. None for a base in full precision."""
    return student_content(base, name, base_spec(quantizer), {}) if quantized_layers(base) else None
