"""How a causal language model's last hidden states become logits: the function, and how a model's own is found out."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from qat_lora.errors import first_line
from qat_lora.models.architecture import decoder, refused, unwrap

# Outputs of a head on which the function that makes logits of them is measured: powers of two, exact in every type.
PROBES = tuple(sign * 2.0**power for power in (-10, 0, 3, 5, 10, 100) for sign in (1, -1))


@dataclass(frozen=True)
class Head:
    """How hidden states h [..., H] become logits [..., V]: z = cap·tanh(y/cap) of y = after·(W·(before·h) + bias).

    weight [V, H]; bias [V] or None; cap None: z = y.
    """

    weight: Tensor
    bias: Tensor | None = None
    before: float = 1.0
    after: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, head: "Head | Tensor") -> "Head":
        """The head itself, or one that is a plain weight."""
        return head if isinstance(head, cls) else cls(head)

    @property
    def is_plain(self) -> bool:
        """Whether logits are the product with the weight and nothing else."""
        return self.bias is None and self.before * self.after == 1 and self.cap is None

    def cast(self, dtype: torch.dtype) -> "Head":
        """The same with its weight in the type that it is multiplied in; what follows the product is fp32."""
        return replace(self, weight=self.weight.to(dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """fp32 logits of hidden states of the weight's type."""
        logits = (hidden @ self.weight.T).float()
        if self.before * self.after != 1:
            logits = logits * (self.before * self.after)
        if self.bias is not None:
            logits = logits + self.bias.float() * self.after
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap

    def gradient(self, grad: Tensor, logits: Tensor) -> Tensor:
        """∂/∂(W·h) of what has the gradient `grad` in its logits, both [..., V]; overwrites `grad`."""
        if self.cap is not None:
            grad = grad.mul_(1 - (logits / self.cap).square_())
        return grad if self.before * self.after == 1 else grad.mul_(self.before * self.after)


@dataclass(frozen=True)
class HeadForm:
    """What of a `Head` is measured, and how many rows of W give logits: the first `vocab`."""

    before: float
    after: float
    cap: float | None
    vocab: int


class _Answer(BaseModelOutputWithPast):
    """A decoder's answer in which whatever else a model looks for is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def head_form(model: nn.Module) -> HeadForm:
    """Measured on the model's own forward pass, with its decoder and its head replaced by known numbers: no weights are
    needed.

    Raises UserError for a model whose logits are another function of its hidden states.
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
    own_type = hidden.to(head.weight.dtype)  # the only one that layers of the model's own would take
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
            raise refused(base, f"it makes no logits of its last hidden states alone ({first_line(failed)[:120]})")
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
        raise refused(base, "its logits are not those of an LM head with at most a factor, a bias and a soft cap")
    return HeadForm(_snapped(float(before.flatten()[0])), _snapped(after), cap, logits.shape[-1])


def _snapped(value: float) -> float:
    return 1.0 if abs(value - 1) < 1e-6 else value
