"""compressed-tensors' pack-quantized folders, for vLLM, SGLang and transformers.

A layer is weight_packed int32 [out, in·bits/32], weight_scale [out, groups] and weight_shape; a weight is scale times
an integer with a sign, stored plus 2^(bits−1). With zero points, weight_zero_point int32 [out·bits/32, groups] is
subtracted from the integer; it is stored plus 2^(bits−1), too. Half-integer levels are odd integers of one bit more,
times half the scale.
"""

import numpy as np
import torch
from torch import Tensor, nn

from qat_lora.export.packed import Layout, words
from qat_lora.models.packed import PACKINGS
from qat_lora.quant.linear import StoredWeight
from qat_lora.quant.spec import QuantSpec


def _coding(spec: QuantSpec) -> tuple[int, int]:
    """(turn, bits): the integer is turn·(code − middle)."""
    return (2, spec.bits + 1) if spec.codebook == "balanced" else (1, spec.bits)


def _misfit(spec: QuantSpec, shape: tuple[int, int]) -> str | None:
    if spec.codebook == "uniform" or spec.scale not in ("group", "tensor"):
        return "it has integer levels with one scale a group or row"
    if spec.offset > spec.zero:
        return "its offsets are whole levels; use +zero"
    if _coding(spec)[1] > 8:
        return "its integers have at most 8 bits"
    return f"{shape[1]} inputs are not divisible by 32" if shape[1] % 32 else None


def _tensors(parts: StoredWeight, spec: QuantSpec) -> dict[str, Tensor]:
    (turn, bits), (_, first) = _coding(spec), _integers(spec)
    integers = turn * parts.codes.astype(np.int16) + (0 if spec.zero else first + 2 ** (bits - 1))
    scale = parts.scale / np.float32(turn)
    kind = np.float32 if spec.narrow else np.float16  # a product of two numbers needs more than fp16 has
    found = {
        "weight_packed": words(integers.astype(np.uint8), bits),
        "weight_scale": torch.from_numpy(scale.astype(kind)),
        "weight_shape": torch.tensor(parts.codes.shape),
    }
    if spec.zero:
        zeros = (-parts.offset_integers).astype(np.uint8)
        found["weight_zero_point"] = words(zeros.T, bits).T.contiguous()
    return found


def _integers(spec: QuantSpec) -> tuple[int, int]:
    turn, _ = _coding(spec)
    return turn, round(turn * spec.lowest)


def _config(kinds: dict[str, QuantSpec], student: nn.Module) -> dict:
    groups = {}
    for number, spec in enumerate(dict.fromkeys(kinds.values())):
        size = spec.size if spec.scale == "group" else None
        weights = {
            "num_bits": _coding(spec)[1], "type": "int", "symmetric": not spec.zero, "dynamic": False, "actorder": None,
            "strategy": "group" if size else "channel", "group_size": size,
        }  # fmt: skip
        targets = [name for name, kind in kinds.items() if kind == spec]
        groups[f"group_{number}"] = {"targets": targets, "weights": weights}
    linear = [n for n, m in student.named_modules() if isinstance(m, nn.Linear) and n not in kinds]
    own = {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed"}
    return {"quantization_config": own | {"config_groups": groups, "ignore": linear}}


LAYOUT = Layout("compressed-tensors", _misfit, _tensors, _integers, PACKINGS["compressed-tensors"], _config)
