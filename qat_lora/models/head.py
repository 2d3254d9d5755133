"""How a causal language model's last hidden states become logits, and the logits' gradients, one strip at a time."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from qat_lora.backend import native
from qat_lora.backend.devices import is_lazy, on_host
from qat_lora.backend.graph import rounded_to, spread, with_barrier
from qat_lora.backend.tiles import HEAD_TILE, rows_at_once, strips_at_once, tiles


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

    def finish(self, product: Tensor, room: Tensor | None = None) -> Tensor:
        """Logits from the product W·h, in fp32 or the product's type if that is wider. room: a buffer for them; without
        it, the logits may overwrite an fp32 product."""
        wide = torch.promote_types(product.dtype, torch.float32)
        logits = product.to(wide) if room is None else room[: len(product)].copy_(product)
        if self.before * self.after != 1:
            logits = logits * (self.before * self.after)
        if self.bias is not None:
            logits = logits + self.bias.to(logits.dtype) * self.after
        return logits if self.cap is None else (logits / self.cap).tanh() * self.cap

    def gradient(self, grad: Tensor, logits: Tensor) -> Tensor:
        """The gradient with respect to W·h, given `grad`, the gradient with respect to the logits; both [..., V].
        Overwrites `grad`."""
        if self.cap is not None:
            grad = grad.mul_(1 - (logits / self.cap).square_())
        return grad if self.before * self.after == 1 else grad.mul_(self.before * self.after)

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


class Strips:
    """Logits x [N, V] of hidden states, divided by a temperature, computed in the type `dtype` one vocabulary strip at
    a time. Every strip is computed once, or twice if the gradients of the head's own weights are needed.

    p is the largest logit of a position's first strip; z [N, 1] = Σ e^(x − p); chosen [N, J] is x − p at `index`, which
    may contain a token twice.
    """

    def __init__(self, hidden: Tensor, head: Head, index: Tensor, dtype: torch.dtype, temperature: float = 1.0):
        """hidden [N, H]; index [N, J]."""
        self.hidden, self.index, self.dtype, self.temperature = hidden, index.contiguous(), dtype, temperature
        self.given, self.head = head, head if head.weight.requires_grad else head.cast(dtype)
        self.blocks, self.columns = strips_at_once(len(hidden), len(head.weight), dtype, hidden.device)
        self.peak, self.z = (torch.zeros(len(index), 1, device=hidden.device) for _ in range(2))
        self.chosen = torch.zeros(index.shape, device=hidden.device)
        self.normalised = False

    @property
    def log_probs(self) -> Tensor:
        """log softmax(x) [N, J] at `index`."""
        return self.chosen - self.z.log()

    def normalise(self) -> "Strips":
        for block in self.blocks:
            self._normalise(block)
        self.normalised = True
        return self

    def gradients(self, mass: Tensor, taken: Tensor, wanted: tuple[bool, bool]):
        """The gradients of Σ mass·log z − Σ taken·chosen with respect to hidden [N, H] and, if `wanted`, the head's
        weight and bias (otherwise None), in fp32 or wider. taken [N, J]; mass [N, 1] is its sum over J."""
        if not any(wanted) and len(self.columns) > 1:
            return self._in_one_pass(mass, taken), None, None
        # In a graph, targets at a frozen head are added as rows of its weight instead of scattered into the logits,
        # unless these rows in bf16 would take more memory than the logits in fp32.
        vocab, width = self.head.weight.shape
        few = 1 < self.index.shape[1] <= 2 * vocab // width
        by_rows = is_lazy(self.hidden) and not any(wanted) and few
        wide = torch.promote_types(self.dtype, torch.float32)
        back = torch.zeros(self.hidden.shape, dtype=wide, device=self.hidden.device)
        sums = [
            torch.empty_like(tensor, dtype=wide) if needed else None
            for tensor, needed in zip((self.given.weight, self.given.bias), wanted)
        ]
        for block in self.blocks:
            product = None if self.normalised else self._normalise(block)
            product = product if len(self.columns) == 1 else None
            hidden, first = self.hidden[block].to(self.dtype), block.start == 0
            factor, taken_here = mass[block] / self.z[block] / self.temperature, taken[block] / -self.temperature
            for strip in self.columns:
                head = self.head.strip(strip, self.dtype)
                if product is None or len(self.columns) > 1:
                    product = _product(hidden, head.weight, product)
                gradient = self._gradient(head, product, block, strip, factor, None if by_rows else taken_here)
                # kept in fp32: the target rows that are added below cancel most of this product
                back[block].add_(gradient @ (head.weight.float() if by_rows else head.weight))
                if sums[0] is not None:
                    _put(sums[0][strip], gradient.T @ hidden, first)
                if sums[1] is not None:
                    _put(sums[1][strip], gradient.sum(0, dtype=wide) / head.before, first)
            if by_rows:
                softmax = self._without_repeats(block, self.chosen[block].exp() * factor)
                asked = self._through_head(block, softmax + taken_here)
                rounded = rounded_to(self.dtype, self._through_head(block, softmax))  # what the product has added
                _add_rows(back[block], self.head.weight, self.index[block], asked - rounded)
        self.normalised = True
        return back, *sums

    def _in_one_pass(self, mass: Tensor, taken: Tensor) -> Tensor:
        """`gradients` with respect to hidden alone, which needs each strip's logits only once: each strip adds
        Σ e^(x − p)·W, and the total is divided by z at the end. The sum leaves out the tokens of `index`, which are
        added last, so that e^(x − p)/z − taken is computed before it is rounded."""
        wide = torch.promote_types(self.dtype, torch.float32)
        back = torch.zeros(self.hidden.shape, dtype=wide, device=self.hidden.device)
        for block in self.blocks:
            here, index, taken_here = back[block], self.index[block], taken[block] / self.temperature
            self._exponentials(block, here)
            if not (self.z[block].isfinite().all() and here.isfinite().all()):
                self.peak[block] = self._largest(self.hidden[block].to(self.dtype))
                self._exponentials(block, here.zero_(), again=True)
            share = mass[block] / self.z[block] / self.temperature
            asked = self._without_repeats(block, self.chosen[block].exp() * share).sub_(taken_here)
            _add_rows(here.mul_(share), self.head.weight, index, self._through_head(block, asked))
        self.normalised = True
        return back

    def _without_repeats(self, block: slice, values: Tensor) -> Tensor:
        """Values [n, J] at a block's `index`, 0 where it repeats an earlier token."""
        index = self.index[block]
        again = (index.unsqueeze(2) == index.unsqueeze(1)).tril(-1).any(2)
        return torch.where(again, 0, values)

    def _through_head(self, block: slice, gradient: Tensor) -> Tensor:
        """The gradient [n, J] with respect to a block's logits at `index`, as one with respect to the products."""
        return self.head.gradient(gradient, (self.chosen[block] + self.peak[block]) * self.temperature)

    def _exponentials(self, block: slice, back: Tensor, again: bool = False) -> None:
        """Compute z and chosen of a block of positions, and add Σ e^(x − p)·W [n, H] over all tokens except those of
        `index` to `back`."""
        hidden, product = self.hidden[block].to(self.dtype), None
        z, chosen = self.z[block].zero_(), self.chosen[block].zero_()
        for strip in self.columns:
            head = self.head.strip(strip, self.dtype)
            product = _product(hidden, head.weight, product)
            part_z, found = self._sums(head, product, block, strip, strip.start == 0 and not again, overwrite=True)
            z.add_(part_z)
            chosen.add_(found)
            back.add_(product @ head.weight)

    def _normalise(self, block: slice, again: bool = False) -> Tensor:
        """Compute peak, z and chosen of a block of positions; returns the products of its last strip. again: a second
        pass, which keeps the peaks."""
        hidden, product = self.hidden[block].to(self.dtype), None
        z, chosen = self.z[block].zero_(), self.chosen[block].zero_()
        for strip in self.columns:
            head = self.head.strip(strip, self.dtype)
            product = _product(hidden, head.weight, product)
            part_z, found = self._sums(head, product, block, strip, strip.start == 0 and not again)
            z.add_(part_z)
            chosen.add_(found)
        if len(self.columns) > 1 and not again and not z.isfinite().all():
            self.peak[block] = self._largest(hidden)
            return self._normalise(block, again=True)
        return product

    def _sums(
        self, head: Head, product: Tensor, block: slice, strip: slice, first: bool, overwrite: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Σ e^(x − p) [n, 1] over a strip's products [n, v], and x − p at `index` [n, J], 0 where that is outside the
        strip. first: set the peaks to the largest of these logits. overwrite: replace the products by e^(x − p) times
        the derivative of x with respect to them, and by 0 at `index`."""
        peak, index = self.peak[block], self.index[block]
        sums, found = (product.new_empty(len(product), n, dtype=torch.float32) for n in (1, index.shape[1]))
        native_sums = native.exponentiate if overwrite else native.normalise
        if native_sums(product, self._finish(head), first, peak, sums, index, strip.start, found):
            return sums, found
        place, inside = self._places(block, strip)
        step, scratch = self._scratch(product)
        for part, at, f, p, s in zip(*(t.split(step) for t in (product, place, found, peak, sums))):
            logits = self._logits(head, part, scratch)
            capped = logits * self.temperature if overwrite and head.cap is not None else None
            if first:
                p.copy_(logits.amax(1, keepdim=True))
            if is_lazy(part) and head.bias is None:  # else a compiler would have to keep the logits in fp32
                f.copy_(self._logits(head, part.gather(1, at), None) - p)
                logits = logits - p
            else:
                f.copy_(logits.sub_(p).gather(1, at))
            s.copy_(logits.exp_().sum(1, keepdim=True))
            if overwrite:
                part.copy_(head.gradient(logits, capped))
        if overwrite:  # an index outside the strip is clamped to a wrong place, where amin with infinity does nothing
            product.scatter_reduce_(1, place, torch.where(inside, 0, torch.inf).to(product.dtype), "amin")
        return sums, found if inside is None else torch.where(inside, found, 0)

    def _largest(self, hidden: Tensor) -> Tensor:
        """The largest logit of each position [n, 1]; needed where it exceeds that of the first strip by so much (88)
        that e^(x − p) overflows."""
        products = (
            (head := self.head.strip(strip, self.dtype), _product(hidden, head.weight, None)) for strip in self.columns
        )
        found = [self._logits(head, product, None).amax(1, keepdim=True) for head, product in products]
        return torch.cat(found, 1).amax(1, keepdim=True)

    def _gradient(
        self, head: Head, product: Tensor, block: slice, strip: slice, mass: Tensor, taken: Tensor | None
    ) -> Tensor:
        """The gradient with respect to a strip's products [n, v]; overwrites them if the device reuses memory. If
        `taken` is None, without the targets, and in fp32."""
        if taken is None:  # on XLA
            grad = self._logits(head, product, None)
            capped = grad * self.temperature if head.cap is not None else None
            return rounded_to(self.dtype, head.gradient((grad - self.peak[block]).exp() * mass, capped))
        if native.softmax(product, self._finish(head), self.peak[block], mass, self.index[block], strip.start, taken):
            return product
        place, inside = self._places(block, strip)
        taken = taken if inside is None else torch.where(inside, taken, 0)
        step, scratch = self._scratch(product)
        for part, at, p, m, t in zip(*(each.split(step) for each in (product, place, self.peak[block], mass, taken))):
            logits = self._logits(head, part, scratch)
            capped = logits * self.temperature if head.cap is not None else None
            grad = logits.sub_(p).exp_().mul_(m)
            grad = grad + spread(at, t, grad.shape[1]) if is_lazy(grad) else grad.scatter_add_(1, at, t)
            grad = head.gradient(grad, capped)
            if scratch is None:
                return grad.to(self.dtype)
            part.copy_(grad)
        return product

    def _finish(self, head: Head) -> tuple[Tensor | None, float, float] | None:
        """Bias, factor and temperature to apply after the product, for a native kernel; None with a soft cap."""
        bias = None if head.bias is None else head.bias.detach().float() * head.after
        return None if head.cap is not None else (bias, head.before * head.after, self.temperature)

    def _scratch(self, product: Tensor) -> tuple[int, Tensor | None]:
        """How many rows of a product to process at a time, and an fp32 buffer for them (None: allocate new memory)."""
        rows = tiles(*product.shape, product.device, HEAD_TILE)[0].stop
        if not on_host(product):
            return rows, None
        return rows, product.new_empty(rows, product.shape[1], dtype=torch.float32)

    def _logits(self, head: Head, product: Tensor, scratch: Tensor | None) -> Tensor:
        """x of some rows of a product, in memory of its own, so that overwriting x leaves the product unchanged."""
        if scratch is None and product.dtype == torch.float32:
            product = product.clone()
        logits = head.finish(product, scratch)
        return logits if self.temperature == 1 else logits.div_(self.temperature)

    def _places(self, block: slice, strip: slice) -> tuple[Tensor, Tensor | None]:
        """The places [n, J] of a block's `index` in a strip, clamped, and which of them are inside it (None: all)."""
        index = self.index[block]
        if len(self.columns) == 1:
            return index, None
        place = index - strip.start
        inside = (place >= 0) & (place < strip.stop - strip.start)
        return place.clamp_(0, strip.stop - strip.start - 1), inside


def _product(hidden: Tensor, weight: Tensor, room: Tensor | None) -> Tensor:
    """hidden · weightᵀ, written into `room`, an earlier product at least as large, if the device reuses memory."""
    if is_lazy(hidden):  # rounded once, so that every reader sees the same values
        return rounded_to(hidden.dtype, (hidden @ weight.T).float()).to(hidden.dtype)
    if room is None or not on_host(hidden):
        return hidden @ weight.T
    return torch.mm(hidden, weight.T, out=room.view(-1)[: len(hidden) * len(weight)].view(len(hidden), len(weight)))


def _add_rows(sums: Tensor, table: Tensor, index: Tensor, weights: Tensor) -> None:
    """sums [n, H] += Σ_j weights[:, j] · table[index[:, j]], with index and weights [n, J]."""
    if native.add_rows(sums, table, index, weights):
        return
    if is_lazy(sums):  # a product of matrices would round the weights to bf16 on a TPU
        sums.add_((weights.unsqueeze(2) * with_barrier(table[index]).to(sums.dtype)).sum(1))
        return
    for rows in tiles(*index.shape, sums.device, max(1, HEAD_TILE // table.shape[1])):
        found = table[index[rows]].to(sums.dtype)
        sums[rows].add_((weights[rows].to(sums.dtype).unsqueeze(1) @ found).squeeze(1))


def _put(place: Tensor, values: Tensor, first: bool) -> None:
    place.copy_(values) if first else place.add_(values)
