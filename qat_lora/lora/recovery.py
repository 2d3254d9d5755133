"""A small LoRA on the frozen low-bit student that recovers quality lost to quantisation."""

from torch import nn

from qat_lora.kd.training import kd_loss
from qat_lora.quant.linear import quantized_layers
from qat_lora.train.language_memory import loading_memory
from qat_lora.train.losses import text_loss
from qat_lora.train.memory import Parts

MODES = {"kd": kd_loss, "sft": text_loss, "recover": text_loss}


def fitting_memory(model: nn.Module) -> Parts:
    """The memory that fitting a new adapter to the quantisation error takes (`lora.add.fit_to_error`)."""
    linear = [layer for layer in quantized_layers(model).values() if isinstance(layer, nn.Linear)]
    moments = sum(4 * layer.in_features**2 for layer in linear)
    base = 4 * sum(p.numel() for name, p in model.named_parameters() if "lora_" not in name)
    return loading_memory(model) | {"base model": base, "second moments": moments}
