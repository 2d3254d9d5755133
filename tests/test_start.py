"""Where a student starts: each method nearer to the teacher than the one before, and step 0 of GPTQ is GPTQ."""

import pytest
import torch

from qat_lora.blocks import block_inputs, block_outputs, compensate_block
from qat_lora.data.batches import batches
from qat_lora.evaluate import heldout_figures
from qat_lora.layer_qat import LayerPlan, train_layers
from qat_lora.models.loading import decoder_layers, load_model
from qat_lora.quant.init import initialise
from qat_lora.quant.linear import freeze, quantized_layers
from qat_lora.quant.student import StudentSpec, quantize
from qat_lora.start import METHODS, start


@pytest.fixture(scope="module")
def calibration(data):
    stream = batches(data[0], 4, 1, seed=0)
    return [next(stream) for _ in range(10)]


@pytest.fixture
def new_student(sharp_model_dir):
    return lambda: quantize(load_model(str(sharp_model_dir)), StudentSpec("int2/g64", "int2/g64"))


def latents(student):
    return {name: layer.weight.detach().clone() for name, layer in quantized_layers(student).items()}


def test_each_method_starts_nearer_to_the_teacher(new_student, calibration, data, backend):
    kl = []
    for method in METHODS:
        student = new_student()
        start(student, method, calibration, "fp32")
        kl.append(heldout_figures(student, data[1], backend, 4, 8)["heldout_kl"])
    assert kl[2] < 0.95 * kl[1] < 0.9 * kl[0], kl


@pytest.mark.parametrize("method", METHODS)
def test_only_gptq_touches_the_weights(new_student, calibration, method):
    student = new_student()
    before = latents(student)
    start(student, method, calibration, "fp32")
    same = [torch.equal(weight, before[name]) for name, weight in latents(student).items()]
    assert not any(same) if method == "gptq" else all(same)


def test_the_first_answer_is_that_of_the_frozen_codes(new_student, calibration, data, backend):
    student = new_student()
    start(student, "gptq", calibration, "fp32")
    before = heldout_figures(student, data[1], backend, 4, 8)
    freeze(student)
    assert heldout_figures(student, data[1], backend, 4, 8) == before


def test_a_layer_sees_what_the_quantised_ones_before_it_give(new_student, calibration, backend):
    """Compensating a block twice from the same weights, with and without its predecessor quantised, differs."""
    ways = []
    for quantised in (True, False):
        student = new_student()
        initialise(student)
        first, second = decoder_layers(student)
        seen = [block_inputs(student, batch["tokens"]) for batch in calibration]
        inputs, kwargs = [hidden for hidden, _ in seen], seen[0][1]
        if quantised:
            compensate_block(first, inputs, kwargs, backend)
        compensate_block(second, block_outputs(first, inputs, kwargs, backend), kwargs, backend)
        ways.append(second.mlp.down_proj.weight.detach().clone())
    assert not torch.equal(*ways)


def test_a_block_of_the_layer_stage_is_compensated_when_its_turn_comes(
    new_student, calibration, make_session, data, backend
):
    """One tiny update a block: the student is GPTQ's, and nearer to the full-precision model's answers at each."""
    heldout, losses = {}, {}
    for compensate in (False, True):
        student = new_student()
        initialise(student)
        plan = LayerPlan(1, 1e-9, 1e-9, 1.0, compensate=compensate)
        session = make_session(f"run{compensate}", backend)
        train_layers(student, calibration, plan, session, backend)
        heldout[compensate] = heldout_figures(student, data[1], backend, 4, 8)["heldout_kl"]
        losses[compensate] = [line["loss"] for line in session.run.metrics()]
    assert heldout[True] < 0.9 * heldout[False]
    assert all(0 < with_ < without for with_, without in zip(losses[True], losses[False]))
