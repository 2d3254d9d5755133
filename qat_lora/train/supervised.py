"""Supervised fine-tuning on packed examples: the loss on the target tokens, and held-out figures per section."""

import torch
from torch import Tensor, nn

from qat_lora.backend import TorchBackend
from qat_lora.backend.devices import on_host
from qat_lora.data.supervised import PackedExamples
from qat_lora.models.architecture import hidden_states, packs
from qat_lora.models.attention import Layout
from qat_lora.quant.student import head_of
from qat_lora.train.evaluation import batch_means, perplexity
from qat_lora.train.losses import sparse_loss, token_log_probs


def packed_states(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """For a batch of PackedExamples: the hidden states [B, K, H] that predict the target tokens, and these tokens
    [B, K]. An example attends only to itself, as if it were alone in its row.

    A model that cannot keep examples apart (`packs`) needs one example per row, followed by padding.
    """
    segments, places, layout = batch["segments"], batch["places"], None
    if packs(model):
        # On the CPU attention runs on one example at a time: 1.4 times the tokens per second of one mask per row
        # (docs/benchmarks.md). Elsewhere the lengths would have to be fetched from the device.
        layout = Layout.packed(segments, batch["positions"], on_host(segments))
    hidden = hidden_states(model, batch["tokens"], layout)
    before = (places - 1).unsqueeze(2).expand(-1, -1, hidden.shape[2])
    return hidden.gather(1, before), batch["tokens"].gather(1, places)


def packed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Weighted cross-entropy of the target tokens, divided by the batch's `total` of weights.

    The LM head is applied only at target tokens.
    """
    hidden, labels = packed_states(model, batch)
    labels = labels.unsqueeze(2)
    return sparse_loss(hidden, head_of(model), labels, torch.ones_like(labels), batch["weights"], batch.get("total"))


def heldout_sections(
    model: nn.Module, dataset: PackedExamples, backend: TorchBackend, batch_size: int, names: dict[str, int]
) -> dict[str, float]:
    """Unweighted NLL in nats/token and perplexity over all target tokens and over those of each section. names:
    {section name: number}."""

    def figures(batch: dict) -> list[Tensor]:
        hidden, labels = packed_states(model, batch)
        nll = -token_log_probs(hidden.flatten(0, 1), head_of(model), labels.flatten())
        sections = batch["sections"].flatten()
        there = [sections > 0, *(sections == number for number in names.values())]
        return [part for keep in there for part in ((nll * keep).sum(), keep.sum(dtype=torch.float32))]

    sums = batch_means(figures, model, dataset, backend, batch_size, len(dataset))
    found = {}
    for name, total, count in zip(("heldout", *names), sums[::2], sums[1::2]):
        if count:
            found |= {f"{name}_nll": total / count, f"{name}_ppl": perplexity(total / count)}
    return found
