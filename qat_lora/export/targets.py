"""Whether a reader holds a student, and what it holds: asked before training, and by the dry run of an export."""

from collections import Counter

from torch import nn

from qat_lora.errors import UserError
from qat_lora.export import compressed_tensors, mlx
from qat_lora.export.gguf import gguf_refusal, inexact, plan_gguf, stored_bits
from qat_lora.export.gguf_types import fitting
from qat_lora.export.gptq import AUTOROUND, AWQ, GPTQ
from qat_lora.export.hf import hf_bytes
from qat_lora.export.packed import packed_layers, plan_packed, rounding
from qat_lora.export.source import Source
from qat_lora.quant.linear import quantized_layers
from qat_lora.quant.targets import FORMATS

LAYOUTS = {layout.name: layout for layout in (compressed_tensors.LAYOUT, GPTQ, AUTOROUND, AWQ, mlx.LAYOUT)}


def check_target(target: str, name: str, student: nn.Module) -> str:
    """What each quantiser of a student of model `name` becomes in the target's files, for the plan of a run. Raises
    UserError, with what works, if the target does not know the architecture or cannot hold a layer exactly."""
    kinds = Counter()
    if target == "llama.cpp":
        if reason := gguf_refusal(name):
            raise UserError(f"--target llama.cpp: {reason}; use --target vllm, mlx or hf")
        for layer, found in quantized_layers(student).items():
            spec = found.quantizer.spec
            kind = fitting(spec, found.weight.shape[-1])[0]
            if kind == "F16":
                raise UserError(
                    f"--target llama.cpp cannot hold {layer}, which is {spec}; use --target vllm, mlx or hf"
                )
            kinds[f"{spec} as {kind}"] += 1
    else:
        if target != "hf":  # which holds everything
            packed_layers(student, LAYOUTS[FORMATS[target]])
        kinds.update(str(layer.quantizer.spec) for layer in quantized_layers(student).values())
    return f"target {target}: " + ", ".join(f"{count} layers {kind}" for kind, count in kinds.items())


def every_format(source: Source) -> list[str]:
    """One line for each format: the student's size and bits in it, and what is rounded; or why it cannot hold it."""
    lines = [f"hf: {hf_bytes(source, False) / 1e6:.1f} MB, 32 bits per quantised weight, level·scale exact in fp32"]
    for name in ("gguf", *LAYOUTS):
        try:
            if name == "gguf":
                plan = plan_gguf(source)
                size, bits, what = plan.model_bytes, stored_bits(plan), inexact(source, plan)
            else:
                plan = plan_packed(source, LAYOUTS[name])
                size, bits, what = plan.bytes(), plan.bits(), rounding(source, plan)
            lines.append(f"{name}: {size / 1e6:.1f} MB, {bits:.3f} bits per quantised weight, {what}")
        except UserError as error:
            lines.append(f"{name}: no: {str(error).partition('; ')[0]}")
    return lines
