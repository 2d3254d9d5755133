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

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

PACKED = "packed_examples"  # the name under which transformers knows the attention below


@dataclass(frozen=True)
class Layout:
    """Which tokens attend to which, before a model's windows restrict that further.

    visible: bool [B, Q, K] (or [1, Q, K]), including causality; query [B, Q] and key [B, K]: the position of each token
    in its own text, on which windows and chunks are based. lengths: the lengths of each row's examples, on the CPU;
    if given, attention runs on one example at a time and computes nothing that a mask would discard.
    """

    visible: Tensor
    query: Tensor
    key: Tensor
    lengths: list[list[int]] | None = None
    plain: MutableMapping[Tensor, bool] = field(default_factory=WeakTensorKeyDictionary)  # results of is_plain

    @classmethod
    def causal(cls, length: int, device: torch.device) -> "Layout":
        """Rows of one text each, with an explicit mask: for devices where checking whether a mask is needed costs a
        host sync."""
        positions = torch.arange(length, device=device).unsqueeze(0)
        return cls(torch.ones(1, length, length, dtype=torch.bool, device=device).tril(), positions, positions)

    @classmethod
    def packed(cls, segments: Tensor, positions: Tensor, one_by_one: bool) -> "Layout":
        """Rows of several examples: segments [B, L] number them, positions [B, L] count from the start of each."""
        length = segments.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=segments.device).tril()
        visible = (segments.unsqueeze(2) == segments.unsqueeze(1)) & causal
        lengths = [row.unique_consecutive(return_counts=True)[1].tolist() for row in segments] if one_by_one else None
        return cls(visible, positions, positions, lengths)

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


@contextmanager
def laid_out(layout: Layout) -> Iterator[None]:
    """Within this context every mask that transformers makes follows the layout."""
    token = _current.set(layout)
    try:
        yield
    finally:
        _current.reset(token)


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
        return sdpa_attention_forward(module, query, key, value, mask, **options)
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


for _name in ("sdpa", "eager"):
    _follow_layout(_name)
AttentionInterface.register(PACKED, _attend)
AttentionMaskInterface.register(PACKED, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
