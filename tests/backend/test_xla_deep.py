"""The XLA path in depth, on torch_xla's CPU device: every stage and variant of the trainings, and their pieces."""

import pytest
import xla_results

pytestmark = pytest.mark.xla
LIMITS = {  # relative and absolute
    "xla_qat.recovery": (1e-5, 0),
    "xla_qat.layers": (1e-4, 0),
    "xla_legal.checkpointed": (1e-3, 0),
    "xla_stories.mingru": (1e-3, 0),
    "xla_stories.transformer": (1e-3, 0),
    "xla_athena.one_step": (1e-3, 1e-4),
    "xla_athena.checkpointed": (1e-3, 1e-4),
}
COMPILED_ONCE = [*(name for name in LIMITS if name != "xla_qat.layers"), "xla_legal.dropout", "xla_qat.grpo"]
PIECES = ["compensation", "pieces", "checkpointing", "bf16", "generation", "late"]
STATES = "xla_stories.states_of_esn", "xla_stories.states_of_diagonal"
PLANTED = "xla_qat.planted", "xla_athena.planted"  # last, since they add to the counters


@pytest.fixture(scope="module")
def checks(on_xla):
    pieces = (f"xla_qat.{name}" for name in PIECES)
    return on_xla("xla_qat.layers", *COMPILED_ONCE, "xla_athena.attempts", *pieces, *STATES, *PLANTED)


def reads(*names: str):
    return pytest.mark.parametrize("found", names, indirect=True, ids=names if len(names) > 1 else [""])


# -- trainings -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("found, limits", LIMITS.items(), indirect=["found"], ids=LIMITS)
def test_logged_figures_equal_the_cpu(found, limits):
    xla_results.assert_same_figures(found, *limits)


@pytest.mark.parametrize("found", COMPILED_ONCE, indirect=True)
def test_nothing_is_compiled_after_the_first_updates_and_nothing_falls_back(found):
    xla_results.assert_compiled_once(found)


@reads("xla_legal.checkpointed", "xla_legal.dropout")
def test_a_packed_micro_batch_is_one_graph(found):
    xla_results.assert_micro_batches_are_one_graph(found)


@reads("xla_athena.one_step", "xla_athena.checkpointed")
def test_rows_halt_when_they_do_on_the_cpu_and_an_update_is_one_graph(found):
    xla_results.assert_halts_as_on_the_cpu_and_updates_are_one_graph(found)


@reads("xla_athena.attempts")
def test_attempts_differ_repeat_and_compile_nothing_after_the_second(found):
    halt, (_, begun, *later) = found["halt"], found["compiles"]
    assert halt["xla"][0] == halt["other seed"][0] == pytest.approx(halt["cpu"][0], abs=1e-4)
    assert halt["xla"][:2] == halt["first two"] and halt["xla"][1:] != halt["other seed"][1:]
    assert len({tuple(attempt) for attempt in halt["xla"]}) == 4
    assert set(later) == {begun} and found["fallbacks"] == 0


@reads("xla_qat.recovery")
def test_the_saved_adapter_equals_the_cpus(found):
    assert found["adapter"] < 1e-3


@reads("xla_qat.layers")
def test_layer_stage_compiles_only_two_blocks(found):
    """The third and fourth block run the graphs of the second."""
    after = {line["block"]: line["compiles"] for line in found["xla"]}
    assert sorted(after) == [0, 1, 2, 3]
    assert after[3] == after[2] == after[1] == found["compiles"] and found["fallbacks"] == 0


@reads("xla_qat.late")
def test_constants_that_round_to_one_late_in_a_run_compile_nothing(found):
    first, second = found["compiles"]
    assert first and not second


@reads("xla_qat.bf16")
def test_a_bf16_update_keeps_fp32_masters_and_auto_is_fp32(found):
    assert found["loss"] == pytest.approx(found["cpu"], rel=1e-2) and found["master"] == "torch.float32"
    assert not found["auto"]


@reads("xla_qat.grpo")
def test_grpo_update_equals_the_cpu(found):
    assert found["figures"]["xla"] == pytest.approx(found["figures"]["cpu"], rel=1e-4, abs=1e-6)
    assert all(value != 0 for value in found["figures"]["cpu"])


@reads("xla_qat.planted")
def test_a_planted_item_call_is_detected(found):
    assert found["fallbacks"] == 1 and "aten::_local_scalar_dense" in found["names"]


@reads("xla_athena.planted")
def test_a_planted_operation_without_a_kernel_is_detected(found):
    assert found["fallbacks"] > 0


# -- pieces ----------------------------------------------------------------------------------------------------------
@reads("xla_qat.compensation")
def test_compensation_gives_the_codes_of_the_cpu(found):
    assert found["xla"] < 0.01 < 0.05 < found["plain"] and found["fallbacks"] == 0


@reads("xla_qat.pieces")
def test_losses_targets_and_fake_quant_equal_the_cpu(found):
    most = dict.fromkeys(("plain", "frozen and capped"), 1e-6)
    most |= {name: 5e-6 for name in found if "/" in name}
    most |= {"targets": 1e-5, "bf16 rows": 2e-3}  # the last is 0.15 if a product was rounded once more on the way
    assert not {name: found[name] for name, limit in most.items() if found[name] >= limit}
    assert found["index"] == found["tail"] == 1.0


@reads("xla_qat.checkpointing")
@pytest.mark.parametrize("kind", ["all", "lora"])
def test_gradients_equal_the_cpu_and_recomputation_changes_none(found, kind):
    assert found[f"{kind} cpu"] < 1e-5  # of the largest gradient of each parameter
    assert found[f"{kind} recomputed"] < 1e-6


@reads("xla_qat.generation")
def test_greedy_completions_equal_the_cpu_and_are_not_compiled_token_by_token(found):
    assert found["same"] and found["fallbacks"] == 0
    short, again, long, still = found["compiles"]
    assert 0 < short <= 4 and again == still == 0 and long <= short + 1  # the check whether all rows have ended


@reads("xla_stories.mingru")
def test_a_longer_story_compiles_nothing_more(found):
    short, long = found["telling"]
    assert 0 < short < 8 and long <= 1


@reads(*STATES)
def test_graph_does_not_grow_with_the_text_and_states_equal_the_cpu(found, request):
    short, within_256, longer, within_4096 = found["instructions"]
    assert 50 < short == within_256 and longer == within_4096
    esn = "esn" in request.node.callspec.id
    assert longer == short if esn else longer < 2 * short, "sixteen times the length takes one more level"
    assert max(found["states"]) < 1e-5 and max(found["gradients"]) < 1e-5
