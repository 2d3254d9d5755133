"""Distillation from a KD cache: losses and held-out figures."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from qat_lora.backend import TorchBackend
from qat_lora.models.architecture import hidden_states
from qat_lora.quant.student import head_of
from qat_lora.train.evaluation import batch_means, perplexity
from qat_lora.train.losses import kept, log_probs_at, sparse_loss


def kd_loss(model: nn.Module, batch: dict[str, Tensor], text_weight: float = 0.0) -> Tensor:
    """Cross-entropy against the cached teacher targets of a batch of KDCacheDataset items, see `sparse_loss`.
    text_weight: of the text's own next token in the targets."""
    hidden = hidden_states(model, batch["tokens"])
    index, prob = with_text(batch, text_weight) if text_weight else (batch["index"], batch["prob"])
    return sparse_loss(hidden, head_of(model), index, prob, batch["mask"], batch.get("total"))


def with_text(batch: dict[str, Tensor], share: float) -> tuple[Tensor, Tensor]:
    """index, prob [B, L, J + 1]: the teacher's J targets, and a `share` for the token that follows in the text. In the
    last position that token is unknown, so the teacher keeps all the weight."""
    tokens, index, prob = (batch[name] for name in ("tokens", "index", "prob"))
    last = torch.arange(tokens.shape[1], device=tokens.device) == tokens.shape[1] - 1
    given = torch.where(last, 0.0, share).to(prob.dtype).expand(tokens.shape).unsqueeze(2)
    following = tokens.roll(-1, 1).unsqueeze(2).to(index.dtype)
    return torch.cat([index, following], 2), torch.cat([prob * (1 - given), given], 2)


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


def heldout_figures(
    model: nn.Module, dataset: Dataset, backend: TorchBackend, batch_size: int, rows: int
) -> dict[str, float]:
    """NLL of the text and KL from the cached teacher, in nats/token, over the first `rows` held-out cache rows, and the
    number of rows (heldout_rows).

    The KL is an unbiased estimate (top K exact, tail sampled); measure_perplexity.py gives the exact one.
    """

    def figures(batch: dict) -> list[Tensor]:
        tokens, mask = batch["tokens"], batch["mask"].float()
        # the next token of the last position is unknown, so that position counts only in the KL
        following = tokens.roll(-1, 1).unsqueeze(2)
        logp = log_probs_at(
            hidden_states(model, tokens), head_of(model), torch.cat([batch["index"], following.to(batch["index"])], 2)
        )
        predicted = F.pad(mask[:, :-1], (0, 1))
        nll = -(logp[..., -1] * predicted).sum()
        kl = -((batch["prob"].float() * logp[..., :-1]).sum(2) * mask).sum() - (batch["entropy"] * mask).sum()
        return [nll, predicted.sum(), kl, mask.sum()]  # sums: batches may have different numbers of targets

    nll, predicted, kl, kept = batch_means(figures, model, dataset, backend, batch_size, rows)
    nll, kl = nll / predicted, kl / kept
    measured = {"heldout_nll": nll, "heldout_ppl": perplexity(nll), "heldout_kl": kl}
    return measured | {"heldout_rows": min(rows, len(dataset))}
