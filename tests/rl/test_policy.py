"""Packed scoring equals scoring each completion on its own, in value and gradient."""

import pytest
import torch

from qat_lora.errors import UserError
from qat_lora.models.loading import load_model
from qat_lora.rl.policy import Prompts, log_probs

TEXTS = [[5, 6, 7, 8, 9], [40, 41, 42]]


def plainly(model, texts, drawn, temperature):
    """One forward pass of the bare HF model for each prompt and completion."""
    logps = []
    for text, group in zip(texts, drawn):
        for completion in group:
            logits = model(torch.tensor([text + completion.tolist()])).logits[0, len(text) - 1 : -1] / temperature
            logps.append(logits.log_softmax(-1).gather(1, completion.unsqueeze(1)).squeeze(1))
    return torch.stack(logps).view(drawn.shape)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("trained_head", [False, True])
def test_log_probs_and_their_gradient_equal_the_plain_models(sharp_model_dir, temperature, trained_head):
    model, random, found, grads = load_model(str(sharp_model_dir)), torch.Generator().manual_seed(1), [], []
    model.get_output_embeddings().weight.requires_grad_(trained_head)
    drawn, weight = torch.randint(3, 512, (2, 3, 4), generator=random), torch.randn(2, 3, 4, generator=random)
    packed = log_probs(model, Prompts.of(TEXTS, 8, 0), drawn, temperature)
    for logp in (packed, plainly(model, TEXTS, drawn, temperature)):
        (logp * weight).sum().backward()
        found.append(logp.detach())
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert len(grads[0]) == len(grads[1]) > 10
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("text, said", [([1, 2, 3], "max-prompt-length 2"), ([], "a prompt is empty")])
def test_an_empty_or_too_long_prompt_is_refused(text, said):
    with pytest.raises(UserError, match=said):
        Prompts.of([text], 2, 0)
