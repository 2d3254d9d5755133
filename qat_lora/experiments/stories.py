"""The reservoir language model and those it is compared with: how they are made, measured, and what they tell."""

import importlib.util
import math
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
from torch import Tensor, nn

from qat_lora.backend import TorchBackend, tpu_chips
from qat_lora.data.stories import Stories, spans
from qat_lora.errors import UserError
from qat_lora.kd.losses import sparse_loss
from qat_lora.models.reservoir import ReservoirBlock, ReservoirSpec
from qat_lora.models.small_lm import MinGRUBlock, SmallLM, TransformerBlock, WindowAttention
from qat_lora.rl.rollout import Sampling, draw
from qat_lora.run.rundir import say

MODELS = ("reservoir", "transformer", "mingru")


def on_tpu(batch_size: int, learning_rate: float) -> tuple[int, float]:
    """What a TPU gets instead: twice the batch, 1.2 times the learning rate."""
    return 2 * batch_size, 1.2 * learning_rate


def get_device(use_tpu: bool = False) -> str:
    """What `open_backend` is to open, said aloud: "tpu" where one is asked for and there, else "cuda" or "cpu"."""
    if use_tpu and importlib.util.find_spec("torch_xla") is None:
        say("Warning: TPU requested but torch_xla not installed. Falling back to GPU.")
    elif use_tpu and not tpu_chips():
        say("Warning: TPU requested but no TPU chip found. Falling back to GPU.")
    elif use_tpu:
        say("Using device: tpu (TPU=Yes)")
        return "tpu"
    kind = "cuda" if torch.cuda.device_count() else "cpu"
    say(f"Using device: {kind} (TPU=No)")
    return kind


@dataclass(frozen=True)
class Shape:
    """A reservoir language model: `blocks` blocks of width `embedding`, each with the reservoirs of `specs` and a mix
    through `hidden` units; `window`: the last block is followed by attention to that many positions, 0: by none."""

    embedding: int
    blocks: int
    hidden: int
    specs: tuple[ReservoirSpec, ...]
    heads: int = 4
    dropout: float = 0.0
    window: int = 0

    def __post_init__(self):
        for name in ("embedding", "blocks", "hidden", "heads"):
            if getattr(self, name) < 1:
                raise UserError(f"--{name} {getattr(self, name)} must be at least 1")
        if self.embedding % (2 * self.heads):  # rotary positions turn pairs
            raise UserError(f"--embedding {self.embedding} does not divide by twice --heads {self.heads}; change one")
        if self.window < 0:
            raise UserError(f"--attention-window {self.window} must not be negative; 0 is no attention")
        if not 0 <= self.dropout < 1:
            raise UserError(f"--dropout {self.dropout} is outside [0, 1); use e.g. 0.1")


def check_kind(kind: str) -> None:
    """Raise UserError for an unknown kind of model."""
    if kind not in MODELS:
        raise UserError(f"--model {kind!r} is not one of {', '.join(MODELS)}")


def build(kind: str, vocab: int, shape: Shape, seed: int) -> SmallLM:
    """A model of `kind`, drawn with `seed`. The baselines have the reservoir model's embedding and number of blocks and
    the hidden width at which their trained parameters come nearest to its."""
    check_kind(kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "reservoir":
            return _reservoir(vocab, shape, seed)
        wanted, least = trained(_reservoir(vocab, shape, seed)), trained(_baseline(kind, vocab, shape, 1))
        if least > wanted:
            raise UserError(
                f"--model {kind} has at least {least:,} trained parameters, the reservoir {wanted:,}; raise --hidden"
            )
        hidden = _nearest(lambda hidden: trained(_baseline(kind, vocab, shape, hidden)), wanted)
        return _baseline(kind, vocab, shape, hidden)


def trained(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _reservoir(vocab: int, shape: Shape, seed: int) -> SmallLM:
    blocks = []
    for number in range(shape.blocks):
        specs = tuple(replace(spec, seed=_seed(seed, number, k)) for k, spec in enumerate(shape.specs))
        blocks.append(ReservoirBlock(shape.embedding, shape.hidden, specs, shape.dropout))
    if shape.window:
        blocks.append(WindowAttention(shape.embedding, shape.heads, shape.window, shape.dropout))
    return SmallLM(vocab, shape.embedding, blocks, shape.dropout)


def _seed(*place: int) -> int:
    """A seed of its own for each place."""
    return int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _baseline(kind: str, vocab: int, shape: Shape, hidden: int) -> SmallLM:
    def block() -> nn.Module:
        if kind == "mingru":
            return MinGRUBlock(shape.embedding, hidden, shape.dropout)
        return TransformerBlock(shape.embedding, hidden, shape.heads, shape.dropout)

    return SmallLM(vocab, shape.embedding, [block() for _ in range(shape.blocks)], shape.dropout)


def _nearest(count, wanted: int) -> int:
    """The hidden width whose count, which grows evenly with it, is nearest to `wanted`."""
    one, two = count(1), count(2)
    return round(1 + (wanted - one) / (two - one))


def story_loss(model: SmallLM, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of tokens [B, T + 1] from the second on, where mask [B, T] is 1."""
    hidden, _ = model(batch["tokens"][:, :-1])
    labels = batch["tokens"][:, 1:].unsqueeze(2)
    weight = model.embedding.weight
    return sparse_loss(hidden, weight, labels, torch.ones_like(labels), batch["mask"], batch.get("total"))


@torch.no_grad()
def heldout(model: SmallLM, stories: Stories, length: int, rows: int, backend: TorchBackend) -> dict[str, float]:
    """Every held-out token, in windows of `length` of which half is context (of the first, none): nats a token,
    perplexity, bits per byte. Each worker measures its share of the batches, of `rows` windows."""
    was_training = model.training
    model.eval()
    sums = []
    batches = spans(stories.heldout, stories.end, length, max(1, length // 2), rows)
    for batch in islice(batches, backend.rank, None, backend.world_size):
        batch = backend.to_device(batch)
        with backend.autocast():
            sums.append(story_loss(model, batch | {"total": torch.ones((), device=batch["mask"].device)}))
        backend.step_boundary()
    model.train(was_training)
    total = sum(backend.group.gather(sum(backend.fetch(*sums))))
    nll = total / len(stories.heldout)
    return {
        "heldout_nll": nll, "heldout_ppl": math.exp(min(nll, 80)),
        "bits_per_byte": total / math.log(2) / stories.heldout_bytes,
    }  # fmt: skip


@torch.no_grad()
def tell(
    model: SmallLM, stories: Stories, begin: list[int], tokens: int, sampling: Sampling, backend: TorchBackend
) -> str:
    """The text of the tokens `begin`, continued for at most `tokens`, one at a time from the carried state."""
    model.eval()
    said = [stories.end, *begin]
    given = backend.to_device({"tokens": torch.tensor([said])})["tokens"]
    state = model.begin(1)
    for _ in range(tokens):
        with backend.autocast():
            hidden, state = model(given, state)
            logits = (hidden[:, -1] @ model.embedding.weight.to(hidden.dtype).T).float()
        given = draw(logits, sampling)[0].unsqueeze(1)
        backend.step_boundary()  # of the state as well: else each token's graph would hold all before it
        token = int(backend.to_host(given))
        if token == stories.end:
            break
        said.append(token)
    return stories.tokenizer.decode(said[1:])
