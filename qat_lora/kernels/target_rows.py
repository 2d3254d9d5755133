"""The softmax of a frozen LM head on XLA, where a scatter into the logits would copy them."""

from torch import Tensor

from qat_lora.kernels.head import Head
from qat_lora.kernels.head_softmax import HeadSoftmax
from qat_lora.kernels.lazy import rounded_to, with_barrier
from qat_lora.kernels.softmax import mass_gradient


class TargetRows(HeadSoftmax):
    """Targets are added to the gradient of the hidden states as rows of the head's weight, instead of scattered into
    the logits. All positions' sums of softmax and targets are rounded separately, as a single product would be."""

    @staticmethod
    def suits(head: Head, index: Tensor) -> bool:
        """Whether there are so few targets that these rows in bf16 take less memory than the logits in fp32."""
        vocab, width = head.weight.shape
        return 1 < index.shape[1] <= 2 * vocab // width

    def gradients(self, mass: Tensor, taken: Tensor, wanted: tuple[bool, bool]) -> tuple[Tensor, None, None]:
        back, _ = self._zeros((False, False))
        for block in self.blocks:
            head, product = self._product(block) if self.normalised else self._normalise(block)
            factor, asked = mass[block] / self.z[block] / self.temperature, taken[block] / -self.temperature
            grad = mass_gradient(product, head, self.temperature, self.peak[block], factor)
            # kept in fp32: the target rows that are added below cancel most of this product
            back[block].add_(rounded_to(self.dtype, grad) @ head.weight.float())
            softmax = self.without_repeats(block, self.chosen[block].exp() * factor)
            rounded = rounded_to(self.dtype, self.through_head(block, softmax))  # what the product has added
            weights = self.through_head(block, softmax + asked) - rounded
            # a product of matrices would round the weights to bf16 on a TPU
            rows = with_barrier(head.weight[self.index[block]]).to(back.dtype)
            back[block].add_((weights.unsqueeze(2) * rows).sum(1))
        self.normalised = True
        return back, None, None
