"""Training a recursive model: the rows of an update, halting over time, evaluation, resuming."""

import io
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from loops import script, train_recursive
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from qat_lora.ahead.rehearsal import Updates
from qat_lora.backend import TorchBackend
from qat_lora.errors import UserError
from qat_lora.experiments.athena.evaluation import answer, kept, measure
from qat_lora.experiments.athena.model import IGNORE, RecursiveModel, RecursiveSpec
from qat_lora.experiments.athena.published import TABLE
from qat_lora.experiments.athena.rows import corpus, draw, split
from qat_lora.experiments.athena.training import RecursivePlan, Trainer, segment_batches
from qat_lora.run.metrics import Ratio, parts_of

CPU = TorchBackend("cpu", "fp32")
NAMES = ("inputs", "labels", "identifiers", "budgets", "least")
PLAN = RecursivePlan(
    steps=20, batch_size=8, learning_rate=1e-2, warmup_steps=3, floor=0.1, clip_grad_norm=1.0, seed=0,
    segments=3, ema=0.9, exploration=0.5,
)  # fmt: skip


@pytest.fixture(scope="module")
def rows():
    return split(draw("sudoku4", 40, 0), 0.2, 0)


def model_of(rows, **changes) -> RecursiveModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_heads": 2, "H_cycles": 2, "L_cycles": 2, "mlp_t": True}
    model = RecursiveModel(RecursiveSpec(rows.vocab, rows.length, **(sizes | changes)))
    nn.init.normal_(model.halt_weight, std=3)  # so that rows halt at different times
    nn.init.zeros_(model.halt_bias)
    return model


def train(trainer: Trainer, rows, first: int, last: int) -> list[dict]:
    session = Updates(CPU, first, last)
    train_recursive(trainer, rows, session)
    return [{name: float(part.value) for name, part in parts_of(figures).items()} for figures in session.figures]


def budgets_only(model: RecursiveModel) -> RecursiveModel:
    """A model whose halting head never halts a row."""
    nn.init.zeros_(model.halt_weight)
    nn.init.constant_(model.halt_bias, -50.0)
    return model


# -- which rows ------------------------------------------------------------------------------------------------------
def test_every_epoch_has_every_row_once(rows):
    train_rows = replace(rows[0], kind=None)  # no symmetries: rows can be told apart
    plan = replace(PLAN, steps=len(train_rows))  # 8 epochs
    seen = torch.cat([batch["inputs"] for batch in segment_batches(train_rows, plan, 0)])
    for epoch in seen.split(len(train_rows)):
        assert sorted(map(tuple, epoch.tolist())) == sorted(map(tuple, train_rows.inputs.tolist()))


@pytest.fixture
def grouped(rows):
    """The 32 rows in 8 groups, each with one puzzle of 2 rows and two puzzles of 1 row; all rows differ."""
    row = np.arange(32, dtype=np.int32)
    return replace(rows[0], kind=None, puzzle=row // 4 * 3 + np.array([0, 0, 1, 2])[row % 4], group=row // 4)


@pytest.mark.parametrize("in_groups", [False, True])
def test_rows_are_the_same_for_two_workers_together_and_after_resuming(rows, grouped, in_groups):
    data = grouped if in_groups else rows[0]
    whole = list(segment_batches(data, PLAN, 0))
    halves = zip(*(segment_batches(data, PLAN, 0, rank, 2) for rank in (0, 1)))
    for one, (left, right) in zip(whole, halves, strict=True):
        assert all(torch.equal(torch.cat([left[name], right[name]]), one[name]) for name in NAMES)
    for one, later in zip(whole[7:], segment_batches(data, PLAN, 7), strict=True):
        assert all(torch.equal(one[name], later[name]) for name in NAMES)


def test_evaluation_uses_every_row_and_ignores_groups(grouped):
    model = model_of(grouped)
    plain = replace(grouped, puzzle=None, group=None)
    assert measure(model, grouped, 3, 8, CPU) == measure(model, plain, 3, 8, CPU)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_configured_share_of_rows_explores(rows, share):
    plan = replace(PLAN, steps=200, exploration=share)
    least = torch.cat([batch["least"] for batch in segment_batches(rows[0], plan, 0)])
    assert (least > 0).float().mean().item() == pytest.approx(share, abs=0.1 * bool(share))
    assert set(least.tolist()) == ({0, 2, 3} if share else {0})


def test_the_learning_rate_rises_and_then_falls_to_its_floor():
    factors = [PLAN.factor(step) for step in range(1, 21)]
    assert factors[:3] == pytest.approx([0.25, 0.5, 0.75]) and factors[-1] == pytest.approx(0.1, abs=0.02)
    assert max(factors) == factors[3] > 0.95
    assert factors[3:] == sorted(factors[3:], reverse=True) and min(factors[3:]) >= 0.1
    assert replace(PLAN, floor=1.0).factor(20) == pytest.approx(1.0)


# -- an update -------------------------------------------------------------------------------------------------------
def test_rows_stay_until_they_reach_their_own_budget(rows):
    """A row that continues keeps its own targets and budget instead of the incoming batch's."""
    texts = [{"prompt": f"{n}?", "response": str(n), "iterations": n % 3 + 1} for n in range(8)]
    data, _ = corpus(texts, "t", 6, False, 0)
    trainer, since = Trainer(budgets_only(model_of(data)), replace(PLAN, learning_rate=1e-6), CPU), {}
    carries, batches = [trainer.carry], segment_batches(data, trainer.plan, 0)

    def check(number: int) -> None:
        before, carry, batch = carries[-1], trainer.carry, next(batches)
        for row in range(8):
            came = batch if before.halted[row] else vars(before)
            assert torch.equal(carry.inputs[row], came["inputs"][row])
            assert torch.equal(carry.labels[row], came["labels"][row]) and carry.budgets[row] == came["budgets"][row]
            since[row] = 1 if before.halted[row] else since[row] + 1
            assert carry.segments[row] == since[row]
            assert bool(carry.halted[row]) == (since[row] == carry.budgets[row])
        carries.append(carry)

    train_recursive(trainer, data, Updates(CPU, last=12, after=check))
    assert len(carries) == 13 and set(trainer.carry.budgets.tolist()) == {1, 2, 3}


def test_an_update_changes_all_weights(rows):
    model = model_of(rows[0])
    trainer = Trainer(model, replace(PLAN, ema=0.0), CPU)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    train(trainer, rows[0], 1, 2)
    assert all(not torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert trainer.shown is model


def test_the_moving_average_follows_its_formula(rows):
    model = model_of(rows[0])
    trainer = Trainer(model, replace(PLAN, ema=0.75), CPU)
    wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
    for number in range(1, 5):
        train(trainer, rows[0], number, number)
        wanted = {name: 0.75 * wanted[name] + 0.25 * p.detach() for name, p in model.named_parameters()}
    torch.testing.assert_close({name: p.detach() for name, p in trainer.shown.named_parameters()}, wanted)


def test_only_embeddings_of_puzzles_in_the_batch_change(rows):
    data = replace(rows[0], identifiers=np.arange(len(rows[0])) % 3 + 1, identifiers_count=6)
    model = model_of(data, identifiers=6)
    trainer = Trainer(model, replace(PLAN, identifier_learning_rate=0.5, identifier_weight_decay=0.0), CPU)
    train(trainer, data, 1, 1)
    moved = (model.identity != 0).any(1).tolist()
    assert moved == [False, True, True, True, False, False]
    sizes = model.identity[1:4].abs()
    torch.testing.assert_close(sizes, torch.full_like(sizes, 0.5 * PLAN.factor(1)))
    assert trainer.shown.identity is model.identity


class Sizes(TorchDispatchMode):
    """Notes the operations that return other tensors of at least `most` elements than `table`."""

    def __init__(self, table: torch.Tensor, most: int):
        super().__init__()
        self.table, self.most, self.found = table, most, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, list | tuple) else [made]:
            large = isinstance(tensor, torch.Tensor) and tensor.numel() >= self.most
            if large and tensor.data_ptr() != self.table.data_ptr():
                self.found.append(str(function))
        return made


def test_neither_a_trainer_nor_its_updates_copy_the_puzzles_embeddings(rows):
    count = 150_000
    data = replace(rows[0], identifiers=np.arange(len(rows[0])) * 7 + count // 2, identifiers_count=count)
    model = model_of(data, identifiers=count)
    with Sizes(model.identity, count) as sizes:
        train(Trainer(model, PLAN, CPU), data, 1, 3)
        assert not sizes.found
        model.identity.sign()
    assert sizes.found == ["aten.sign.default"]
    assert set(model.identity.any(1).nonzero()[:, 0].tolist()) <= set(data.identifiers.tolist())


def test_metrics_count_only_halted_rows_with_labels(rows):
    """An untrained model gets none of them right."""
    labels = np.where(np.arange(len(rows[0]))[:, None] % 2, IGNORE, rows[0].labels)
    data, counts = replace(rows[0], labels=labels, kind=None), []
    trainer = Trainer(model_of(data), replace(PLAN, exploration=1.0), CPU)
    session = Updates(CPU, last=6)

    def check(number: int) -> None:
        found, carry = session.figures[-1], trainer.carry
        ended = (carry.halted & (carry.labels != IGNORE).any(1)).nonzero()[:, 0]
        counts.append(len(ended))
        assert carry.halted.sum() >= len(ended)
        assert found["segments"] == Ratio(carry.segments[ended].sum(), len(ended))
        assert found["exact"] == Ratio(0, len(ended))
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * PLAN.factor(number))

    session.after = check
    train_recursive(trainer, data, session)
    assert 0 in counts and max(counts) > 1


def test_the_loss_falls(rows):
    trainer = Trainer(model_of(rows[0]), replace(PLAN, steps=100, batch_size=16, segments=4, warmup_steps=10), CPU)
    found = train(trainer, rows[0], 1, 100)
    first, last = (sum(line["loss"] for line in part) for part in (found[:10], found[-10:]))
    assert last < 0.8 * first


# -- measuring -------------------------------------------------------------------------------------------------------
def test_batched_evaluation_equals_evaluating_one_row_at_a_time(rows):
    """The reference runs each row that has labels alone, until its head halts and to the end."""
    model, heldout = model_of(rows[1]), rows[1]
    # make answers partly right: half of the labels are the model's own answers
    found, _ = answer(model, heldout.batch(np.arange(len(heldout))), 3, CPU)
    labels = heldout.labels.copy()
    labels[::2], labels[1::4, 4:], labels[3] = found.full[::2], IGNORE, IGNORE
    heldout = replace(heldout, labels=labels)
    exact, cells, used, loss = [[], []], [[], []], [], []
    for number in np.flatnonzero((labels != IGNORE).any(1)):
        batch = heldout.batch(np.array([number]))
        z_H, z_L = (model.H_init.expand(1, 17, -1), model.L_init.expand(1, 17, -1))
        asked, early = batch["labels"] != IGNORE, None
        for segment in range(1, 4):
            with torch.no_grad():
                z_H, z_L, logits, halt = model(z_H, z_L, batch["inputs"], model.identity[:1])
            if early is None and (halt > 0 or segment == 3):
                early = logits.argmax(-1)
                used.append(segment)
        share = torch.where(logits < 0, 1 / (1 - logits), logits + 1)
        share = (share / share.sum(-1, keepdim=True)).log().gather(-1, batch["labels"].clamp(min=0)[..., None])
        loss += (-share[..., 0][asked]).tolist()
        for where, tokens in enumerate((early, logits.argmax(-1))):
            right = (tokens == batch["labels"])[asked]
            exact[where].append(float(right.all()))
            cells[where] += right.float().tolist()
    wanted = {
        "heldout_exact": np.mean(exact[0]), "heldout_cells": np.mean(cells[0]), "heldout_exact_full": np.mean(exact[1]),
        "heldout_cells_full": np.mean(cells[1]), "heldout_loss": np.mean(loss), "heldout_segments": np.mean(used),
        "heldout_rows": len(used),
    }  # fmt: skip
    for batch_size in (2, 3, len(heldout), 20):  # whatever pads the last batch
        assert measure(model, heldout, 3, batch_size, CPU) == pytest.approx(wanted)
    assert 0 < wanted["heldout_exact_full"] < 1 and 1 < wanted["heldout_segments"] < 3


@pytest.mark.parametrize("workers, batch_size", [(2, 12), (2, 4), (4, 12), (4, 8)])
def test_workers_evaluate_equally_many_batches_and_together_equal_one_worker(rows, workers, batch_size):
    """There are 8 rows, so in a batch of 12 some workers have only padding, which must not count."""
    model, heldout, boundaries = model_of(rows[1]), rows[1], []

    class Worker(TorchBackend):
        def step_boundary(self):
            boundaries[-1] += 1

    def sums(rank: int, count: int) -> list[float]:
        backend, given = Worker("cpu", "fp32"), []
        backend.group = SimpleNamespace(rank=rank, world_size=count, gather=lambda v: given.append(v) or [[1.0] * 8])
        boundaries.append(0)
        measure(model, heldout, 3, batch_size, backend)
        return given[0]

    shares = [sums(rank, workers) for rank in range(workers)]
    assert len(set(boundaries)) == 1
    assert np.sum(shares, 0) == pytest.approx(sums(0, 1))


def test_a_budget_halts_a_row_in_evaluation_too(rows):
    heldout = replace(rows[1], budgets=np.arange(len(rows[1])) % 2 + 1)
    found, _ = answer(budgets_only(model_of(heldout)), heldout.batch(np.arange(4)), 3, CPU)
    assert found.segments.tolist() == [1, 2, 1, 2]


# -- resuming -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ema", [0.9, 0.0])
def test_resumed_training_equals_uninterrupted_training(rows, ema):
    """Including carry, moving average, optimiser and puzzles' embeddings."""
    plan = replace(PLAN, ema=ema)
    whole = Trainer(model_of(rows[0]), plan, CPU)
    wanted = train(whole, rows[0], 1, 12)
    first = Trainer(model_of(rows[0]), plan, CPU)
    assert train(first, rows[0], 1, 5) == wanted[:5]
    assert not first.carry.halted.all(), "the test would not notice a lost carry"
    state = [dict(part) for part in first.state()]
    again = Trainer(model_of(rows[0]), plan, CPU)
    nn.init.normal_(again.model.head)
    again.load(*state)
    assert train(again, rows[0], 6, 12) == wanted[5:]
    found = kept(again.shown, CPU)
    for name, tensor in kept(whole.shown, CPU).items():
        assert torch.equal(tensor, found[name]), name


def test_a_checkpoint_stores_the_puzzles_embeddings_twice_only_if_the_best_state_is_older(rows):
    data = replace(rows[0], identifiers=np.arange(len(rows[0])), identifiers_count=150_000)
    trainer = Trainer(model_of(data, identifiers=150_000), PLAN, CPU)
    table = trainer.model.identity

    def tables() -> float:
        """How many tables a checkpoint has room for; also loads it."""
        file = io.BytesIO()
        torch.save(trainer.state()[1], file)
        file.seek(0)
        assert torch.equal(torch.load(file)["identity"], table)
        return file.getbuffer().nbytes / table.nbytes

    train(trainer, data, 1, 1)
    assert tables() == pytest.approx(1, abs=0.2)
    trainer.evaluate(rows[1], 1)
    best = trainer.best["state"][TABLE]
    assert tables() == pytest.approx(1, abs=0.2) and torch.equal(best, table)
    before = table.clone()
    train(trainer, data, 2, 2)
    assert tables() == pytest.approx(2, abs=0.2) and torch.equal(best, before) and not torch.equal(best, table)


@pytest.mark.parametrize("changes, said", [
    ({"ema_decay": 1.0}, "--ema-decay 1.0 must be at least 0 and below 1"),
    ({"lr_min_ratio": 1.5}, "--lr-min-ratio 1.5 must be from 0 to 1"),
    ({"halt_exploration": -0.1}, "--halt-exploration -0.1 must be from 0 to 1"),
    ({"beta2": 1.0}, "--beta2 1.0 must be at least 0 and below 1"),
])  # fmt: skip
def test_impossible_options_are_refused(changes, said):
    with pytest.raises(UserError, match=said):
        script("pretrain").Config(**changes)
