"""Folders whose linear layers are packed codes: GPTQ (version 1), AutoRound in its form, AWQ, compressed-tensors, MLX.

The numbers of bits and weights of a group follow from the shapes of the tensors.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from qat_lora.errors import UserError
from qat_lora.kernels.codes import unpack_codes
from qat_lora.models.source import config_json, stored_quantised, weight_files


class PackedWeight(NamedTuple):
    """A weight [out, in] of a file, from codes uint8 [out, in] of `bits` bits and scales fp32 [out, groups]: (code −
    zero) · scale with zeros uint8 [out, groups], or code · scale + offset with offsets fp32 [out, groups]."""

    codes: np.ndarray
    bits: int
    scale: np.ndarray
    zero: np.ndarray | None
    offset: np.ndarray | None = None

    def integers(self) -> np.ndarray:
        """Codes without their zeros, int16 [out, in]."""
        codes = self.codes.astype(np.int16)
        return codes if self.zero is None else codes - self.each(self.zero)

    def value(self) -> Tensor:
        """fp32 [out, in]."""
        found = self.integers() * self.each(self.scale)
        return torch.from_numpy(found if self.offset is None else found + self.each(self.offset))

    def each(self, part: np.ndarray) -> np.ndarray:
        """One value for each weight, [out, in], from one for each group."""
        return np.repeat(part, self.codes.shape[1] // part.shape[1], axis=1)


def from_words(packed: Tensor, bits: int) -> np.ndarray:
    """int32 words [rows, columns·bits/32] → integers uint8 [rows, columns]: a stream of bits, lowest first."""
    shape = (len(packed), packed.shape[1] * 32 // bits)
    return unpack_codes(packed.contiguous().view(torch.uint8).view(-1), bits, shape).numpy()


def _numbers(tensor: Tensor) -> np.ndarray:
    return np.ascontiguousarray(tensor.float().numpy())


def _gptq(tensors: dict[str, Tensor], layer: str, config: dict) -> PackedWeight:
    scale = _numbers(tensors["scales"].T)
    out, groups = scale.shape
    bits = tensors["qzeros"].shape[1] * 32 // out
    columns = tensors["qweight"].shape[0] * 32 // bits
    usual = torch.arange(columns) // (columns // groups)
    if not torch.equal(tensors.get("g_idx", usual).long(), usual):
        raise UserError(f"{layer} groups inputs in the order of their size (desc_act); quantise without it")
    zeros = from_words(tensors["qzeros"], bits) + np.uint8(1) & np.uint8(2**bits - 1)
    return PackedWeight(from_words(tensors["qweight"].T, bits), bits, scale, zeros.T)


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of eight columns in a word


def _awq(tensors: dict[str, Tensor], layer: str, config: dict) -> PackedWeight:
    def columns(name: str) -> np.ndarray:
        stored = from_words(tensors[name], 4)
        return stored.reshape(len(stored), -1, 8)[:, :, np.argsort(AWQ_ORDER)].reshape(len(stored), -1).T

    return PackedWeight(columns("qweight"), 4, _numbers(tensors["scales"].T), columns("qzeros"))


def _compressed(tensors: dict[str, Tensor], layer: str, config: dict) -> PackedWeight:
    columns, scale = int(tensors["weight_shape"][1]), _numbers(tensors["weight_scale"])
    bits = tensors["weight_packed"].shape[1] * 32 // columns
    codes, zeros = from_words(tensors["weight_packed"], bits), np.full(scale.shape, 2 ** (bits - 1), np.uint8)
    if "weight_zero_point" in tensors:
        zeros = from_words(tensors["weight_zero_point"].T, bits).T
    return PackedWeight(codes, bits, scale, zeros)


def _mlx(tensors: dict[str, Tensor], layer: str, config: dict) -> PackedWeight:
    own = config["quantization"].get(layer, config["quantization"])
    scale, offset = _numbers(tensors["scales"]), _numbers(tensors["biases"])
    return PackedWeight(from_words(tensors["weight"].view(torch.int32), own["bits"]), own["bits"], scale, None, offset)


class Packing(NamedTuple):
    """A format: the suffixes of a layer's tensors, the first of which marks one, those that it may also have, and what
    they mean."""

    suffixes: tuple[str, ...]
    more: tuple[str, ...]
    weight: Callable[[dict[str, Tensor], str, dict], PackedWeight]


PACKINGS = {
    "gptq": Packing(("qweight", "qzeros", "scales"), ("g_idx",), _gptq),
    "awq": Packing(("qweight", "qzeros", "scales"), (), _awq),
    "compressed-tensors": Packing(
        ("weight_packed", "weight_scale", "weight_shape"), ("weight_zero_point",), _compressed
    ),
    "quantization": Packing(("scales", "biases", "weight"), (), _mlx),  # MLX
}


def packing(name: str) -> Packing | None:
    """How the linear layers of a model are packed; None if they are not. Raises UserError for another method."""
    method, config = stored_quantised(name), config_json(name)
    if not method:
        return None
    own = config.get("quantization_config", {})  # that of a part of a multimodal model is not read
    told = {key: own.get(key) for key in ("checkpoint_format", "packing_format", "format", "version")}
    reads = {
        "gptq": own and told["checkpoint_format"] in (None, "gptq"),
        "auto-round": told["packing_format"] == "auto_round:auto_gptq",
        "awq": told["version"] in (None, "gemm") and own.get("bits") == 4,
        "compressed-tensors": told["format"] == "pack-quantized",
        "quantization": "quantization" in config,
    }
    if not reads.get(method):
        said = ", ".join([method, *(f"{key} {value}" for key, value in told.items() if value)])
        raise UserError(
            f"model {name!r} is stored quantised ({said}), which is not read here; give its bf16, fp16 or fp32 "
            "version, or one in GPTQ's form, AWQ's (gemm, 4 bits), compressed-tensors' pack-quantized, MLX or GGUF"
        )
    return PACKINGS["gptq" if method == "auto-round" else method]


def unpacked(name: str) -> tuple[dict[str, PackedWeight], dict[str, Tensor]]:
    """The packed weights of a model, by the name of their layer, and its other tensors. Raises UserError for a layer
    with another layout."""
    how, config = packing(name), config_json(name)
    held: dict[str, Tensor] = {}
    for path in weight_files(name):
        held |= load_file(path)
    first = how.suffixes[0]
    layers = [key.removesuffix(f".{first}") for key in held if key.endswith(f".{first}")]
    packed = {}
    for layer in layers:
        mine = [key for key in held if key.rpartition(".")[0] == layer and not key.endswith(".bias")]
        tensors = {key.rpartition(".")[2]: held.pop(key) for key in mine}
        try:
            if tensors.keys() - {*how.more} != {*how.suffixes}:
                raise UserError(
                    f"{layer} is stored as {', '.join(sorted(tensors))}, which is read only if it is "
                    f"{', '.join(how.suffixes)}"
                )
            packed[layer] = how.weight(tensors, layer, config)
        except (UserError, ValueError, RuntimeError, ArithmeticError, LookupError) as error:
            raise UserError(f"model {name!r}: {error}") from error
    if not packed:
        raise UserError(f"model {name!r} is stored quantised by its config.json, but none of its layers is packed")
    return packed, held
