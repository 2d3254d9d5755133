"""Whether a reader holds a student, and what it holds: asked before training."""

from collections import Counter

from torch import nn

from qat_lora.errors import UserError
from qat_lora.export import compressed_tensors, mlx
from qat_lora.export.gguf import gguf_refusal
from qat_lora.export.gguf_types import fitting
from qat_lora.export.gptq import AUTOROUND, GPTQ
from qat_lora.export.packed import packed_layers
from qat_lora.quant.linear import quantized_layers
from qat_lora.quant.targets import FORMATS

LAYOUTS = {layout.name: layout for layout in (compressed_tensors.LAYOUT, GPTQ, AUTOROUND, mlx.LAYOUT)}


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
        layers = packed_layers(student, LAYOUTS[FORMATS[target]]) if target != "hf" else {
            layer: found.quantizer for layer, found in quantized_layers(student).items()
        }  # fmt: skip
        kinds.update(str(quantizer.spec) for quantizer in layers.values())
    return f"target {target}: " + ", ".join(f"{count} layers {kind}" for kind, count in kinds.items())
