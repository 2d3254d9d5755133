"""End-to-end quantisation-aware training of a student from a KD cache."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.utils.data import Dataset

from qat_lora.kd.losses import kd_loss, target_entropy
from qat_lora.quant.training import parameter_groups, select_parameters
from qat_lora.run.metrics import Metric, Share, Total
from qat_lora.run.session import Session
from qat_lora.train.average import average_of, follow
from qat_lora.train.loop import Plan, Stage, Trained, fit, row_stream, tokens_of, trained_parameters
from qat_lora.train.optimizer import new_optimizer


@dataclass(frozen=True)
class QATPlan(Plan):
    """scale_learning_rate: of the quantisers' scales. scope: what learns, see `select_parameters`. ema: decay of the
    moving average that is measured and saved in the student's place; 0: the student itself."""

    scale_learning_rate: float = 0.0
    scope: str = "all"
    ema: float = 0.0


def qat_stage(
    student: nn.Module, train: Dataset, plan: QATPlan, session: Session, evaluate: Callable[[int, nn.Module], dict],
    name: str = "qat",
) -> Stage:  # fmt: skip
    """A stage that trains what a placed student leaves trainable, and the plan's scope, on a KDCacheDataset.

    evaluate(step, model) gives held-out figures, and keeps the best state if it likes; model is the student, or its
    moving average.
    """
    backend = session.backend
    kept = trained_parameters(student)  # of earlier stages too
    select_parameters(student, plan.scope)
    groups = parameter_groups(student, plan.learning_rate, plan.scale_learning_rate)
    optimizer = new_optimizer(groups, backend)
    average = average_of(student) if plan.ema else None
    shown = student if average is None else average
    return Stage(
        name, session, plan, optimizer, row_stream(train, plan, backend),
        Trained(student, optimizer, average, parameters=kept), lambda step: evaluate(step, shown),
        after=(lambda: follow(average, student, plan.ema)) if plan.ema else None,
    )  # fmt: skip


def kd_objective(model: nn.Module, batch: dict) -> tuple:
    """The distillation loss of a batch, and its metrics."""
    loss = kd_loss(model, batch)
    metrics: dict[str, Metric] = {"loss": Share(loss), "kl": Share(loss - target_entropy(batch))}
    return loss, metrics | {"tokens": Total(tokens_of(batch))}


def train_qat(
    student: nn.Module, train: Dataset, plan: QATPlan, session: Session, evaluate: Callable[[int, nn.Module], dict],
    stage: str = "qat",
) -> None:  # fmt: skip
    """`qat_stage`, from its first update to its last, for what is not scripts/train_qat.py."""
    fit(qat_stage(student, train, plan, session, evaluate, stage), student, kd_objective)
