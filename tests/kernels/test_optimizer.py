"""The optimiser equals AdamW if all steps agree in sign with their gradients, and never steps against a gradient."""

import pytest
import torch
from torch import nn

from qat_lora.kernels.optimizer import CautiousAdamW

DEFAULTS = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.0}


def walk(optimizer, p: nn.Parameter, gradients) -> None:
    for gradient in gradients:
        p.grad = gradient.clone()
        optimizer.step()


@pytest.mark.parametrize("group", [{}, {"betas": (0.8, 0.99), "weight_decay": 0.5}])
def test_it_equals_adamw_if_all_steps_agree(group, kernels):
    """Also for a group with its own betas and (decoupled) weight decay."""
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(5)) for _ in range(2))
    gradients = (torch.rand(6, 5) + 0.1) * torch.tensor([1.0, -1.0, 10.0, -10.0, 1e-3])  # each keeps its sign
    walk(CautiousAdamW([{"params": [ours], "lr": 0.1} | group]), ours, gradients)
    walk(torch.optim.AdamW([theirs], **DEFAULTS | group), theirs, gradients)
    torch.testing.assert_close(ours, theirs)


def test_steps_against_the_gradient_are_skipped_and_the_others_scaled_up():
    ours, theirs = (nn.Parameter(torch.zeros(4)) for _ in range(2))
    mine = CautiousAdamW([{"params": [ours], "lr": 0.1}])
    other = torch.optim.AdamW([theirs], **DEFAULTS)
    # the second value's second gradient changes sign, its momentum does not
    for gradient in torch.ones(1, 4), torch.tensor([[1.0, -0.1, 1.0, 1.0]]):
        before = ours.detach().clone()
        walk(mine, ours, gradient), walk(other, theirs, gradient)
    assert ours[1] == before[1] and theirs[1] != before[1]
    moved = (ours - before)[[0, 2, 3]]
    torch.testing.assert_close(moved, (theirs - before)[[0, 2, 3]] * 4 / 3)


def test_each_group_has_its_own_rate_and_parameters_without_gradient_do_not_change():
    slow, fast, still = (nn.Parameter(torch.zeros(3)) for _ in range(3))
    optimizer = CautiousAdamW([{"params": [slow, still], "lr": 0.01}, {"params": [fast], "lr": 0.1}])
    slow.grad, fast.grad = torch.ones(3), torch.ones(3)
    optimizer.step()
    assert fast.tolist() == pytest.approx([-0.1] * 3) and slow.tolist() == pytest.approx([-0.01] * 3)
    assert not still.any()


def test_it_resumes_from_its_saved_state():
    gradients = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    whole, part = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    walk(CautiousAdamW([{"params": [whole], "lr": 0.1}]), whole, gradients)
    first, resumed = (CautiousAdamW([{"params": [part], "lr": 0.1}]) for _ in range(2))
    walk(first, part, gradients[:4])
    resumed.load_state_dict(first.state_dict())
    walk(resumed, part, gradients[4:])
    assert torch.equal(part, whole)


def test_weight_decay_applies_to_parameters_whose_step_does_not_agree():
    p = nn.Parameter(torch.ones(4))
    walk(CautiousAdamW([{"params": [p], "lr": 0.1, "weight_decay": 0.5}]), p, torch.zeros(1, 4))
    assert p.tolist() == pytest.approx([0.95] * 4)
