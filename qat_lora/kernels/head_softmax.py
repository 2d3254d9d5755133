"""The softmax of an LM head at chosen tokens, and its gradients, without ever holding the logits of all positions."""

from dataclasses import replace

import torch
from torch import Tensor

from qat_lora.backend.devices import is_lazy
from qat_lora.kernels.head import Head
from qat_lora.kernels.lazy import rounded_to
from qat_lora.kernels.softmax import gradient, normalise
from qat_lora.kernels.tiles import rows_at_once


class HeadSoftmax:
    """Logits x [N, V] of hidden states, divided by a temperature, from products in the type `dtype`; each is computed
    once, or twice if `gradients` comes after `normalise`.

    p [N, 1] keeps e^(x − p) finite; z [N, 1] = Σ e^(x − p); chosen [N, J] is x − p at `index`, which may contain a
    token twice. This class holds the logits of a block of positions and of the whole vocabulary: the form for GPUs and
    XLA. `TwoPasses` and `OnePass` cut the vocabulary for the CPU; `TargetRows` is for frozen heads on XLA.
    """

    def __init__(self, hidden: Tensor, head: Head, index: Tensor, dtype: torch.dtype, temperature: float = 1.0):
        """hidden [N, H]; index [N, J]."""
        self.hidden, self.index, self.dtype, self.temperature = hidden, index.contiguous(), dtype, temperature
        self.given, self.head = head, head if head.weight.requires_grad else head.cast(dtype)
        self.peak, self.z = (torch.zeros(len(index), 1, device=hidden.device) for _ in range(2))
        self.chosen = torch.zeros(index.shape, device=hidden.device)
        self.normalised = False

    @property
    def log_probs(self) -> Tensor:
        """log softmax(x) [N, J] at `index`."""
        return self.chosen - self.z.log()

    @property
    def blocks(self) -> list[slice]:
        """The positions that are computed at a time."""
        return rows_at_once(len(self.hidden), len(self.head.weight), self.dtype, self.hidden.device)

    def normalise(self) -> "HeadSoftmax":
        """Compute p, z and chosen."""
        for block in self.blocks:
            self._normalise(block)
        self.normalised = True
        return self

    def gradients(self, mass: Tensor, taken: Tensor, wanted: tuple[bool, bool]) -> tuple[Tensor | None, ...]:
        """The gradients of Σ mass·log z − Σ taken·chosen with respect to hidden [N, H] and, if `wanted`, the head's
        weight and bias (otherwise None), in fp32 or wider. taken [N, J]; mass [N, 1] is its sum over J."""
        back, sums = self._zeros(wanted)
        for block in self.blocks:
            head, product = self._product(block) if self.normalised else self._normalise(block)
            factor, asked = mass[block] / self.z[block] / self.temperature, taken[block] / -self.temperature
            grad = self._piece(gradient, head, product, block, 0, self.peak[block], factor, asked)
            self._add(back[block], sums, slice(0, len(head.weight)), grad, head, self._cast(block), block.start == 0)
        self.normalised = True
        return back, *sums

    def _normalise(self, block: slice) -> tuple[Head, Tensor]:
        head, product = self._product(block)
        found = self._piece(normalise, head, product, block, 0, None)
        self.peak[block], self.z[block], self.chosen[block] = found
        return head, product

    def _product(self, block: slice) -> tuple[Head, Tensor]:
        """The head in the product's type, and its products [n, V] with a block of positions."""
        head = replace(self.head, weight=self.head.weight.to(self.dtype))
        product = self._cast(block) @ head.weight.T
        if is_lazy(product):  # rounded once, so that every reader sees the same values
            product = rounded_to(self.dtype, product.float()).to(self.dtype)
        return head, product

    def _cast(self, block: slice) -> Tensor:
        return self.hidden[block].to(self.dtype)

    def _piece(self, function, head: Head, product: Tensor, block: slice, start: int, *others):
        """A function of `kernels.softmax` for a block's products with the vocabulary from token `start` on."""
        return function(head, product, self.index[block], start, self.temperature, *others)

    def without_repeats(self, block: slice, values: Tensor) -> Tensor:
        """Values [n, J] at a block's `index`, 0 where it repeats an earlier token."""
        index = self.index[block]
        again = (index.unsqueeze(2) == index.unsqueeze(1)).tril(-1).any(2)
        return torch.where(again, 0, values)

    def through_head(self, block: slice, grad: Tensor) -> Tensor:
        """The gradient [n, J] with respect to a block's logits at `index`, as one with respect to the products."""
        return self.head.gradient(grad, (self.chosen[block] + self.peak[block]) * self.temperature)

    def _zeros(self, wanted: tuple[bool, bool]) -> tuple[Tensor, list[Tensor | None]]:
        """Room for the gradients with respect to hidden, and to the head's weight and bias."""
        wide = torch.promote_types(self.dtype, torch.float32)
        back = torch.zeros(self.hidden.shape, dtype=wide, device=self.hidden.device)
        parts = zip((self.given.weight, self.given.bias), wanted)
        return back, [torch.empty_like(part, dtype=wide) if needed else None for part, needed in parts]

    @staticmethod
    def _add(
        back: Tensor, sums: list[Tensor | None], rows: slice, grad: Tensor, head: Head, hidden: Tensor, first: bool
    ) -> None:
        """Add what the gradient of products [n, v] contributes to those of hidden states and of rows of the head."""
        back.add_(grad @ head.weight)
        if sums[0] is not None:
            _put(sums[0][rows], grad.T @ hidden, first)
        if sums[1] is not None:
            _put(sums[1][rows], grad.sum(0, dtype=sums[1].dtype) / head.before, first)


def _put(place: Tensor, values: Tensor, first: bool) -> None:
    place.copy_(values) if first else place.add_(values)
