"""Small language models that differ only in their memory, with the minGRU and attention blocks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat_lora.experiments.stories.scan import gated_scan
from qat_lora.models.rotary import rotation, turned


class SmallLM(nn.Module):
    """Embedding, blocks and norm; the LM head is tied to the embedding. Every block has begin(rows) → state and
    forward(x [B, T, D], state) → (y, state)."""

    def __init__(self, vocab: int, width: int, blocks: list[nn.Module], dropout: float):
        super().__init__()
        self.embedding = nn.Embedding(vocab, width)
        nn.init.normal_(self.embedding.weight, std=width**-0.5)
        self.blocks, self.norm, self.dropout = nn.ModuleList(blocks), nn.LayerNorm(width), nn.Dropout(dropout)

    def begin(self, rows: int) -> list:
        """The initial state of `rows` texts."""
        return [block.begin(rows) for block in self.blocks]

    def forward(self, tokens: Tensor, state: list | None = None) -> tuple[Tensor, list]:
        """Last hidden states [B, T, D] of tokens [B, T] that follow `state`, and the state after them. If the state is
        carried over, the cost per token does not depend on the text's length (except for a transformer)."""
        x, after = self.dropout(self.embedding(tokens) * self.embedding.embedding_dim**0.5), []
        for block, own in zip(self.blocks, self.begin(len(tokens)) if state is None else state):
            x, own = block(x, own)
            after.append(own)
        return self.norm(x), after


def feed_forward(width: int, hidden: int, dropout: float) -> nn.Sequential:
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, hidden),
        nn.GELU(),
        nn.Dropout(dropout),
        nn.Linear(hidden, width),
        nn.Dropout(dropout),
    )


class MinGRUBlock(nn.Module):
    """minGRU (arXiv 2410.01201) and a feed-forward layer: h_t = (1 − z_t)·h_{t−1} + z_t·h̃_t, with z_t and h̃_t
    computed from x_t alone."""

    def __init__(self, width: int, hidden: int, dropout: float):
        super().__init__()
        self.width, self.norm, self.both = width, nn.LayerNorm(width), nn.Linear(width, 2 * width)
        self.out, self.dropout = nn.Linear(width, width), nn.Dropout(dropout)
        self.after = feed_forward(width, hidden, dropout)

    def begin(self, rows: int) -> Tensor:
        return self.out.weight.new_zeros(rows, self.width)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        gate, candidate = self.both(self.norm(x)).float().chunk(2, -1)
        # the paper's g keeps h̃ positive, so that states cannot cancel in a product of many gates
        candidate = torch.where(candidate >= 0, candidate + 0.5, candidate.sigmoid())
        gate = gate.sigmoid()
        states = gated_scan(1 - gate, gate * candidate, state.float())
        x = x + self.dropout(self.out(states))
        return x + self.after(x), states[:, -1]


class TransformerBlock(nn.Module):
    """Causal self-attention with rotary positions (arXiv 2104.09864) and a feed-forward layer; the state is all keys
    and values so far."""

    def __init__(self, width: int, hidden: int, heads: int, dropout: float):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.dropout, self.after = nn.Dropout(dropout), feed_forward(width, hidden, dropout)

    def begin(self, rows: int) -> tuple[Tensor, Tensor]:
        none = self.out.weight.new_zeros(rows, self.heads, 0, self.out.in_features // self.heads)
        return none, none

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        q, k, v = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        before = state[0].shape[2]
        q, k = rotated(q, before), rotated(k, before)
        if before:
            k, v = torch.cat([state[0].to(k.dtype), k], 2), torch.cat([state[1].to(v.dtype), v], 2)
        sees = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=x.device).tril(before)
        heard = F.scaled_dot_product_attention(q, k, v, attn_mask=sees)
        x = x + self.dropout(self.out(heard.transpose(1, 2).flatten(2)))
        return x + self.after(x), (k, v)


class WindowAttention(nn.Module):
    """Causal self-attention to the last `window` positions. Their keys and values are the state, so its size is fixed.
    Positions before the text hold zeros and are attended to as well."""

    def __init__(self, width: int, heads: int, window: int, dropout: float):
        super().__init__()
        self.heads, self.window, self.norm = heads, window, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.dropout = nn.Dropout(dropout)

    def begin(self, rows: int) -> Tensor:
        return self.out.weight.new_zeros(2, rows, self.heads, self.window, self.out.in_features // self.heads)

    def forward(self, x: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        q, *new = (t.unflatten(2, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        kept = torch.cat([state.to(q.dtype), torch.stack(new)], 3)  # [2, B, heads, window + T, D]
        sees = torch.ones(x.shape[1], kept.shape[3], dtype=torch.bool, device=x.device).tril(self.window).triu(1)
        heard = F.scaled_dot_product_attention(rotated(q, self.window), rotated(kept[0], 0), kept[1], attn_mask=sees)
        return x + self.dropout(self.out(heard.transpose(1, 2).flatten(2))), kept[:, :, :, -self.window :]


def rotated(x: Tensor, start: int) -> Tensor:
    """Queries or keys [B, heads, T, D] with rotary embeddings for positions start, start + 1, …"""
    return turned(x, *rotation(start, x.shape[2], x.shape[-1], x.dtype, x.device))
