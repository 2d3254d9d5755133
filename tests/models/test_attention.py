"""The attention of XLA's graphs against torch's own, on fp64 inputs; the softmax is in fp32."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from qat_lora.models.attention import GraphAttention


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("length", [5, 300, 512])
@pytest.mark.parametrize("causal", [True, False])
def test_graph_attention_and_its_gradients_equal_torchs(length, causal):
    """Two query heads share a key head. Causal rows are computed in up to four blocks; one key is visible to a single
    query."""
    torch.manual_seed(0)
    q, k, v = drawn(3, 2, length, 16), drawn(3, length, 16), drawn(3, length, 16)
    mask = torch.ones(3, 1, length, length, dtype=torch.bool)
    mask = mask.tril() if causal else mask
    mask[..., 3] &= torch.arange(length) == 3
    ours = GraphAttention.apply(q, k, v, mask, 0.3, causal)
    keys, values = (tensor.unsqueeze(1).expand(-1, 2, -1, -1) for tensor in (k, v))
    theirs = scaled_dot_product_attention(q, keys, values, mask, scale=0.3)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=2e-6)  # the softmax is in fp32
    given = torch.randn_like(ours)
    for one, other in zip(*(torch.autograd.grad(out, (q, k, v), given) for out in (ours, theirs))):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
