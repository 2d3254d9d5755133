"""Scopes of an end-to-end stage, its moving average, and training only the scales."""

import dataclasses

import pytest
import torch
from loops import train_qat
from students import student_of

from qat_lora.kd.training import QATPlan
from qat_lora.quant.linear import freeze, quantized_layers
from qat_lora.quant.student import StudentSpec, plain_model, quantize
from qat_lora.train.loop import update_ema

SPEC = StudentSpec("int2/g32", "lut2/r4")
PLAN = QATPlan(6, 4, 1, 4e-3, warmup_steps=2, clip_grad_norm=1.0, seed=0, scale_learning_rate=4e-3)


@pytest.fixture
def new_student(sharp_model_dir):
    return lambda spec=SPEC: student_of(sharp_model_dir, spec)


def values_of(student):
    return {name: p.detach().clone() for name, p in student.named_parameters()}


def same(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def codes_of(student):
    return {name: layer.quantizer.encode(layer.weight) for name, layer in quantized_layers(student).items()}


# -- scopes -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("scope", "moves"),
    [("mlp", lambda n: ".mlp." in n), ("attn", lambda n: ".self_attn." in n), ("weights", lambda n: "scale" not in n)],
)
def test_only_parameters_in_the_scope_change(scope, moves, new_student, data, make_session, backend):
    student, plan = new_student(StudentSpec("int2/g32", "balanced4/g32")), dataclasses.replace(PLAN, scope=scope)
    trained = {name for name, p in student.named_parameters() if p.requires_grad}
    before = values_of(student)
    train_qat(student, data[0], plan, make_session("run", backend), no_figures)
    moved = {name for name, p in student.named_parameters() if not torch.equal(p, before[name])}
    assert moved and moved == {name for name in trained if moves(name)}


def no_figures(step, model):
    return {}


# -- the moving average -----------------------------------------------------------------------------------------------
def test_the_average_equals_one_computed_by_hand():
    average, student = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    student.bias.requires_grad_(False)
    average.weight.data.fill_(1), average.bias.data.fill_(7)
    for value, wanted in ((5.0, 2.0), (2.0, 2.0), (6.0, 3.0)):
        student.weight.data.fill_(value)
        update_ema(average, student, 0.75)
        assert average.weight.item() == pytest.approx(wanted) and average.bias.item() == 7


def test_the_average_is_evaluated_does_not_affect_training_and_survives_a_resume(
    new_student, data, make_session, backend, dies_at
):
    averaging = dataclasses.replace(PLAN, ema=0.5)

    def train(run, plan=averaging):
        """(student, values of the model evaluated last, whether that was the student)"""
        student, measured = new_student(), []

        def evaluate(step, model):
            measured[:] = values_of(model), model is student
            return {}

        train_qat(student, data[0], plan, make_session(run, backend, save=2), evaluate)
        return values_of(student), *measured

    plain, _, itself = train("plain", PLAN)
    student, average, _ = train("whole")
    assert itself and same(student, plain)
    assert not torch.equal(average["model.norm.weight"], student["model.norm.weight"])
    assert torch.equal(average["model.embed_tokens.weight"], student["model.embed_tokens.weight"])
    with dies_at(4):
        train("parts")
    assert same(train("parts")[1], average)


def test_a_four_bit_student_becomes_a_two_bit_one(new_student, sharp_model_dir):
    """The new student's latent weights are the old one's quantised weights, and its norms are copied too."""
    fine = new_student(StudentSpec("balanced4/g32", "balanced4/g32"))
    fine.model.norm.weight.data.mul_(1.5)
    freeze(fine)
    shown = values_of(fine)
    coarse = quantize(plain_model(fine), SPEC)
    for name, p in coarse.named_parameters():
        if ".quantizer." not in name:
            assert torch.equal(p, shown[name]), name
    assert coarse.model.layers[0].mlp.up_proj.quantizer.spec.bits == 2
    assert coarse.model.layers[0].mlp.up_proj.weight.requires_grad
