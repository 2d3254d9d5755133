"""Our GRPO loss and its gradient beside TRL's own, in fp64: `make test-peers`."""

from collections import defaultdict
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from qat_lora.rl.loss import REDUCTIONS, Objective, grpo_loss, token_weights

pytestmark = pytest.mark.peer
ROWS, WIDTH = 6, 7


def theirs(logp, old, reference, advantages, mask, objective, micro_batches):
    """The loss as TRL's trainer computes it, from log-probabilities that are given instead of a model."""
    from trl import GRPOTrainer

    class Trainer(GRPOTrainer):
        def __init__(self):
            self.current_gradient_accumulation_steps = micro_batches

        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            return logp, torch.zeros_like(logp), None

    trainer = Trainer()
    alone = SimpleNamespace(
        num_processes=1, sync_gradients=True, gather=lambda t: t, gather_for_metrics=lambda t: t,
        reduce=lambda t, reduction: t,
    )  # fmt: skip
    settings = {
        "aux_loss_enabled": False, "top_entropy_quantile": 1.0, "off_policy_mask_threshold": None, "use_vllm": False,
        "importance_sampling_level": "token", "_entropy_bonus_enabled": False, "use_adaptive_entropy": False,
        "beta": objective.beta, "loss_type": objective.reduction, "epsilon_low": objective.clip_low,
        "epsilon_high": objective.clip_high, "max_completion_length": WIDTH, "accelerator": alone,
        "args": SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=micro_batches),
        "model": SimpleNamespace(training=True), "_metrics": {"train": defaultdict(list)},
    }  # fmt: skip
    for name, value in settings.items():
        setattr(trainer, name, value)
    ids = torch.zeros(ROWS, WIDTH, dtype=torch.long)
    return trainer._compute_loss(None, {
        "prompt_ids": ids, "prompt_mask": ids, "completion_ids": ids, "completion_mask": mask, "advantages": advantages,
        "old_per_token_logps": old, "ref_per_token_logps": reference, "num_items_in_batch": mask.sum() * micro_batches,
    })  # fmt: skip


def ours(logp, old, reference, advantages, mask, objective, micro_batches):
    update = ROWS * micro_batches, mask.sum() * micro_batches
    weights = token_weights(mask, objective.reduction, *update, WIDTH, micro_batches)
    return grpo_loss(logp, old, reference if objective.beta else None, advantages, weights, objective)


@pytest.mark.parametrize(
    "reduction, beta, clip, masked, on_policy, micro_batches",
    list(product(REDUCTIONS, (0.0, 0.04), ((0.2, 0.28), (0.1, 0.1)), (False, True), (False, True), (1, 3))),
)
def test_loss_and_gradient_equal(reduction, beta, clip, masked, on_policy, micro_batches):
    """Of one micro-batch, in an update of as many."""
    random = torch.Generator().manual_seed(5)
    logp, old, reference = (-2 * torch.rand(ROWS, WIDTH, generator=random, dtype=torch.double) for _ in range(3))
    advantages = torch.randn(ROWS, generator=random, dtype=torch.double)
    lengths = torch.tensor([7, 1, 4, 3, 7, 2])
    mask = (torch.arange(WIDTH) < lengths.unsqueeze(1)).double()
    if masked:
        mask[[1, 4]] = 0
    objective, found = Objective(reduction, *clip, beta), []
    for loss_of in (ours, theirs):
        leaf = logp.clone().requires_grad_()
        start = leaf.detach() if on_policy else old
        loss = loss_of(leaf, start, reference, advantages, mask, objective, micro_batches)
        loss.backward()
        found.append((loss.detach(), leaf.grad))
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=1e-10)
    assert found[0][1].abs().sum() > 0
