"""Log-probabilities of completions under a policy; each prompt is computed once for all its completions."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qat_lora.errors import UserError
from qat_lora.models.architecture import hidden_states, packs
from qat_lora.models.attention import Layout
from qat_lora.quant.student import head_of
from qat_lora.train.losses import token_log_probs


@dataclass(frozen=True)
class Prompts:
    """tokens [P, L], left-padded; mask [P, L], 1 at the prompt's own tokens."""

    tokens: Tensor
    mask: Tensor

    @classmethod
    def of(cls, texts: list[list[int]], length: int, pad: int) -> "Prompts":
        """Prompts padded to one length. Raises UserError for one that is longer or empty."""
        for ids in texts:
            if not ids:
                raise UserError("a prompt is empty; remove it")
            if len(ids) > length:
                raise UserError(f"a prompt of {len(ids)} tokens exceeds --max-prompt-length {length}; raise it")
        tokens = torch.tensor([[pad] * (length - len(ids)) + ids for ids in texts])
        return cls(tokens, torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in texts]).bool())

    def positions(self) -> Tensor:
        """Position of each token in its prompt [P, L]; 0 for padding."""
        return (self.mask.long().cumsum(1) - 1).clamp(min=0)

    def lengths(self) -> Tensor:
        return self.mask.long().sum(1)


def log_probs(model: nn.Module, prompts: Prompts, completions: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of every completion token, [P, G, C].

    completions [P, G, C]: G for each prompt, padded to C with any token; temperature: divisor of the logits.
    """
    before = (_together if packs(model) else _apart)(model, prompts, completions)
    logp = token_log_probs(before.flatten(0, 2), head_of(model), completions.reshape(-1), temperature)
    return logp.view(completions.shape)


def _together(model: nn.Module, prompts: Prompts, completions: Tensor) -> Tensor:
    """The hidden states [P, G, C, H] from which completion tokens are predicted. A prompt and its G completions are one
    row of L + G·C tokens in which each completion sees only its prompt and itself, so a prompt is computed once."""
    group, width = completions.shape[1:]
    length = prompts.tokens.shape[1]
    tokens = torch.cat([prompts.tokens, completions.flatten(1)], 1)
    ahead = torch.arange(width, device=tokens.device)
    own = (prompts.lengths().unsqueeze(1) + ahead).repeat(1, group)
    positions = torch.cat([prompts.positions(), own], 1)
    hidden = hidden_states(model, tokens, Layout(_visible(prompts.mask, group, width), positions, positions))
    # a completion's first token is predicted at the prompt's last position, every other one at the token before
    first = hidden[:, length - 1 : length].unsqueeze(1).expand(-1, group, -1, -1)
    return torch.cat([first, hidden[:, length:].unflatten(1, (group, width))[:, :, :-1]], 2)


def _apart(model: nn.Module, prompts: Prompts, completions: Tensor) -> Tensor:
    """The same as `_together`, for a model that cannot keep completions apart in one row: each completion has its own
    row, which begins with its prompt and is padded at the end."""
    count, group, width = completions.shape
    length = prompts.tokens.shape[1]
    rows = torch.cat([prompts.tokens.repeat_interleave(group, 0), completions.flatten(0, 1)], 1)
    own = prompts.lengths().repeat_interleave(group, 0).unsqueeze(1)
    place = torch.arange(length + width, device=rows.device) + length - own
    hidden = hidden_states(model, rows.gather(1, place.clamp(max=length + width - 1)))
    before = own - 1 + torch.arange(width, device=rows.device)
    return hidden.gather(1, before.unsqueeze(2).expand(-1, -1, hidden.shape[2])).unflatten(0, (count, group))


def _visible(prompt: Tensor, group: int, width: int) -> Tensor:
    """Attention mask of rows that hold a prompt and its completions: bool [P, L + G·C, L + G·C]."""
    length = prompt.shape[1]
    place = torch.arange(length + group * width, device=prompt.device)
    owner = torch.where(place < length, 0, (place - length) // width + 1)  # 0: the prompt
    sees = (owner[:, None] == owner[None, :]) | (owner[None, :] == 0)
    sees = sees & (place[:, None] >= place[None, :])
    real = torch.cat([prompt, prompt.new_ones(len(prompt), group * width)], 1)
    own = torch.eye(len(place), dtype=torch.bool, device=prompt.device)  # padding sees itself
    return sees & real[:, None, :] | own
