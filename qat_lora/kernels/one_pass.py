"""The softmax of a frozen LM head on the CPU, with each logit computed only once."""

from torch import Tensor

from qat_lora.kernels.softmax import add_rows, exponentiate
from qat_lora.kernels.two_passes import TwoPasses


class OnePass(TwoPasses):
    """Each strip adds Σ e^(x − p)·W to the gradient of the hidden states, and the total is divided by z at the end. The
    sum leaves out the tokens of `index`, which are added last, so that e^(x − p)/z − taken is computed before it is
    rounded."""

    def gradients(self, mass: Tensor, taken: Tensor, wanted: tuple[bool, bool]) -> tuple[Tensor, None, None]:
        back, _ = self._zeros((False, False))
        for block in self.blocks:
            here, index = back[block], self.index[block]
            self.over_strips(exponentiate, block, back=here)
            if not (self.z[block].isfinite().all() and here.isfinite().all()):
                self.peak[block] = self.largest(self._cast(block))
                self.over_strips(exponentiate, block, again=True, back=here.zero_())
            share = mass[block] / self.z[block] / self.temperature
            softmax = self.without_repeats(block, self.chosen[block].exp() * share)
            asked = softmax.sub_(taken[block] / self.temperature)
            add_rows(here.mul_(share), self.head.weight, index, self.through_head(block, asked))
        self.normalised = True
        return back, None, None
