"""The scripts' training loops, and single updates outside a run, for tests."""

import functools
import runpy

from qat_lora.errors import ROOT
from qat_lora.rl.grpo import policy_loss, without_dropout
from qat_lora.run.metrics import Metric, Share, Total
from qat_lora.run.scripts import load_script
from qat_lora.train.loop import plain_stage, tokens_of

script = functools.cache(load_script)
one_update = runpy.run_path(str(ROOT / "benchmarks" / "one_update.py"))["update"]


def train_plain(model, rows, loss_of, plan, session, evaluate=lambda step: {}, stage="train") -> None:
    """Train one stage with the loss loss_of(model, batch)."""
    model.train()
    for update in plain_stage(stage, model, rows, plan, session, evaluate):
        for batch in update:
            with session.backend.autocast():
                loss = loss_of(model, batch)
            session.backend.backward(loss)
            update.add(loss=Share(loss), tokens=Total(tokens_of(batch)))
        update.record(grad_norm=update.step())


def train_qat(student, train, plan, session, evaluate) -> None:
    script("train_qat").end_to_end(student, train, plan, session, evaluate)


def train_recovery_lora(model, train, mode, plan, session, evaluate) -> None:
    script("train_recovery_lora").recover(model, train, mode, plan, session, evaluate)


def train_grpo(model, reference, prompts, judge, plan, session, evaluate=lambda step: {}) -> None:
    script("train_musclebob_improved").reinforce(model, reference, prompts, judge, plan, session, evaluate)


def train_recursive(trainer, rows, session, evaluate=None) -> None:
    script("pretrain").train_segments(trainer, rows, session, evaluate)


def learn(model, reference, rollouts, optimizer, plan, backend) -> dict:
    """Make one update on rollouts outside a run; returns its loss, kl and grad_norm."""
    without_dropout(model)
    found: dict[str, Metric] = {}
    for part in rollouts.parts:
        loss, metrics = policy_loss(model, reference, part, plan, backend)
        backend.backward(loss)
        for name, metric in metrics.items():
            found[name] = found[name] + metric.detached() if name in found else metric.detached()
        backend.step_boundary()
    values = {name: metric.value for name, metric in found.items()}
    return values | {"grad_norm": backend.update(optimizer, plan.clip_grad_norm)}
