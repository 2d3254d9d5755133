"""Bits go where they save the most: beside every assignment of a small problem, and layers quantised by hand."""

import itertools
import random

import pytest
import torch

from qat_lora.backend import TorchBackend
from qat_lora.data.batches import first_batches
from qat_lora.kd.allocation import Choice, allocate, sensitivities
from qat_lora.kd.dataset import KDCacheDataset
from qat_lora.kd.training import kd_loss
from qat_lora.models.loading import load_model
from qat_lora.quant.calibration import calibrate
from qat_lora.quant.spec import QuantSpec
from qat_lora.quant.student import StudentSpec, quantize

MENU = [QuantSpec.parse(text) for text in ("int2/g64", "int3/g64", "int4/g32")]
CACHE = ["--length", 16, "--max-rows", 32, "--device", "cpu", "--precision", "fp32"]


def problem(seed: int) -> dict[str, list[Choice]]:
    """Six layers of different sizes, whose KL falls by about a factor of four with each bit."""
    draw = random.Random(seed)
    sizes = [draw.choice((1, 2, 4)) for _ in range(6)]
    worst = [draw.uniform(0.01, 1) for _ in range(6)]
    return {
        f"{n}.a": [Choice(f"{b}", b * size, high / draw.uniform(3, 5) ** (b - 2)) for b in (2, 3, 4)]
        for n, (size, high) in enumerate(zip(sizes, worst))
    }


@pytest.mark.parametrize("seed", range(10))
def test_no_assignment_of_the_same_bits_is_much_better(seed):
    choices = problem(seed)
    least = sum(found[0].bits for found in choices.values())
    for budget in (least, least + 3, least + 7, 10 * least):
        chosen = allocate(choices, budget)
        assert chosen.keys() == choices.keys() and sum(c.bits for c in chosen.values()) <= budget
        every = (each for each in itertools.product(*choices.values()) if sum(c.bits for c in each) <= budget)
        best = min(sum(c.kl for c in each) for each in every)
        worst = sum(found[0].kl for found in choices.values())
        assert sum(c.kl for c in chosen.values()) - best <= 0.1 * (worst - best) + 1e-12
    with pytest.raises(ValueError, match=str(least)):
        allocate(choices, least - 1)


def test_a_step_that_does_not_fit_leaves_room_for_others():
    choices = {
        "large": [Choice("2", 20, 9.0), Choice("4", 40, 0.0)], "small": [Choice("2", 2, 0.2), Choice("4", 4, 0.1)]
    }  # fmt: skip
    assert [c.quantiser for c in allocate(choices, 30).values()] == ["2", "4"]
    worse = {"a": [Choice("2", 2, 0.1), Choice("3", 3, 0.2), Choice("4", 4, 0.05)]}
    assert [allocate(worse, budget)["a"].quantiser for budget in (3, 4)] == ["2", "4"], "more bits may cost more KL"


@torch.no_grad()
def test_the_kl_of_a_layer_is_what_it_costs_alone(run, sharp_model_dir, tmp_path):
    run("build_kd_cache", "--model", sharp_model_dir, "--cache-dir", tmp_path / "c", *CACHE)
    batches, backend = first_batches(KDCacheDataset(tmp_path / "c", "train"), 8, 4, 0), TorchBackend("cpu", "fp32")
    found = sensitivities(load_model(str(sharp_model_dir)), MENU, batches, backend)

    def loss(spec: StudentSpec | None) -> float:
        model = load_model(str(sharp_model_dir)).eval()
        if spec:
            calibrate(quantize(model, spec), "mse", batches, "fp32")
        return sum(kd_loss(model, batch).item() for batch in batches) / len(batches)

    before, some = loss(None), ("0.mlp.down_proj", "1.self_attn.q_proj")
    for name in some:
        alone = StudentSpec("none", "none", layers=f"{name}=int2/g64")
        assert found[name][0].kl == pytest.approx(max(0, loss(alone) - before), rel=1e-3, abs=1e-6)
    for choices in found.values():
        assert [choice.quantiser for choice in choices] == [str(spec) for spec in MENU]
        kl = [choice.kl for choice in choices]
        assert kl[0] == 0 or kl[0] > 3 * kl[1] > 9 * kl[2]
