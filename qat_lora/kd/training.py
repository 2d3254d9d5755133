"""Distillation from a KD cache: the losses, and the end-to-end stage of quantisation-aware training."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from qat_lora.models.architecture import hidden_states
from qat_lora.quant.linear import parameter_groups
from qat_lora.quant.student import head_of
from qat_lora.quant.training import select_parameters
from qat_lora.run.options import RATE, check_range
from qat_lora.run.session import Session
from qat_lora.train.loop import Plan, Stage, StageState, ema_copy, row_stream, trained_parameters, update_ema
from qat_lora.train.losses import kept, sparse_loss
from qat_lora.train.optimizer import new_optimizer


def kd_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy against the cached teacher targets of a batch of KDCacheDataset items, see `sparse_loss`."""
    hidden = hidden_states(model, batch["tokens"])
    return sparse_loss(hidden, head_of(model), batch["index"], batch["prob"], batch["mask"], batch.get("total"))


def target_entropy(batch: dict[str, Tensor]) -> Tensor:
    """The teacher's entropy in a batch, normalised like `kd_loss`: loss − entropy estimates the KL to the teacher."""
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


@dataclass(frozen=True)
class QATPlan(Plan):
    """scale_learning_rate: learning rate of the quantisers' scales; None: learning_rate. scope: which parameters to
    train, see `select_parameters`. ema: decay of the moving average (EMA) of the weights, which is evaluated and saved
    instead of the student; 0: the student itself."""

    scale_learning_rate: float | None = None
    scope: str = "all"
    ema: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        check_range("scale_learning_rate", self.scale_rate, **RATE)
        check_range("ema", self.ema, at_least=0, below=1)

    @property
    def scale_rate(self) -> float:
        return self.learning_rate if self.scale_learning_rate is None else self.scale_learning_rate


def qat_stage(
    student: nn.Module, train: Dataset, plan: QATPlan, session: Session, evaluate: Callable[[int, nn.Module], dict]
) -> Stage:
    """A stage that trains a placed student's trainable parameters within the plan's scope on a KDCacheDataset.

    evaluate(step, model) returns held-out figures and may save the best checkpoint; model is the student, or its moving
    average.
    """
    backend = session.backend
    kept = trained_parameters(student)  # including those trained in earlier stages
    select_parameters(student, plan.scope)
    groups = parameter_groups(student, plan.learning_rate, plan.scale_rate)
    optimizer = new_optimizer(groups, backend)
    average = ema_copy(student) if plan.ema else None
    shown = student if average is None else average
    return Stage(
        "qat", session, plan, optimizer, row_stream(train, plan, backend),
        StageState(student, optimizer, average, parameters=kept), lambda step: evaluate(step, shown),
        after_step=(lambda: update_ema(average, student, plan.ema)) if plan.ema else None,
    )  # fmt: skip
