"""The divergence of a student from its cached teacher on held-out rows."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from qat_lora.backend import TorchBackend
from qat_lora.models.architecture import hidden_states
from qat_lora.quant.student import head_of
from qat_lora.train.evaluation import batch_means, perplexity
from qat_lora.train.losses import log_probs_at


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
