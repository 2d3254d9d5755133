"""Story models: choosing the device, the loss, held-out metrics and generated stories."""

import importlib.util
import math
from itertools import islice

import torch
from torch import Tensor

from qat_lora.backend import TorchBackend, tpu_chips
from qat_lora.experiments.stories.baselines import SmallLM
from qat_lora.experiments.stories.text import Stories, spans
from qat_lora.rl.rollout import Sampling, draw
from qat_lora.run.console import say, watched
from qat_lora.train.evaluation import perplexity
from qat_lora.train.loop import trained_parameters
from qat_lora.train.losses import sparse_loss

OPENING = 6  # tokens of a held-out story that the model continues


def on_tpu(batch_size: int, learning_rate: float) -> tuple[int, float]:
    """Settings for a TPU: twice the batch size and 1.2 times the learning rate."""
    return 2 * batch_size, 1.2 * learning_rate


def get_device(use_tpu: bool = False) -> str:
    """The device for `open_backend`, which is also printed: "tpu" if requested and present, else "cuda" or "cpu"."""
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


def story_loss(model: SmallLM, batch: dict[str, Tensor]) -> Tensor:
    """Cross-entropy of tokens [B, T + 1], from the second token on, at the positions where mask [B, T] is 1."""
    hidden, _ = model(batch["tokens"][:, :-1])
    labels = batch["tokens"][:, 1:].unsqueeze(2)
    weight = model.embedding.weight
    return sparse_loss(hidden, weight, labels, torch.ones_like(labels), batch["mask"], batch.get("total"))


@torch.no_grad()
def heldout(model: SmallLM, stories: Stories, length: int, rows: int, backend: TorchBackend) -> dict[str, float]:
    """Measure nats/token, perplexity and bits per byte over every held-out token, in windows of `length` tokens. The
    first half of each window is context only, except in the first window. Each worker measures its share of the
    batches, which have `rows` windows each."""
    was_training = model.training
    model.eval()
    sums = []
    batches = spans(stories.heldout, stories.end, length, max(1, length // 2), rows)
    mine = islice(batches, backend.rank, None, backend.world_size)
    count = -(-len(stories.heldout) // (rows * max(1, length // 2) * backend.world_size))
    for batch in watched(mine, "evaluating", count, shown=backend.is_main):
        batch = backend.to_device(batch)
        with backend.autocast():
            sums.append(story_loss(model, batch | {"total": torch.ones((), device=batch["mask"].device)}))
        backend.step_boundary()
    model.train(was_training)
    total = sum(backend.group.gather(sum(backend.fetch(*sums))))
    nll = total / len(stories.heldout)
    return {
        "heldout_nll": nll,
        "heldout_ppl": perplexity(nll),
        "bits_per_byte": total / math.log(2) / stories.heldout_bytes,
    }


class Evaluation:
    """evaluate(step): figures over every held-out token, see `heldout`; `best` holds the state of the lowest loss and
    its figures."""

    def __init__(self, model: SmallLM, stories: Stories, length: int, rows: int, backend: TorchBackend):
        self.measured, self.model, self.backend = (model, stories, length, rows, backend), model, backend
        self.best: dict = {}  # saved in checkpoints

    def __call__(self, step: int) -> dict[str, float]:
        backend, best, figures = self.backend, self.best, heldout(*self.measured)
        if backend.is_main and (not best or figures["heldout_nll"] < best["figures"]["heldout_nll"]):
            state = backend.to_host(trained_parameters(self.model))
            state = {name: tensor.clone() for name, tensor in state.items()}  # on a CPU the originals keep changing
            best.update(figures={"step": step, **figures}, state=state)
        return figures


def tell_stories(model: SmallLM, stories: Stories, tokens: int, sampling: Sampling, backend: TorchBackend) -> list[str]:
    """One story from nothing, and two that continue held-out texts, each by at most `tokens` tokens."""
    openings = [[], *stories.openings(2, OPENING)]
    return [tell(model, stories, begin, tokens, sampling, backend) for begin in openings]


@torch.no_grad()
def tell(
    model: SmallLM, stories: Stories, begin: list[int], tokens: int, sampling: Sampling, backend: TorchBackend
) -> str:
    """The text of the tokens `begin`, continued by at most `tokens` tokens, one at a time from the carried state."""
    model.eval()
    said = [stories.end, *begin]
    given = backend.to_device({"tokens": torch.tensor([said])})["tokens"]
    state = model.begin(1)
    for _ in range(tokens):
        with backend.autocast():
            hidden, state = model(given, state)
            logits = (hidden[:, -1] @ model.embedding.weight.to(hidden.dtype).T).float()
        given = draw(logits, sampling)[0].unsqueeze(1)
        backend.step_boundary()  # also cuts the state's graph, which would otherwise grow with every token
        token = int(backend.to_host(given))
        if token == stories.end:
            break
        said.append(token)
    return stories.tokenizer.decode(said[1:])


def unigram_perplexity(stories: Stories) -> float:
    """Held-out perplexity of a unigram model with the token frequencies of the training text; every count is raised by
    one, so that no token has probability 0."""

    def counts(tokens: Tensor) -> Tensor:
        pieces = (tokens[start : start + 2**20].long() for start in range(0, len(tokens), 2**20))
        return sum(torch.bincount(piece, minlength=stories.vocab) for piece in pieces).double()

    training, measured = counts(stories.train), counts(stories.heldout)
    logp = ((training + 1) / (training + 1).sum()).log()
    return math.exp(-(measured * logp).sum().item() / measured.sum().item())
