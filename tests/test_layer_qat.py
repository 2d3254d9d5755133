"""Layer-wise QAT: each block learns its full-precision outputs from quantised inputs, and nothing else changes."""

import dataclasses
from functools import partial
from itertools import islice

import pytest
import torch
from students import student_of

from qat_lora.data.batches import batches
from qat_lora.kd.training import heldout_figures
from qat_lora.layer_qat import LayerPlan, relative_error, train_layers
from qat_lora.models.architecture import decoder_layers
from qat_lora.quant.blockwise import block_outputs, first_inputs, run_block
from qat_lora.quant.linear import full_precision
from qat_lora.quant.student import StudentSpec

PLAN = LayerPlan(steps=12, learning_rate=4e-3, clip_grad_norm=1.0)


@pytest.fixture(scope="module")
def data(data):
    """Ten batches of four rows, and the held-out rows."""
    return list(islice(batches(data[0], 4, 1, seed=0), 10)), data[1]


@pytest.fixture
def new_student(sharp_model_dir):
    return partial(student_of, sharp_model_dir, StudentSpec("balanced2/g32", "lut2/r4"))


@pytest.fixture
def train(new_student, make_session, data, backend):
    """train(plan, name): (student, lines of metrics.jsonl) of layer-wise training."""

    def run(plan=PLAN, name="run"):
        student, session = new_student(), make_session(name, backend)
        train_layers(student, data[0], plan, session)
        return student, session.run.metrics()

    return run


def test_every_block_and_the_whole_model_improve(train, new_student, data, backend):
    student, lines = train(dataclasses.replace(PLAN, steps=60))
    assert [line["block"] for line in lines] == [0] * 60 + [1] * 60
    for block, bound in ((lines[:60], 0.75), (lines[60:], 0.8)):  # the second one also corrects the first one's errors
        losses = [line["loss"] for line in block]
        assert sum(losses[-10:]) < bound * sum(losses[:10]), "the last pass over the ten batches against the first"
    before, after = (heldout_figures(s, data[1], backend, 4, 8)["heldout_kl"] for s in (new_student(), student))
    assert after < 0.82 * before


def test_only_the_current_block_changes(new_student, make_session, data, backend, monkeypatch):
    student, seen = new_student(), []
    update = backend.update

    def watched(optimizer, clip):
        before = [p.detach().clone() for p in student.parameters()]
        norm = update(optimizer, clip)
        moved = {name for (name, p), old in zip(student.named_parameters(), before) if not torch.equal(p, old)}
        seen.append((len(seen) // 2, moved))
        assert all(p.grad is None for p in student.parameters())
        return norm

    monkeypatch.setattr(backend, "update", watched)
    plan = dataclasses.replace(PLAN, steps=2)
    train_layers(student, data[0], plan, make_session("run", backend))
    for index in (0, 1):
        names = {f"model.layers.{index}.{name}" for name, _ in decoder_layers(student)[index].named_parameters()}
        first, second = (moved for block, moved in seen if block == index)
        assert first == names and second <= names, "all latents, scales and norms of one block"
    assert len(seen) == 4
    assert all(p.requires_grad for name, p in student.named_parameters() if "embed" not in name)


def test_no_position_dominates_the_loss():
    wanted = torch.ones(1, 4, 8)
    answer = wanted + torch.tensor([0.0, 0.5, 1000.0, -1001.0]).view(1, 4, 1)
    answer.requires_grad_()
    error = relative_error(answer, wanted)
    torch.testing.assert_close(error[0], torch.tensor([0.0, (0.5 / 1.5) ** 2, (1000 / 1001) ** 2, (1001 / 1000) ** 2]))
    error.sum().backward()
    assert answer.grad[0, 0].abs().max() == 0, "no gradient where there is no error"
    assert answer.grad[0, 2].norm() < answer.grad[0, 1].norm() and (answer.grad[0, 2] > 0).all()


def test_targets_come_from_the_full_precision_model(new_student, make_session, data, backend):
    """The first update of the second block, computed by hand: its input comes from the student, whose first block is
    trained by then, and its target from the original model, with no block quantised."""
    student, original, session = new_student(), new_student(), make_session("run", backend)
    train_layers(student, data[0], dataclasses.replace(PLAN, steps=3), session)
    tokens = data[0][0]["tokens"]
    with torch.no_grad():
        (embedded,), calls = first_inputs(original, [{"tokens": tokens}], backend)
        assert torch.equal(embedded, original.model.embed_tokens(tokens))
        first, second = (calls[index][0] for index in range(2))
        out = run_block(decoder_layers(original)[1], run_block(decoder_layers(student)[0], embedded, first), second)
        with full_precision(original):
            target = embedded
            for layer, call in zip(decoder_layers(original), (first, second)):
                target = run_block(layer, target, call)
        size = torch.stack([out.square().sum(-1), target.square().sum(-1)]).amax(0)
        loss = ((out - target).square().sum(-1) / size).mean()
    logged = session.run.metrics()[3]
    assert logged["block"] == 1 and logged["loss"] == pytest.approx(float(loss), rel=1e-5)


@torch.no_grad()
def test_blocks_one_by_one_equal_the_model(new_student, data, backend):
    student = new_student()
    tokens = data[0][0]["tokens"]
    hidden, calls = first_inputs(student, [{"tokens": tokens}], backend)
    for index, layer in enumerate(decoder_layers(student)):
        hidden = block_outputs(layer, hidden, calls[index], backend)
    torch.testing.assert_close(student.lm_head(student.model.norm(hidden[0])), student(tokens).logits)


def test_the_learning_rate_restarts_for_every_block(train):
    _, lines = train(dataclasses.replace(PLAN, steps=4))
    rates = [line["lr"] for line in lines]
    assert rates[:4] == rates[4:] and rates[0] == PLAN.learning_rate
    assert rates[:4] == sorted(set(rates), reverse=True), "strictly decreasing"


def test_a_resumed_run_equals_an_uninterrupted_one(train, new_student, make_session, data, backend, monkeypatch):
    """Three updates per block, killed after a checkpoint: within the first block, between both, within the second."""
    plan = dataclasses.replace(PLAN, steps=3)
    whole, lines = train(plan, "whole")
    for stop in (2, 3, 5):
        first = make_session(str(stop), backend, save=1)

        def die(step, save=first._save, stop=stop):
            save(step)
            if step == stop:
                raise KeyboardInterrupt

        monkeypatch.setattr(first, "_save", die)
        with pytest.raises(KeyboardInterrupt):
            train_layers(new_student(), data[0], plan, first)
        student, again = train(plan, str(stop))
        assert [line["loss"] for line in again] == [line["loss"] for line in lines]
        assert all(torch.equal(p, q) for p, q in zip(student.parameters(), whole.parameters()))
