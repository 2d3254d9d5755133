"""The softmax of an LM head on the CPU, in strips of the vocabulary that stay in the cores' caches."""

import torch
from torch import Tensor

from qat_lora.kernels.head import Head
from qat_lora.kernels.head_softmax import HeadSoftmax
from qat_lora.kernels.softmax import gradient, normalise
from qat_lora.kernels.tiles import strips_at_once


class TwoPasses(HeadSoftmax):
    """One pass over the strips for p, z and chosen, another for the gradients, which computes the products again."""

    def __init__(self, hidden: Tensor, head: Head, index: Tensor, dtype: torch.dtype, temperature: float = 1.0):
        super().__init__(hidden, head, index, dtype, temperature)
        self.positions, self.columns = strips_at_once(len(hidden), len(head.weight), dtype)

    @property
    def blocks(self) -> list[slice]:
        return self.positions

    def gradients(self, mass: Tensor, taken: Tensor, wanted: tuple[bool, bool]) -> tuple[Tensor | None, ...]:
        back, sums = self._zeros(wanted)
        for block in self.blocks:
            product = None if self.normalised else self._normalise(block)
            product = product if len(self.columns) == 1 else None
            hidden, first = self._cast(block), block.start == 0
            factor, asked = mass[block] / self.z[block] / self.temperature, taken[block] / -self.temperature
            for strip in self.columns:
                head = self.head.strip(strip, self.dtype)
                if product is None or len(self.columns) > 1:
                    product = multiplied(hidden, head.weight, product)
                grad = self._piece(gradient, head, product, block, strip.start, self.peak[block], factor, asked)
                self._add(back[block], sums, strip, grad, head, hidden, first)
        self.normalised = True
        return back, *sums

    def _normalise(self, block: slice) -> Tensor:
        """Compute p, z and chosen of a block of positions; returns the products of its last strip."""
        product = self.over_strips(normalise, block)
        if len(self.columns) > 1 and not self.z[block].isfinite().all():
            self.peak[block] = self.largest(self._cast(block))
            product = self.over_strips(normalise, block, again=True)
        return product

    def over_strips(self, function, block: slice, again: bool = False, back: Tensor | None = None) -> Tensor:
        """Compute p, z and chosen of a block of positions with `normalise` or `exponentiate`; returns the products of
        its last strip. again: keep the peaks. back [n, H]: gets what `function` leaves of the products, times W."""
        hidden, product = self._cast(block), None
        z, chosen = self.z[block].zero_(), self.chosen[block].zero_()
        for strip in self.columns:
            head = self.head.strip(strip, self.dtype)
            product = multiplied(hidden, head.weight, product)
            peak = None if strip.start == 0 and not again else self.peak[block]
            self.peak[block], part_z, found = self._piece(function, head, product, block, strip.start, peak)
            z.add_(part_z)
            chosen.add_(found)
            if back is not None:
                back.add_(product @ head.weight)
        return product

    def largest(self, hidden: Tensor) -> Tensor:
        """The largest logit of each position [n, 1]; needed where it exceeds that of the first strip by so much (88)
        that e^(x − p) overflows."""
        heads = (self.head.strip(strip, self.dtype) for strip in self.columns)
        found = [head.finish(hidden @ head.weight.T).amax(1, keepdim=True) / self.temperature for head in heads]
        return torch.cat(found, 1).amax(1, keepdim=True)


def multiplied(hidden: Tensor, weight: Tensor, room: Tensor | None) -> Tensor:
    """hidden · weightᵀ, written into `room`, an earlier product at least as large, if there is one."""
    if room is None:
        return hidden @ weight.T
    return torch.mm(hidden, weight.T, out=room.view(-1)[: len(hidden) * len(weight)].view(len(hidden), len(weight)))
