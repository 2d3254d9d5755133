"""Sampling of completions with static shapes. On XLA there are three graphs in all: the prompts with their first token,
every further token, and the result."""

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import shorten

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from qat_lora.backend import TorchBackend, compute_dtype
from qat_lora.errors import UserError, first_line
from qat_lora.kernels.lazy import number_like
from qat_lora.models.architecture import (
    cached_states,
    counts_slots,
    embedding_rows,
    hidden_states,
    is_recurrent,
    model_type,
    own_cache,
    unwrap,
)
from qat_lora.models.attention import Layout
from qat_lora.models.check import CLOSE, FAULTS, sample_tokens
from qat_lora.models.generate import check_sampling
from qat_lora.quant.linear import quantised_once
from qat_lora.quant.student import head_of
from qat_lora.rl.policy import Prompts, log_probs


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. temperature 0: take the most probable one. top_k 0, top_p 1: no restriction."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self):
        check_sampling(self.temperature, self.top_k, self.top_p)


@dataclass(frozen=True)
class Completions:
    """tokens [P, G, C], padded with an end token; mask [P, G, C], 1 up to and including the end; logp [P, G, C] of each
    token under softmax(logits / temperature), regardless of top_k and top_p, and entropy [P, G, C] of that
    distribution, both 0 after the end; ended [P, G]. C is the requested length on XLA and elsewhere that of the longest
    completion, so that nothing is computed beyond it."""

    tokens: Tensor
    mask: Tensor
    logp: Tensor
    entropy: Tensor
    ended: Tensor


@torch.no_grad()
def rollout(
    model: nn.Module,
    prompts: Prompts,
    group: int,
    length: int,
    sampling: Sampling,
    ends: Sequence[int],
    backend: TorchBackend,
) -> Completions:
    """`group` completions of at most `length` tokens for each prompt, which is computed once.

    A completion ends with any of `ends`. Draws come from the device's generator: seed the backend.
    """
    count = len(prompts.tokens)
    stop = backend.to_device({"ends": torch.tensor(list(ends))})["ends"]
    with backend.autocast(), quantised_once(model):
        head = head_of(model)
        head = head.cast(compute_dtype(head.weight))  # once: autocast would cast it for every token
        reader = (_OwnCache if is_recurrent(model) else _Slots)(model, prompts, group, length)
        logits = head.logits(reader.first().to(head.weight.dtype)).repeat_interleave(group, 0)

        rows = count * group
        tokens, logps = stop.new_zeros(length, rows), logits.new_zeros(length, rows)
        entropies = torch.zeros_like(logps)
        step, finished = stop.new_zeros(1), torch.zeros(rows, dtype=torch.bool, device=stop.device)
        token = stop.new_zeros(rows)
        fill = stop[0]
        for turn in range(length):
            if turn:
                logits = head.logits(reader.next(token, step - 1).to(head.weight.dtype))
            token, logp, entropy = draw(logits, sampling)
            token = torch.where(finished, fill, token)
            for all_steps, this_step in ((tokens, token), (logps, logp), (entropies, entropy)):
                all_steps.index_copy_(0, step, this_step.unsqueeze(0))
            finished, step = finished | (token.unsqueeze(1) == stop).any(1), step + 1
            backend.step_boundary()
            if (turn + 1) % backend.steps_between_reads == 0 and backend.fetch(finished.all())[0]:
                break
    tokens, logps, entropies = tokens.T, logps.T, entropies.T
    mask = _until_end(tokens, stop, step)
    tokens = torch.where(mask, tokens, fill)
    width = length if backend.static_shapes else int(backend.fetch(mask.sum(1).max())[0])
    columns = [t[:, :width].reshape(count, group, width) for t in (tokens, mask, logps * mask, entropies * mask)]
    done = Completions(*columns, finished.view(count, group))
    backend.step_boundary()
    return done


@torch.no_grad()
def check_answers(model: nn.Module, static_shapes: bool, with_values: bool = True) -> None:
    """Raise UserError unless a model on the CPU can be sampled from (with static shapes if `static_shapes`) and the
    log-probabilities of its answers, from sampling and from scoring them afterwards, equal those of its own forward
    pass.

    with_values False: the model has no weights, so only static shapes are checked.
    """
    if is_recurrent(model) and static_shapes:
        raise UserError(
            f"model type {model_type(model)!r} carries a state from token to token, so on XLA every new token would "
            "compile another graph; use --device cpu or cuda"
        )
    if not with_values:
        return
    if counts_slots(model):
        raise _no_answers(model, "its attention window counts padding too")
    sample, no_end = sample_tokens(model, 8).tolist(), (embedding_rows(model),)
    prompts = Prompts.of([sample[:5], sample[5:]], 6, 0)
    try:
        done = rollout(model, prompts, 2, 7, Sampling(temperature=0.0), no_end, TorchBackend("cpu", "fp32"))
        scored = log_probs(model, prompts, done.tokens)
        gaps, sizes = [], []
        for text, mask, group, *ours in zip(prompts.tokens, prompts.mask, done.tokens, done.logp, scored):
            tokens = group[0]  # the same for the whole group: the most probable ones
            row = torch.cat([text[mask], tokens]).unsqueeze(0)
            own = unwrap(model)(input_ids=row, use_cache=False).logits[0, -len(tokens) - 1 : -1].float()
            wanted = own.log_softmax(1).gather(1, tokens.unsqueeze(1)).squeeze(1)
            gaps.append((torch.stack(ours) - wanted).abs().max())
            sizes.append(own.abs().max())
    except FAULTS as error:
        reason = f"sampling two test prompts failed ({shorten(first_line(error), 120)})"
        if isinstance(getattr(error, "obj", None), _Slots | DynamicCache):
            reason = f"the cache used here lacks {error.name}"
        raise _no_answers(model, reason) from error
    gap, largest = (float(torch.stack(values).max()) for values in (gaps, sizes))
    if not gap <= 2 * CLOSE * max(1.0, largest):
        raise _no_answers(model, f"log-probabilities of its answers differ by {gap:.1e}")


def _no_answers(model: nn.Module, reason: str) -> UserError:
    return UserError(f"model type {model_type(model)!r} cannot be sampled from here: {reason}; use another model")


def draw(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor]:
    """A token [B] from each row of logits [B, V], its log-probability [B] under softmax(logits / temperature), and the
    entropy [B] of that distribution.

    Gumbel-argmax: no multinomial, which XLA would run on the host.
    """
    logp = (logits / (sampling.temperature or 1.0)).log_softmax(1)
    entropy = -(logp.exp() * logp).sum(1)
    if not sampling.temperature:
        best = logp.max(1)
        return best.indices, best.values, entropy
    kept = logp
    if sampling.top_k and sampling.top_k < logp.shape[1]:
        least = kept.topk(sampling.top_k, 1).values[:, -1:]
        kept = kept.masked_fill(kept < least, -torch.inf)
    if sampling.top_p < 1:
        ordered = kept.softmax(1).sort(1, descending=True).values
        # including the token that crosses top_p
        inside = ordered.cumsum(1) - ordered < number_like(sampling.top_p, ordered)
        least = ordered.masked_fill(~inside, torch.inf).amin(1, keepdim=True)
        kept = kept.masked_fill(kept.softmax(1) < least, -torch.inf)
    waiting = -torch.rand_like(logp).clamp(min=1e-30).log()  # exponential; minus its log is a Gumbel variable
    token = (kept - waiting.clamp(min=1e-30).log()).argmax(1)
    return token, logp.gather(1, token.unsqueeze(1)).squeeze(1), entropy


class _Slots:
    """Processes prompts and then `group` completions of each, token by token, acting as the model's cache. The keys and
    values of every layer, [B, heads, slots, D], are written at `slot`, a device tensor, so that every further token
    uses the same graph."""

    is_compileable = False

    def __init__(self, model: nn.Module, prompts: Prompts, group: int, length: int):
        self.model, self.prompts, self.group, self.length = model, prompts, group, length
        self.slot: Tensor | None = None  # None while the prompts are computed
        self.layers: dict[int, list[Tensor]] = {}
        ahead = prompts.lengths().unsqueeze(1) + torch.arange(length, device=prompts.tokens.device)
        self.positions = torch.cat([prompts.positions(), ahead], 1).repeat_interleave(group, 0)
        room = prompts.mask.new_zeros(len(prompts.mask), length)
        self.visible = torch.cat([prompts.mask, room], 1).repeat_interleave(group, 0)

    def first(self) -> Tensor:
        """Last hidden states [P, H] of the prompts."""
        tokens, mask, positions = self.prompts.tokens, self.prompts.mask, self.prompts.positions()
        at = tokens.shape[1]
        sees = mask.unsqueeze(1) & torch.ones(at, at, dtype=torch.bool, device=tokens.device).tril()
        sees = sees | torch.eye(at, dtype=torch.bool, device=tokens.device)
        hidden = hidden_states(self.model, tokens, Layout(sees, positions, positions), self)[:, -1]
        for layer, both in self.layers.items():
            room = [t.new_zeros(t.shape[0], t.shape[1], self.length, t.shape[3]) for t in both]
            self.layers[layer] = [torch.cat(pair, 2).repeat_interleave(self.group, 0) for pair in zip(both, room)]
        return hidden

    def next(self, token: Tensor, step: Tensor) -> Tensor:
        """Last hidden states [P·G, H] after one more token [P·G] of each completion; step: its index, a device tensor
        [1]."""
        self.slot = self.prompts.tokens.shape[1] + step
        self.visible = self.visible.index_fill(1, self.slot, True)
        layout = Layout(self.visible.unsqueeze(1), self.positions.index_select(1, self.slot), self.positions)
        return hidden_states(self.model, token.unsqueeze(1), layout, self)[:, -1]

    # The cache interface that models use. Its length does not matter, since the layout defines the masks.
    def update(self, key: Tensor, value: Tensor, layer: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if self.slot is None:
            self.layers[layer] = [key, value]
            return key, value
        pairs = zip(self.layers[layer], (key, value))
        return tuple(slots.index_copy_(2, self.slot, new.to(slots.dtype)) for slots, new in pairs)

    def get_seq_length(self, layer: int = 0) -> int:
        return 0

    def get_query_offset(self, layer: int = 0) -> int:
        return 0

    def get_mask_sizes(self, queries: int, layer: int = 0) -> tuple[int, int]:
        return queries, 0


class _OwnCache:
    """Like `_Slots`, but with the model's own cache, for blocks that carry a state instead of keys and values. It grows
    token by token, so it is not for XLA."""

    def __init__(self, model: nn.Module, prompts: Prompts, group: int, length: int):
        self.model, self.prompts, self.cache = model, prompts, own_cache(model)
        self.group, self.position = group, prompts.lengths().repeat_interleave(group, 0).unsqueeze(1)
        self.mask = prompts.mask.repeat_interleave(group, 0)

    def first(self) -> Tensor:
        tokens, mask, positions = self.prompts.tokens, self.prompts.mask, self.prompts.positions()
        hidden = cached_states(self.model, tokens, mask, positions, self.cache)[:, -1]
        self.cache.reorder_cache(torch.arange(len(tokens), device=tokens.device).repeat_interleave(self.group))
        return hidden

    def next(self, token: Tensor, step: Tensor) -> Tensor:
        self.mask = torch.cat([self.mask, self.mask.new_ones(len(token), 1)], 1)
        hidden = cached_states(self.model, token.unsqueeze(1), self.mask, self.position, self.cache)[:, -1]
        self.position = self.position + 1
        return hidden


def _until_end(tokens: Tensor, stop: Tensor, steps: Tensor) -> Tensor:
    """Which of tokens [R, length] belong to a completion: those up to its first end, among the `steps` drawn."""
    is_end = (tokens.unsqueeze(2) == stop).any(2).long()
    return (is_end.cumsum(1) - is_end == 0) & (torch.arange(tokens.shape[1], device=stop.device) < steps)
