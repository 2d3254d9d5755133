"""The softmax of a frozen LM head on the CPU, with each logit computed only once."""

from torch import Tensor

from qat_lora.kernels.softmax import add_rows, exponentiate
from qat_lora.kernels.two_passes import TwoPasses, multiplied


class OnePass(TwoPasses):
    """Each strip adds Σ e^(x − p)·W to the gradient of the hidden states, and the total is divided by z at the end. The
    sum leaves out the tokens of `index`, which are added last, so that e^(x − p)/z − taken is computed before it is
    rounded."""

    def gradients(self, mass: Tensor, taken: Tensor, wanted: tuple[bool, bool]) -> tuple[Tensor, None, None]:
        back, _ = self._zeros((False, False))
        for block in self.blocks:
            here, index = back[block], self.index[block]
            self._exponentials(block, here)
            if not (self.z[block].isfinite().all() and here.isfinite().all()):
                self.peak[block] = self.largest(self._cast(block))
                self._exponentials(block, here.zero_(), again=True)
            share = mass[block] / self.z[block] / self.temperature
            softmax = self.without_repeats(block, self.chosen[block].exp() * share)
            asked = softmax.sub_(taken[block] / self.temperature)
            add_rows(here.mul_(share), self.head.weight, index, self.through_head(block, asked))
        self.normalised = True
        return back, None, None

    def _exponentials(self, block: slice, back: Tensor, again: bool = False) -> None:
        """Compute z and chosen of a block of positions, and add Σ e^(x − p)·W [n, H] over all tokens except those of
        `index` to `back`. again: with the peaks of before."""
        hidden, product = self._cast(block), None
        z, chosen = self.z[block].zero_(), self.chosen[block].zero_()
        for strip in self.columns:
            head = self.head.strip(strip, self.dtype)
            product = multiplied(hidden, head.weight, product)
            peak = None if strip.start == 0 and not again else self.peak[block]
            self.peak[block], part_z, found = self._piece(exponentiate, head, product, block, strip.start, peak)
            z.add_(part_z)
            chosen.add_(found)
            back.add_(product @ head.weight)
