"""Supervised fine-tuning on packed examples: the loss of what is to be learned, and held-out figures by section."""

import math

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from qat_lora.backend import TorchBackend
from qat_lora.data.sft import PackedExamples
from qat_lora.evaluate import batch_means
from qat_lora.kd.losses import sparse_loss, token_log_probs
from qat_lora.models.loading import decoder, unwrap
from qat_lora.quant.student import head_weight

PACKED = "packed_examples"  # the attention below, among transformers' own
# Where examples are attended to one by one: 1.4 times the tokens a second of one mask a row (docs/benchmarks.md).
# Elsewhere their lengths would have to be fetched from the device.
ONE_BY_ONE = ("cpu",)


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options):
    """transformers' attention, one example of a packed row after the other where `examples` says how long they are:
    nothing is computed that a mask would throw away. Without them, its usual one."""
    examples = options.pop("examples", None)
    if examples is None:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    rows = []
    for row, lengths in enumerate(examples):
        parts = zip(*(tensor[row : row + 1].split(lengths, 2) for tensor in (query, key, value)))
        seen = [sdpa_attention_forward(module, *part, None, is_causal=True, **options)[0] for part in parts]
        rows.append(torch.cat(seen, 1))
    return torch.cat(rows), None


AttentionInterface.register(PACKED, _attend)
AttentionMaskInterface.register(PACKED, sdpa_mask)


def packed_states(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Of a batch of PackedExamples: the hidden states [B, K, H] from which the tokens [B, K] at its places are
    predicted. An example is seen from itself alone, as if it stood in a row of its own."""
    segments, places = batch["segments"], batch["places"]
    length, apart = segments.shape[1], {}
    sees = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
    sees = (segments.unsqueeze(2) == segments.unsqueeze(1)) & sees
    if segments.device.type in ONE_BY_ONE:  # an architecture that does not pass `examples` on still has the mask
        unwrap(model).config._attn_implementation = PACKED
        apart = {"examples": [row.unique_consecutive(return_counts=True)[1].tolist() for row in segments]}
    hidden = decoder(model)(
        input_ids=batch["tokens"], position_ids=batch["positions"], attention_mask=sees.unsqueeze(1), use_cache=False,
        **apart,
    ).last_hidden_state  # fmt: skip
    before = (places - 1).unsqueeze(2).expand(-1, -1, hidden.shape[2])
    return hidden.gather(1, before), batch["tokens"].gather(1, places)


def packed_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Weighted cross-entropy of the tokens to be learned, divided by the batch's `total` of weights.

    The LM head is applied where there is something to learn and nowhere else.
    """
    hidden, labels = packed_states(model, batch)
    labels = labels.unsqueeze(2)
    return sparse_loss(
        hidden, head_weight(model), labels, torch.ones_like(labels), batch["weights"], batch.get("total")
    )


def heldout_sections(
    model: nn.Module, dataset: PackedExamples, backend: TorchBackend, batch_size: int, names: dict[str, int]
) -> dict[str, float]:
    """NLL in nats a token and perplexity of everything to be learned, whatever it weighs, and of each section; names:
    section numbers. The rows of the dataset are to be a multiple of the batch (`multiple` of PackedExamples)."""

    def figures(batch: dict) -> list[Tensor]:
        hidden, labels = packed_states(model, batch)
        nll = -token_log_probs(hidden.flatten(0, 1), head_weight(model), labels.flatten())
        sections = batch["sections"].flatten()
        there = [sections > 0, *(sections == number for number in names.values())]
        return [part for keep in there for part in ((nll * keep).sum(), keep.sum(dtype=torch.float32))]

    sums = batch_means(figures, model, dataset, backend, batch_size, len(dataset))
    found = {}
    for name, total, count in zip(("heldout", *names), sums[::2], sums[1::2]):
        if count:
            found |= {f"{name}_nll": total / count, f"{name}_ppl": math.exp(min(80.0, total / count))}
    return found
