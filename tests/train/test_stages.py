"""Scopes of an end-to-end stage, its moving average, and training only the scales."""

import dataclasses

import pytest
import torch

from qat_lora.kd.evaluation import heldout_figures
from qat_lora.kd.training import QATPlan, kd_loss, train_qat
from qat_lora.models.loading import load_model
from qat_lora.quant.init import initialise
from qat_lora.quant.linear import free_scales, freeze, quantized_layers
from qat_lora.quant.student import StudentSpec, load_student, quantize, reload_student, save_student, unquantised
from qat_lora.quant.training import select_parameters
from qat_lora.train.loop import update_ema

SPEC = StudentSpec("int2/g32", "lut2/r4")
PLAN = QATPlan(
    steps=6, batch_size=4, accumulation=1, learning_rate=4e-3, warmup_steps=2, clip_grad_norm=1.0, seed=0,
    scale_learning_rate=4e-3,
)  # fmt: skip


@pytest.fixture
def new_student(sharp_model_dir):
    def make(spec=SPEC):
        student = quantize(load_model(str(sharp_model_dir)), spec)
        initialise(student)
        return student

    return make


def values_of(student):
    return {name: p.detach().clone() for name, p in student.named_parameters()}


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


def test_a_scope_does_not_unfreeze_parameters(new_student):
    student = new_student()
    select_parameters(student, "all")
    assert not student.model.embed_tokens.weight.requires_grad


# -- the moving average -----------------------------------------------------------------------------------------------
def test_the_average_equals_one_computed_by_hand():
    average, student = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    student.bias.requires_grad_(False)
    average.weight.data.fill_(1), average.bias.data.fill_(7)
    for value, wanted in ((5.0, 2.0), (2.0, 2.0), (6.0, 3.0)):
        student.weight.data.fill_(value)
        update_ema(average, student, 0.75)
        assert average.weight.item() == pytest.approx(wanted) and average.bias.item() == 7


def test_the_average_is_evaluated_and_does_not_affect_training(new_student, data, make_session, backend):
    students, measured = {}, {}
    for name, plan in (("plain", PLAN), ("average", dataclasses.replace(PLAN, ema=0.5))):
        students[name] = new_student()

        def evaluate(step, model, name=name):
            measured[name] = model
            return {}

        train_qat(students[name], data[0], plan, make_session(name, backend), evaluate)
    assert measured["plain"] is students["plain"]
    average = values_of(measured["average"])
    for name, value in values_of(students["plain"]).items():
        assert torch.equal(value, students["average"].get_parameter(name)), name
    assert not torch.equal(average["model.norm.weight"], students["plain"].model.norm.weight)
    assert torch.equal(average["model.embed_tokens.weight"], students["plain"].model.embed_tokens.weight)


def test_a_resumed_run_keeps_its_average(new_student, data, make_session, backend):
    plan, measured = dataclasses.replace(PLAN, ema=0.5), {}

    def run(name, run_name, deadly=None):
        def evaluate(step, model):
            measured[name] = values_of(model)
            return {}

        session = make_session(run_name, backend, save=2)
        if deadly:
            record = session.record

            def killing(**values):
                nonlocal deadly
                deadly -= 1
                if not deadly:
                    raise KeyboardInterrupt
                record(**values)

            session.record = killing
        train_qat(new_student(), data[0], plan, session, evaluate)

    run("whole", "whole")
    with pytest.raises(KeyboardInterrupt):
        run("killed", "parts", deadly=4)
    run("resumed", "parts")
    for name, value in measured["whole"].items():
        assert torch.equal(value, measured["resumed"][name]), name


# -- scales only ------------------------------------------------------------------------------------------------------
def test_training_only_the_scales_improves_the_student_and_keeps_codes(new_student, data, make_session, backend):
    student = new_student()
    before, codes = heldout_figures(student, data[1], backend, 4, 8)["heldout_kl"], codes_of(student)
    freeze(student)
    free_scales(student.requires_grad_(False))
    plan = dataclasses.replace(PLAN, steps=60, scale_learning_rate=1e-2)
    train_qat(student, data[0], plan, make_session("run", backend), no_figures, stage="scales")
    assert heldout_figures(student, data[1], backend, 4, 8)["heldout_kl"] < 0.95 * before
    for name, layer in quantized_layers(student).items():
        assert torch.equal(layer.quantizer.codes, codes[name])


@pytest.mark.parametrize("text", ["int2/g32", "balanced2/tensor", "lut2/r4"])
def test_with_fixed_codes_weight_and_gradients_are_those_of_level_times_scale(text, new_student):
    student = new_student(StudentSpec(text, "none"))
    freeze(student)
    free_scales(student.requires_grad_(False))
    layer = student.model.layers[0].mlp.up_proj
    quantizer, x = layer.quantizer, torch.randn(5, layer.in_features)
    assert torch.equal(layer(x), x @ quantizer.decode(quantizer.codes).T)
    layer(x).square().sum().backward()
    ours = [p.grad.clone() for p in quantizer.parameters()]
    quantizer.zero_grad()
    spec = quantizer.spec
    level = (quantizer.codes.float() * spec.step + spec.lowest).view(quantizer.grouped(layer.weight).shape)
    weight = (level * quantizer.scale_matrix()).view(layer.weight.shape)
    (x @ weight.T).square().sum().backward()
    shared = weight.numel() / spec.scale_values(*weight.shape) if spec.scale != "lowrank" else 1
    for got, p in zip(ours, quantizer.parameters()):
        torch.testing.assert_close(got, p.grad / (shared * spec.largest) ** 0.5, rtol=1e-4, atol=1e-6)


def test_a_stage_continues_from_a_student_file(new_student, data, tmp_path, sharp_model_dir):
    student = new_student()
    save_student(tmp_path / "best.pt", student, str(sharp_model_dir), SPEC, {})
    wanted = values_of(load_student(tmp_path / "best.pt")[0])
    for p in student.parameters():
        p.data.add_(0.1)
    reload_student(tmp_path / "best.pt", student)
    for name, value in values_of(student).items():
        assert torch.equal(value, wanted[name]), name
    assert not any(p.requires_grad for p in student.parameters())
    batch = {key: value[None] for key, value in data[0][0].items()}
    assert torch.isfinite(kd_loss(student, batch))


def test_a_four_bit_student_becomes_a_two_bit_one(new_student, sharp_model_dir):
    """The new student's latent weights are the old one's quantised weights, and its norms are copied too."""
    fine = new_student(StudentSpec("balanced4/g32", "balanced4/g32"))
    fine.model.norm.weight.data.mul_(1.5)
    freeze(fine)
    shown = values_of(fine)
    coarse = quantize(unquantised(fine), SPEC)
    for name, p in coarse.named_parameters():
        if ".quantizer." not in name:
            assert torch.equal(p, shown[name]), name
    assert coarse.model.layers[0].mlp.up_proj.quantizer.spec.bits == 2
    assert coarse.model.layers[0].mlp.up_proj.weight.requires_grad
