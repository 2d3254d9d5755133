"""The softmax of an LM head's logits at some tokens, over one piece of its products: plain functions and their C form.

For products W·h [n, v] of a piece of the vocabulary that starts at token `start`, x is a logit divided by the
temperature, p [n, 1] a peak that keeps e^(x − p) finite, and index [n, J] the tokens that are asked for.
"""

from ctypes import Structure, c_float, c_long, c_void_p

import torch
from torch import Tensor

from qat_lora.kernels import native
from qat_lora.kernels.head import Head
from qat_lora.kernels.lazy import scattered
from qat_lora.kernels.tiles import TILE, tiles


def normalise(
    head: Head, product: Tensor, index: Tensor, start: int, temperature: float, peak: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(p, Σ e^(x − p) [n, 1], x − p at `index`, 0 where that is outside the piece). peak: p of an earlier piece; None:
    the largest of these x."""
    if found := _in_c("normalise", head, product, index, start, temperature, peak):
        return found
    return _normalised(product, head, index, start, temperature, peak)


def exponentiate(
    head: Head, product: Tensor, index: Tensor, start: int, temperature: float, peak: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Like `normalise`, but also overwrites the product with e^(x − p) · temperature · ∂x/∂product, 0 at `index`."""
    if found := _in_c("exponentiate", head, product, index, start, temperature, peak):
        return found
    found = _normalised(product, head, index, start, temperature, peak)
    product.copy_(mass_gradient(product, head, temperature, found[0], torch.ones_like(found[0])))
    place, inside = _places(product, index, start)
    # where an index is outside, its place is a wrong one, and amin with infinity does nothing
    product.scatter_reduce_(1, place, torch.where(inside, 0, torch.inf).to(product.dtype), "amin")
    return found


def gradient(
    head: Head, product: Tensor, index: Tensor, start: int, temperature: float, peak: Tensor, mass: Tensor,
    taken: Tensor,
) -> Tensor:  # fmt: skip
    """(mass · e^(x − p) + taken at `index`) · temperature · ∂x/∂product [n, v] in the product's type, with mass [n, 1]
    and taken [n, J]. May overwrite the product."""
    finish = _Finish.of(head, temperature)
    if finish and native.suits(product, peak, mass, taken, types=native.TYPES):
        places = _Places.of(index, start)
        native.run("softmax", product.shape, product, native.TYPES[product.dtype], finish, peak, mass, places, taken)
        return product
    grad = mass_gradient(product, head, temperature, peak, mass, (index, start, taken))
    return grad.to(product.dtype)


@native.fused
def _normalised(
    product: Tensor, head: Head, index: Tensor, start: int, temperature: float, peak: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    place, inside = _places(product, index, start)
    x = head.finish(product) / temperature
    peak = x.amax(1, keepdim=True) if peak is None else peak
    # from the product: a compiler would otherwise have to keep all x in fp32
    asked = head.finish(product.gather(1, place), place) / temperature - peak
    return peak, (x - peak).exp().sum(1, keepdim=True), torch.where(inside, asked, 0)


@native.fused
def mass_gradient(
    product: Tensor, head: Head, temperature: float, peak: Tensor, mass: Tensor,
    targets: tuple[Tensor, int, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """mass · e^(x − p) · temperature · ∂x/∂product [n, v], in fp32 or wider. targets: (index, start, taken), to add
    taken before the last factor, see `gradient`."""
    logits = head.finish(product)
    grad = (logits / temperature - peak).exp() * mass
    if targets is not None:
        index, start, taken = targets
        place, inside = _places(product, index, start)
        grad = scattered(grad, place, torch.where(inside, taken, 0).to(grad.dtype))
    return head.gradient(grad, logits)


def _places(product: Tensor, index: Tensor, start: int) -> tuple[Tensor, Tensor]:
    """The places [n, J] of `index` in the piece, clamped, and which of them are inside it."""
    place, most = index - start, product.shape[1] - 1
    return place.clamp(0, most), (place >= 0) & (place <= most)


# -- in C ------------------------------------------------------------------------------------------------------------
class _Places(Structure):
    """The index [n, J] of the wanted columns; `start` is the index of the first column."""

    _fields_ = (("index", c_void_p), ("start", c_long), ("count", c_long))

    @classmethod
    def of(cls, index: Tensor, start: int) -> "_Places":
        return cls(index.data_ptr(), start, index.shape[-1])


class _Finish(Structure):
    """What is done with a product, for heads without a soft cap."""

    _fields_ = (("bias", c_void_p), ("factor", c_float), ("temperature", c_float))

    @classmethod
    def of(cls, head: Head, temperature: float) -> "_Finish | None":
        if head.cap is not None:
            return None
        bias = None if head.bias is None else head.bias.detach().float() * head.after
        found = cls(None if bias is None else bias.data_ptr(), head.before * head.after, temperature)
        found.kept = bias  # alive as long as its address is in use
        return found


def _in_c(
    kernel: str, head: Head, product: Tensor, index: Tensor, start: int, temperature: float, peak: Tensor | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    finish = _Finish.of(head, temperature)
    if finish is None or not native.suits(product, types=native.TYPES):
        return None
    first = peak is None
    sums, chosen = (product.new_empty(len(product), n, dtype=torch.float32) for n in (1, index.shape[1]))
    peak = torch.empty_like(sums) if first else peak.contiguous()
    given = native.TYPES[product.dtype], finish, first, peak, sums, _Places.of(index, start), chosen
    native.run(kernel, product.shape, product, *given)
    return peak, sums, chosen


def add_rows(sums: Tensor, table: Tensor, index: Tensor, weights: Tensor) -> None:
    """sums [n, H] += Σ_j weights[:, j] · table[index[:, j]], with index and weights [n, J], on the CPU. Raises
    IndexError if an index is not in the table [V, H]."""
    if not native.suits(table, sums, weights, types=native.TYPES):
        for rows in tiles(*index.shape, sums.device, max(1, TILE // table.shape[1])):
            found = table[index[rows]].to(sums.dtype)
            sums[rows].add_((weights[rows].to(sums.dtype).unsqueeze(1) @ found).squeeze(1))
        return
    places = _Places.of(index.contiguous(), 0)
    if native.run("add_rows", (len(sums), *table.shape), sums, table, native.TYPES[table.dtype], places, weights):
        raise IndexError(f"indices from {index.min()} to {index.max()} exceed a table of {len(table)} rows")
