"""Perplexity and KL divergence from the teacher, computed with fixed shapes."""

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from qat_lora.backend import TorchBackend, compute_dtype
from qat_lora.backend.sharding import as_shards
from qat_lora.data.packing import window_starts, windowed
from qat_lora.errors import UserError
from qat_lora.kernels.tiles import tiles
from qat_lora.models.architecture import hidden_states
from qat_lora.quant.student import head_of
from qat_lora.run.console import watched
from qat_lora.train.losses import text_loss


def perplexity(nll: float) -> float:
    """e^nll for an NLL in nats/token; it stays finite."""
    return math.exp(min(nll, 80))


def heldout_nll(
    model: nn.Module, dataset: Dataset, backend: TorchBackend, batch_size: int, rows: int
) -> dict[str, float]:
    """NLL in nats/token and perplexity over the target tokens of the first `rows` rows of a TextDataset, and the number
    of rows used (heldout_rows). Raises UserError if they have no target token."""

    def figures(batch: dict) -> list[Tensor]:
        kept = batch["mask"][:, 1:].sum(dtype=torch.float32)
        return [text_loss(model, batch | {"total": torch.ones_like(kept)}), kept]

    total, kept = batch_means(figures, model, dataset, backend, batch_size, rows)
    if not kept:
        raise UserError("the held-out rows have no target token; hold out more rows")
    nll = total / kept
    return {"heldout_nll": nll, "heldout_ppl": perplexity(nll), "heldout_rows": min(rows, len(dataset))}


def batch_means(figures, model: nn.Module, dataset: Dataset, backend: TorchBackend, batch_size: int, rows: int) -> list:
    """Means over batches of figures(batch) for the first `rows` rows, see `batch_sums`."""
    count = -(-min(rows, len(dataset)) // batch_size)
    return [total / count for total in batch_sums(figures, model, dataset, backend, batch_size, rows)]


@torch.no_grad()
def batch_sums(figures, model: nn.Module, dataset: Dataset, backend: TorchBackend, batch_size: int, rows: int) -> list:
    """Sums over batches of figures(batch) for the first `rows` rows. All batches have one shape: the last is padded
    with rows whose `mask` and `sections` are 0, so that ratios of sums weighted by them do not depend on batch_size.

    Worker k takes batches k, k+W, …; all workers run the same number of batches, and surplus batches do not count.
    """
    rows = min(rows, len(dataset))
    count = -(-rows // batch_size)
    if rows < 1:
        raise UserError(f"{rows} held-out rows leave nothing to measure; hold out more, or raise --eval-rows")
    was_training = model.training
    model.eval()
    mine = []
    numbers = range(backend.rank, -(-count // backend.world_size) * backend.world_size, backend.world_size)
    for number in watched(numbers, "evaluating", len(numbers), shown=backend.is_main):
        start = number % count * batch_size
        items = [dataset[i] for i in range(start, min(start + batch_size, rows))]
        zeros = {name: torch.zeros_like(items[0][name]) for name in ("mask", "sections") if name in items[0]}
        items += [items[0] | zeros] * (batch_size - len(items))
        batch = backend.to_device({key: torch.stack([item[key] for item in items]) for key in items[0]})
        with backend.autocast():
            mine.append(figures(batch))
        backend.step_boundary()
    model.train(was_training)
    as_shards(model)
    width = len(mine[0])
    values = backend.fetch(*[value for row in mine for value in row])
    shares = backend.group.gather([values[at : at + width] for at in range(0, len(values), width)])
    by_batch = [share[turn] for turn in range(len(mine)) for share in shares][:count]
    return [sum(column) for column in zip(*by_batch)]


def windows(
    tokens: Tensor, length: int, stride: int, limit: int | None = None, bos: int | None = None
) -> tuple[Tensor, Tensor]:
    """Windows [N, length] of a token stream, and the number of scored tokens at the end of each [N].

    stride = length: blocked, each window alone (its first token is not scored). stride < length: sliding; after the
    first window only the last `stride` tokens are scored, with the earlier ones as context. With `bos`, that token
    replaces the first token of each window, which is never scored. An incomplete last window is dropped.
    Raises UserError if the text is shorter than one window.
    """
    if not 1 <= stride <= length:
        raise UserError(f"stride={stride} must be from 1 to the window length {length}")
    starts = window_starts(tokens, length, stride, bos)[:limit]
    if not starts:
        raise UserError(f"the text has {len(tokens)} tokens, fewer than one window of {length}; use a shorter --length")
    new = [length, *(later - start for start, later in pairwise(starts))]
    return windowed(tokens, starts, length, bos), torch.tensor([min(count, length - 1) for count in new])


def counted(tokens: Tensor, scored: Tensor, given: int | None = None) -> Tensor:
    """Whether each of tokens[:, 1:] is scored [N, L − 1]: the last `scored` [N] of a window [N, L], except `given`."""
    length = tokens.shape[1]
    where = torch.arange(1, length) >= (length - scored).unsqueeze(1)
    return where if given is None else where & (tokens[:, 1:] != given)


def text_figures(
    model: nn.Module,
    tokens: Tensor,
    scored: Tensor,
    backend: TorchBackend,
    batch_size: int = 1,
    teacher: nn.Module | None = None,
    given: int | None = None,
) -> dict[str, float]:
    """Exact figures over the last `scored` [N] tokens of windows [N, L], except `given` tokens.

    nll in nats/token, ppl = e^nll, and with a teacher kl = E[KL(teacher‖model)] over the same positions. If the
    teacher's embedding has more rows than the model's (same tokenizer, other padding), its probabilities beyond the
    model's rows are dropped and the rest renormalised. Probability that the model assigns to rows that the teacher
    lacks counts against the model, as in the KD loss.
    """
    where = counted(tokens, scored, given)
    rows, total = [{"tokens": window, "mask": mask} for window, mask in zip(tokens, where)], int(where.sum())

    def figures(batch: dict) -> list[Tensor]:
        return _window_sums(model, teacher, batch["tokens"].long(), batch["mask"])

    nll, kl = (value / total for value in batch_sums(figures, model, rows, backend, batch_size, len(rows)))
    found = {"nll": nll, "ppl": perplexity(nll), "tokens": total}
    return found if teacher is None else found | {"kl": kl}


def _window_sums(model, teacher, tokens: Tensor, mask: Tensor) -> list[Tensor]:
    """[Σ NLL, Σ KL] over the positions where mask is 1; logits in blocks, softmax in fp32."""
    models = [model] if teacher is None else [model, teacher]
    hidden = [hidden_states(m, tokens)[:, :-1].flatten(0, 1) for m in models]
    heads = [head_of(m).cast(compute_dtype(h)) for h, m in zip(hidden, models)]
    vocab = max(len(head.weight) for head in heads)
    labels, keep = tokens[:, 1:].reshape(-1, 1), mask.reshape(-1).float()
    nll = kl = keep.new_zeros(())
    for blocks in zip(*(head.products(h, vocab, len(heads)) for h, head in zip(hidden, heads))):
        start, count = blocks[0][0].start, len(blocks[0][1])
        for part in tiles(count, vocab, keep.device):
            rows = slice(start + part.start, start + part.stop)
            logp = [head.finish(product[part]).log_softmax(-1) for head, (_, product) in zip(heads, blocks)]
            nll = nll - (logp[0].gather(1, labels[rows]).squeeze(1) * keep[rows]).sum()
            if teacher is not None:
                mine, its = logp  # over the common vocabulary
                if its.shape[1] > mine.shape[1]:
                    its = its[:, : mine.shape[1]].log_softmax(-1)
                kl = kl + ((its.exp() * (its - mine[:, : its.shape[1]])).sum(1) * keep[rows]).sum()
    return [nll, kl]
