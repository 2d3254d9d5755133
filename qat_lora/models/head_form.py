"""Measures on a model how its last hidden states become logits: the form of its LM head (`kernels.head.Head`)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from qat_lora.errors import first_line
from qat_lora.models.architecture import decoder, refused, unwrap

# Values fed in as the product W·h to measure how logits are computed from it: powers of two, exact in every dtype.
PROBES = tuple(sign * 2.0**power for power in (-10, 0, 3, 5, 10, 100) for sign in (1, -1))


@dataclass(frozen=True)
class HeadForm:
    """The measured part of a `Head`; only the first `vocab` rows of W give logits."""

    before: float
    after: float
    cap: float | None
    vocab: int


class _Answer(BaseModelOutputWithPast):
    """A decoder's output whose missing attributes read as None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def head_form(model: nn.Module) -> HeadForm:
    """The form of a model's LM head, measured by running its own forward with the decoder and head replaced by known
    values; needs no weights.

    Raises UserError for a model whose logits are not of this form.
    """
    base = unwrap(model)
    if not isinstance(base.__dict__.get("_head_form"), HeadForm):
        base._head_form = _measured(base)
    return base._head_form


def _measured(base: nn.Module) -> HeadForm:
    head, stack = base.get_output_embeddings(), decoder(base)
    if head is None or stack is base or getattr(head, "weight", None) is None or head.weight.ndim != 2:
        raise refused(base, "it has no decoder followed by a single LM head")
    rows, width = head.weight.shape
    hidden = torch.linspace(0.5, 1.5, width, dtype=torch.float64).view(1, 1, -1)
    own_type = hidden.to(head.weight.dtype)  # the only type that extra layers before the head would accept
    given = torch.tensor(PROBES, dtype=torch.float64).repeat(-(-rows // len(PROBES)))[:rows].view(1, 1, -1)
    seen = {}

    def fake_head(x: Tensor) -> Tensor:
        seen["x"] = x.double().cpu()
        return given.clone()

    head.forward = fake_head
    try:
        for states in (hidden, own_type):
            stack.forward = lambda *args, **kwargs: _Answer(last_hidden_state=states)  # noqa: B023
            try:
                logits = base(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False).logits.double().cpu()
                break
            except Exception as error:
                failed = error
        else:
            reason = first_line(failed)[:120]
            raise refused(base, f"its logits cannot be computed from its last hidden states alone ({reason})")
    finally:
        del stack.forward, head.forward
    before = seen["x"] / hidden if "x" in seen and seen["x"].shape == hidden.shape else torch.full((2,), torch.nan)
    if not torch.allclose(before, before.flatten()[0].expand_as(before), rtol=1e-5):
        raise refused(base, "it has layers of its own between the last hidden states and the LM head")
    given = given[..., : logits.shape[-1]]
    after, largest = (float((logits / given)[given == PROBES[0]].mean()), float(logits.abs().max()))
    cap = largest if largest < 2.0**90 else None
    wanted = given * after if cap is None else cap * torch.tanh(given * after / cap)
    if logits.shape[:2] != (1, 1) or not torch.allclose(logits, wanted, rtol=1e-4, atol=1e-6):
        raise refused(base, "it computes logits from the LM head with more than a factor, a bias and a soft cap")
    return HeadForm(_snapped(float(before.flatten()[0])), _snapped(after), cap, logits.shape[-1])


def _snapped(value: float) -> float:
    return 1.0 if abs(value - 1) < 1e-6 else value
