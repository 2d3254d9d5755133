"""GPU kernels in Triton that fuse chains of operations into one pass over memory; the counterpart of native.c.

Quantisation rounds every operation as torch does on a GPU; exponentials and sums are equal up to rounding. `native`
decides which tensors they get: contiguous ones whose indices fit into 32 bits.
"""

import functools
from itertools import takewhile

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048  # elements of one program
ROW_BLOCK = 4096  # logits of a row that a program handles at a time
MOST_PLACES = 1024  # most target tokens per position that `_softmax` handles
WIDEST_GROUP = 1024  # weights per scale that one program can sum up
SLICES = ["peaks", "index"]  # of a block of positions; each alignment would compile a kernel
OPTIONS = {"enable_fp_fusion": False, "num_warps": 8}  # a fused multiplication and addition rounds differently


@triton.jit
def _codes(w, s, lowest, inverse, top):
    """(w / s, its code rounded but not clipped, limited to −1 … top + 1)."""
    x = tl.div_rn(w, s)
    code = tl.clamp((x - lowest) * inverse, -1.0, top + 1.0, propagate_nan=tl.PropagateNan.ALL)
    return x, (code + 12582912.0) - 12582912.0  # adding 1.5 · 2²³ rounds to the nearest integer, ties to even


@triton.jit
def _level(code, lowest, step, top):
    return tl.clamp(code, 0.0, top, propagate_nan=tl.PropagateNan.ALL) * step + lowest


@triton.jit
def _scales(s, at, kept, PER: tl.constexpr):
    """Each weight's scale. PER consecutive weights share one; 0: all weights do."""
    if PER == 0:
        return tl.load(s + at * 0)
    return tl.load(s + at // PER, kept, 1.0)


@triton.jit
def _quantise(w, s, out, n, lowest, inverse, step, top, PER: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = at < n
    scale = _scales(s, at, kept, PER)
    _, code = _codes(tl.load(w + at, kept, 0.0), scale, lowest, inverse, top)
    tl.store(out + at, (_level(code, lowest, step, top) * scale).to(out.dtype.element_ty), kept)


@triton.jit
def _gradients(w, s, grad, of_w, of_s, n, lowest, inverse, step, top, PER: tl.constexpr, BLOCK: tl.constexpr):
    """of_s: the gradient of each weight's scale, before any sum."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = at < n
    x, code = _codes(tl.load(w + at, kept, 0.0), _scales(s, at, kept, PER), lowest, inverse, top)
    inside = ((code >= 0) & (code <= top)).to(tl.float32)
    g = tl.load(grad + at, kept, 0.0).to(tl.float32)
    tl.store(of_w + at, g * inside, kept)
    tl.store(of_s + at, (_level(code, lowest, step, top) - x * inside) * g, kept)


@triton.jit
def _group_gradients(
    w, s, grad, of_w, of_s, count, lowest, inverse, step, top, PER: tl.constexpr, WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """of_s: the gradient of each of `count` scales, summed over its PER ≤ WIDTH weights."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    place = tl.arange(0, WIDTH)
    at = group[:, None] * PER + place[None, :]
    kept = (group < count)[:, None] & (place < PER)[None, :]
    scale = tl.load(s + group, group < count, 1.0)[:, None]
    x, code = _codes(tl.load(w + at, kept, 0.0), scale, lowest, inverse, top)
    inside = ((code >= 0) & (code <= top)).to(tl.float32)
    g = tl.load(grad + at, kept, 0.0).to(tl.float32)
    tl.store(of_w + at, g * inside, kept)
    products = (_level(code, lowest, step, top) - x * inside) * g
    tl.store(of_s + group, tl.sum(tl.where(kept, products, 0.0), 1), group < count)


@triton.jit
def _move(m, v, size, eps):
    return tl.div_rn(m, tl.sqrt_rn(v) * size + eps)


@triton.jit(do_not_specialize_on_alignment=["agreeing"])
def _update_moments(grad, m, v, agreeing, n, first, second, size, eps, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = at < n
    g, mean, square = tl.load(grad + at, kept, 0.0), tl.load(m + at, kept, 0.0), tl.load(v + at, kept, 0.0)
    mean += (g - mean) * first
    square += (g * g - square) * second
    tl.store(m + at, mean, kept)
    tl.store(v + at, square, kept)
    agrees = (_move(mean, square, size, eps) * g > 0) & kept
    tl.atomic_add(agreeing, tl.sum(agrees.to(tl.int32), 0))


@triton.jit(do_not_specialize_on_alignment=["agreeing"])
def _apply_moves(p, grad, m, v, agreeing, n, rate, least, size, eps, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    kept = at < n
    rate = rate / tl.maximum(tl.load(agreeing).to(tl.float32) / n, least)
    move = _move(tl.load(m + at, kept, 0.0), tl.load(v + at, kept, 0.0), size, eps)
    old = tl.load(p + at, kept, 0.0)
    # written so that a NaN reaches the parameter
    tl.store(p + at, tl.where(move * tl.load(grad + at, kept, 0.0) <= 0, old, old - rate * move), kept)


@triton.jit
def _logits(row, bias, at, kept, factor, temperature, PLAIN: tl.constexpr, BIASED: tl.constexpr):
    x = tl.load(row + at, kept, 0.0).to(tl.float32)
    if PLAIN:
        return x
    x *= factor
    if BIASED:
        x += tl.load(bias + at, kept, 0.0)
    return x / temperature


@triton.jit(do_not_specialize_on_alignment=SLICES)
def _normalise(
    products, bias, peaks, sums, index, chosen, start, factor, temperature, FIRST: tl.constexpr, PLAIN: tl.constexpr,
    BIASED: tl.constexpr, VOCAB: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    row, lane = products + number * VOCAB, tl.arange(0, BLOCK)
    if FIRST:
        most = tl.full([BLOCK], float("-inf"), tl.float32)
        for begin in range(0, VOCAB, BLOCK):
            at = begin + lane
            kept = at < VOCAB
            x = _logits(row, bias, at, kept, factor, temperature, PLAIN, BIASED)
            most = tl.maximum(most, tl.where(kept, x, float("-inf")))
        peak = tl.max(most, 0)
        tl.store(peaks + number, peak)
    else:
        peak = tl.load(peaks + number)
    total = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, VOCAB, BLOCK):
        at = begin + lane
        kept = at < VOCAB
        x = _logits(row, bias, at, kept, factor, temperature, PLAIN, BIASED)
        total += tl.where(kept, tl.exp(x - peak), 0.0)
    tl.store(sums + number, tl.sum(total, 0))
    for begin in range(0, COUNT, PLACES):
        place = begin + tl.arange(0, PLACES)
        asked = place < COUNT
        token = tl.load(index + number * COUNT + place, asked, -1)
        inside = asked & (token >= start) & (token < start + VOCAB)
        found = _logits(row, bias, token - start, inside, factor, temperature, PLAIN, BIASED) - peak
        tl.store(chosen + number * COUNT + place, tl.where(inside, found, 0.0), asked)


@triton.jit(do_not_specialize_on_alignment=SLICES)
def _softmax(
    products, bias, peaks, masses, index, taken, start, factor, temperature, PLAIN: tl.constexpr, BIASED: tl.constexpr,
    VOCAB: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    number = tl.program_id(0).to(tl.int64)
    row, lane, place = products + number * VOCAB, tl.arange(0, BLOCK), tl.arange(0, PLACES)
    index, taken = index + number * COUNT, taken + number * COUNT
    peak, mass = tl.load(peaks + number), tl.load(masses + number)
    token = tl.load(index + place, place < COUNT, -1)
    inside = (place < COUNT) & (token >= start) & (token < start + VOCAB)
    values = tl.exp(_logits(row, bias, token - start, inside, factor, temperature, PLAIN, BIASED) - peak) * mass
    for other in range(0, COUNT):
        values += tl.where(token == tl.load(index + other), tl.load(taken + other), 0.0)
    tl.debug_barrier()  # these products must be read before they are overwritten
    for begin in range(0, VOCAB, BLOCK):
        at = begin + lane
        kept = at < VOCAB
        x = _logits(row, bias, at, kept, factor, temperature, PLAIN, BIASED)
        tl.store(row + at, (tl.exp(x - peak) * (mass * factor)).to(row.dtype.element_ty), kept)
    tl.debug_barrier()
    tl.store(row + token - start, (values * factor).to(row.dtype.element_ty), inside)


def _weights_per_scale(weight: Tensor, scale: Tensor) -> int | None:
    """How many consecutive weights share a scale, 0 if all of them do; None if the scales are laid out otherwise."""
    if scale.numel() == 1:
        return 0
    shared = sum(takewhile(bool, (one == other for one, other in zip(scale.shape, weight.shape))))
    return weight.numel() // scale.numel() if set(scale.shape[shared:]) <= {1} else None


@functools.cache
def _form(lowest: float, step: float, levels: int) -> tuple[float, float, float, float]:
    """torch divides by a Python number on a GPU by multiplying with its reciprocal in fp32."""
    return lowest, float(1 / torch.tensor(step, dtype=torch.float32)), step, levels - 1.0


def quantised(
    weight: Tensor, scale: Tensor, lowest: float, step: float, levels: int, dtype: torch.dtype
) -> Tensor | None:
    """See `native.quantised`."""
    per, n = _weights_per_scale(weight, scale), weight.numel()
    if per is None:
        return None
    out, form = torch.empty_like(weight, dtype=dtype), _form(lowest, step, levels)
    _quantise[(triton.cdiv(n, BLOCK),)](weight, scale, out, n, *form, PER=per, BLOCK=BLOCK, **OPTIONS)
    return out


def gradients(
    weight: Tensor, scale: Tensor, grad: Tensor, lowest: float, step: float, levels: int
) -> tuple[Tensor, Tensor] | None:
    """See `native.gradients`."""
    per, n, form = _weights_per_scale(weight, scale), weight.numel(), _form(lowest, step, levels)
    if per is None:
        return None
    of_weight, one_each = torch.empty_like(weight), scale.shape == (*weight.shape[:2], 1)
    given = weight, scale, grad.contiguous(), of_weight
    if one_each and 1 < per <= WIDEST_GROUP:
        of_scale, width = torch.empty_like(scale), triton.next_power_of_2(per)
        groups = max(1, BLOCK // width)
        _group_gradients[(triton.cdiv(scale.numel(), groups),)](
            *given, of_scale, scale.numel(), *form, PER=per, WIDTH=width, GROUPS=groups, **OPTIONS
        )
        return of_weight, of_scale
    of_scale = torch.empty_like(weight)
    _gradients[(triton.cdiv(n, BLOCK),)](*given, of_scale, n, *form, PER=per, BLOCK=BLOCK, **OPTIONS)
    return of_weight, of_scale.sum(2, keepdim=True) if one_each else of_scale


def cautious_steps(
    mine: list[tuple[Tensor, ...]], first: float, second: float, size: float, eps: float, lr: float, least: float
) -> None:
    """See `native.cautious_steps`; for all tuples."""
    counts = torch.zeros(len(mine), dtype=torch.int32, device=mine[0][0].device)
    for agreeing, (p, grad, m, v) in zip(counts, mine):
        n, grid = p.numel(), (triton.cdiv(p.numel(), BLOCK),)
        _update_moments[grid](grad, m, v, agreeing, n, first, second, size, eps, BLOCK=BLOCK, **OPTIONS)
        _apply_moves[grid](p, grad, m, v, agreeing, n, lr, least, size, eps, BLOCK=BLOCK, **OPTIONS)
        torch.autograd.graph.increment_version(p)  # caches of casts notice by it that p has changed


def _finish(products: Tensor, finish: tuple[Tensor | None, float, float]) -> tuple[Tensor, dict]:
    bias, factor, temperature = finish
    plain = bias is None and factor == temperature == 1
    return products if bias is None else bias, {
        "factor": factor, "temperature": temperature, "PLAIN": plain, "BIASED": bias is not None,
    }  # fmt: skip


def normalise(
    products: Tensor, finish: tuple, first: bool, peaks: Tensor, sums: Tensor, index: Tensor, start: int, chosen: Tensor
) -> bool:
    """See `native.normalise`."""
    count = index.shape[1]
    bias, form = _finish(products, finish)
    _normalise[(len(products),)](
        products, bias, peaks, sums, index, chosen, start, FIRST=first, VOCAB=products.shape[1], COUNT=count,
        BLOCK=ROW_BLOCK, PLACES=min(MOST_PLACES, triton.next_power_of_2(count)), **form, **OPTIONS,
    )  # fmt: skip
    return True


def softmax(
    products: Tensor, finish: tuple, peaks: Tensor, mass: Tensor, index: Tensor, start: int, taken: Tensor
) -> bool:
    """See `native.softmax`."""
    count = index.shape[1]
    if count > MOST_PLACES:
        return False
    bias, form = _finish(products, finish)
    _softmax[(len(products),)](
        products, bias, peaks, mass, index, taken, start, VOCAB=products.shape[1], COUNT=count, BLOCK=ROW_BLOCK,
        PLACES=triton.next_power_of_2(count), **form, **OPTIONS,
    )  # fmt: skip
    return True
