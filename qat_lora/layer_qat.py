"""Layer-by-layer QAT: each block learns to reproduce its full-precision outputs from the quantised student's inputs.

The stage before end-to-end training: one block at a time, which needs little memory and initialises 2-bit students far
better than any scale search (EfficientQAT's first phase, arXiv 2407.11062).
"""

from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from qat_lora.backend import TorchBackend, is_xla_device, xla_mark_step  # noqa: F401 (the guide imports the two from here)
from qat_lora.backend.sharding import as_shards, whole
from qat_lora.kernels.optimizer import CautiousAdamW, new_optimizer
from qat_lora.models.architecture import decoder_layers
from qat_lora.quant.blockwise import Call, block_outputs, compensate_block, first_inputs, run_block
from qat_lora.quant.linear import full_precision
from qat_lora.quant.rates import rate_shares
from qat_lora.run.metrics import Last, Share, Total
from qat_lora.run.session import Session
from qat_lora.train.loop import cosine, load_trained, set_learning_rates, trained_state


@dataclass(frozen=True)
class LayerPlan:
    """steps: updates per block, each on one batch. compensate: apply GPTQ to each block before training it, on the
    outputs of the trained blocks before it."""

    steps: int
    learning_rate: float
    clip_grad_norm: float
    compensate: bool = False


def train_layers(student: nn.Module, batches: list[dict], plan: LayerPlan, session: Session):
    """Train the blocks of a placed student in order, on `batches` (dicts of tokens [B, L], all of one shape).

    Loss: `relative_error` between a block's outputs in the student and in the full-precision model. In the student, its
    inputs come from the trained blocks before it, so it also learns to undo their errors. Each worker has its own
    batches; together they act as one larger batch.
    """
    backend, layers = session.backend, _Layers(student, batches, plan, session.backend)
    for step in session.steps("layers", len(layers.blocks) * plan.steps, layers.state, layers.load):
        block, inner = divmod(step - 1, plan.steps)
        layers.reach(block, inner)
        factor = cosine(inner, plan.steps)
        set_learning_rates(layers.optimizer, factor)
        batch, call = layers.batch(inner % len(batches))
        with _only_trainable(student, layers.blocks[block]), backend.autocast():
            out = run_block(layers.blocks[block], batch["hidden"], call)
            loss = relative_error(out.float(), batch["target"].float()).mean() / backend.world_size
            backend.backward(loss)
        norm, tokens = backend.update(layers.optimizer, plan.clip_grad_norm), Total(batch["tokens"].numel())
        rate = Last(plan.learning_rate * factor)
        session.record(loss=Share(loss.detach()), grad_norm=norm, block=Last(block), tokens=tokens, lr=rate)


class _Layers:
    """The block in training, its inputs and its targets.

    inputs, targets: hidden states of every batch on the host: the outputs of the student's trained blocks, and those of
    the full-precision model up to and including block `known`.
    """

    def __init__(self, student: nn.Module, batches: list[dict], plan: LayerPlan, backend: TorchBackend):
        self.student, self.batches, self.plan, self.backend = student, batches, plan, backend
        self.blocks = decoder_layers(student)
        self.current = self.known = -1
        self.optimizer = self.saved = None  # saved: an optimiser's state from a checkpoint, until its block is reached
        self.inputs: list[Tensor] = []
        self.targets: list[Tensor] = []
        self.calls: list[tuple[Call, ...]] = []

    def state(self) -> tuple[dict, dict]:
        return trained_state(self.student, self.optimizer, {"block": self.current})

    def load(self, tensors: dict | Path, trainer: dict) -> None:
        self._begin()
        self._know(trainer["block"])
        optimizer = self._new_optimizer(trainer["block"])
        load_trained(self.student, optimizer, tensors, trainer)
        self.saved = optimizer.state_dict()

    def reach(self, block: int, inner: int) -> None:
        """Advance to a block's inner-th update (0-based); also takes a resumed run through the finished blocks."""
        if not self.inputs:
            self._begin()
        while self.current < block:
            if self.current >= 0:
                self.inputs = self._outputs(self.current, self.inputs)
            self.current += 1
        if self.optimizer is None or inner == 0:
            self._start(block, resumed=bool(self.saved and inner))

    def _begin(self) -> None:
        self.inputs, self.calls = first_inputs(self.student, self.batches, self.backend)
        as_shards(self.student)
        self.targets = self.inputs

    def _outputs(self, block: int, inputs: list[Tensor]) -> list[Tensor]:
        return block_outputs(self.blocks[block], inputs, self.calls[block], self.backend)

    def _know(self, block: int) -> None:
        """Advance `targets` to a block; the blocks not yet passed must still be untrained."""
        while self.known < block:
            self.known += 1
            with full_precision(self.blocks[self.known]):
                self.targets = self._outputs(self.known, self.targets)

    def _start(self, block: int, resumed: bool) -> None:
        """Begin a block's training, or resume in the middle of it."""
        self._know(block)
        if self.plan.compensate and not resumed:
            with whole(self.blocks[block]):
                compensate_block(self.blocks[block], self.inputs, self.calls[block], self.backend)
        self.optimizer = self._new_optimizer(block)
        if resumed:
            self.optimizer.load_state_dict(self.saved)
        self.saved = None

    def _new_optimizer(self, block: int) -> CautiousAdamW:
        shares = rate_shares(self.student, layerwise=True)
        return new_optimizer(self.blocks[block], self.plan.learning_rate, self.backend, shares)

    def batch(self, at: int) -> tuple[dict[str, Tensor], Call]:
        """A batch on the device, with the current block's input and target, and how the block is called."""
        batch = {"hidden": self.inputs[at], "target": self.targets[at]} | self.batches[at]
        return self.backend.to_device(batch), self.calls[self.current][at]


def relative_error(answer: Tensor, wanted: Tensor) -> Tensor:
    """Squared error of hidden states [B, L, H] at each position [B, L], divided by the larger of their squared norms.

    It is computed per position, because the next block's norm rescales each position, and a mean over all would be
    dominated by the few positions with massive activations. The divisor is the larger norm, because where only the
    answer is massive, the relative error would otherwise be in the thousands.
    """
    size = torch.maximum(wanted.square().sum(-1), answer.detach().square().sum(-1))
    return (answer - wanted).square().sum(-1) / size


@contextmanager
def _only_trainable(student: nn.Module, layer: nn.Module):
    """Context in which only the parameters of `layer` get gradients."""
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
