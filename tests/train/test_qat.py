"""End-to-end QAT: it learns, counts updates, reduces gradients once and clips them afterwards; restoring is strict."""

import dataclasses
import math
from functools import partial

import pytest
import torch
from loops import train_qat
from students import student_of

from qat_lora.backend import TorchBackend
from qat_lora.data.batches import batches
from qat_lora.errors import UserError
from qat_lora.kd.training import heldout_figures, kd_loss
from qat_lora.quant.linear import quantized_layers
from qat_lora.quant.rates import rate_shares, usual_rates
from qat_lora.quant.student import StudentSpec
from qat_lora.run.rundir import Run
from qat_lora.run.session import Every, Session
from qat_lora.train.loop import Plan, restore

PLAN = Plan(6, 4, 1, 4e-3, warmup_steps=2, clip_grad_norm=1.0, seed=0)


@pytest.fixture(scope="module")
def new_student(sharp_model_dir):
    return partial(student_of, sharp_model_dir, StudentSpec("balanced2/g32", "lut2/r4", "balanced4/g32"))


@pytest.fixture(scope="module")
def train(new_student, data, backend, tmp_path_factory):
    """train(plan, backend): (student, lines of metrics.jsonl with a loss)."""

    def run(plan, backend=backend):
        student = new_student()
        session = Session(Run(tmp_path_factory.mktemp("run"), resumed=False), backend, Every(log=1))
        train_qat(student, data[0], plan, session, lambda step: {})
        return student, [line for line in session.run.metrics() if "loss" in line]

    return run


@pytest.fixture(scope="module")
def usual(train):
    """The student trained by PLAN, and its lines. Do not change it."""
    return train(PLAN)


class Counting(TorchBackend):
    """Records its calls, rates and norms; its reduction multiplies by 1.5, as if another worker added half our
    gradient."""

    def __init__(self):
        super().__init__("cpu", "fp32")
        self.calls, self.norms, self.rates = [], [], []

    def reduce(self, tensors):
        self.calls.append("reduce")
        for tensor in tensors:
            tensor.mul_(1.5)

    def prepare(self, optimizer):
        step = optimizer.step

        def watched():
            self.calls.append("step")
            self.rates.append([group["lr"] for group in optimizer.param_groups])
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            self.norms.append(float(torch.linalg.vector_norm(torch.stack([g.norm() for g in grads]))))
            step()

        optimizer.step = watched


# -- learning ---------------------------------------------------------------------------------------------------------
def test_the_loss_falls_and_the_student_approaches_the_teacher(train, new_student, data, backend):
    student, lines = train(dataclasses.replace(PLAN, steps=40))
    for figure, floor in (("loss", lines[0]["loss"] - lines[0]["kl"]), ("kl", 0)):
        values = [line[figure] - floor for line in lines]
        assert sum(values[-10:]) < 0.6 * sum(values[:10]), f"{figure} above the teacher's entropy"
    before, after = (heldout_figures(s, data[1], backend, 4, 8)["heldout_kl"] for s in (new_student(), student))
    assert after < 0.85 * before


def test_all_parameters_are_trained(usual, new_student):
    for (name, p), q in zip(usual[0].named_parameters(), new_student().parameters()):
        assert not torch.equal(p, q), name


def test_metrics_equal_those_computed_by_hand(usual, new_student, data):
    """Loss, KL and gradient norm of the first update, computed directly from its batch."""
    student, lines = new_student(), usual[1]
    batch = next(batches(data[0], 4, 1, PLAN.seed))
    loss = kd_loss(student, batch)
    loss.backward()
    norm = math.sqrt(sum(float(p.grad.square().sum()) for p in student.parameters()))
    assert lines[0]["loss"] == pytest.approx(loss.item(), rel=1e-6)
    assert lines[0]["kl"] == pytest.approx(loss.item() - batch["entropy"].mean().item(), rel=1e-5)
    assert lines[0]["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert lines[0]["tokens"] == 4 * 32


SHARES = {"int2/g32": (3.1e-3, 3.1e-3), "lut4/r4": (1.3e-4, 5.2e-4), "int8/g32": (3.6e-6, 1.4e-5)}


@pytest.mark.parametrize("spec", SHARES)
def test_the_usual_rates_are_proportional_to_the_weights(sharp_model_dir, spec):
    student = student_of(sharp_model_dir, StudentSpec(spec, spec))
    for times in (1.0, 5.0):
        weights = [layer.weight.data.mul_(times).flatten() for layer in quantized_layers(student).values()]
        size = float(torch.cat(weights).square().mean().sqrt())
        assert usual_rates(student) == pytest.approx([share * size for share in SHARES[spec]], rel=0.06)


def test_the_usual_rates_are_those_of_the_coarsest_quantiser(sharp_model_dir):
    specs = ("int4/g32", "int4/g32"), ("int2/g32", "int2/g32"), ("int2/g32", "int4/g32")
    fine, coarse, mixed = (usual_rates(student_of(sharp_model_dir, StudentSpec(*spec))) for spec in specs)
    assert coarse == mixed and coarse > fine


def test_layers_of_more_bits_train_at_their_own_rate(train):
    """In the first update of `train`'s student, whose MLP and attention have 2 bits and whose head has 4."""
    backend = Counting()
    student, _ = train(dataclasses.replace(PLAN, steps=1, warmup_steps=0), backend)
    head = student.get_output_embeddings()
    shares, layerwise = rate_shares(student), rate_shares(student, layerwise=True)
    for name, layer in quantized_layers(student).items():
        wanted = (1 / 24, 1 / 6) if layer is head else (1, 1)
        for p in (layer.weight, *layer.quantizer.parameters()):
            assert (shares[p], layerwise[p]) == pytest.approx(wanted), name
    assert backend.rates == [pytest.approx([PLAN.learning_rate, PLAN.learning_rate / 24])]


def test_the_usual_rates_are_valid_for_any_weights(new_student):
    student = new_student()
    for value in (0.0, math.nan, math.inf):
        for layer in quantized_layers(student).values():
            layer.weight.data.fill_(value)
        for rate in usual_rates(student):
            dataclasses.replace(PLAN, learning_rate=rate)


# -- updates ----------------------------------------------------------------------------------------------------------
def test_accumulation_equals_one_large_batch(usual, train):
    """Two micro-batches of two rows equal one of four: same updates, and metrics cover the whole update."""
    whole, lines = usual
    parts, accumulated = train(dataclasses.replace(PLAN, batch_size=2, accumulation=2))
    for one, other in zip(lines, accumulated, strict=True):
        assert other["tokens"] == one["tokens"]
        for figure in ("loss", "kl", "grad_norm"):
            assert other[figure] == pytest.approx(one[figure], rel=1e-3), figure
    for p, q in zip(whole.parameters(), parts.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_an_update_reduces_once_then_clips_at_the_logged_rate(train, usual, accumulation):
    """The original reduced gradients again inside xm.optimizer_step, and its schedule counted micro-batches."""
    backend, plan = Counting(), dataclasses.replace(PLAN, accumulation=accumulation)
    _, lines = train(dataclasses.replace(plan, clip_grad_norm=0.1), backend=backend)
    assert backend.calls == ["reduce", "step"] * PLAN.steps
    assert backend.norms == pytest.approx([0.1] * PLAN.steps, rel=1e-3)
    if accumulation == 1:
        assert lines[0]["grad_norm"] == pytest.approx(1.5 * usual[1][0]["grad_norm"]), "reduced, not yet clipped"
    rates = [line["lr"] for line in lines]
    assert rates[:3] == pytest.approx([PLAN.learning_rate * f for f in (1 / 3, 2 / 3, 1)])
    assert rates[3:] == sorted(rates[3:], reverse=True) and rates[-1] < 0.5 * PLAN.learning_rate
    assert backend.rates == [pytest.approx([rate, rate / 24]) for rate in rates]


# -- refusals ---------------------------------------------------------------------------------------------------------
def test_restore_is_strict(new_student):
    """The original loaded checkpoints with strict=False, which hid every mismatch."""
    student, other = new_student(), new_student()
    saved = {name: p.detach() + 1 for name, p in student.named_parameters()}
    restore(other, saved)
    assert all(torch.equal(p, saved[name]) for name, p in other.named_parameters())
    name = "model.layers.0.mlp.up_proj.quantizer.scale"
    for bad, wrong in (
        ({n: t for n, t in saved.items() if n != name}, f"only one side has parameter {name}"),
        (saved | {"model.extra": torch.ones(1)}, "only one side has parameter model.extra"),
        (saved | {name: saved[name].squeeze(2)}, r"\[128, 2\] there, \[128, 2, 1\] here"),
    ):
        with pytest.raises(UserError, match=wrong):
            restore(other, bad)


# -- impossible plans ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "changes, said",
    [
        ({"steps": -1}, "steps -1 must be from 0"), ({"batch_size": 0}, "batch_size 0"), 
        ({"learning_rate": math.nan}, "learning_rate nan"),
    ],
)  # fmt: skip
def test_an_impossible_plan_is_refused(changes, said):
    with pytest.raises(UserError, match=said):
        dataclasses.replace(PLAN, **changes)
