"""What a student is trained by: cross-entropy against the teacher, cached and sparse or dense."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat_lora.models.architecture import hidden_states
from qat_lora.quant.student import head_of
from qat_lora.train.losses import kept, sparse_loss


def kd_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy against the cached teacher targets of a batch of KDCacheDataset items, see `sparse_loss`."""
    hidden = hidden_states(model, batch["tokens"])
    return sparse_loss(hidden, head_of(model), batch["index"], batch["prob"], batch["mask"], batch.get("total"))


def target_entropy(batch: dict[str, Tensor]) -> Tensor:
    """The teacher's entropy in a batch, divided as `kd_loss` is: loss − entropy estimates the KL to the teacher."""
    return (batch["entropy"] * batch["mask"]).sum() / batch["total"]


def kd_soft_ce(student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0, mask: Tensor | None = None):
    """Dense soft cross-entropy against the teacher's softmax, times temperature², averaged over kept positions.

    logits [..., V]; mask [...], 1 keeps (None: all). XLA-safe, unlike F.kl_div. The minimum is the teacher's entropy
    (times temperature²), not 0. Raises ValueError when the mask keeps nothing (checked on the CPU only).
    """
    with torch.no_grad():
        target = F.softmax(teacher_logits.float() / temperature, dim=-1)
    loss = -(target * F.log_softmax(student_logits.float() / temperature, dim=-1)).sum(-1) * temperature**2
    if mask is None:
        return loss.mean()
    return (loss * mask).sum() / kept(mask)
