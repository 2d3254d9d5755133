"""Initialisation of a student: each method gets closer to the teacher than the one before; GPTQ block by block."""

import contextlib
from itertools import islice

import pytest
import torch

from qat_lora.data.batches import batches
from qat_lora.kd.training import heldout_figures
from qat_lora.layer_qat import LayerPlan, train_layers
from qat_lora.models.architecture import decoder_layers, hidden_states
from qat_lora.models.loading import load_model
from qat_lora.quant.blockwise import block_outputs, compensate_block, first_inputs
from qat_lora.quant.calibration import calibrate as start
from qat_lora.quant.init import initialise, set_scale
from qat_lora.quant.linear import full_precision, quantized_layers
from qat_lora.quant.student import StudentSpec, quantize


@pytest.fixture(scope="module")
def calibration(data):
    return list(islice(batches(data[0], 4, 1, seed=0), 10))


@pytest.fixture
def new_student(sharp_model_dir):
    return lambda: quantize(load_model(str(sharp_model_dir)), StudentSpec("int2/g64", "int2/g64"))


def test_each_method_starts_closer_to_the_teacher_and_only_gptq_changes_the_weights(
    new_student, calibration, data, backend
):
    latents = [layer.weight for layer in quantized_layers(new_student()).values()]
    kl = []
    for method in ("rtn", "mse", "gptq"):
        student = new_student()
        start(student, method, calibration, "fp32")
        kl.append(heldout_figures(student, data[1], backend, 4, 8)["heldout_kl"])
        same = [torch.equal(layer.weight, old) for layer, old in zip(quantized_layers(student).values(), latents)]
        assert not any(same) if method == "gptq" else all(same)
    assert kl[2] < 0.95 * kl[1] < 0.9 * kl[0], kl


def test_a_block_is_compensated_on_the_outputs_of_quantised_blocks(new_student, calibration, backend):
    """The second block is reproduced from its full-precision weights; with inputs from the full-precision first block
    the result is different."""
    student, by_hand = new_student(), {}
    start(student, "gptq", calibration, "fp32")
    first, second = decoder_layers(student)
    inputs, calls = first_inputs(student, calibration, backend)
    for name, block in (("quantised", first), ("full", decoder_layers(new_student())[0])):
        with contextlib.nullcontext() if name == "quantised" else full_precision(block):
            reached = block_outputs(block, inputs, calls[0], backend)
        by_hand[name] = decoder_layers(new_student())[1]
        initialise(by_hand[name], search=False)
        compensate_block(by_hand[name], reached, calls[1], backend)
    down = {name: block.mlp.down_proj.weight for name, block in by_hand.items()}
    assert torch.equal(second.mlp.down_proj.weight, down["quantised"])
    assert not torch.equal(second.mlp.down_proj.weight, down["full"])


@torch.no_grad()
def test_a_quantised_head_weights_errors_by_its_inputs(sharp_model_dir, calibration):
    base, spec = load_model(str(sharp_model_dir)), StudentSpec("none", "none", "balanced4/g32")
    student, by_hand = (quantize(load_model(str(sharp_model_dir)), spec) for _ in range(2))
    start(student, "mse", calibration, "fp32")
    hidden = torch.cat([hidden_states(base, batch["tokens"]).flatten(0, 1) for batch in calibration])
    set_scale(by_hand.lm_head, moment=hidden.square().mean(0))
    torch.testing.assert_close(student.lm_head.quantizer.scale, by_hand.lm_head.quantizer.scale)
    set_scale(by_hand.lm_head)
    assert not torch.allclose(student.lm_head.quantizer.scale, by_hand.lm_head.quantizer.scale)


def test_the_layer_stage_compensates_each_block_before_training_it(
    new_student, calibration, make_session, data, backend
):
    """One tiny update per block: the student equals GPTQ's, and the loss is lower at every block."""
    heldout, losses = [], []
    for compensate in (False, True):
        student, session = new_student(), make_session(f"run{compensate}", backend)
        initialise(student)
        train_layers(student, calibration, LayerPlan(1, 1e-9, 1.0, compensate=compensate), session)
        heldout.append(heldout_figures(student, data[1], backend, 4, 8)["heldout_kl"])
        losses.append([line["loss"] for line in session.run.metrics()])
    assert heldout[1] < 0.9 * heldout[0]
    assert all(0 < compensated < plain for plain, compensated in zip(*losses))
