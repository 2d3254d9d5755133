"""A small LoRA on the frozen low-bit student that recovers quality lost to quantisation."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from qat_lora.backend import TorchBackend, compute_dtype
from qat_lora.kd.training import kd_loss, kd_soft_ce, target_entropy
from qat_lora.models.architecture import hidden_states
from qat_lora.quant.student import head_of
from qat_lora.run.metrics import Share, Total
from qat_lora.run.session import Session
from qat_lora.train.loop import Plan, Stage, StageState, fit, row_stream, tokens_of
from qat_lora.train.losses import text_loss
from qat_lora.train.optimizer import new_optimizer

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


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    hidden = hidden_states(model, tokens)
    return head_of(model).cast(compute_dtype(hidden)).logits(hidden)


def recovery_stage(
    model: nn.Module, train: Dataset, plan: Plan, session: Session, evaluate: Callable[[int], dict]
) -> Stage:
    """A stage that trains the adapter of a placed PEFT model; gradients pass through the frozen student below it."""
    backend = session.backend
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = new_optimizer([{"params": trained, "lr": plan.learning_rate}], backend)
    stream = row_stream(train, plan, backend)
    return Stage("recovery", session, plan, optimizer, stream, StageState(model, optimizer), evaluate)


def train_recovery_lora(
    model: nn.Module, train: Dataset, mode: str, plan: Plan, anchor: Anchor | None, session: Session,
    evaluate: Callable[[int], dict],
) -> None:  # fmt: skip
    """Run `recovery_stage` to its end, for callers other than scripts/train_recovery_lora.py.

    mode: "kd" (train is a KDCacheDataset), "sft" or "recover" (train is a TextDataset).
    """

    def objective(model: nn.Module, batch: dict) -> tuple:
        loss = MODES[mode](model, batch)
        metrics = {"kl": Share(loss - target_entropy(batch))} if mode == "kd" and not anchor else {}
        if anchor:
            loss = loss + anchor.loss(model) / (plan.accumulation * session.backend.world_size)
        return loss, {"loss": Share(loss), **metrics, "tokens": Total(tokens_of(batch))}

    fit(recovery_stage(model, train, plan, session, evaluate), model, objective)
