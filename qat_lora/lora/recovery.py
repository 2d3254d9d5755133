"""A small LoRA on the frozen low-bit student that recovers quality lost to quantisation."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qat_lora.backend import TorchBackend, compute_dtype
from qat_lora.kd.training import kd_loss, kd_soft_ce
from qat_lora.models.architecture import hidden_states, unwrap
from qat_lora.quant.linear import quantized_layers
from qat_lora.quant.student import head_of
from qat_lora.train.language_memory import loading_memory
from qat_lora.train.losses import text_loss
from qat_lora.train.memory import Parts

MODES = {"kd": kd_loss, "sft": text_loss, "recover": text_loss}


@dataclass(frozen=True)
class Anchor:
    """Logits of the student without its adapter, to keep training close to them: tokens [n, L] and logits [n, L, V]."""

    tokens: Tensor
    logits: Tensor
    weight: float

    @classmethod
    @torch.no_grad()
    def of(cls, student: nn.Module, tokens: Tensor, weight: float, backend: TorchBackend) -> "Anchor":
        tokens = backend.to_device({"tokens": tokens})["tokens"]
        with backend.autocast():
            logits = _logits(student, tokens)
        backend.step_boundary()
        return cls(tokens, logits, weight)

    def loss(self, model: nn.Module) -> Tensor:
        """weight · KL(original student ‖ model), up to the constant entropy."""
        return self.weight * kd_soft_ce(_logits(model, self.tokens), self.logits)

    @staticmethod
    def memory(model: nn.Module, positions: int) -> int:
        """Bytes of five tensors of the size of its logits: stored and new logits, softmax, log softmax, gradient."""
        return 5 * 4 * positions * unwrap(model).get_output_embeddings().weight.shape[0]


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    hidden = hidden_states(model, tokens)
    return head_of(model).cast(compute_dtype(hidden)).logits(hidden)


def fitting_memory(model: nn.Module) -> Parts:
    """The memory that fitting a new adapter to the quantisation error takes (`lora.add.fit_to_error`)."""
    linear = [layer for layer in quantized_layers(model).values() if isinstance(layer, nn.Linear)]
    moments = sum(4 * layer.in_features**2 for layer in linear)
    base = 4 * sum(p.numel() for name, p in model.named_parameters() if "lora_" not in name)
    return loading_memory(model) | {"base model": base, "second moments": moments}
