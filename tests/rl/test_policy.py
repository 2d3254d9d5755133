"""Packed scoring equals scoring each completion on its own, in value and gradient."""

import pytest
import torch

from qat_lora.errors import UserError
from qat_lora.models.loading import load_model
from qat_lora.rl.policy import Prompts, _together, log_probs

TEXTS = [[5, 6, 7, 8, 9], [40, 41, 42]]


@pytest.fixture
def model(sharp_model_dir):
    model = load_model(str(sharp_model_dir))
    model.get_output_embeddings().weight.requires_grad_(False)
    return model


def completions(group: int = 3, width: int = 4):
    return torch.randint(3, 512, (2, group, width), generator=torch.Generator().manual_seed(1))


def plainly(model, texts, drawn, temperature):
    """One forward pass of the bare HF model for each prompt and completion."""
    logps = []
    for text, group in zip(texts, drawn):
        for completion in group:
            logits = model(torch.tensor([text + completion.tolist()])).logits[0, len(text) - 1 : -1] / temperature
            logps.append(logits.log_softmax(-1).gather(1, completion.unsqueeze(1)).squeeze(1))
    return torch.stack(logps).view(drawn.shape)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_their_gradient_equal_the_plain_models(model, temperature):
    drawn, found, grads = completions(), [], []
    weight = torch.randn(drawn.shape, generator=torch.Generator().manual_seed(2))
    packed = log_probs(model, Prompts.of(TEXTS, 8, 0), drawn, temperature)
    for logp in (packed, plainly(model, TEXTS, drawn, temperature)):
        (logp * weight).sum().backward()
        found.append(logp.detach())
        grads.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
    assert len(grads[0]) == len(grads[1]) > 10
    torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-4)


def test_padding_of_the_prompt_does_not_matter(model):
    with torch.no_grad():
        short = log_probs(model, Prompts.of(TEXTS, 5, 0), completions())
        long = log_probs(model, Prompts.of(TEXTS, 13, 7), completions())
    torch.testing.assert_close(short, long, rtol=1e-5, atol=1e-5)


def test_a_completion_does_not_see_its_neighbours(model):
    drawn, prompts = completions(), Prompts.of(TEXTS, 8, 0)
    with torch.no_grad():
        before = log_probs(model, prompts, drawn)
        drawn[:, 1] = 99
        after = log_probs(model, prompts, drawn)
    same = (before == after).all(2)
    assert same[:, [0, 2]].all() and not same[:, 1].any()


def test_a_trainable_head_gets_autograds_gradient(model):
    weight = model.get_output_embeddings().weight.requires_grad_(True)
    prompts, done, found = Prompts.of(TEXTS, 8, 0), completions(), []
    dense = (_together(model, prompts, done) @ weight.T).log_softmax(-1)
    for logp in (log_probs(model, prompts, done), dense.gather(-1, done.unsqueeze(-1)).squeeze(-1)):
        weight.grad = None
        (logp * torch.linspace(0, 1, logp.numel()).view(logp.shape)).sum().backward()
        found.append((logp.detach(), weight.grad))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("text, said", [([1, 2, 3], "max-prompt-length 2"), ([], "a prompt is empty")])
def test_an_empty_or_too_long_prompt_is_refused(text, said):
    with pytest.raises(UserError, match=said):
        Prompts.of([text], 2, 0)
