"""The device, the loss and the held-out figures of story models, and the stories that they tell."""

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
from qat_lora.train.losses import sparse_loss


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
        "heldout_ppl": math.exp(min(nll, 80)),
        "bits_per_byte": total / math.log(2) / stories.heldout_bytes,
    }


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


def unigram_perplexity(stories: Stories) -> float:
    """The held-out perplexity of a model that knows how often each token occurs in the training text, and no context;
    every count is one higher than it is, so that no token has probability 0."""
    training, measured = (_counts(tokens, stories.vocab) for tokens in (stories.train, stories.heldout))
    logp = ((training + 1) / (training + 1).sum()).log()
    return math.exp(-(measured * logp).sum().item() / measured.sum().item())


def _counts(tokens: Tensor, vocab: int) -> Tensor:
    """How often each token of the vocabulary occurs: float64 [vocab]."""
    pieces = (tokens[start : start + 2**20].long() for start in range(0, len(tokens), 2**20))
    return sum(torch.bincount(piece, minlength=vocab) for piece in pieces).double()
