"""The GRPO loss: known values, gradients, and what must not affect it."""

import math

import pytest
import torch

from qat_lora.errors import UserError
from qat_lora.rl.objective import EPS, REDUCTIONS, Objective, group_advantages, grpo_loss, k3, token_weights


def tensors(seed: int = 0, rows: int = 6, width: int = 5):
    random = torch.Generator().manual_seed(seed)
    logp, old, reference = (-torch.rand(rows, width, generator=random, dtype=torch.double) for _ in range(3))
    advantages = torch.randn(rows, generator=random, dtype=torch.double)
    lengths = torch.randint(1, width + 1, (rows,), generator=random)
    mask = (torch.arange(width) < lengths.unsqueeze(1)).double()
    return logp.requires_grad_(), old, reference, advantages, mask


def weights_of(mask, reduction):
    """The weights of an update in one batch."""
    return token_weights(mask, reduction, len(mask), mask.sum(), mask.shape[1])


REDUCTION = pytest.mark.parametrize("reduction", REDUCTIONS)


# -- advantages ------------------------------------------------------------------------------------------------------
def test_advantages_by_hand():
    advantages, informative = group_advantages(torch.tensor([[1.0, 3.0], [2.0, 2.0]]))
    assert advantages[0].tolist() == pytest.approx([-1 / (math.sqrt(2) + EPS), 1 / (math.sqrt(2) + EPS)])
    assert advantages[1].tolist() == [0, 0] and informative.tolist() == [True, False]


def test_a_tie_up_to_rounding_is_a_tie():
    """0.7 is not exact in binary: a group's mean differs from it, and division by a std near 0 would amplify that."""
    advantages, informative = group_advantages(torch.full((1, 7), 0.7))
    assert not informative.any() and not advantages.any()


def test_scales_of_advantages():
    rewards = torch.tensor([[0.0, 1.0], [0.0, 4.0]])
    none, _ = group_advantages(rewards, "none")
    assert none.tolist() == [[-0.5, 0.5], [-2, 2]]
    batch, _ = group_advantages(rewards, "batch")
    torch.testing.assert_close(batch, none / (rewards.std() + EPS))
    group, _ = group_advantages(rewards)
    assert group[0, 1].item() == pytest.approx(group[1, 1].item(), rel=1e-3)


def test_impossible_groups_are_refused():
    with pytest.raises(UserError, match="1 answer for a prompt"):
        group_advantages(torch.ones(2, 1))
    with pytest.raises(UserError, match="'max' is not one of"):
        group_advantages(torch.ones(2, 2), "max")


# -- loss ------------------------------------------------------------------------------------------------------------
def test_on_policy_loss_is_minus_the_mean_advantage_and_its_gradient_is_reinforces():
    logp, _, _, advantages, mask = tensors()
    loss = grpo_loss(logp, logp.detach(), None, advantages, weights_of(mask, "dapo"), Objective(beta=0))
    assert loss.item() == pytest.approx(-(advantages.unsqueeze(1) * mask).sum().item() / mask.sum().item())
    loss.backward()
    torch.testing.assert_close(logp.grad, -advantages.unsqueeze(1) * mask / mask.sum())


def test_the_ratio_is_clipped_on_the_side_that_would_go_further():
    logp = torch.log(torch.tensor([[1.5], [1.5], [0.5], [0.5]], dtype=torch.double)).requires_grad_()
    advantages, weights = torch.tensor([1.0, -1.0, 1.0, -1.0]).double(), torch.ones(4, 1).double()
    objective = Objective(beta=0, clip_low=0.2, clip_high=0.3)
    loss = grpo_loss(logp, torch.zeros(4, 1).double(), None, advantages, weights, objective)
    assert loss.item() == pytest.approx(-1.3 + 1.5 - 0.5 + 0.8)
    loss.backward()
    assert logp.grad.squeeze(1).tolist() == pytest.approx([0, 1.5, -0.5, 0])


def test_kl_is_k3_and_its_gradient_pulls_towards_the_reference():
    logp = torch.tensor([[-1.0]], dtype=torch.double, requires_grad=True)
    reference, one = torch.tensor([[-0.5]]).double(), torch.ones(1, 1).double()
    loss = grpo_loss(logp, logp.detach(), reference, torch.zeros(1), one, Objective(beta=0.1))
    assert k3(logp, reference).item() == pytest.approx(math.exp(0.5) - 1.5)
    assert loss.item() == pytest.approx(0.1 * (math.exp(0.5) - 1.5))
    loss.backward()
    assert logp.grad.item() == pytest.approx(0.1 * (1 - math.exp(0.5)))


def test_token_weights_by_hand():
    mask = torch.tensor([[1.0, 1, 1], [1, 0, 0]])
    assert token_weights(mask, "grpo", 2, 4, 3).tolist() == [pytest.approx([1 / 6] * 3), [0.5, 0, 0]]
    assert token_weights(mask, "bnpo", 4, 8, 3).sum() == 1
    assert token_weights(mask, "bnpo", 4, 8, 3, micro_batches=2).sum() == 0.5
    assert token_weights(mask, "dapo", 4, torch.tensor(8), 3).sum() == 0.5
    assert token_weights(mask, "dr_grpo", 4, 8, 3).sum().item() == pytest.approx(4 / 12)


@REDUCTION
def test_gradient(reduction):
    logp, old, reference, advantages, mask = tensors()
    weights = weights_of(mask, reduction)

    def loss(logp):
        return grpo_loss(logp, old, reference, advantages, weights, Objective(reduction, beta=0.1))

    assert torch.autograd.gradcheck(loss, logp)


@REDUCTION
def test_masked_tokens_have_no_effect(reduction):
    logp, old, reference, advantages, mask = tensors()
    mask[2] = 0
    weights = weights_of(mask, reduction)
    loss = grpo_loss(logp, old, reference, advantages, weights, Objective(reduction))
    other = torch.where(mask.bool(), logp.detach(), torch.tensor(-3.0).double()).requires_grad_()
    same = grpo_loss(other, old, reference, advantages, weights, Objective(reduction))
    for value in (loss, same):
        value.backward()
    assert loss.item() == same.item() and torch.equal(logp.grad, other.grad)
    assert not logp.grad[~mask.bool()].any()


@REDUCTION
def test_a_batch_without_target_tokens_has_zero_loss(reduction):
    logp, old, reference, advantages, mask = tensors()
    loss = grpo_loss(logp, old, reference, advantages, weights_of(mask * 0, reduction), Objective(reduction))
    loss.backward()
    assert loss.item() == 0 and not logp.grad.any()


@pytest.mark.parametrize("values", [{"reduction": "ppo"}, {"beta": -1}, {"clip_low": 1.0}, {"clip_high": 0.0}])
def test_impossible_objectives_are_refused(values):
    with pytest.raises(UserError):
        Objective(**values)
