"""Distillation losses: known values, gradients equal to dense references, masks, and no [B, L, V] tensor."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from qat_lora.kd.targets import _targets
from qat_lora.kd.training import kd_soft_ce
from qat_lora.kernels import tiles
from qat_lora.kernels.head import Head
from qat_lora.kernels.lazy import spread
from qat_lora.train.loop import restore
from qat_lora.train.losses import log_probs_at, sparse_loss, token_log_probs

B, L, H, V, J = 2, 6, 8, 50, 7


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def case():
    """hidden, head, index (with repeats), prob, mask of one sparse loss."""
    index = torch.randint(0, V, (B, L, J), generator=torch.Generator().manual_seed(1))
    index[..., 1] = index[..., 0]
    mask = torch.tensor([[1, 1, 0, 1, 1, 0], [0, 1, 1, 1, 0, 1]], dtype=torch.uint8)
    return random(B, L, H), random(V, H, seed=2), index, random(B, L, J, seed=3).softmax(-1), mask


def dense(hidden, head, index, prob, mask, total=None):
    """The same loss in fp64 from full logits, with prob scattered over the vocabulary."""
    logp = (hidden.double() @ head.double().T).log_softmax(-1)
    target = torch.zeros_like(logp).scatter_add(-1, index, prob.double())
    return (-(target * logp).sum(-1) * mask).sum() / (mask.sum() if total is None else total)


def gradients(loss_of, hidden, head, *rest):
    hidden, head = hidden.clone().requires_grad_(), head.clone().requires_grad_()
    loss = loss_of(hidden, head, *rest)
    loss.backward()
    return loss.detach(), hidden.grad, head.grad


def largest_tensor(function) -> int:
    """Elements of the largest tensor that any operation of function() creates, including backward passes."""

    class Watch(TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            tensors = [t for t in (out if isinstance(out, tuple | list) else [out]) if isinstance(t, torch.Tensor)]
            self.largest = max([self.largest, *(t.numel() for t in tensors)])
            return out

    with Watch() as watch:
        function()
    return watch.largest


# -- dense ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("temperature", [1.0, 2.0, 0.5])
def test_uniform_logits_give_log_v_times_t_squared(temperature):
    loss = kd_soft_ce(torch.zeros(B, L, V), torch.full((B, L, V), 3.0), temperature)
    assert float(loss) == pytest.approx(math.log(V) * temperature**2)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_dense_gradient_is_the_softmax_difference(temperature):
    student, teacher = random(B, L, V).requires_grad_(), random(B, L, V, seed=1).requires_grad_()
    kd_soft_ce(student, teacher, temperature).backward()
    p, t = ((x.detach() / temperature).softmax(-1) for x in (student, teacher))
    torch.testing.assert_close(student.grad, temperature * (p - t) / (B * L), rtol=1e-4, atol=1e-7)
    assert teacher.grad is None


def test_a_mask_in_the_dense_loss_equals_the_subset(case):
    student, teacher, mask = random(B, L, V), random(B, L, V, seed=1), case[4]
    subset = kd_soft_ce(student[mask.bool()], teacher[mask.bool()])
    for kind in (torch.uint8, torch.bool, torch.float32):
        torch.testing.assert_close(kd_soft_ce(student, teacher, mask=mask.to(kind)), subset)


def test_an_empty_mask_is_refused(case):
    *rest, mask = case
    with pytest.raises(ValueError, match="keeps no position"):
        sparse_loss(*rest, torch.zeros_like(mask))
    with pytest.raises(ValueError, match="keeps no position"):
        kd_soft_ce(random(B, L, V), random(B, L, V), mask=torch.zeros(B, L))


# -- sparse -----------------------------------------------------------------------------------------------------------
def test_targets_on_the_whole_vocabulary_give_the_dense_loss(case):
    hidden, head, *_, mask = case
    teacher = random(B, L, V, seed=5)
    prob, index = teacher.softmax(-1).sort(-1, descending=True)
    loss = sparse_loss(hidden, head, index, prob, mask)
    torch.testing.assert_close(loss, kd_soft_ce(hidden @ head.T, teacher, mask=mask))


@pytest.mark.parametrize("total", [None, torch.tensor(5.0)])
@pytest.mark.parametrize("mass", [1.0, 0.6])
def test_value_and_gradients_equal_a_dense_fp64_reference(case, mass, total):
    """Also where an index repeats or the mask is 0; 3: a factor upstream of the loss."""
    hidden, head, index, prob, mask = case
    rest = index, prob * mass, mask, total
    pair = [gradients(lambda *given, loss=loss: 3 * loss(*given), hidden, head, *rest) for loss in (sparse_loss, dense)]
    for ours, wanted in zip(*pair):
        torch.testing.assert_close(ours, wanted.float(), rtol=1e-4, atol=1e-6)
    assert not pair[0][1][mask == 0].any(), "exactly zero"


@pytest.fixture
def in_strips(monkeypatch):
    """in_strips(positions, tokens): compute heads in blocks of `positions` positions and strips of `tokens` tokens."""

    def set_sizes(positions: int, tokens: int) -> None:
        monkeypatch.setattr(tiles, "POSITIONS", positions)
        monkeypatch.setattr(tiles, "STRIP_BYTES", 4 * positions * tokens)

    return set_sizes


def test_strips_cover_everything_within_the_limits(in_strips):
    in_strips(5, 7)
    blocks, columns = tiles.strips_at_once(12, 23, torch.float32)
    assert [i for s in blocks for i in range(12)[s]] == list(range(12)) and max(s.stop - s.start for s in blocks) <= 5
    assert [i for s in columns for i in range(23)[s]] == list(range(23)) and max(s.stop - s.start for s in columns) <= 8
    assert len(tiles.rows_at_once(12, 10**9, torch.float32, torch.device("cpu"))) == 12, "at least one position"


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(("positions", "tokens"), [(1, 3), (7, 9), (100, 5)])
def test_strips_do_not_change_the_result(case, positions, tokens, trained, in_strips, kernels):
    found = []
    for _ in range(2):
        hidden, head = case[0].clone().requires_grad_(), case[1].clone().requires_grad_(trained)
        loss = sparse_loss(hidden, head, *case[2:])
        loss.backward()
        found.append([loss.detach(), hidden.grad, *([head.grad] if trained else [])])
        in_strips(positions, tokens)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("trained", [False, True])
def test_a_logit_far_above_the_first_strip_does_not_overflow(case, trained, in_strips, kernels):
    hidden, head, *rest = case
    head = head.clone()
    head[-1] = 300 * hidden[0, 0] / hidden[0, 0].square().sum()
    whole = gradients(sparse_loss, hidden, head, *rest)
    in_strips(4, 3)
    hidden, head = hidden.clone().requires_grad_(), head.requires_grad_(trained)
    loss = sparse_loss(hidden, head, *rest)
    loss.backward()
    for ours, wanted in zip((loss.detach(), hidden.grad, head.grad), whole):
        assert ours is None or torch.testing.assert_close(ours, wanted) is None


def test_strips_of_bf16_products_change_the_result_by_rounding_only(in_strips, kernels):
    """Compares one pass over a frozen head's strips with all logits at once, in bf16 products as in training."""
    hidden, head, mask = random(2, 40, 32), random(500, 32, seed=2), torch.ones(2, 40)
    index, found = torch.randint(500, (2, 40, J), generator=torch.Generator().manual_seed(1)), []
    for _ in range(2):
        given = hidden.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            loss = sparse_loss(given, head, index, torch.full(index.shape, 1 / J), mask)
        loss.backward()
        found.append((loss.detach(), given.grad))
        in_strips(80, 60)
    torch.testing.assert_close(found[1][0], found[0][0])
    assert (found[1][1] - found[0][1]).norm() < 0.004 * found[0][1].norm(), "half a bf16 unit in the last place"


def test_a_token_beyond_the_head_is_refused(case, in_strips, kernels):
    hidden, head, index, prob, mask = case
    index[0, 0, 0] = V
    in_strips(4, 3)
    with pytest.raises(IndexError):
        sparse_loss(hidden.requires_grad_(), head, index, prob, mask)


def test_full_logits_are_never_allocated(in_strips):
    vocab, length = 400, 32
    hidden, head = random(B, length, H).requires_grad_(), random(vocab, H).requires_grad_()
    index = torch.randint(0, vocab, (B, length, J), generator=torch.Generator().manual_seed(1))
    given = hidden, head, index, torch.full((B, length, J), 1 / J), torch.ones(B, length)
    in_strips(32, 100)
    assert largest_tensor(lambda: sparse_loss(*given).backward()) <= 32 * 100
    assert largest_tensor(lambda: dense(*given).backward()) >= B * length * vocab


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("trained", [False, True])
def test_gradients_of_log_probs_in_strips_equal_autograd(case, temperature, trained, in_strips, kernels):
    hidden, head = case[0].flatten(0, 1), case[1]
    tokens, coming = torch.arange(len(hidden)) % V, random(len(hidden))
    in_strips(5, 4)

    def plain(hidden, head, tokens, temperature):
        return (hidden @ head.T / temperature).log_softmax(1).gather(1, tokens[:, None]).squeeze(1)

    found = []
    for function in (token_log_probs, plain):
        given = [hidden.clone().requires_grad_(), head.clone().requires_grad_(trained)]
        logp = function(*given, tokens, temperature)
        (logp * coming).sum().backward()
        found.append([logp.detach(), *(tensor.grad for tensor in given[: 1 + trained])])
    torch.testing.assert_close(*found)


def test_log_probs_at_tokens(case, in_strips, kernels):
    hidden, head, index = case[:3]
    wanted = (hidden @ head.T).log_softmax(-1).gather(2, index)
    in_strips(5, 4)
    torch.testing.assert_close(log_probs_at(hidden, head, index), wanted)


def test_a_frozen_weight_that_changes_is_cast_again():
    weight, hidden = random(V, H), random(3, H)
    first = Head(weight).cast(torch.bfloat16)
    assert Head(weight).cast(torch.bfloat16).weight.data_ptr() == first.weight.data_ptr(), "the cast is kept"
    weight.add_(1)
    assert torch.equal(Head(weight).cast(torch.bfloat16).weight, weight.bfloat16())
    frozen = torch.nn.Module()
    frozen.weight = torch.nn.Parameter(weight)
    Head(frozen.weight.requires_grad_(False)).cast(torch.bfloat16)
    restore(frozen, {"weight": weight + 1})
    assert torch.equal(Head(frozen.weight).cast(torch.bfloat16).weight, frozen.weight.bfloat16()), "after restore"
    part = Head(weight[:5]).cast(torch.bfloat16)
    assert torch.equal(part.weight, weight[:5].bfloat16()) and part.logits(hidden.bfloat16()).shape == (3, 5)


def test_the_loss_without_gradients_is_the_same(case):
    hidden, head, *rest = case
    with torch.no_grad():
        found = sparse_loss(hidden.requires_grad_(), head.requires_grad_(), *rest)
    assert not found.requires_grad
    torch.testing.assert_close(found, sparse_loss(hidden, head, *rest).detach())


def test_bf16_autocast_keeps_the_softmax_in_fp32(case):
    wanted = gradients(dense, *case)
    with torch.autocast("cpu", torch.bfloat16):
        ours = gradients(sparse_loss, *case)
    assert ours[0].dtype == ours[1].dtype == ours[2].dtype == torch.float32
    for value, reference in zip(ours, wanted):
        torch.testing.assert_close(value, reference.float(), rtol=0.05, atol=0.01)


# -- bias -------------------------------------------------------------------------------------------------------------
def test_sampled_tails_are_unbiased_and_plain_top_k_is_not():
    """Plain top-K distillation inflates the head of the distribution, so its expected gradient has another direction
    than the full one. Top K with tail draws has the same direction."""
    k, draws, repeats = 4, 8, 200
    hidden, head, teacher = random(1, 1, H), random(V, H, seed=2) * 0.3, random(1, V, seed=4)
    full = gradients(dense, hidden, head, torch.arange(V).view(1, 1, V), teacher.softmax(-1)[None], torch.ones(1, 1))
    uniforms = torch.rand(1, draws * repeats, generator=torch.Generator().manual_seed(6))
    index, prob, tail, _ = _targets(teacher.clone(), k, uniforms)
    rest = (1 - prob.sum()) / draws
    sampled = torch.zeros(H)
    for draw in tail.view(repeats, draws):
        both = torch.cat([index[0], draw])[None, None], torch.cat([prob[0], rest.expand(draws)])[None, None]
        sampled += gradients(sparse_loss, hidden, head, *both, torch.ones(1, 1))[1].flatten() / repeats
    plain = gradients(sparse_loss, hidden, head, index[None], (prob / prob.sum())[None], torch.ones(1, 1))[1].flatten()

    def cosine(gradient):
        return F.cosine_similarity(gradient, full[1].flatten().float(), dim=0)

    assert cosine(plain) < 0.95 < 0.99 <= cosine(sampled)
    torch.testing.assert_close(sampled.norm(), full[1].norm().float(), rtol=0.1, atol=0)


@pytest.mark.parametrize("width", [512, 50257, 151936])
@pytest.mark.parametrize("count", [1, 20])
def test_spread_equals_scattering(width, count):
    """Also where an index repeats, and in widths that 128 does not divide."""
    torch.manual_seed(0)
    index, values = torch.randint(width, (5, count)), torch.rand(5, count)
    index[:, -1] = index[:, 0]
    index[0, 0] = width - 1
    wanted = torch.zeros(5, width).scatter_add_(1, index, values)
    torch.testing.assert_close(spread(index, values, width), wanted, rtol=1e-6, atol=0)
