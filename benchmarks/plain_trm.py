"""A tiny recursive model in plain PyTorch (arXiv 2510.04871): the baseline for our speed, the reference for our maths.

It follows the paper's equations and the arithmetic of the published training: weights are cast at every use, gate and
value share one matrix, an MLP over positions transposes its input and output, the loss is computed in fp64, AdamW and
the moving average loop over the parameters, and metrics are fetched at every step. Its weights have the names of the
published checkpoints (docs/athena.md). It shares no code with qat_lora.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Sizes:
    vocab: int
    length: int
    width: int
    heads: int
    kv_heads: int
    layers: int
    H: int
    L: int
    inner: int  # units of the MLP over features
    inner_t: int  # units of the MLP over positions; 0 for attention
    puzzle: int = 1  # positions of the puzzle
    causal: bool = False
    one_step: bool = False


class Linear(nn.Module):
    def __init__(self, into: int, out: int, bias: float | None = None):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out, into) / math.sqrt(into))
        self.bias = None if bias is None else nn.Parameter(torch.full((out,), bias))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class SwiGLU(nn.Module):
    def __init__(self, width: int, inner: int):
        super().__init__()
        self.gate_up_proj, self.down_proj = Linear(width, 2 * inner), Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        return self.down_proj(F.silu(gate) * up)


class Attention(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.sizes, self.head = sizes, sizes.width // sizes.heads
        self.qkv_proj = Linear(sizes.width, (sizes.heads + 2 * sizes.kv_heads) * self.head)
        self.o_proj = Linear(sizes.width, sizes.width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        rows, positions, _ = x.shape
        heads, shared = self.sizes.heads, self.sizes.kv_heads
        qkv = self.qkv_proj(x).view(rows, positions, heads + 2 * shared, self.head)
        q, k, v = qkv[:, :, :heads], qkv[:, :, heads : heads + shared], qkv[:, :, heads + shared :]
        q, k = turn(q, cos, sin), turn(k, cos, sin)
        own = torch.arange(heads, device=x.device) // (heads // shared)
        q, k, v = q.transpose(1, 2), k[:, :, own].transpose(1, 2), v[:, :, own].transpose(1, 2)
        heard = F.scaled_dot_product_attention(q, k, v, is_causal=self.sizes.causal)
        return self.o_proj(heard.transpose(1, 2).reshape(rows, positions, -1))


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos[:, None] + torch.cat([-second, first], -1) * sin[:, None]


def norm(x: Tensor) -> Tensor:
    """Over the last dimension."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, sizes: Sizes):
        super().__init__()
        self.over_positions = sizes.inner_t > 0
        if self.over_positions:
            self.mlp_t = SwiGLU(sizes.puzzle + sizes.length, sizes.inner_t)
        else:
            self.self_attn = Attention(sizes)
        self.mlp = SwiGLU(sizes.width, sizes.inner)

    def forward(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.over_positions:  # the first norm is over positions, too
            turned = h.transpose(1, 2)
            h = norm(turned + self.mlp_t(turned)).transpose(1, 2)
        else:
            h = norm(h + self.self_attn(h, cos, sin))
        return norm(h + self.mlp(h))


class PlainTRM(nn.Module):
    """forward(z_H, z_L, inputs, puzzle) → z_H, z_L, logits, halting logit; all except the parameters in `dtype`."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype):
        super().__init__()
        self.sizes, self.dtype = sizes, dtype
        self.embed_tokens, self.L_level, self.puzzle_emb = nn.Module(), nn.Module(), nn.Module()
        self.embed_tokens.embedding_weight = nn.Parameter(torch.randn(sizes.vocab, sizes.width) / sizes.width**0.5)
        self.L_level.layers = nn.ModuleList([Layer(sizes) for _ in range(sizes.layers)])
        self.lm_head = Linear(sizes.width, sizes.vocab)
        self.q_head = Linear(sizes.width, 2, bias=-5.0)
        nn.init.zeros_(self.q_head.weight)
        self.puzzle_emb.register_buffer("weights", torch.zeros(1, sizes.width))
        self.register_buffer("H_init", torch.randn(sizes.width))
        self.register_buffer("L_init", torch.randn(sizes.width))
        half = sizes.width // sizes.heads // 2
        angles = torch.outer(
            torch.arange(sizes.puzzle + sizes.length).double(), 10_000 ** -(torch.arange(half).double() / half)
        )
        self.register_buffer("cos", angles.cos().repeat(1, 2).float(), persistent=False)
        self.register_buffer("sin", angles.sin().repeat(1, 2).float(), persistent=False)

    def f(self, h: Tensor) -> Tensor:
        for layer in self.L_level.layers:
            h = layer(h, self.cos.to(h.dtype), self.sin.to(h.dtype))
        return h

    def forward(self, z_H: Tensor, z_L: Tensor, inputs: Tensor, puzzle: Tensor):
        sizes, words = self.sizes, self.embed_tokens.embedding_weight.to(self.dtype)[inputs]
        given = F.pad(puzzle.to(self.dtype), (0, sizes.puzzle * sizes.width - puzzle.shape[1]))
        x = math.sqrt(sizes.width) * torch.cat([given.view(-1, sizes.puzzle, sizes.width), words], 1)
        with torch.no_grad():
            for _ in range(sizes.H - 1):
                for _ in range(sizes.L):
                    z_L = self.f(z_L + z_H + x)
                z_H = self.f(z_H + z_L)
            if sizes.one_step:
                for _ in range(sizes.L - 1):
                    z_L = self.f(z_L + z_H + x)
        for _ in range(1 if sizes.one_step else sizes.L):
            z_L = self.f(z_L + z_H + x)
        z_H = self.f(z_H + z_L)
        return z_H.detach(), z_L.detach(), self.lm_head(z_H[:, sizes.puzzle :]), self.q_head(z_H[:, 0])[:, 0]


def stablemax_cross_entropy(logits: Tensor, labels: Tensor, ignore: int) -> Tensor:
    """Loss of each position, [B, L], in fp64 as published; 0 where the label is `ignore`."""
    x = logits.double()
    s = torch.where(x < 0, 1 / (1 - x), x + 1)
    share = torch.log(s / s.sum(-1, keepdim=True))
    asked = labels != ignore
    chosen = share.gather(-1, torch.where(asked, labels, 0)[..., None])[..., 0]
    return -torch.where(asked, chosen, 0)


def losses(logits: Tensor, halt: Tensor, labels: Tensor, ignore: int) -> tuple[Tensor, Tensor]:
    """The loss (summed over rows: a row's mean loss over its labels, plus half its halting loss); which rows are right,
    [B]."""
    asked = labels != ignore
    right = ((logits.argmax(-1) == labels) & asked).sum(-1) == asked.sum(-1)
    cells = (stablemax_cross_entropy(logits, labels, ignore) / asked.sum(-1, keepdim=True).clamp(min=1)).sum()
    wide = halt.to(torch.promote_types(halt.dtype, torch.float32))
    return cells + 0.5 * F.binary_cross_entropy_with_logits(wide, right.to(wide.dtype), reduction="sum"), right


class PlainTraining:
    """The published loop: a carry whose halted rows are replaced, AdamW, a moving average, metrics of every step."""

    def __init__(self, model: PlainTRM, rows: int, lr: float, decay: float, segments: int, ignore: int):
        self.model, self.decay, self.segments, self.ignore = model, decay, segments, ignore
        self.optimizer = torch.optim.AdamW(model.parameters(), lr, betas=(0.9, 0.95), weight_decay=0.1)
        self.average = {name: p.detach().clone() for name, p in model.named_parameters()}
        sizes = model.sizes
        shape, device = (rows, sizes.puzzle + sizes.length, sizes.width), model.H_init.device
        self.z_H, self.z_L = (torch.empty(shape, dtype=model.dtype, device=device) for _ in range(2))
        self.steps = torch.zeros(rows, dtype=torch.long, device=device)
        self.halted = torch.ones(rows, dtype=torch.bool, device=device)
        self.inputs = self.labels = torch.zeros(rows, sizes.length, dtype=torch.long, device=device)

    def step(self, inputs: Tensor, labels: Tensor, puzzle: Tensor) -> dict[str, float]:
        model, out = self.model, self.halted
        self.z_H = torch.where(out[:, None, None], model.H_init.to(model.dtype), self.z_H)
        self.z_L = torch.where(out[:, None, None], model.L_init.to(model.dtype), self.z_L)
        self.steps = torch.where(out, 0, self.steps) + 1
        self.inputs = torch.where(out[:, None], inputs, self.inputs)
        self.labels = torch.where(out[:, None], labels, self.labels)
        self.z_H, self.z_L, logits, halt = model(self.z_H, self.z_L, self.inputs, puzzle)
        loss, right = losses(logits, halt, self.labels, self.ignore)
        (loss / len(inputs)).backward()
        with torch.no_grad():
            explores = torch.rand_like(halt, dtype=torch.float32) < 0.1
            longest = torch.randint_like(self.steps, 2, self.segments + 1) * explores
            self.halted = (self.steps >= self.segments) | ((halt > 0) & (self.steps >= longest))
            figures = {
                "count": self.halted.sum(),
                "exact": (self.halted & right).sum(),
                "loss": loss,
                "cells": (logits.argmax(-1) == self.labels).sum(),
                "steps": (self.steps * self.halted).sum(),
                "halts_right": (self.halted & ((halt >= 0) == right)).sum(),
            }
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for name, p in model.named_parameters():
                self.average[name] = self.decay * self.average[name] + (1 - self.decay) * p
        return {name: value.item() for name, value in figures.items()}
