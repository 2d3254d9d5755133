"""The XLA path, run for real on torch_xla's CPU device: results equal to the CPU's, and compiled once.

torch_xla patches torch when imported, so all checks run in one process (xla_checks.py); the tests read its results.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qat_lora.run.checkpoint import load_checkpoint

pytestmark = pytest.mark.xla
PATH = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # compiles in half the time


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("xla")


@pytest.fixture(scope="module")
def checks(folder, sharp_model_dir):
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("xla_checks.py"), sharp_model_dir, folder],
        env=os.environ | {"PJRT_DEVICE": "CPU", "XLA_FLAGS": QUICK, "PYTHONPATH": PATH},
        capture_output=True,
        text=True,
    )
    assert (folder / "found.json").exists(), done.stderr[-3000:]
    return json.loads((folder / "found.json").read_text())


@pytest.fixture
def found(checks, request):
    """The result of the check of this name."""
    check = checks[request.param]
    if "error" in check:
        pytest.fail(check["error"], pytrace=False)
    return check


def reads(name: str):
    return pytest.mark.parametrize("found", [name], indirect=True, ids=[""])


def steps(lines: list[dict]) -> list[dict]:
    return [line for line in lines if "loss" in line]


def assert_same_figures(found: dict, names: tuple[str, ...], count: int, relative: float) -> None:
    """The first `count` logged lines agree between XLA and CPU."""
    xla, cpu = found["lines"]["xla"], found["lines"]["cpu"]
    assert len(xla) == len(cpu) >= count
    for ours, theirs in zip(xla[:count], cpu[:count]):
        shared = [name for name in names if name in theirs]
        assert shared
        assert [ours[name] for name in shared] == pytest.approx([theirs[name] for name in shared], rel=relative)


@reads("placing")
def test_ties_hold_and_the_optimiser_owns_the_models_parameters(found):
    assert found["tied"] and found["device"] == "xla" and found["same ids"] and found["gradients"]


@reads("qat")
def test_five_steps_of_qat_equal_the_cpu(found):
    first_evaluation_and_five_steps = 7  # with the evaluation after the third
    assert_same_figures(found, ("loss", "heldout_nll"), first_evaluation_and_five_steps, 1e-5)
    assert_same_figures(found, ("kl", "grad_norm", "heldout_kl"), first_evaluation_and_five_steps, 1e-4)


@pytest.mark.parametrize("found", ["qat", "scales", "recovery"], indirect=True)
def test_nothing_is_compiled_after_the_first_step(found):
    """Through warm-up, accumulation, logging, evaluation, the last batch of an epoch and saving."""
    compiles = [line["compiles"] for line in steps(found["lines"]["xla"])]
    assert compiles[0] > 0 and set(compiles) == {compiles[0]}
    assert found["end"]["compiles"] == compiles[-1]


@pytest.mark.parametrize("found", ["qat", "scales", "recovery", "layers", "generation", "grpo"], indirect=True)
def test_nothing_falls_back_to_the_host(found):
    assert found["end"]["fallbacks"] == 0


@reads("planted")
def test_a_planted_item_call_is_detected(found):
    assert found["before"] == 0 and found["after"] == 1
    assert found["names"] == ["aten::_local_scalar_dense"]


@reads("recovery")
def test_recovery_equals_the_cpu(found):
    assert_same_figures(found, ("loss", "heldout_nll"), 7, 1e-5)
    assert found["adapter"] < 1e-3, "as saved"


@reads("scales")
def test_scales_alone_equal_the_cpu(found):
    assert_same_figures(found, ("loss", "heldout_nll"), 7, 1e-5)


@reads("layers")
def test_layer_stage_equals_the_cpu(found):
    assert_same_figures(found, ("loss",), 6, 1e-4)


@reads("late")
def test_constants_that_round_to_one_late_in_a_run_compile_nothing(found):
    first, second = found["compiles"]
    assert first and not second


@reads("layers")
def test_layer_stage_compiles_only_two_blocks(found):
    """The third and fourth block run the graphs of the second."""
    lines = found["lines"]["xla"]
    after = {line["block"]: line["compiles"] for line in lines}
    assert sorted(after) == [0, 1, 2, 3]
    assert after[3] == after[2] == after[1] == found["end"]["compiles"]


@reads("compensation")
def test_compensation_gives_the_codes_of_the_cpu(found):
    assert found["xla"] < 0.01 < 0.05 < found["plain"] and found["fallbacks"] == 0


@reads("pieces")
def test_losses_targets_and_fake_quant_equal_the_cpu(found):
    for name in ("sparse_loss", "frozen head", "frozen and capped"):
        assert found[name] < 1e-6, name
    assert found["bf16 rows"] < 2e-3  # 0.15 if a product was rounded once more on the way
    assert found["targets"] < 1e-5
    assert found["index"] == found["tail"] == 1.0
    for spec in ("balanced2/g32", "int4/g32", "lut4/r4", "balanced3/tensor"):
        assert found[spec] < 5e-6, spec


@reads("checkpointing")
@pytest.mark.parametrize("kind", ["all", "lora"])
def test_gradients_equal_the_cpu_and_recomputation_changes_none(found, kind):
    assert not {key: text for key, text in found.items() if "error" in key}
    assert found[f"{kind} cpu"] < 1e-5  # of the largest gradient of each parameter
    assert found[f"{kind} recomputed"] < 1e-6


@reads("generation")
def test_greedy_completions_equal_the_cpu_and_are_not_compiled_token_by_token(found):
    assert found["same"]
    short, again, long, still = found["compiles"]
    assert 0 < short <= 4 and again == still == 0 and long <= short + 1  # the check whether all rows have ended


@reads("grpo")
def test_grpo_compiles_nothing_after_the_second_step(found):
    """With validation, logging and saving."""
    compiles = [line["compiles"] for line in steps(found["lines"]["xla"])]
    assert len(compiles) == 4 and set(compiles[1:]) == {found["end"]["compiles"]}


@reads("grpo")
def test_grpo_update_equals_the_cpu(found):
    assert found["figures"]["xla"] == pytest.approx(found["figures"]["cpu"], rel=1e-4, abs=1e-6)
    assert all(value != 0 for value in found["figures"]["cpu"])


@reads("bf16")
def test_bf16_update_runs_and_keeps_fp32_masters(found):
    assert found["loss"] == pytest.approx(found["cpu"], rel=1e-2) and found["master"] == "torch.float32"


def test_auto_precision_on_torch_xlas_cpu_is_fp32(checks):
    assert checks["precision"] == {"auto": False, "seconds": checks["precision"]["seconds"]}


def test_checkpoint_written_on_xla_loads_without_torch_xla(checks, folder):
    assert "error" not in checks["qat"]
    tensors, trainer, meta = load_checkpoint(folder / "qat-xla")
    assert "torch_xla" not in sys.modules
    assert meta["step"] == 7 and "model.norm.weight" in tensors
    states = trainer["stage"]["optimizer"]["state"].values()
    values = [v for state in states for v in state.values()] + list(tensors.values())
    assert values and all(type(value) is torch.Tensor and value.device.type == "cpu" for value in values)
    cpu = load_checkpoint(folder / "qat-cpu")[0]
    assert cpu.keys() == tensors.keys()
