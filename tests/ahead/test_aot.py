"""The TPU's own compiler, without a TPU: graphs compile, and cost what they should. test_aot_deep.py compiles those of
every experiment.

Recording needs torch_xla's CPU device and so a process of its own (aot_checks.py); compiling needs libtpu.
"""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from patience import PATIENCE, wait_until

from qat_lora.ahead import aot
from qat_lora.ahead.aot import CHIPS, LIBTPU, Compiled, Compiler, NotCompiled, refusal
from qat_lora.ahead.traffic import hbm_bytes
from qat_lora.errors import ROOT, UserError

pytestmark = [
    pytest.mark.tpu,
    pytest.mark.skipif(aot.libtpu_version() is None, reason="libtpu and jax come with requirements-dev.txt"),
]


@pytest.fixture(scope="module")
def recorded(record) -> dict:
    return record("fp32", "recovery", "linear", "float64", "callback", "too large", "read")


@pytest.fixture(scope="module")
def linear(recorded):
    """The graph of an update of a linear layer."""
    return recorded["linear"]["linear"][0]


@pytest.fixture(scope="module", autouse=True)
def bare_environment():
    """Where the environment does not forbid it, libtpu asks a metadata server for minutes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aot, "OPENING", PATIENCE)
        for name in aot.ENVIRONMENT:
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="module")
def v5e(tmp_path_factory):
    with Compiler("v5e", file=tmp_path_factory.mktemp("kept") / "compiled.jsonl") as compiler:
        yield compiler


def test_every_graph_of_an_experiment_compiles_and_a_later_update_has_none_of_its_own(recorded, v5e):
    phases = recorded["recovery"]
    assert not [found for graphs in phases.values() for found in v5e.compile(graphs) if isinstance(found, NotCompiled)]
    first, later = ({graph.hash for graph in phases[f"recovery: {name}"]} for name in ("first update", "update"))
    assert later <= first


def test_what_a_step_updates_is_donated(recorded):
    """Weights, gradients and both moments: nothing that outlives the step is stored twice."""
    last = recorded["recovery"]["recovery: update"][-1]
    adapters = 2 * 6  # A and B, for all layers but k_proj
    assert len(last.donated) >= 4 * adapters


def test_figures_equal_those_computed_by_hand_are_the_same_again_and_are_kept(linear, tmp_path, monkeypatch):
    found = []
    for number in range(2):
        with Compiler("v6e", file=tmp_path / str(number)) as compiler:
            found += compiler.compile([linear])
    one, two = ({k: v for k, v in vars(r).items() if k != "seconds"} for r in found)
    assert one == two
    weights, rows = 256 * 256 * 4, 64 * 256 * 4
    assert abs(one["arguments"] - (2 * weights + rows)) < 2**14 and abs(one["aliased"] - 2 * weights) < 2**14
    assert abs(one["flops"] / (2 * 2 * 64 * 256 * 256) - 1) < 0.1  # the product, and the gradient of the weight

    file = tmp_path / "0"
    noise = '{"key": "cut sho\n{"key": "k", "peak": 1}\n'
    file.write_text(noise + file.read_text() + '{"key": "cut sho')  # an interrupted write
    monkeypatch.setattr(aot, "_Child", lambda *_: pytest.fail("compiled again"))
    with Compiler("v6e", file=file) as compiler:
        assert compiler.compile([linear]) == found[:1] and compiler.is_known(linear)


@pytest.mark.parametrize("name, said", [("float64", "float64"), ("callback", "host_callback")])
def test_a_planted_fault_is_refused(recorded, v5e, name, said):
    results = v5e.compile(recorded[name][name])
    assert any(isinstance(r, NotCompiled) and said in str(r) and "\n" not in str(r) for r in results)


def test_a_graph_that_does_not_fit_says_by_how_much(recorded, v5e):
    (refused,) = v5e.compile(recorded["too large"]["too large"])
    assert isinstance(refused, NotCompiled) and refused.need > refused.limit > 15 * 2**30
    said = r"it needs (\d+\.\d+) GB of HBM, (\d+\.\d+) GB more than the 16.91 GB that a program can use"
    need, more = map(float, re.fullmatch(said, str(refused)).groups())
    assert need == pytest.approx(16.91 + more, abs=0.011)


def test_tensors_that_a_graph_does_not_use_take_memory_too(linear, v5e):
    fits, refused = v5e.compile([linear, replace(linear, beside=16 * 2**30)])
    assert isinstance(fits, Compiled) and refused.need == fits.peak + 16 * 2**30


def test_a_host_read_in_a_step_is_named(recorded):
    assert re.match(r"aot_checks.py:\d+ reads a value of the device on the host \(item", recorded["read"])


# -- bad input -------------------------------------------------------------------------------------------------------
def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(aot, "libtpu_version", lambda: None)
    with pytest.raises(UserError, match=r"not installed; pip install -r requirements-dev.txt"):
        Compiler("v6e")


def test_a_chip_that_this_libtpu_does_not_know_is_named(tmp_path):
    with pytest.raises(UserError, match=r"does not know tpu7x, which needs e.g. 0.0.52; use another --chip"):
        Compiler("tpu7x", file=tmp_path / "k")


def test_a_compiler_that_dies_is_reported_and_never_asks_a_metadata_server(linear):
    child = aot._Child("v6e", "1x1", LIBTPU)
    environment = Path(f"/proc/{child.process.pid}/environ")
    wait_until(environment.read_bytes)  # empty until the child has replaced its image
    given = environment.read_text().split("\0")
    assert {f"{name}={value}" for name, value in aot.ENVIRONMENT.items()} <= set(given)
    child.process.kill()
    with pytest.raises(UserError, match="ended with exit code -9"):
        child.compile(linear)


def test_a_libtpu_that_does_not_answer_times_out(linear, tmp_path, monkeypatch):
    monkeypatch.setattr(aot, "OPENING", 0.01)
    with Compiler("v6e", file=tmp_path / "k") as compiler, pytest.raises(UserError, match="did not open within"):
        compiler.compile([linear])


def test_the_pin_of_libtpu_is_that_of_torch_xla():
    assert f"libtpu=={LIBTPU} " in (ROOT / "requirements-dev.txt").read_text()


def test_a_refusal_is_one_line():
    text = "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error.\nUsed 32.00G of 15.75G hbm. Exceeded hbm capacity"
    assert refusal(text).need == 32 * 2**30
    assert "\n" not in str(refusal("a\n  b"))


# -- figures ---------------------------------------------------------------------------------------------------------
def test_a_roofline_is_the_slower_of_operations_and_bytes():
    figures = Compiled(0, 0, 0, 0, 0, 0, flops=918e12, accessed=0, moved=819e9)
    assert figures.roofline(CHIPS["v6e"]) == 1.0
    assert figures.roofline(CHIPS["v5e"]) == pytest.approx(918 / 197)


PROGRAM = """HloModule m

%body (p: (s32[], f32[1024])) -> (s32[], f32[1024]) {
  %p = (s32[], f32[1024]{0}) parameter(0)
  %x = f32[1024]{0} get-tuple-element(%p), index=1
  %y = f32[1024]{0} add(%x, %x)
  ROOT %t = (s32[], f32[1024]{0}) tuple(%y, %y)
}

%gathered (a: f32[1000,64], b: s32[8]) -> f32[8,64] {
  %a = f32[1000,64]{1,0} parameter(0)
  %b = s32[8]{0} parameter(1)
  ROOT %g = f32[8,64]{1,0} gather(%a, %b), offset_dims={1}
}

ENTRY %main (w: f32[1000,64], i: s32[8], v: bf16[256]) -> f32[8,64] {
  %w = f32[1000,64]{1,0} parameter(0)
  %i = s32[8]{0} parameter(1)
  %v = bf16[256]{0} parameter(2)
  %c = (bf16[256]{0:S(1)}, bf16[256]{0}, u32[]) copy-start(%v)
  %d = bf16[256]{0:S(1)} copy-done(%c)
  %e = bf16[256]{0:S(1)} negate(%d)
  %f = f32[8,64]{1,0} fusion(%w, %i), kind=kLoop, calls=%gathered
  %l = (s32[], f32[1024]{0}) while(%f), condition=%c2, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  ROOT %r = f32[8,64]{1,0} bitcast(%f)
}
"""


def test_traffic_counts_what_crosses_hbm():
    """A prefetch once, work in vector memory not at all, of a gathered table only the rows, a loop as often as it
    runs."""
    prefetch, gather, loop = 256 * 2, 8 * 64 * 4 * 2 + 8 * 4, 5 * 3 * 1024 * 4
    assert hbm_bytes(PROGRAM) == prefetch + gather + loop
