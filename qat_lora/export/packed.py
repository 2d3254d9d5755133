"""Export to folders of safetensors whose quantised layers are packed codes: what the formats of compressed_tensors.py,
gptq.py and mlx.py share. Every folder is read back and compared code by code before it is kept.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from qat_lora.errors import UserError
from qat_lora.export.hf import ADAPTER_FOLDER, write_adapter
from qat_lora.export.source import Source
from qat_lora.kernels.codes import pack_codes
from qat_lora.models.generate import end_tokens
from qat_lora.models.loading import load_tokenizer, plain_state
from qat_lora.models.packed import PackedWeight, Packing
from qat_lora.models.writing import differs
from qat_lora.quant.linear import ExpertWeight, Quantizer, StoredWeight, each, quantized_layers
from qat_lora.quant.spec import QuantSpec
from qat_lora.run.files import read_json, write_json, writing

FILE = "model.safetensors"


@dataclass(frozen=True)
class Layout:
    """How a format stores quantised layers.

    misfit(spec, shape): why it cannot hold a weight exactly; None if it can. tensors(parts, spec): what it stores of a
    layer, by suffix of the layer's name. integers(spec): (turn, first): the integer of a code is turn·code + first, and
    its unit 1/turn of the scale. packing: what reads the folder again. config(kinds, student): what it adds to
    config.json, for {layer: spec}; raises UserError for kinds that do not go together.
    adapter(source, folder, shown): writes the adapter. tables: whether an embedding may be packed. kinds: the model
    types that its library knows, and its name; None if it knows every model that transformers does.
    """

    name: str
    misfit: Callable[[QuantSpec, tuple[int, int]], str | None]
    tensors: Callable[[StoredWeight, QuantSpec], dict[str, Tensor]]
    integers: Callable[[QuantSpec], tuple[int, int]]
    packing: Packing
    config: Callable[[dict[str, QuantSpec], nn.Module], dict]
    adapter: Callable[[Source, Path, Path], None] = write_adapter
    tables: bool = False
    kinds: tuple[frozenset[str], str] | None = None


@dataclass
class PackedPlan:
    """A packed export: the quantised layers by name, and every other tensor as it will be stored."""

    layout: Layout
    layers: dict[str, Quantizer]
    plain: dict[str, Tensor] = field(default_factory=dict)

    def bytes(self) -> int:
        """Bytes of all tensors, without the few kB of headers."""
        return self._packed_bytes() + sum(value.numel() * value.element_size() for value in self.plain.values())

    def bits(self) -> float:
        """Bits per quantised weight in the file."""
        return 8 * self._packed_bytes() / sum(quantizer.codes.numel() for quantizer in self.layers.values())

    def _packed_bytes(self) -> int:
        kinds = {name: (quantizer.spec, quantizer.shape) for name, quantizer in self.layers.items()}
        one_of = dict(zip(kinds.values(), self.layers.values()))  # packing takes seconds, and shapes repeat
        sizes = {kind: sum(t.nbytes for t in self.tensors(quantizer).values()) for kind, quantizer in one_of.items()}
        return sum(sizes[kind] for kind in kinds.values())

    def tensors(self, quantizer: Quantizer) -> dict[str, Tensor]:
        return self.layout.tensors(quantizer.parts(), quantizer.spec)


def packed_layers(student: nn.Module, layout: Layout) -> dict[str, Quantizer]:
    """The quantised layers of a student, with or without values, by the names that they have in a file. Raises
    UserError with the layer and what works if the format cannot hold one."""
    layers, embedding, kind = {}, student.get_input_embeddings(), student.config.model_type
    if layout.kinds and kind not in layout.kinds[0]:
        raise UserError(f"{layout.name}: {layout.kinds[1]} has no model type {kind!r}; use hf")
    names = {id(module): name for name, module in student.named_modules()}
    for name, layer in quantized_layers(student).items():
        quantizer = layer.quantizer
        if isinstance(layer, ExpertWeight):
            raise UserError(f"{layout.name} cannot hold the experts {name}; use hf")
        tied = layer.weight is embedding.weight
        if tied and not layout.tables:
            raise UserError(
                f"{layout.name} cannot hold the quantised head {name}, which is tied to the embedding; train with "
                "--head none, or use mlx, gguf or hf"
            )
        if why := layout.misfit(quantizer.spec, quantizer.shape):
            raise UserError(
                f"{layout.name} cannot hold {name}, which is {quantizer.spec} ({why}); use hf, or another quantiser: "
                "--target names those that a reader holds"
            )
        layers[names[id(embedding)] if tied else name] = quantizer
    layout.config({name: quantizer.spec for name, quantizer in layers.items()}, student)
    return layers


def plan_packed(source: Source, layout: Layout) -> PackedPlan:
    """What an export in `layout` holds; raises UserError as `packed_layers` does."""
    student, layers = source.student, packed_layers(source.student, layout)
    packed = {f"{name}.weight" for name in layers}
    plan = PackedPlan(layout, layers)
    for name, value in plain_state(student).items():
        if name not in packed:
            plan.plain[name] = stored_plain(name, value.detach())
    return plan


def stored_plain(name: str, value: Tensor) -> Tensor:
    """A tensor that is not quantised as it is stored: matrices in fp16, vectors in fp32."""
    if value.ndim < 2 or not value.is_floating_point():
        return value.contiguous()
    half = value.to(torch.float16)
    if not half.isfinite().all():
        raise UserError(f"{name} holds values beyond 65504, fp16's largest; use --format hf")
    return half.contiguous()


def rounding(source: Source, plan: PackedPlan) -> str:
    """What a packed export rounds, for the user."""
    state = plain_state(source.student)
    errors = {n: float((state[n].float() - v.float()).abs().max()) for n, v in plan.plain.items()}
    rounded = [name for name, error in errors.items() if error]
    if not rounded:
        return "everything exact"
    more = f" and {len(rounded) - 1} others" * (len(rounded) > 1)
    return f"codes, scales and offsets exact; to fp16 (by at most {max(errors.values()):.1g}): {rounded[0]}{more}"


def write_packed(source: Source, plan: PackedPlan, folder: Path, shown: Path) -> None:
    """Write and check a folder: weights, config, tokenizer, generation config, and the adapter in adapter/."""
    student, tokenizer, layout = source.student, load_tokenizer(source.name), plan.layout
    state = dict(plan.plain)
    for name, quantizer in plan.layers.items():
        state |= {f"{name}.{suffix}": value for suffix, value in plan.tensors(quantizer).items()}
    with writing(shown):
        save_file(state, folder / FILE, metadata={"format": "pt"})
        student.generation_config.eos_token_id = end_tokens(student, tokenizer)
        student.config.save_pretrained(folder)
        student.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        extra = layout.config({name: quantizer.spec for name, quantizer in plan.layers.items()}, student)
        held = read_json(folder / "config.json")
        write_json(folder / "config.json", held | {"dtype": "float16"} | rope_for_others(held) | extra)
        if source.adapter:
            layout.adapter(source, folder / ADAPTER_FOLDER, shown)
    check_packed(plan, folder, shown)


def rope_for_others(config: dict) -> dict:
    """The rotation's settings under the names that libraries other than transformers 5 read them from."""
    settings = config.get("rope_parameters") or {}
    full, local = settings.get("full_attention", settings), settings.get("sliding_attention", {})
    found = {"rope_theta": full["rope_theta"]} if "rope_theta" in full else {}
    found |= {"rope_local_base_freq": local["rope_theta"]} if "rope_theta" in local else {}
    kind = full.get("rope_type", "default")
    return found | ({} if kind == "default" else {"rope_scaling": full | {"type": kind}})


def check_packed(plan: PackedPlan, folder: Path, shown: Path) -> None:
    """Read the folder back and compare: every code, scale and offset, and every plain value, bit for bit."""
    tensors, config = load_file(folder / FILE), read_json(folder / "config.json")
    for name, value in plan.plain.items():
        if name not in tensors or not torch.equal(tensors[name], value):
            raise differs(shown / FILE, name)
    for name, quantizer in plan.layers.items():
        suffixes = plan.tensors(quantizer)
        if not {f"{name}.{suffix}" for suffix in suffixes} <= tensors.keys():
            raise differs(shown / FILE, name)
        found = plan.layout.packing.weight({s: tensors[f"{name}.{s}"] for s in suffixes}, name, config)
        if not _same(found, quantizer, *plan.layout.integers(quantizer.spec)):
            raise differs(shown / FILE, name)


def _same(found: PackedWeight, quantizer: Quantizer, turn: int, first: int) -> bool:
    wanted = quantizer.parts()
    scale, integers = each(wanted.scale, found.scale.shape[1]), turn * wanted.codes.astype(np.int16) + first
    if quantizer.spec.zero and found.zero is not None:
        integers = integers + found.each(wanted.offset_integers)
    same = np.array_equal(found.integers(), integers)
    same = same and np.array_equal(found.scale * np.float32(turn), scale)
    if found.offset is not None:
        implied = scale * np.float32(quantizer.spec.lowest)
        offset = implied if wanted.offset is None else each(wanted.offset, scale.shape[1])
        same = same and np.array_equal(found.offset, offset)
    return same


# -- integers and words ----------------------------------------------------------------------------------------------
def words(integers: np.ndarray, bits: int) -> Tensor:
    """Integers below 2^bits [rows, columns] as int32 words [rows, columns·bits/32]: a stream of bits, lowest first."""
    packed = pack_codes(torch.from_numpy(np.ascontiguousarray(integers)), bits)
    return packed.view(torch.int32).view(len(integers), -1)
