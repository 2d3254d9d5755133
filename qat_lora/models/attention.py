"""Which tokens of a row attend to which, in addition to the windows of the model's own blocks.

transformers makes each mask from a function of two positions (causal, sliding window, chunks), one for each kind of
block, and passes it to an interface named after the attention implementation. Within `laid_out`, this module extends
that interface to rows that hold several texts, padded prompts and a cache. The model's own code still decides which
block gets which mask.
"""

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from qat_lora.backend.devices import is_lazy

PACKED = "packed_examples"  # the name under which transformers knows the attention below


@dataclass(frozen=True)
class Layout:
    """Which tokens attend to which, before a model's windows restrict that further.

    visible: bool [B, Q, K] (or [1, Q, K]), including causality; query [B, Q] and key [B, K]: the position of each token
    in its own text, on which windows and chunks are based. lengths: the lengths of each row's examples, on the CPU;
    if given, attention runs on one example at a time and computes nothing that a mask would discard. is_causal: whether
    query i sees no key after i.
    """

    visible: Tensor
    query: Tensor
    key: Tensor
    lengths: list[list[int]] | None = None
    is_causal: bool = False
    plain: MutableMapping[Tensor, bool] = field(default_factory=WeakTensorKeyDictionary)  # results of is_plain

    @classmethod
    def causal(cls, length: int, device: torch.device) -> "Layout":
        """Rows of one text each, with an explicit mask: for devices where checking whether a mask is needed costs a
        host sync."""
        positions = torch.arange(length, device=device).unsqueeze(0)
        visible = torch.ones(1, length, length, dtype=torch.bool, device=device).tril()
        return cls(visible, positions, positions, is_causal=True)

    @classmethod
    def packed(cls, segments: Tensor, positions: Tensor, one_by_one: bool) -> "Layout":
        """Rows of several examples: segments [B, L] number them, positions [B, L] count from the start of each."""
        length = segments.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
        visible = (segments.unsqueeze(2) == segments.unsqueeze(1)) & causal
        lengths = [row.unique_consecutive(return_counts=True)[1].tolist() for row in segments] if one_by_one else None
        return cls(visible, positions, positions, lengths, is_causal=True)

    def mask(self, allowed: Callable) -> Tensor:
        """bool [B, 1, Q, K] from a mask function of transformers (batch, head, query position, key position)."""
        batch = torch.arange(len(self.query), device=self.query.device)[:, None, None, None]
        seen = allowed(batch, torch.zeros_like(batch), self.query[:, None, :, None], self.key[:, None, None, :])
        return seen & self.visible.unsqueeze(1)

    def is_plain(self, mask: Tensor) -> bool:
        """Whether a mask that the model made from this layout adds no restriction to it. Costs one host sync per
        mask."""
        if mask not in self.plain:
            self.plain[mask] = torch.equal(mask[:, 0], self.visible.expand_as(mask[:, 0]))
        return self.plain[mask]


_current: ContextVar[Layout | None] = ContextVar("layout", default=None)
_whole: ContextVar[bool] = ContextVar("whole rows", default=False)


@contextmanager
def laid_out(layout: Layout) -> Iterator[None]:
    """Within this context every mask that transformers makes follows the layout."""
    token = _current.set(layout)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def whole_rows() -> Iterator[None]:
    """Within this context transformers treats each row as one text. Otherwise it reads a tensor in every forward pass
    to look for rows that hold several, for which the host waits for the device."""
    token = _whole.set(True)
    try:
        yield
    finally:
        _whole.reset(token)


def _search_for_texts(search: Callable) -> Callable:
    @wraps(search)
    def find(*args, **kwargs):
        return None if _whole.get() else search(*args, **kwargs)

    return find


def _follow_layout(name: str) -> None:
    original = ALL_MASK_ATTENTION_FUNCTIONS[name]

    def mask(*args, **kwargs):
        layout = _current.get()
        if layout is None:
            return original(*args, **kwargs)
        seen = layout.mask(kwargs["mask_function"]).expand(kwargs["batch_size"], -1, -1, -1)
        if name == "sdpa":
            return seen
        dtype = kwargs.get("dtype", torch.float32)  # eager attention adds its mask
        return torch.where(seen, torch.zeros((), device=seen.device, dtype=dtype), torch.finfo(dtype).min)

    AttentionMaskInterface.register(name, mask)


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options):
    """transformers' attention, run on the examples of a packed row one at a time if the layout has their lengths."""
    layout = options.pop("layout", None)
    if layout is None or mask is None or options.get("position_bias") is not None:
        return _sdpa(module, query, key, value, mask, **options)
    plain, rows = layout.is_plain(mask), []
    for row, lengths in enumerate(layout.lengths):
        parts = zip(*(tensor[row : row + 1].split(lengths, 2) for tensor in (query, key, value)))
        seen, start = [], 0
        for part, length in zip(parts, lengths):
            own = None if plain else mask[row : row + 1, :, start : start + length, start : start + length]
            seen.append(sdpa_attention_forward(module, *part, own, is_causal=plain, **options)[0])
            start += length
        rows.append(torch.cat(seen, 1))
    return torch.cat(rows), None


class GraphAttention(torch.autograd.Function):
    """softmax(scale·q·kᵀ + mask)·v [N, G, Q, D], for which the TPU's compiler moves fewer bytes than for torch's own
    decomposition (docs/benchmarks.md).

    q [N, G, Q, D]: the G query heads that share a key head; k, v [N, K, D]; mask: bool, broadcastable to [N, 1, Q, K],
    without a gradient. causal: query i sees no key after i, so blocks of queries skip the keys after them.

    The scores are the largest tensors in a decoder block. They are not kept: the backward pass computes them again, and
    the probabilities from each row's log-sum-exp (as in FlashAttention-2, arXiv 2307.08691). The products are in the
    type of v, the softmax is in fp32, and key heads are not repeated.
    """

    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, causal: bool) -> Tensor:
        ctx.scale, ctx.blocks = scale, _query_blocks(q.shape[2], k.shape[1], causal)
        outs, logs = [], []
        for rows, keys in ctx.blocks:
            scores = _scores(q[:, :, rows], k[:, :keys], mask[..., rows, :keys], scale)
            peak = scores.amax(-1, keepdim=True)
            weights = (scores - peak).exp()
            total = weights.sum(-1, keepdim=True)
            outs.append(((_folded(weights.to(v.dtype)) @ v[:, :keys]).view(*weights.shape[:3], -1) / total).to(v.dtype))
            logs.append(peak + total.log())
        out, log = torch.cat(outs, 2), torch.cat(logs, 2)
        ctx.save_for_backward(q, k, v, mask, out, log)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):
        q, k, v, mask, out, log = ctx.saved_tensors
        grad = grad.to(v.dtype)
        mean = (grad.float() * out.float()).sum(-1, keepdim=True)
        to_q, to_k, to_v = [], 0, 0
        for rows, keys in ctx.blocks:
            queries, given = q[:, :, rows], grad[:, :, rows]
            scores = _scores(queries, k[:, :keys], mask[..., rows, :keys], ctx.scale)
            weights = (scores - log[:, :, rows]).exp()
            change = (_folded(given) @ v[:, :keys].mT).view(weights.shape)
            change = _folded((weights * (change - mean[:, :, rows]) * ctx.scale).to(q.dtype))
            rest = (0, 0, 0, k.shape[1] - keys)
            to_q.append((change @ k[:, :keys]).view(queries.shape))
            to_k = to_k + nn.functional.pad(change.mT @ _folded(queries), rest).float()
            to_v = to_v + nn.functional.pad(_folded(weights.to(v.dtype)).mT @ _folded(given), rest).float()
        return torch.cat(to_q, 2), to_k.to(k.dtype), to_v.to(v.dtype), None, None, None


def _query_blocks(length: int, keys: int, causal: bool) -> list[tuple[slice, int]]:
    """Blocks of queries, and how many keys each may see. Four blocks skip three eighths of the scores; more would skip
    more, but each adds operations to the graph."""
    count = min(4, max(1, length // 128)) if causal else 1
    edges = [length * number // count for number in range(count + 1)]
    return [(slice(a, b), b if causal else keys) for a, b in pairwise(edges)]


def _folded(x: Tensor) -> Tensor:
    """[N, G, Q, X] as [N, G·Q, X]."""
    return x.flatten(1, 2)


def _scores(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> Tensor:
    """fp32 scores [N, G, Q, K]; the lowest number where the mask is false."""
    scores = (_folded(q) @ k.mT).view(*q.shape[:3], -1).float() * scale
    return torch.where(mask, scores, torch.finfo(torch.float32).min)


def _sdpa(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options):
    """transformers' attention; on XLA, `GraphAttention` where it applies."""
    if is_lazy(query):  # autocast skips attention, and RoPE gives fp32 queries and keys with bf16 values
        query, key = query.to(value.dtype), key.to(value.dtype)
    plain = mask is not None and mask.dtype == torch.bool and mask.shape[1] == 1
    if not (is_lazy(query) and plain) or options.get("dropout") or options.get("position_bias") is not None:
        return sdpa_attention_forward(module, query, key, value, mask, **options)
    (batch, heads, keys), layout = key.shape[:3], _current.get()
    queries = query.reshape(batch * heads, -1, *query.shape[2:])  # query heads that share a key head are adjacent
    seen = mask.expand(batch, heads, -1, -1).reshape(batch * heads, 1, *mask.shape[2:])
    causal = layout is not None and layout.is_causal and query.shape[2] == keys
    scale = options.get("scaling") or query.shape[-1] ** -0.5
    out = GraphAttention.apply(queries, key.flatten(0, 1), value.flatten(0, 1), seen, scale, causal)
    return out.view(batch, query.shape[1], -1, value.shape[-1]).transpose(1, 2), None


for _name in ("sdpa", "eager"):
    _follow_layout(_name)
masking_utils.find_packed_sequence_indices = _search_for_texts(masking_utils.find_packed_sequence_indices)
AttentionInterface.register("sdpa", _sdpa)
AttentionInterface.register(PACKED, _attend)
AttentionMaskInterface.register(PACKED, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
