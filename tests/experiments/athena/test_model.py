"""The recursive model against an independent plain one in fp64, and its parts on known values."""

import copy
import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from qat_lora.backend import TorchBackend
from qat_lora.errors import UserError
from qat_lora.experiments.athena.model import (
    FEW_POSITIONS,
    IGNORE,
    RecursiveModel,
    RecursiveSpec,
    attention,
    fresh,
    halting,
    refill,
    rows_to_sum,
    segment_loss,
    sign_update,
    stablemax_loss,
)
from qat_lora.experiments.athena.published import state_of

ROWS, LENGTH, VOCAB = 5, 7, 6
SIZES = {"hidden_size": 16, "num_heads": 4, "L_layers": 2, "H_cycles": 3, "L_cycles": 2}
KINDS = {
    "mlp": {"mlp_t": True},
    "attention": {},
    "grouped": {"num_kv_heads": 2},
    "causal": {"causal": True},
    "one step": {"mlp_t": True, "one_step_gradient": True},
    "three layers": {"L_layers": 3, "H_cycles": 1, "L_cycles": 1},
    "puzzle over positions": {"mlp_t": True, "puzzle_emb_len": 3, "puzzle_emb_ndim": 40},
    "puzzle of one position and a part": {"puzzle_emb_len": 4, "puzzle_emb_ndim": 17},
}


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.double)


def model_of(**changes) -> RecursiveModel:
    """A model in fp64 with a non-zero halting head."""
    torch.manual_seed(0)
    model = RecursiveModel(RecursiveSpec(VOCAB, LENGTH, **(SIZES | changes)))
    nn.init.normal_(model.halt_weight)
    return model.double()


def rows_of(model: RecursiveModel) -> tuple:
    made = torch.Generator().manual_seed(1)
    shape, spec = (ROWS, model.spec.positions, 16), model.spec
    z_H, z_L = (torch.randn(shape, generator=made, dtype=torch.double) for _ in range(2))
    inputs, labels = (torch.randint(1, VOCAB, (ROWS, LENGTH), generator=made) for _ in range(2))
    picked = torch.randn(ROWS, spec.puzzle_width, generator=made, dtype=torch.double).requires_grad_()
    labels[0, :3] = IGNORE
    return (z_H, z_L, inputs, picked), labels


def plain_of(model: RecursiveModel, plain):
    """The same weights in the plain model."""
    spec = model.spec
    sizes = plain.Sizes(
        spec.vocab, spec.length, spec.hidden_size, spec.num_heads, spec.kv_heads, spec.L_layers, spec.H_cycles,
        spec.L_cycles, spec.inner(16), spec.inner(spec.positions) if spec.mlp_t else 0, spec.puzzle_emb_len,
        spec.causal, spec.one_step_gradient,
    )  # fmt: skip
    other = plain.PlainTRM(sizes, torch.double).double()
    half = spec.head_width // 2
    angles = torch.arange(spec.positions).double()[:, None] * 10_000 ** -(torch.arange(half).double() / half)
    other.cos, other.sin = (turn(angles).repeat(1, 2) for turn in (torch.cos, torch.sin))
    other.puzzle_emb.weights = model.identity
    other.load_state_dict({name.removeprefix("inner."): tensor for name, tensor in state_of(model).items()})
    return other


def gradients_of(model: RecursiveModel) -> dict[str, torch.Tensor]:
    """The gradients under the published names."""
    held = copy.deepcopy(model)
    for there, here in zip(held.parameters(), model.parameters()):
        there.data = torch.zeros_like(here) if here.grad is None else here.grad
    return {name.removeprefix("inner."): tensor for name, tensor in state_of(held).items()}


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_segment_and_its_gradient_equal_the_plain_model_in_fp64(kind, checkpointed, load_script):
    plain, model = load_script("plain_trm"), model_of(**KINDS[kind])
    model.checkpoint = TorchBackend("cpu", "fp32").checkpoint if checkpointed else None
    (*given, picked), labels = rows_of(model)
    other, puzzle = plain_of(model, plain), picked.detach().clone().requires_grad_()
    ours, theirs = model(*given, picked), other(*given, puzzle)
    torch.testing.assert_close(tuple(ours), tuple(theirs), rtol=1e-10, atol=1e-10)
    loss, right = segment_loss(*ours[2:], labels)
    total, right_there = plain.losses(*theirs[2:], labels, IGNORE)
    torch.testing.assert_close(loss.sum(), total, rtol=1e-10, atol=1e-10)
    assert right.tolist() == right_there.tolist()
    loss.sum().backward()
    total.backward()
    torch.testing.assert_close(picked.grad, puzzle.grad, rtol=1e-9, atol=1e-10)
    found = gradients_of(model)
    for name, parameter in other.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-9, atol=1e-10)


def test_only_the_last_cycle_has_a_gradient():
    """Comparison with the plain model would not show a gradient that reaches too far back in both."""
    model, before, last = (model_of(mlp_t=True, H_cycles=cycles) for cycles in (3, 2, 1))  # with equal weights
    (*begin, inputs, picked), _ = rows_of(model)
    grads = []
    for made, states in ((model, begin), (last, before(*begin, inputs, picked)[:2])):
        loss = made(*states, inputs, picked)[2].square().sum()
        grads.append(torch.autograd.grad(loss, [made.head, made.blocks[0].mlp[0]]))
    torch.testing.assert_close(*grads)


def test_returned_states_are_detached_and_logits_are_not():
    model = model_of()
    z_H, z_L, logits, halt = model(*rows_of(model)[0])
    assert not z_H.requires_grad and not z_L.requires_grad and logits.requires_grad and halt.requires_grad


@pytest.mark.parametrize("places", [5, FEW_POSITIONS + 1])
@pytest.mark.parametrize("causal", [False, True])
def test_both_attention_implementations_equal_softmax_attention(places, causal):
    q, k, v = noise(3, 2, 3, places, 4)
    scores = q @ k.transpose(2, 3) / 2
    if causal:
        scores = scores.masked_fill(torch.ones(places, places).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(attention(q, k, v, causal), scores.softmax(-1) @ v)


# -- the loss --------------------------------------------------------------------------------------------------------
def test_stablemax_follows_its_definition():
    logits = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [1.0, -1.0, 0.0, 3.0]]], dtype=torch.double)
    loss = stablemax_loss(logits, torch.tensor([[2, 1]]))
    assert loss[0, 0].item() == pytest.approx(math.log(4))
    assert loss[0, 1].item() == pytest.approx(-math.log(0.5 / (2 + 0.5 + 1 + 4)))


def test_stablemax_in_fp32_equals_fp64_even_for_large_logits():
    logits = noise(4, 9, 11).float() * 1e4
    labels = logits.argmin(-1)
    wanted = stablemax_loss(logits.double(), labels).float()
    torch.testing.assert_close(stablemax_loss(logits, labels), wanted, rtol=1e-5, atol=1e-5)


def test_stablemax_has_the_right_gradient_at_0():
    logits = torch.zeros(1, 1, 4, requires_grad=True)
    stablemax_loss(logits, torch.tensor([[0]])).sum().backward()
    torch.testing.assert_close(logits.grad[0, 0], torch.tensor([-0.75, 0.25, 0.25, 0.25]))


def test_what_has_no_label_affects_neither_loss_nor_correctness_nor_the_head():
    """The rows are right but for a position without a label, without any label, and wrong."""
    logits, halt = noise(3, LENGTH, VOCAB).requires_grad_(), torch.tensor([0.5, -2.0, 3.0], requires_grad=True)
    labels = torch.full((3, LENGTH), IGNORE)
    labels[0, 1:] = logits[0, 1:].argmax(-1)
    labels[2, 1] = (logits[2, 1].argmax() + 1) % VOCAB
    loss, right = segment_loss(logits, halt, labels)
    loss.sum().backward()
    assert right.tolist() == [True, False, False] and loss[1] == 0
    assert halt.grad[1] == 0 and not logits.grad[1].any() and halt.grad[0] < 0 < halt.grad[2]
    assert torch.equal(segment_loss(logits[::2], halt[::2], labels[::2])[0], loss[::2])


def test_the_halting_head_starts_with_zero_weight_and_its_bias():
    model = RecursiveModel(RecursiveSpec(VOCAB, LENGTH, **SIZES))
    assert model.halt_weight.abs().max() == 0 and model.halt_bias.tolist() == [-5.0, -5.0]
    assert "halt_bias" in dict(model.named_parameters())


# -- nothing leaks ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("at", range(LENGTH))
@torch.no_grad()
def test_in_causal_rows_a_token_does_not_affect_earlier_positions(at):
    model = model_of(causal=True)
    (z_H, z_L, inputs, picked), _ = rows_of(model)
    _, _, one, one_halt = model(z_H, z_L, inputs, picked)
    inputs[:, at] = inputs[:, at] % (VOCAB - 1) + 1
    _, _, other, other_halt = model(z_H, z_L, inputs, picked)
    assert torch.equal(one[:, :at], other[:, :at]) and not torch.equal(one[:, at], other[:, at])
    assert torch.equal(one_halt, other_halt), "the halting head has seen an answer"


# -- the carry -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("logit, done, budget, least, through", [
    (-1.0, 1, 0, 0, False), (1.0, 1, 0, 0, True), (0.0, 1, 0, 0, False),  # the head alone
    (-1.0, 4, 0, 0, True), (-1.0, 3, 0, 0, False),  # the run's maximum
    (-1.0, 2, 2, 0, True), (-1.0, 1, 2, 0, False), (-1.0, 4, 9, 0, True),  # a budget, and one above the maximum
    (1.0, 1, 2, 0, True),  # the head before the budget
    (1.0, 1, 0, 3, False), (1.0, 3, 0, 3, True), (-1.0, 4, 0, 9, True),  # exploring, but not beyond the maximum
    (-1.0, 2, 2, 4, True),  # nor beyond a budget
])  # fmt: skip
def test_when_a_row_halts(logit, done, budget, least, through):
    values = [torch.tensor([value]) for value in (logit, done, budget)]
    assert halting(*values, 4, torch.tensor([least])).tolist() == [through]


def batch_of(value: int) -> dict:
    rows, each = torch.full((3, LENGTH), value), torch.full((3,), value)
    return {"inputs": rows, "labels": rows + 1, "identifiers": each, "budgets": each}


def test_only_halted_rows_are_replaced_budgets_included():
    model = model_of()
    carry = refill(fresh(model, 3), batch_of(1), model)
    assert (carry.inputs == 1).all() and (carry.labels == 2).all() and carry.budgets.tolist() == [1, 1, 1]
    assert carry.segments.tolist() == [0, 0, 0] and not carry.halted.any()
    begin = [init.expand(3, 1 + LENGTH, -1) for init in (model.H_init, model.L_init)]
    torch.testing.assert_close([carry.z_H, carry.z_L], begin)
    moved = replace(
        carry, z_H=carry.z_H + 1, z_L=carry.z_L + 1, segments=torch.tensor([1, 2, 3]),
        halted=torch.tensor([False, True, False]),
    )  # fmt: skip
    again = refill(moved, batch_of(3), model)
    assert again.inputs[:, 0].tolist() == [1, 3, 1] and again.labels[:, 0].tolist() == [2, 4, 2]
    assert again.identifiers.tolist() == [1, 3, 1] and again.budgets.tolist() == [1, 3, 1]
    assert again.segments.tolist() == [1, 0, 3] and not again.halted.any()
    for found, kept, first in zip((again.z_H, again.z_L), (moved.z_H, moved.z_L), begin):
        torch.testing.assert_close(found[[0, 2]], kept[[0, 2]])
        torch.testing.assert_close(found[1], first[1])


# -- the puzzles' embeddings -----------------------------------------------------------------------------------------
def over_workers(identifiers: torch.Tensor, gradient: torch.Tensor, workers: int) -> torch.Tensor:
    """What the workers' sum gives for rows that they share evenly."""
    shares = zip(identifiers.chunk(workers), gradient.chunk(workers))
    return sum(rows_to_sum(*share, torch.arange(workers) == rank) for rank, share in enumerate(shares))


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("identifiers", [[2, 2, 5, 2, 5, 8, 7, 7], [0, 1, 0, 3, 0, 1, 0, 0], [4] * 8])
def test_sign_update_equals_a_dense_reference_and_leaves_other_embeddings_alone(identifiers, workers):
    """Identifiers repeat within and across workers, and gradients of one puzzle partly cancel."""
    table, gradient, lr, decay = noise(9, 4), noise(8, 4, seed=1), 0.1, 0.5
    gradient[3] = -gradient[0]
    before, wanted = table.clone(), table.clone()
    for puzzle in set(identifiers):
        total = sum(gradient[row] for row in range(8) if identifiers[row] == puzzle)
        wanted[puzzle] = wanted[puzzle] * (1 - lr * decay) - lr * total.sign()
    sign_update(table, over_workers(torch.tensor(identifiers), gradient, workers), lr, decay)
    torch.testing.assert_close(table, wanted, rtol=0, atol=1e-12)
    others = [puzzle for puzzle in range(9) if puzzle not in identifiers]
    assert torch.equal(table[others], before[others])


def test_fp32_gradients_of_one_puzzle_give_the_same_bits_for_any_number_of_workers():
    identifiers, gradient = torch.arange(48) % 5, noise(48, 33).float()
    tables = [torch.ones(7, 33) for _ in range(4)]
    for table, workers in zip(tables, (1, 2, 3, 16)):
        sign_update(table, over_workers(identifiers, gradient, workers), 0.1, 0.5)
    assert all(torch.equal(table, tables[0]) for table in tables[1:])


def test_identifiers_that_fp32_cannot_hold_are_exact():
    first = 2**24 + 1
    table = torch.zeros(first + 3, 1)
    sign_update(table, over_workers(torch.tensor([first, first + 2]), torch.tensor([[1.0], [-1.0]]), 2), 0.5, 0.0)
    assert table.nonzero()[:, 0].tolist() == [first, first + 2] and table[first:, 0].tolist() == [-0.5, 0, 0.5]


# -- impossible sizes ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("changes, said", [
    ({"hidden_size": 20, "num_heads": 4}, "arch.hidden_size 20 does not divide by twice arch.num_heads 4"),
    ({"num_kv_heads": 3}, "arch.num_heads 4 does not divide by arch.num_kv_heads 3"),
    ({"puzzle_emb_ndim": 33, "puzzle_emb_len": 2}, "arch.puzzle_emb_ndim 33 is more than arch.puzzle_emb_len 2 "),
    ({"mlp_t": True, "causal": True}, "use arch.mlp_t=false"),
])  # fmt: skip
def test_impossible_sizes_are_refused_with_both_numbers(changes, said):
    with pytest.raises(UserError, match=said):
        RecursiveSpec(VOCAB, LENGTH, **(SIZES | changes))


@pytest.mark.parametrize(
    "changes", [{}, {"mlp_t": True, "puzzle_emb_len": 16}, {"num_kv_heads": 2}, {"L_layers": 3, "expansion": 2.0}]
)
def test_the_spec_knows_the_number_of_weights(changes):
    spec = RecursiveSpec(VOCAB, LENGTH, **(SIZES | changes))
    assert spec.parameters == sum(p.numel() for p in RecursiveModel(spec).parameters())
