"""Warm-up, peak and end of the schedule. It never reaches 0, which would compile another graph on XLA."""

import pytest
import torch

from qat_lora.train.loop import cosine, set_learning_rates


def test_warm_up_is_linear_and_reaches_the_peak():
    assert [cosine(s, 100, warmup=4) for s in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_without_warm_up_it_starts_at_the_peak():
    assert cosine(0, 10) == 1.0


def test_the_values_half_way_and_at_the_end():
    assert cosine(55, 100, warmup=10) == pytest.approx(0.5)
    assert cosine(100, 100, warmup=10) == pytest.approx(1e-6)
    assert cosine(1000, 100, warmup=10) == pytest.approx(1e-6)  # and stays there


@pytest.mark.parametrize("total, warmup", [(1, 0), (2, 1), (10, 3), (300, 10), (0, 0)])
def test_it_is_never_zero_and_never_above_the_peak(total, warmup):
    factors = [cosine(step, total, warmup) for step in range(total + 2)]
    assert all(0 < factor <= 1 for factor in factors)


def test_it_rises_to_a_single_peak_and_falls():
    factors = [cosine(step, 50, 5) for step in range(50)]
    peak = factors.index(1.0)
    assert peak == 5
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)


def test_groups_keep_their_ratio_and_factors_do_not_compound():
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in (0.4, 0.02)])
    for factor in (0.5, 0.25, 1.0):
        set_learning_rates(optimizer, factor)
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.4 * factor, 0.02 * factor])


def test_the_peak_survives_saving_and_loading():
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.4)
    set_learning_rates(optimizer, 0.5)
    other = torch.optim.SGD([torch.zeros(1)], lr=0.4)
    other.load_state_dict(optimizer.state_dict())
    set_learning_rates(other, 0.25)
    assert other.param_groups[0]["lr"] == pytest.approx(0.1)
