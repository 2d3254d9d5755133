"""What a policy thinks of completions: their log-probabilities, with each prompt computed once for all of them."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qat_lora.errors import UserError
from qat_lora.kd.losses import token_log_probs
from qat_lora.models.loading import decoder
from qat_lora.quant.student import head_weight


@dataclass(frozen=True)
class Prompts:
    """tokens [P, L], left-padded; mask [P, L], 1 at the prompt's own."""

    tokens: Tensor
    mask: Tensor

    @classmethod
    def of(cls, texts: list[list[int]], length: int, pad: int) -> "Prompts":
        """Prompts of one length. Raises UserError for one that is longer or empty."""
        for ids in texts:
            if not 0 < len(ids) <= length:
                raise UserError(f"a prompt of {len(ids)} tokens does not fit --max-prompt-length {length}; raise it")
        tokens = torch.tensor([[pad] * (length - len(ids)) + ids for ids in texts])
        return cls(tokens, torch.tensor([[0] * (length - len(ids)) + [1] * len(ids) for ids in texts]).bool())

    def positions(self) -> Tensor:
        """Position of each token in its prompt [P, L]; of padding 0."""
        return (self.mask.long().cumsum(1) - 1).clamp(min=0)

    def lengths(self) -> Tensor:
        return self.mask.long().sum(1)


def log_probs(model: nn.Module, prompts: Prompts, completions: Tensor, temperature: float = 1.0) -> Tensor:
    """Log-probability of every completion token, [P, G, C].

    completions [P, G, C]: G of each prompt, filled up to C with anything; temperature: what the logits are divided by.
    A prompt and its G completions are one row of L + G·C tokens under a mask by which each completion sees its prompt
    and itself, so that a prompt is computed once.
    """
    count, group, width = completions.shape
    length = prompts.tokens.shape[1]
    tokens = torch.cat([prompts.tokens, completions.flatten(1)], 1)
    ahead = torch.arange(width, device=tokens.device)
    own = (prompts.lengths().unsqueeze(1) + ahead).repeat(1, group)
    hidden = decoder(model)(
        input_ids=tokens, position_ids=torch.cat([prompts.positions(), own], 1),
        attention_mask=_packed_mask(prompts.mask, group, width), use_cache=False,
    ).last_hidden_state  # fmt: skip
    # a completion's first token is predicted at the prompt's last position, every other one at the token before
    first = hidden[:, length - 1 : length].unsqueeze(1).expand(-1, group, -1, -1)
    before = torch.cat([first, hidden[:, length:].unflatten(1, (group, width))[:, :, :-1]], 2)
    logp = token_log_probs(
        before.reshape(-1, hidden.shape[-1]), head_weight(model), completions.reshape(-1), temperature
    )
    return logp.view(count, group, width)


def _packed_mask(prompt: Tensor, group: int, width: int) -> Tensor:
    """What sees what in rows of a prompt and its completions: bool [P, 1, L + G·C, L + G·C]."""
    count, length = prompt.shape
    place = torch.arange(length + group * width, device=prompt.device)
    owner = torch.where(place < length, 0, (place - length) // width + 1)  # 0: the prompt
    sees = (owner[:, None] == owner[None, :]) | (owner[None, :] == 0)
    sees = sees & (place[:, None] >= place[None, :])
    real = torch.cat([prompt, prompt.new_ones(count, group * width)], 1)
    sees = sees & real[:, None, :] | torch.eye(
        len(place), dtype=torch.bool, device=prompt.device
    )  # padding sees itself
    return sees.unsqueeze(1)
