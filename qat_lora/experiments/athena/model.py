"""The recursive reasoning model: a small stack of blocks applied repeatedly to a latent answer; one graph per segment.

Tiny Recursive Model, arXiv 2510.04871; deep supervision and halting from the Hierarchical Reasoning Model, 2506.21734.
With the sizes of preset `trm` it is the published network (see published.py).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat_lora.backend.devices import compute_dtype, has_attention_kernel, numbers_on, without_autocast
from qat_lora.errors import UserError
from qat_lora.models.rotary import rotation, turned
from qat_lora.train.memory import ADAM, Parts

IGNORE = -100  # label of a position without a loss
EPS = 1e-5
UNITS = 256  # hidden units of a gated MLP are a multiple of this, as in the published network
FEW_POSITIONS = 128
HALT_BIAS = -5.0  # so that no row halts before the head is trained


@dataclass(frozen=True)
class RecursiveSpec:
    """Sizes of a model for rows of `length` tokens from a vocabulary of `vocab`. The first puzzle_emb_len positions,
    before the tokens, hold the embedding of the row's puzzle, one of `identifiers`: puzzle_emb_ndim values (None:
    hidden_size), filled up with zeros.

    Each of the H_cycles cycles updates z_L L_cycles times and then z_H once, always with the same `L_layers` blocks.
    Gradients flow through the last cycle only; with one_step_gradient, only through its last two updates. mlp_t: tokens
    are mixed by an MLP over positions instead of attention. causal: a position sees only itself and earlier positions.
    The halting head, at position 0, then sees no token, because a position that sees the whole prompt may also see
    response tokens.
    """

    vocab: int
    length: int
    hidden_size: int = 512
    num_heads: int = 8
    num_kv_heads: int | None = None
    L_layers: int = 2
    H_cycles: int = 3
    L_cycles: int = 6
    expansion: float = 4.0
    mlp_t: bool = False
    causal: bool = False
    puzzle_emb_len: int = 1
    puzzle_emb_ndim: int | None = None
    identifiers: int = 1
    one_step_gradient: bool = False

    def __post_init__(self):
        if self.hidden_size % (2 * self.num_heads):  # rotary embeddings rotate pairs
            raise UserError(
                f"arch.hidden_size {self.hidden_size} does not divide by twice arch.num_heads {self.num_heads}; "
                "change one"
            )
        if self.num_heads % self.kv_heads:
            raise UserError(
                f"arch.num_heads {self.num_heads} does not divide by arch.num_kv_heads {self.kv_heads}; change one"
            )
        if self.puzzle_width > self.puzzle_emb_len * self.hidden_size:
            raise UserError(
                f"arch.puzzle_emb_ndim {self.puzzle_width} is more than arch.puzzle_emb_len {self.puzzle_emb_len} "
                f"times arch.hidden_size {self.hidden_size}; change one"
            )
        if self.mlp_t and self.causal:
            raise UserError("arch.mlp_t=true mixes all positions, but these rows are causal text; use arch.mlp_t=false")

    @property
    def kv_heads(self) -> int:
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def head_width(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def heard(self) -> int:
        """Width of queries, keys and values together."""
        return (self.num_heads + 2 * self.kv_heads) * self.head_width

    @property
    def puzzle_width(self) -> int:
        return self.hidden_size if self.puzzle_emb_ndim is None else self.puzzle_emb_ndim

    @property
    def positions(self) -> int:
        """Positions of the latent states: those of the puzzle and one per token."""
        return self.puzzle_emb_len + self.length

    def inner(self, width: int) -> int:
        """Hidden units of a SwiGLU over `width` values: 2/3 · expansion · width, rounded up to a multiple of UNITS. The
        factor 2/3 makes up for its third matrix."""
        return UNITS * math.ceil(round(self.expansion * width * 2 / 3) / UNITS)

    @property
    def parameters(self) -> int:
        """Number of trained weights."""
        width, positions = self.hidden_size, self.positions
        mix = 3 * positions * self.inner(positions) if self.mlp_t else (self.heard + width) * width
        return self.L_layers * (mix + 3 * width * self.inner(width)) + 2 * self.vocab * width + 2 * (width + 1)


class Block(nn.Module):
    """The weights of one block, [out, in] each. `mix` mixes positions: either a matrix for queries, keys and values and
    a matrix for the output, or the three matrices of a gated MLP over positions. `mlp`: the three matrices of the gated
    MLP over features.

    Gate and value are separate matrices. If they were halves of one matrix, the backward pass would have to concatenate
    their gradients, which on a CPU costs as much as the activation itself.
    """

    def __init__(self, spec: RecursiveSpec):
        super().__init__()
        width, positions = spec.hidden_size, spec.positions
        if spec.mlp_t:
            self.mix = nn.ParameterList(gated(positions, spec.inner(positions)))
        else:
            self.mix = nn.ParameterList([matrix(spec.heard, width), matrix(width, width)])
        self.mlp = nn.ParameterList(gated(width, spec.inner(width)))


def gated(width: int, inner: int) -> list[nn.Parameter]:
    """Gate, value and output matrices of SwiGLU (arXiv 2002.05202)."""
    return [matrix(inner, width), matrix(inner, width), matrix(width, inner)]


def matrix(out: int, into: int) -> nn.Parameter:
    """A normal weight of standard deviation 1/√into, truncated as in `normal`."""
    return nn.Parameter(normal(out, into) / math.sqrt(into))


def normal(*shape: int) -> Tensor:
    """Normal values truncated at two standard deviations and rescaled to standard deviation 1."""
    return nn.init.trunc_normal_(torch.empty(shape), a=-2.0, b=2.0) / 0.8796


class RecursiveModel(nn.Module):
    """See RecursiveSpec. `identity` [identifiers, puzzle_width] holds the puzzles' embeddings; it is a buffer with its
    own optimiser (`sign_update`). The initial states are drawn once, are the same for all rows, and are not trained.
    The halting head has a second output, which the published network has but does not use either."""

    def __init__(self, spec: RecursiveSpec):
        super().__init__()
        self.spec, width = spec, spec.hidden_size
        self.embedding = matrix(spec.vocab, width)
        self.blocks = nn.ModuleList([Block(spec) for _ in range(spec.L_layers)])
        self.head = matrix(spec.vocab, width)
        self.halt_weight = nn.Parameter(torch.zeros(2, width))
        self.halt_bias = nn.Parameter(torch.full((2,), HALT_BIAS))
        self.register_buffer("H_init", normal(width))
        self.register_buffer("L_init", normal(width))
        self.register_buffer("identity", torch.zeros(spec.identifiers, spec.puzzle_width))
        self.checkpoint: Callable | None = None  # set by a backend to recompute state updates in the backward pass

    def forward(
        self, z_H: Tensor, z_L: Tensor, inputs: Tensor, picked: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run one segment on states [B, positions, D], tokens [B, L] and the rows' puzzle embeddings [B, puzzle_width];
        returns z_H, z_L, logits [B, L, vocab] and halting logits [B].

        The returned states are detached and have the dtype of the input states; the logits are fp32 or better. Under
        autocast, weights are cast once per segment.
        """
        spec, given, cast = self.spec, z_H.dtype, compute_dtype(z_H)
        with without_autocast(inputs):
            weights = [p.to(cast) for block in self.blocks for p in block.parameters()]
            turns = rotation(0, spec.positions, spec.head_width, cast, inputs.device)
            tokens = F.embedding(inputs, self.embedding.to(cast))
            first = spec.puzzle_emb_len
            puzzle = F.pad(picked.to(cast), (0, first * spec.hidden_size - spec.puzzle_width))
            e = math.sqrt(spec.hidden_size) * torch.cat([puzzle.unflatten(1, (first, -1)), tokens], 1)
            z_H, z_L = z_H.to(cast), z_L.to(cast)
            with torch.no_grad():
                for _ in range(spec.H_cycles - 1):
                    z_H, z_L = self.cycle(z_H, z_L, e, turns, weights, spec.L_cycles)
                if spec.one_step_gradient:
                    z_L = self.inward(z_H, z_L, e, turns, weights, spec.L_cycles - 1)
            updates = 1 if spec.one_step_gradient else spec.L_cycles
            z_H, z_L = self.cycle(z_H, z_L, e, turns, weights, updates)
            logits = F.linear(z_H[:, first:], self.head.to(cast))
            halt = F.linear(z_H[:, 0], self.halt_weight.to(cast), self.halt_bias.to(cast))[:, 0]
        wide = torch.promote_types(cast, torch.float32)
        return z_H.detach().to(given), z_L.detach().to(given), logits.to(wide), halt.to(wide)

    def cycle(self, z_H: Tensor, z_L: Tensor, e: Tensor, turns: tuple, weights: list, updates: int) -> tuple:
        z_L = self.inward(z_H, z_L, e, turns, weights, updates)
        return self.update(z_H + z_L, turns, weights), z_L

    def inward(self, z_H: Tensor, z_L: Tensor, e: Tensor, turns: tuple, weights: list, updates: int) -> Tensor:
        given = z_H + e
        for _ in range(updates):
            z_L = self.update(z_L + given, turns, weights)
        return z_L

    def update(self, h: Tensor, turns: tuple, weights: list) -> Tensor:
        if self.checkpoint is not None and torch.is_grad_enabled():
            return self.checkpoint(self.stack, h, *turns, *weights)
        return self.stack(h, *turns, *weights)

    def stack(self, h: Tensor, cos: Tensor, sin: Tensor, *weights: Tensor) -> Tensor:
        """Apply all blocks to h [B, S, D]: h = rms(h + mix(h)), h = rms(h + swiglu(h)). After an MLP over positions the
        first norm is over positions, too. It reads only sizes from the model, so its compiled version also works for
        copies of the model."""
        each = len(weights) // self.spec.L_layers
        for first in range(0, len(weights), each):
            *mix, gate, value, out = weights[first : first + each]
            h = rms(h + across(h, *mix), 1) if self.spec.mlp_t else rms(h + self.attended(h, *mix, cos, sin))
            h = rms(h + F.linear(F.silu(F.linear(h, gate)) * F.linear(h, value), out))
        return h

    def attended(self, h: Tensor, mix_in: Tensor, mix_out: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads, shared = self.spec.num_heads, self.spec.kv_heads
        qkv = F.linear(h, mix_in).unflatten(2, (-1, self.spec.head_width))
        qk, v = qkv.split([heads + shared, shared], 2)
        q, k = turned(qk, cos[:, None], sin[:, None]).split([heads, shared], 2)
        if shared < heads:
            k, v = (x.repeat_interleave(heads // shared, 2) for x in (k, v))
        heard = attention(*(x.transpose(1, 2) for x in (q, k, v)), self.spec.causal)
        return F.linear(heard.transpose(1, 2).flatten(2), mix_out)


def attention(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """softmax(qkᵀ/√D)·v for q, k, v [B, heads, S, D]. For few positions on a CPU, two plain matrix products are faster
    than the fused kernel: it is made for long texts, and its bf16 backward pass takes 8 times as long
    (docs/benchmarks.md)."""
    if causal or has_attention_kernel(q) or q.shape[2] > FEW_POSITIONS:
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    weights = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(2, 3)).softmax(
        -1, torch.promote_types(q.dtype, torch.float32)
    )
    return torch.matmul(weights.to(v.dtype), v)


def across(h: Tensor, gate: Tensor, value: Tensor, out: Tensor) -> Tensor:
    """SwiGLU over the positions of h [B, S, D]. The weights are the left factors, so nothing is transposed. With
    positions as the first dimension it would be a single product, which scales less well to two threads."""
    gate, value, out = (weight.expand(len(h), -1, -1) for weight in (gate, value, out))
    return torch.bmm(out, F.silu(torch.bmm(gate, h)) * torch.bmm(value, h))


def rms(x: Tensor, dim: int = 2) -> Tensor:
    """x [B, S, D] divided by the root mean square of one dimension, without a weight."""
    if dim == 2:
        return F.rms_norm(x, x.shape[-1:], eps=EPS)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide * torch.rsqrt(wide.square().mean(dim, keepdim=True) + EPS)).to(x.dtype)


# -- the loss --------------------------------------------------------------------------------------------------------
def stablemax_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Stablemax cross-entropy (arXiv 2501.04697) [B, L] of logits [B, L, V], in their dtype; 0 where the label is
    IGNORE.

    Stablemax is s(x)/Σs with s(x) = x + 1 for x ≥ 0 and 1/(1 − x) for x < 0, which equals the softmax of
    log s(x) = ±log(1 + |x|). Computed as that softmax, it needs no fp64, which TPUs lack.
    """
    sign = torch.where(logits < 0, -1.0, 1.0).to(logits.dtype)  # not 0 at 0, where the slope of log s is 1
    logs = sign * (sign * logits).log1p()
    return F.cross_entropy(logs.transpose(1, 2), labels, ignore_index=IGNORE, reduction="none")


def segment_loss(logits: Tensor, halt: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss in nats [B] and whether the whole answer is right [B], from logits [B, L, V], halt [B] and labels [B, L].

    A row's loss is the mean stablemax cross-entropy over its labelled positions plus ½ × the binary cross-entropy of
    its halting logit, whose target is whether the answer is right. A row without labels has loss 0 and counts as
    wrong."""
    labelled = labels != IGNORE
    count = labelled.sum(1)
    right = ((logits.argmax(-1) == labels) | ~labelled).all(1) & (count > 0)
    loss = stablemax_loss(logits, labels).sum(1) / count.clamp(min=1)
    halting = F.binary_cross_entropy_with_logits(halt, right.to(halt.dtype), reduction="none")
    return loss + 0.5 * halting * (count > 0), right


# -- the carry -------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Carry:
    """State of B rows between segments: latent states [B, positions, D], segments done [B], whether the row has
    halted [B], and the rows themselves: inputs, labels [B, L], identifiers, budgets [B]."""

    z_H: Tensor
    z_L: Tensor
    segments: Tensor
    halted: Tensor
    inputs: Tensor
    labels: Tensor
    identifiers: Tensor
    budgets: Tensor


ROWS = ("inputs", "labels", "identifiers", "budgets")


def fresh(model: RecursiveModel, rows: int) -> Carry:
    """A carry whose rows have all halted, so that the first `refill` replaces them."""
    spec, device = model.spec, model.H_init.device
    states = (model.H_init.expand(rows, spec.positions, -1).clone() for _ in range(2))
    numbers = (torch.zeros(rows, spec.length, dtype=torch.long, device=device) for _ in range(2))
    single = [torch.zeros(rows, dtype=torch.long, device=device) for _ in range(3)]
    through = torch.ones(rows, dtype=torch.bool, device=device)
    return Carry(*states, single[0], through, *numbers, *single[1:])


def refill(carry: Carry, batch: dict[str, Tensor], model: RecursiveModel) -> Carry:
    """Replace each halted row by the batch's row at the same index, with the initial states; the other rows keep
    everything, labels and budgets included."""
    out = carry.halted
    rows = {
        name: torch.where(out.unflatten(0, (-1, *[1] * (batch[name].ndim - 1))), batch[name], getattr(carry, name))
        for name in ROWS
    }
    z_H = torch.where(out[:, None, None], model.H_init, carry.z_H)
    z_L = torch.where(out[:, None, None], model.L_init, carry.z_L)
    return Carry(z_H, z_L, torch.where(out, 0, carry.segments), torch.zeros_like(out), **rows)


def halting(halt: Tensor, segments: Tensor, budgets: Tensor, most: int, least: Tensor | int = 0) -> Tensor:
    """Which rows halt [B] after `segments` segments: those that have reached their budget (0 means `most`, which also
    caps larger budgets), and those with a positive halting logit after at least `least` segments."""
    limit = torch.where(budgets > 0, budgets.clamp(max=most), most)
    return (segments >= limit) | ((halt > 0) & (segments >= least))


# -- the puzzles' embeddings -----------------------------------------------------------------------------------------
PART = 2**24  # fp32 holds every whole number up to this


def rows_to_sum(identifiers: Tensor, gradient: Tensor, mine: Tensor) -> Tensor:
    """What SignSGD needs from all W workers, as one tensor [W · B, D + 2] to be summed over them: the gradients [B, D]
    of a worker's rows and their puzzles' identifiers [B] at this worker's place, and zeros at the places of the others,
    so that the sum has the rows of all workers. mine [W]: true at this worker's rank; it is data, so that on XLA all
    workers run one graph. An identifier takes two columns, because fp32 holds only those up to 2^24."""
    columns = torch.stack([identifiers // PART, identifiers % PART], 1)
    rows = torch.cat([gradient, columns.to(gradient.dtype)], 1)
    return torch.where(mine[:, None, None], rows, 0.0).flatten(0, 1)


@torch.no_grad()
def sign_update(table: Tensor, rows: Tensor, lr: float, weight_decay: float) -> None:
    """SignSGD with decoupled weight decay on the embeddings [count, D] of a batch's puzzles, in place. rows [G, D + 2]:
    see `rows_to_sum`. A puzzle's gradient is the sum over its rows.

    Neither reads nor writes other embeddings, so the time does not depend on `count`. Shapes are static: no sorting, no
    unique.
    """
    gradient, columns = rows[:, :-2], rows[:, -2:].long()
    identifiers = columns[:, 0] * PART + columns[:, 1]
    same = identifiers[:, None] == identifiers  # [G, G]
    sums = same.to(gradient.dtype) @ gradient  # the same for all rows of a puzzle, up to rounding
    sums = sums.index_select(0, same.int().argmax(1))  # that of a puzzle's first row: now to the bit
    lr, keep = numbers_on(table, lr, 1 - lr * weight_decay)
    moved = table.index_select(0, identifiers) * keep - lr * sums.sign()
    table.index_copy_(0, identifiers, moved)  # rows of one puzzle write equal values, so their order does not matter


def recursive_memory(spec: RecursiveSpec, rows: int, ema: bool, bf16: bool, checkpointing: bool) -> dict[str, int]:
    """Lower bound on the bytes that a worker needs to train a recursive model on `rows` rows per update, keyed by the
    options to lower; the first are those that reduce the number of weights.

    Counts the weights with their gradients, moments and moving average; the puzzles' embeddings, once; and for each row
    the carry, tokens, labels, logits, its puzzle's embedding with its gradient, and the activations that no compiler
    recomputes in the backward pass: inputs and outputs of each block's matrices (with checkpointing: the input of each
    state update).
    """
    positions, width, cast = spec.positions, spec.hidden_size, 2 if bf16 else 4
    updates = 2 if spec.one_step_gradient else spec.L_cycles + 1  # state updates with a gradient
    mixed = 2 * spec.inner(positions) * width if spec.mlp_t else positions * (spec.heard + width)
    block = mixed + 2 * positions * (width + spec.inner(width))
    kept = positions * width if checkpointing else spec.L_layers * block
    row = (
        2 * 4 * (positions * width + spec.puzzle_width) + updates * kept * cast + spec.length * (2 * 8 + 4 * spec.vocab)
    )
    wide = spec.mlp_t and spec.positions > spec.hidden_size  # then most weights mix positions
    weights = ("arch.mlp_t to false, or " if wide else "") + "arch.hidden_size, arch.L_layers or arch.expansion"
    return {
        weights: (ADAM + 4 * ema) * spec.parameters,
        "arch.puzzle_emb_ndim, or take data with fewer puzzle identifiers": 4 * spec.identifiers * spec.puzzle_width,
        "global_batch_size, arch.hidden_size or arch.L_cycles": rows * row,
    }


def memory_of(spec: RecursiveSpec, rows: int, ema: bool, bf16: bool, checkpointing: bool) -> dict[str, Parts]:
    """A worker's estimated memory on a device with its own: the lower bound, and what each block keeps of its norm in
    fp32 for the backward pass, the input and the normalised input."""
    least = recursive_memory(spec, rows, ema, bf16, checkpointing).values()
    names = "weights with gradients, moments and average", "puzzles' embeddings", "carry and activations"
    blocks = 0 if checkpointing else spec.L_layers * (2 if spec.one_step_gradient else spec.L_cycles + 1)
    norms = {"norms": 8 * rows * blocks * spec.positions * spec.hidden_size}
    return {"training": dict(zip(names, least)) | norms}
