"""Warm-up, peak and end of the schedule. It never reaches 0, which would compile another graph on XLA."""

import pytest
import torch

from qat_lora.train.loop import cosine, set_learning_rates


def test_warm_up_is_linear_and_then_half_a_cosine_falls_to_almost_zero():
    assert [cosine(s, 100, warmup=4) for s in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert cosine(0, 10) == 1.0, "without warm-up"
    assert cosine(55, 100, warmup=10) == pytest.approx(0.5)
    assert cosine(100, 100, warmup=10) == cosine(1000, 100, warmup=10) == pytest.approx(1e-6)
    factors = [cosine(step, 50, 5) for step in range(5, 50)]
    assert factors == sorted(factors, reverse=True)


@pytest.mark.parametrize("total, warmup", [(1, 0), (2, 1), (10, 3), (300, 10), (0, 0)])
def test_it_is_never_zero_and_never_above_the_peak(total, warmup):
    assert all(0 < cosine(step, total, warmup) <= 1 for step in range(total + 2))


def test_groups_keep_their_ratio_factors_do_not_compound_and_the_peak_survives_saving():
    first, other = (torch.optim.SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in (0.4, 0.02)]) for _ in range(2))
    for factor in (0.5, 0.25, 1.0, 0.5):
        set_learning_rates(first, factor)
        assert [group["lr"] for group in first.param_groups] == pytest.approx([0.4 * factor, 0.02 * factor])
    other.load_state_dict(first.state_dict())
    set_learning_rates(other, 0.25)
    assert [group["lr"] for group in other.param_groups] == pytest.approx([0.1, 0.005])
