"""A mixture of experts with static shapes: every expert runs on every token, without the sorting and counting that XLA
would do on the host."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

STATIC = "static"  # the name under which transformers knows the implementation below


def static_experts(self: nn.Module, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The output [T, H] of transformers' expert modules for hidden states [T, H], chosen experts [T, K] and their
    weights [T, K].

    Runs only two matrix products: every token goes through every expert, with weight 0 for experts that were not
    chosen. This costs experts/K times the arithmetic of the chosen experts alone.
    """
    experts, tokens = self.num_experts, len(hidden)
    chosen = index.unsqueeze(2) == torch.arange(experts, device=index.device)
    share = (chosen * weights.unsqueeze(2)).sum(1)  # [T, E]
    up, down = self.gate_up_proj if self.has_gate else self.up_proj, self.down_proj
    if self.is_transposed:
        up, down = up.transpose(1, 2), down.transpose(1, 2)
    inner = F.linear(hidden, up.reshape(-1, up.shape[2])).view(tokens, experts, -1)
    if self.has_bias:
        inner = inner + (self.gate_up_proj_bias if self.has_gate else self.up_proj_bias)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    if self.has_post_expert_norm:  # applied to an expert's output before it is weighted
        answers = torch.einsum("tei,ehi->teh", inner, down)
        answers = self.post_expert_norm(answers + self.down_proj_bias if self.has_bias else answers)
        return (answers * share.unsqueeze(2)).sum(1).to(hidden.dtype)
    weighted = (inner * share.unsqueeze(2)).flatten(1)
    out = weighted.to(inner.dtype) @ down.transpose(1, 2).reshape(-1, down.shape[1])
    if self.has_bias:
        out = out + share.to(out.dtype) @ self.down_proj_bias
    return out.to(hidden.dtype)


ALL_EXPERTS_FUNCTIONS.register(STATIC, static_experts)
