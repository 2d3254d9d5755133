"""GPTQ folders (version 1), for vLLM, SGLang and GPTQModel, the same bytes with AutoRound's config, and AWQ folders.

A layer is qweight int32 [in·bits/32, out], scales fp16 [groups, out], qzeros int32 [groups, out·bits/32] and g_idx
[in]; a weight is scale·(q − zero), with zero − 1 in qzeros. In AWQ, qweight is int32 [in, out/8], qzeros holds the zero
itself, and columns are in the order of AWQ_ORDER.
"""

import functools

import numpy as np
import torch
from torch import Tensor, nn

from qat_lora.errors import UserError
from qat_lora.export.packed import Layout, words
from qat_lora.models.architecture import decoder_layers
from qat_lora.models.packed import AWQ_ORDER, PACKINGS
from qat_lora.quant.linear import StoredWeight
from qat_lora.quant.spec import QuantSpec


def _zero(spec: QuantSpec) -> int:
    """The code of the level 0."""
    return round(-spec.lowest)


def _misfit(spec: QuantSpec, shape: tuple[int, int]) -> str | None:
    if spec.codebook not in ("int", "ternary") or spec.offset > spec.zero or spec.scale != "group":
        return "it has integer levels with one scale a group"
    if spec.narrow:
        return "its scales are fp16"
    if spec.bits not in (2, 3, 4, 8):
        return "it has 2, 3, 4 or 8 bits"
    return f"{shape} is not divisible by 32" if shape[0] % 32 or shape[1] % 32 else None


def _tensors(parts: StoredWeight, spec: QuantSpec) -> dict[str, Tensor]:
    columns, groups = parts.codes.shape[1], parts.scale.shape[1]
    return {
        "qweight": words(parts.codes, spec.bits).T.contiguous(),
        "qzeros": words(_zeros(parts, spec) - 1 & np.uint8(2**spec.bits - 1), spec.bits),
        "scales": _scales(parts),
        "g_idx": torch.arange(columns, dtype=torch.int32) // (columns // groups),
    }


def _zeros(parts: StoredWeight, spec: QuantSpec) -> np.ndarray:
    """uint8 [groups, out]."""
    usual = np.full(parts.scale.shape, -_zero(spec))
    return (-(parts.offset_integers if spec.zero else usual)).astype(np.uint8).T


def _scales(parts: StoredWeight) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(parts.scale.astype(np.float16).T))


def _awq_misfit(spec: QuantSpec, shape: tuple[int, int]) -> str | None:
    return _misfit(spec, shape) if spec.bits == 4 else "it has 4 bits"


def _awq_tensors(parts: StoredWeight, spec: QuantSpec) -> dict[str, Tensor]:
    def ordered(integers: np.ndarray) -> Tensor:
        rows = integers.reshape(len(integers), -1, 8)[:, :, AWQ_ORDER]
        return words(rows.reshape(integers.shape), 4)

    qweight, qzeros = ordered(np.ascontiguousarray(parts.codes.T)), ordered(_zeros(parts, spec))
    return {"qweight": qweight, "qzeros": qzeros, "scales": _scales(parts)}


def _integers(spec: QuantSpec) -> tuple[int, int]:
    return 1, -_zero(spec)


def _config(kinds: dict[str, QuantSpec], student: nn.Module, name: str) -> dict:
    specs = list(dict.fromkeys(kinds.values()))
    if len(specs) > 1 or kinds.keys() != {*_linears(student)}:
        raise UserError(
            f"{name} has one quantiser for all linear layers of the blocks; this student has "
            f"{', '.join(map(str, specs))} in {len(kinds)} layers; use compressed-tensors or mlx"
        )
    shared = {"bits": specs[0].bits, "group_size": specs[0].size, "sym": not specs[0].zero}
    own = {
        "gptq": {"quant_method": "gptq", "checkpoint_format": "gptq", "desc_act": False, "lm_head": False},
        "autoround": {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "data_type": "int"},
        "awq": {"quant_method": "awq", "version": "gemm", "zero_point": True, "modules_to_not_convert": ["lm_head"]},
    }
    return {"quantization_config": shared | own[name]}


def _linears(student: nn.Module) -> list[str]:
    """The names of all linear layers of the blocks."""
    inside = {id(module) for block in decoder_layers(student) for module in block.modules()}
    return [n for n, m in student.named_modules() if id(m) in inside and isinstance(m, nn.Linear)]


GPTQ, AUTOROUND = (
    Layout(name, _misfit, _tensors, _integers, PACKINGS["gptq"], functools.partial(_config, name=name))
    for name in ("gptq", "autoround")
)
AWQ = Layout("awq", _awq_misfit, _awq_tensors, _integers, PACKINGS["awq"], functools.partial(_config, name="awq"))
