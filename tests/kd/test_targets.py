"""Teacher targets: the same top K as a full sort, tail draws with the right distribution, an unbiased entropy."""

import pytest
import torch

from qat_lora.kd.targets import _targets, teacher_targets
from qat_lora.kernels import tiles
from qat_lora.models.loading import load_model

pytestmark = pytest.mark.usefixtures("kernels")


def logits_of(rows, vocab, seed=0, scale=2.0):
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def uniforms_of(rows, draws, seed=1):
    return torch.rand(rows, draws, generator=torch.Generator().manual_seed(seed))


def tail_of(logits, k):
    """The softmax without its top K, renormalised, in fp64."""
    prob = logits.double().softmax(-1)
    prob = prob.scatter(1, prob.topk(k, dim=1).indices, 0.0)
    return prob / prob.sum(1, keepdim=True)


@pytest.mark.parametrize("vocab", [3, 60, 64, 500, 509, 512, 1000])  # 500, 509, 1000: the search's table is ragged
def test_top_k_equals_a_full_sort_and_draws_come_from_the_tail(vocab):
    k = min(8, vocab - 1)
    logits = logits_of(40, vocab)
    index, prob, tail, _ = _targets(logits.clone(), k, uniforms_of(40, 500))
    wanted = logits.softmax(-1).topk(k, dim=1)
    assert torch.equal(index, wanted.indices)
    torch.testing.assert_close(prob, wanted.values, rtol=1e-5, atol=1e-8)
    assert int(tail.min()) >= 0 and int(tail.max()) < vocab
    assert not (tail.unsqueeze(2) == index.unsqueeze(1)).any()


@pytest.mark.parametrize("vocab", [60, 500])
def test_the_whole_top_k_may_lie_in_one_group(vocab):
    """The search looks at the K best groups of strided tokens; put all K into one group, and one into each."""
    for stride in (1, 2 ** round(vocab.bit_length() / 2), -(-vocab // 2 ** round(vocab.bit_length() / 2))):
        logits = logits_of(1, vocab)
        wanted = torch.arange(7) * stride % vocab
        logits[0, wanted] = torch.arange(7) + 20.0
        index, *_ = _targets(logits, 7, uniforms_of(1, 1))
        assert index[0].tolist() == wanted.flip(0).tolist()


def test_k_equal_to_the_vocabulary():
    logits = logits_of(5, 512)
    index, prob, tail, entropy = _targets(logits.clone(), 512, uniforms_of(5, 3))
    assert torch.equal(index.sort(1).values, torch.arange(512).expand(5, -1)) and int(tail.max()) < 512
    torch.testing.assert_close(prob.sum(1), torch.ones(5))
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy())


@pytest.mark.parametrize("vocab", [500, 512, 1000])
def test_draws_at_the_edges_of_a_group_have_mass(vocab):
    """Random numbers within rounding of a cumulative sum's steps may hit a token without mass, or none at all. A cache
    of 10⁸ draws has some. They may fall back to the top token, which always exists."""
    logits, k = logits_of(400, vocab), 8
    groups = -(-vocab // 2 ** round(vocab.bit_length() / 2))
    mass = tail_of(logits, k)
    mass = torch.cat([mass, mass.new_zeros(400, -vocab % groups)], 1).view(400, -1, groups).sum(1)
    steps = (mass.cumsum(1) * 2**24).round()
    edges = torch.cat([steps + i for i in range(-4, 5)], 1).clamp(0, 2**24 - 1) / 2**24
    index, _, tail, entropy = _targets(logits.clone(), k, edges.float())
    assert int(tail.max()) < vocab and entropy.max() < 20
    assert not (tail.unsqueeze(2) == index[:, None, 1:]).any()
    assert (tail == index[:, :1]).float().mean() < 1e-3


def test_a_teacher_without_a_tail_draws_existing_tokens():
    """All mass outside the top K underflows: the draws have no weight, but must still be valid token ids."""
    logits = torch.full((2, 500), -200.0)
    logits[:, :8] = torch.arange(8.0)
    _, prob, tail, entropy = _targets(logits.clone(), 8, uniforms_of(2, 5))
    torch.testing.assert_close(prob.sum(1), torch.ones(2))
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy())
    assert int(tail.max()) < 500


@pytest.mark.parametrize("vocab", [60, 64, 500])
def test_draws_follow_the_distribution_of_the_tail(vocab):
    draws, k = 200_000, 4
    logits = logits_of(1, vocab)
    _, _, tail, _ = _targets(logits.clone(), k, uniforms_of(1, draws))
    expected = tail_of(logits, k)[0] * draws
    counts = torch.bincount(tail[0], minlength=vocab)
    often = expected > 10
    chi = ((counts[often] - expected[often]).square() / expected[often]).sum()
    freedom = int(often.sum()) - 1
    assert chi < freedom + 5 * (2 * freedom) ** 0.5


def test_entropy_and_divergence_are_unbiased():
    """cross-entropy − entropy, averaged over draws, is KL(teacher‖student); noise is small if the two are close."""
    vocab, k, draws = 100, 4, 12
    teacher = logits_of(1, vocab)
    student = teacher + logits_of(1, vocab, seed=7, scale=0.3)
    logp, logt = student.log_softmax(-1), teacher.log_softmax(-1)
    index, prob, tail, entropy = _targets(teacher.expand(4000, -1).clone(), k, uniforms_of(4000, draws))
    rest = (1 - prob.sum(1, keepdim=True)) / draws
    cross = -(prob * logp[0, index]).sum(1) - (rest * logp[0, tail]).sum(1)

    def check(estimates, exact):
        error = estimates.std() / len(estimates) ** 0.5
        assert abs(estimates.mean() - exact) < 4 * error, (estimates.mean(), exact, error)

    check(entropy, -(logt.exp() * logt).sum())
    exact = (logt.exp() * (logt - logp)).sum()
    check(cross - entropy, exact)
    assert (cross - entropy).std() < entropy.std(), "both terms share their draws, so most noise cancels"


def test_a_pass_over_tokens_equals_the_dense_softmax(sharp_model_dir, monkeypatch):
    teacher = load_model(str(sharp_model_dir))
    tokens = torch.arange(60).reshape(3, 20) * 8 + 1  # not 0: the pad token's embedding is 0, its logits are all equal
    uniforms = uniforms_of(3, 20 * 5).view(3, 20, 5)
    whole = teacher_targets(teacher, tokens, 8, uniforms)
    with torch.no_grad():
        wanted = teacher(tokens).logits.softmax(-1).topk(8)
    assert torch.equal(whole["index"], wanted.indices)
    torch.testing.assert_close(whole["prob"], wanted.values, rtol=1e-4, atol=1e-7)
    shapes = {name: tuple(value.shape) for name, value in whole.items()}
    assert shapes == {"index": (3, 20, 8), "prob": (3, 20, 8), "tail": (3, 20, 5), "entropy": (3, 20)}
    assert not any(value.requires_grad for value in whole.values())
    monkeypatch.setattr(tiles, "HEAD_BYTES", 4 * 512 * 7)
    for name, value in teacher_targets(teacher, tokens, 8, uniforms).items():
        torch.testing.assert_close(value, whole[name], rtol=1e-4, atol=1e-5)
