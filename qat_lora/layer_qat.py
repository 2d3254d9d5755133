"""Layer-by-layer QAT: each block learns to answer, on quantised inputs, as it does in the full-precision model.

The stage before end-to-end training: a block at a time, cheap in memory, and a far better start at 2 bits than any
scale search (EfficientQAT's first phase, arXiv 2407.11062).
"""

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qat_lora.blocks import BlockCalls, Call, block_outputs, compensate_block, first_inputs, run_block
from qat_lora.evaluate import kd_loss
from qat_lora.models.architecture import as_answer, decoder_layers, replaced
from qat_lora.qat import MOST_UPDATES, MOST_WEIGHT, check_range, check_rate, parameter_groups, restore
from qat_lora.quant.linear import unquantized
from qat_lora.run.schedule import cosine, set_learning_rates
from qat_lora.run.session import Session


@dataclass(frozen=True)
class LayerPlan:
    """steps updates of one batch for each block; kd_weight: of a global distillation term, 0 leaves it out;
    compensate: each block starts with GPTQ on the inputs that the trained blocks before it give."""

    steps: int
    learning_rate: float
    clip_grad_norm: float
    kd_weight: float = 0.0
    compensate: bool = False

    def __post_init__(self):
        check_range("--layer-steps", self.steps, 0, MOST_UPDATES)
        check_range("--layer-kd-weight", self.kd_weight, 0, MOST_WEIGHT)
        check_rate("--layer-learning-rate", self.learning_rate)


def train_layers(student: nn.Module, batches: list[dict], plan: LayerPlan, session: Session):
    """Train the blocks of a placed student in order, on `batches` (dicts of tokens [B, L], all of one shape).

    Loss: `relative_error` of what the block makes of the inputs that the trained blocks before it produce, to what the
    same block answers in the full-precision model: it learns to undo their errors too. With kd_weight, plus that weight
    times the cached distillation loss of the whole model, the later blocks in full precision (batches then carry index,
    prob and mask). Each of several workers has batches of its own, and all train as on one larger batch.
    """
    backend = session.backend
    layers = decoder_layers(student)
    current, optimizer, saved, calls = -1, None, None, BlockCalls([], {})
    inputs, targets, known = [], [], -1  # `targets`: what the full-precision model's block `known` answers

    def state() -> tuple[dict, dict]:
        trained = {name: p for name, p in student.named_parameters() if p.requires_grad}
        return trained, {"optimizer": optimizer.state_dict(), "block": current}

    def begin() -> None:
        nonlocal inputs, calls, targets
        inputs, calls = first_inputs(student, batches, backend)
        targets = inputs

    def know(index: int) -> None:
        """Let `targets` reach block `index`, as long as the blocks up to it are untrained."""
        nonlocal targets, known
        while known < index:
            known += 1
            with unquantized(layers[known]):
                targets = block_outputs(layers[known], targets, calls.block(known), backend)

    def load(tensors: dict, trainer: dict) -> None:
        nonlocal saved
        begin()
        know(trainer["block"])
        restore(student, tensors)
        saved = trainer["optimizer"]

    for step in session.steps("layers", len(layers) * plan.steps, state, load):
        index, inner = divmod(step - 1, plan.steps)
        if not inputs:
            begin()
        while current < index:  # also walks a resumed run through the blocks that are done
            if current >= 0:
                inputs = block_outputs(layers[current], inputs, calls.block(current), backend)
            current += 1
            if current == index:
                know(index)
                resumed = saved and inner  # in the middle of this block
                if plan.compensate and not resumed:
                    compensate_block(layers[index], inputs, calls.block(index), backend)
                groups = parameter_groups(layers[index], plan.learning_rate, plan.learning_rate)
                optimizer = backend.optimizer(groups)
                if resumed:
                    optimizer.load_state_dict(saved)
                saved = None
        at = inner % len(batches)
        batch = {"hidden": inputs[at], "target": targets[at]} | batches[at]
        figures = _update(student, index, batch, calls.block(index)[at], calls.answers, optimizer, plan, inner, backend)
        session.record(**figures)


def _update(
    student, index: int, batch: dict, call: Call, answers: dict, optimizer, plan: LayerPlan, inner: int, backend
) -> dict:
    """One update of block `index`: its inner-th (0-based)."""
    layer = decoder_layers(student)[index]
    factor = cosine(inner, plan.steps)
    set_learning_rates(optimizer, factor)
    batch = backend.to_device(batch)
    with _only_trainable(student, layer), backend.autocast():
        out = run_block(layer, batch["hidden"], call)
        loss = relative_error(out.float(), batch["target"].float()).mean() / backend.world_size
        if plan.kd_weight:
            loss = loss + plan.kd_weight * _rest_of_model_loss(student, index, out, answers, batch)
        backend.backward(loss)
    norm = backend.update(optimizer, plan.clip_grad_norm)
    rate = plan.learning_rate * factor
    return {"loss": loss.detach(), "grad_norm": norm, "block": index, "tokens": batch["tokens"].numel(), "lr": rate}


def _rest_of_model_loss(student, index: int, hidden: Tensor, answers: dict[type, int], batch: dict) -> Tensor:
    """Cached distillation loss of the model from block `index` on, whose answer is `hidden`; later blocks in full
    precision."""
    layers = decoder_layers(student)

    def passed(block: nn.Module) -> Callable:
        return lambda *args, **kwargs: as_answer(hidden, answers[type(block)])

    with unquantized(layers[index + 1 :]), replaced(layers[: index + 1], passed):
        return kd_loss(student, batch)


def relative_error(answer: Tensor, wanted: Tensor) -> Tensor:
    """Squared error of hidden states [B, L, H] at each position [B, L], relative to the larger one's square.

    Position by position, because the next block's norm sees each at its own size, and a mean over all would be ruled by
    the few positions of massive activations; the larger one, because where only the answer is massive its error would
    be thousands of times the target.
    """
    size = torch.maximum(wanted.square().sum(-1), answer.detach().square().sum(-1))
    return (answer - wanted).square().sum(-1) / size


@contextmanager
def _only_trainable(student: nn.Module, layer: nn.Module):
    """Within this context only the parameters of `layer` take gradients."""
    before = {p: p.requires_grad for p in student.parameters()}
    for p in before:
        p.requires_grad_(False)
    for p in layer.parameters():
        p.requires_grad_(before[p])
    try:
        yield
    finally:
        for p, wanted in before.items():
            p.requires_grad_(wanted)
