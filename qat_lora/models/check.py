"""The check at load time: refuse a model unless our results equal its own."""

import torch
from torch import Tensor, nn

from qat_lora.errors import UserError, first_line
from qat_lora.models.architecture import (
    decoder,
    embedding_rows,
    hidden_states,
    model_type,
    refused,
    set_packs,
    text_config,
    unwrap,
)
from qat_lora.models.attention import Layout
from qat_lora.models.head_form import head_form

CHECKED = 12  # tokens in each text that `check` compares
CLOSE = 1e-4  # tolerance relative to the largest logit; covers fp32 sums in a different order
# The exceptions that a forward pass may raise if it cannot handle its arguments.
FAULTS = (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, NotImplementedError)


def sample_tokens(model: nn.Module, count: int) -> Tensor:
    """Token ids [count] spread over the vocabulary. The lowest ids are often special tokens, and a model that was
    hardly trained on them can amplify fp32 rounding into visible differences."""
    return (torch.arange(count) * 7919 + 11) % min(embedding_rows(model), 50_000)


@torch.no_grad()
def check(model: nn.Module) -> None:
    """Raise UserError unless the hidden states and logits computed here equal the model's own, in fp32 on the CPU.

    Compares them on a few tokens: plain rows, rows with an explicit mask (as on XLA), and, to find out whether examples
    can be packed together, two texts in one row.
    """
    first = sample_tokens(model, CHECKED)
    second = first.flip(0)
    changed = torch.cat([first[:-1], (first[-1:] + 1) % embedding_rows(model)])
    tokens = torch.stack([first, changed, second])
    try:
        own = unwrap(model)(input_ids=tokens, use_cache=False).logits.float()
    except Exception as error:
        raise refused(model, f"its own forward pass fails on tokens alone ({first_line(error)[:120]})") from error
    if not own.isfinite().all():
        raise UserError(
            f"model type {model_type(model)!r} gives NaN or infinite logits; its weights may be damaged; copy it again"
        )
    limit = CLOSE * float(own.abs().max())
    if float((own[0, :-1] - own[1, :-1]).abs().max()) > limit:
        raise refused(model, "its logits depend on later tokens, so it is not a causal language model")
    for what, layout in (("", None), (" with an explicit mask", Layout.causal(CHECKED, tokens.device))):
        try:
            ours = _logits(model, tokens, layout)
        except UserError:
            raise
        except FAULTS as error:
            raise refused(model, f"it fails{what} ({first_line(error)[:120]})") from error
        gap = float((ours - own).abs().max()) if ours.shape == own.shape else float("inf")
        if not gap <= limit:
            raise refused(
                model,
                f"logits computed here{what} differ from transformers' by {gap:.1e}; the largest is "
                f"{float(own.abs().max()):.1e}",
            )
    # Llama 4's attention temperature changes every few thousand slots of a row, so a short row would not show it.
    counts = getattr(text_config(model), "attn_temperature_tuning", False)
    set_packs(model, not counts and _keeps_apart(model, torch.cat([first, second]), own[[0, 2]].flatten(0, 1), limit))


def _logits(model: nn.Module, tokens: Tensor, layout: Layout | None) -> Tensor:
    form, head = head_form(model), unwrap(model).get_output_embeddings()
    y = form.after * head(hidden_states(model, tokens, layout) * form.before)[..., : form.vocab].float()
    return y if form.cap is None else form.cap * torch.tanh(y / form.cap)


def _keeps_apart(model: nn.Module, tokens: Tensor, own: Tensor, limit: float) -> bool:
    count = torch.arange(CHECKED)
    segments, positions = torch.arange(2).repeat_interleave(CHECKED), torch.cat([count, count])
    config = decoder(model).config  # differs from model.config if the model comes from a multimodal one
    before = config._attn_implementation
    try:
        for one_by_one in (False, True):
            layout = Layout.packed(segments.unsqueeze(0), positions.unsqueeze(0), one_by_one)
            if not float((_logits(model, tokens.unsqueeze(0), layout)[0] - own).abs().max()) <= limit:
                return False
        return True
    except FAULTS:  # an architecture that does not accept positions or a mask
        return False
    finally:
        config._attn_implementation = before
