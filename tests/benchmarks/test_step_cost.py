"""The cost of an update on paper: known values, and the operations that torch counts."""

import dataclasses

import pytest
import torch
import transformers
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from qat_lora.backend import TorchBackend
from qat_lora.kd.training import kd_loss
from qat_lora.quant.init import initialise

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2,
}  # fmt: skip
Q, K, MLP = 32 * 32, 16 * 32, 96 * 32
ROWS, LENGTH = 2, 16


@pytest.fixture(scope="module")
def cost(load_script):
    return load_script("step_cost")


@pytest.fixture(scope="module")
def config(cost):
    return cost.config_of("smollm2-135m", **SIZES)


def batch() -> dict:
    shape = ROWS, LENGTH
    prob = torch.full((*shape, 2), 0.5)
    return {
        "tokens": torch.arange(ROWS * LENGTH).view(shape) % 64, "index": torch.ones(*shape, 2, dtype=torch.long),
        "prob": prob, "mask": torch.ones(shape), "total": torch.tensor(float(ROWS * LENGTH)),
    }  # fmt: skip


@pytest.fixture(scope="module")
def large(cost):
    """QAT of Qwen3-0.6B, without storage."""
    return cost.trained(cost.empty(cost.config_of("qwen3-0.6b")), "QAT", 8)


# -- operations ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stage", ["QAT", "SFT", "recovery"])
@pytest.mark.parametrize("recompute", [False, True])
def test_operations_are_those_that_torch_counts(cost, config, stage, recompute):
    model = transformers.AutoModelForCausalLM.from_config(config)
    model = cost.trained(model, stage, 2, lambda student: initialise(student, search=False)).train()
    backend = TorchBackend("cpu", "fp32")
    if recompute:
        backend.gradient_checkpointing(model)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        backend.backward(kd_loss(model, batch()))
    ratio = cost.micro_batch_flops(model, ROWS, LENGTH, recompute) / counter.get_total_flops()
    # torch does not count LoRA's products in place, and the first block needs no gradient of a frozen embedding
    assert 1 < ratio < 1.1 if stage == "recovery" else ratio == 1


# -- bytes -----------------------------------------------------------------------------------------------------------
def test_a_ring_sends_known_bytes(cost):
    found = cost.Traffic(gathered=800, scattered=400, reduced=100, gathers=2, scatters=1, reductions=1)
    assert cost.bytes_sent(found, 1, 3) == 0
    assert cost.bytes_sent(found, 4, 1) == 0.75 * (800 + 400 + 2 * 100)
    assert cost.bytes_sent(found, 4, 3) == 0.75 * (3 * 1200 + 2 * 100)
    assert cost.bytes_sent(found, 2, 1, gloo=True) == 0.5 * (800 + 2 * 400 + 2 * 100)


def test_a_whole_model_reduces_its_trained_parameters(cost, large):
    found = cost.traffic(large, 8, shard=False)
    trained = [p for p in large.parameters() if p.requires_grad]
    assert found.reduced == 4 * sum(p.numel() for p in trained) and not found.gathered + found.scattered
    assert found.reductions == 1 + sum(p.numel() >= 2**16 for p in trained)


def test_shards_gather_blocks_twice_and_the_rest_once(cost, config):
    model = cost.trained(cost.empty(config), "SFT", 2)
    block, outside = 4 * (2 * Q + 2 * K + 3 * MLP + 2 * 32), 4 * (64 * 32 + 32)
    found = cost.traffic(model, 2, shard=True)
    assert (found.gathered, found.scattered) == (2 * 2 * block + outside, 2 * block + outside)
    assert (found.gathers, found.scatters) == (5, 3)


def test_rows_that_do_not_divide_are_padded(cost):
    parameters = [torch.nn.Parameter(torch.empty(3, 5)), torch.nn.Parameter(torch.empty(8))]
    assert cost.padded(parameters, 1) == 4 * (15 + 8)
    assert cost.padded(parameters, 4) == 4 * (20 + 8)
    assert cost.padded(parameters, 16) == 4 * (80 + 16)


# -- seconds and memory ----------------------------------------------------------------------------------------------
def test_the_largest_part_binds(cost):
    parts = {"compute": 1.0, "optimiser": 0.1, "inside": 2.0, "between": 3.0, "hops": 0.5}
    whole, shards = (cost.Step(**parts, shard=shard) for shard in (False, True))
    assert whole.binds == shards.binds == "between" and whole.network == 3.5
    assert whole.seconds == pytest.approx(4.6) and shards.seconds == pytest.approx(3.6)


def test_more_boxes_use_the_network_between_them(cost, large):
    box = cost.BOXES["H100"]
    one, two = (cost.step(large, box, workers, 4, 256, 1, False, False) for workers in (8, 16))
    assert one.between == 0 < two.between and one.compute == two.compute
    assert two.inside / one.inside == pytest.approx((15 / 16) / (7 / 8))


def test_the_first_way_that_fits(cost, large):
    shard, recompute, need = cost.way_to_fit(large, cost.BOXES["H100"], 8, 4, 256)
    assert (shard, recompute) == (False, False) and need == cost.worker_memory(
        large, cost.BOXES["H100"], 1, 4, 256, False
    )
    small = dataclasses.replace(cost.BOXES["H100"], memory=need)
    assert cost.way_to_fit(large, small, 1, 4, 256)[:2] == (False, True)
    assert cost.way_to_fit(large, dataclasses.replace(small, memory=5e9), 1, 4, 256) is None
    assert cost.way_to_fit(large, dataclasses.replace(small, memory=5e9), 8, 4, 256)[0]
    assert cost.way_to_fit(large, dataclasses.replace(small, memory=5e9, kind="xla"), 8, 4, 256) is None
