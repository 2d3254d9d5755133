"""How a causal language model's last hidden states become logits, and the logits' gradients."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from qat_lora.backend.devices import is_lazy, on_host
from qat_lora.kernels.tiles import rows_at_once


@dataclass(frozen=True)
class Head:
    """How hidden states h [..., H] become logits [..., V]: z = cap·tanh(y/cap), y = after·(W·(before·h) + bias).

    weight [V, H]; bias [V] or None; cap None: z = y.
    """

    weight: Tensor
    bias: Tensor | None = None
    before: float = 1.0
    after: float = 1.0
    cap: float | None = None

    @classmethod
    def of(cls, head: "Head | Tensor") -> "Head":
        """`head` itself, or a head that is just the weight `head`."""
        return head if isinstance(head, cls) else cls(head)

    @property
    def is_plain(self) -> bool:
        """Whether the logits are just the product with the weight."""
        return self.bias is None and self.before * self.after == 1 and self.cap is None

    def cast(self, dtype: torch.dtype) -> "Head":
        """The head with its weight in `dtype`, the type of the product; everything after the product is in fp32."""
        return replace(self, weight=_cast(self.weight, dtype))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of hidden states of the weight's type; see `finish`."""
        return self.finish(hidden @ self.weight.T)

    def finish(self, product: Tensor, index: Tensor | None = None) -> Tensor:
        """Logits from the product W·h [n, V], in fp32 or the product's type if that is wider. index: [n, J] if the
        product holds only the tokens at this index."""
        logits = product.to(torch.promote_types(product.dtype, torch.float32))
        if self.before * self.after != 1:
            logits = logits * (self.before * self.after)
        if self.bias is not None:
            bias = self.bias if index is None else self.bias[index]
            logits = logits + bias.to(logits.dtype) * self.after
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap

    def gradient(self, grad: Tensor, logits: Tensor) -> Tensor:
        """The gradient with respect to W·h, given `grad`, the gradient with respect to the logits; both [..., V]."""
        if self.cap is not None:
            grad = grad * (1 - (logits / self.cap).square())
        return grad if self.before * self.after == 1 else grad * (self.before * self.after)

    def strip(self, rows: slice, dtype: torch.dtype) -> "Head":
        """The head restricted to a slice of the vocabulary; see `cast`."""
        return replace(self, weight=self.weight[rows].to(dtype), bias=None if self.bias is None else self.bias[rows])

    def products(self, hidden: Tensor, vocab: int | None = None, heads: int = 1) -> Iterator[tuple[slice, Tensor]]:
        """Iterate over blocks of positions of hidden [N, H], of any type, and the product W·h [n, V] of each in the
        weight's type. The caller may overwrite a product; the next block reuses its memory. [N, V] is never allocated.

        vocab, heads: if several heads iterate over the same positions together, their largest vocabulary and their
        number, so that all get the same blocks.
        """
        weight, room = self.weight, None
        for rows in rows_at_once(len(hidden), vocab or len(weight), weight.dtype, weight.device, heads):
            h = hidden[rows].to(weight.dtype)
            if not on_host(weight):
                yield rows, h @ weight.T
                continue
            room = h.new_empty(len(h), len(weight)) if room is None else room
            yield rows, torch.mm(h, weight.T, out=room[: len(h)])


_casts = WeakIdKeyDictionary()  # casts, cached while the frozen weight lives; misses writes through .data


def _cast(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """A weight in the type used for the product. The cast of a frozen weight is cached, because a cast takes as long as
    a product."""
    own = weight._base if weight._is_view() else weight
    if dtype == weight.dtype or weight.requires_grad or is_lazy(weight) or not own.is_contiguous():
        return weight.to(dtype)
    state = own._version, own.data_ptr(), dtype
    if own not in _casts or _casts[own][0] != state:
        _casts[own] = state, own.detach().to(dtype)
    return _casts[own][1].as_strided(weight.shape, weight.stride(), weight.storage_offset() - own.storage_offset())
