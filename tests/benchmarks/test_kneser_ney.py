"""The n-gram model that a reservoir has to beat is a correct baseline."""

import math
import random

import pytest


@pytest.fixture
def model(load_script):
    tokens = random.Random(0).choices(range(6), weights=(8, 5, 3, 2, 1, 0), k=400)
    return load_script("kneser_ney").KneserNey(tokens, 3, 6), tokens


@pytest.mark.parametrize("context", [(), (0,), (1, 0), (5, 5), (2, 0, 1, 1)])
def test_probabilities_sum_to_one_and_none_is_zero(model, context):
    """After seen and unseen contexts, and after contexts longer than the model's order."""
    found = [model[0].probability(token, context) for token in range(6)]
    assert sum(found) == pytest.approx(1) and min(found) > 0


def test_by_hand(load_script):
    """Bigrams of "a b a b a c"."""
    kneser_ney = load_script("kneser_ney").KneserNey([0, 1, 0, 1, 0, 2], 2, 3)
    level = kneser_ney.levels[1]
    assert level.counts == {(0, 1): 2, (1, 0): 2, (0, 2): 1} and level.sums == {(0,): 3, (1,): 2}
    assert level.discounts == pytest.approx((0, 0.2, 1.7, 2.2))
    assert [kneser_ney.probability(token, (0,)) for token in range(3)] == pytest.approx([19 / 90, 28 / 90, 43 / 90])
    unigrams = kneser_ney.levels[0]
    assert unigrams.counts == {(1,): 1, (0,): 1, (2,): 1}, "the number of contexts, not of occurrences"


def test_seen_tokens_are_likelier_than_unseen_ones(model):
    kneser_ney, tokens = model
    seen, strange = kneser_ney.nll(tokens), kneser_ney.nll([5] * len(tokens))
    assert seen < len(tokens) * math.log(6) < strange
