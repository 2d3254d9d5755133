"""The TPU's own compiler on the graphs of every experiment, without a TPU: they compile, and cost what they should.

Recording needs torch_xla's CPU device and so a process of its own (aot_checks.py); compiling needs libtpu.
"""

import os
import pickle
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from qat_lora.backend import aot
from qat_lora.backend.aot import CHIPS, LIBTPU, Compiled, Compiler, NotCompiled, refusal
from qat_lora.backend.traffic import hbm_bytes
from qat_lora.errors import ROOT, UserError

pytestmark = [
    pytest.mark.tpu,
    pytest.mark.skipif(aot.libtpu_version() is None, reason="libtpu and jax come with requirements-dev.txt"),
]
CHECKS = Path(__file__).with_name("aot_checks.py")


@pytest.fixture(scope="module")
def recorded(tiny_model_dir, tmp_path_factory) -> dict:
    """{(experiment, precision): {phase: graphs}}, and the planted faults. The model has one layer of two heads:
    compiling takes as long as a graph is large."""
    folder, found = tmp_path_factory.mktemp("recorded"), {}
    few = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config = LlamaConfig.from_pretrained(tiny_model_dir, **few)
    LlamaForCausalLM(config).save_pretrained(folder / "model")

    def run(precision: str) -> dict:
        out = folder / precision
        words = [sys.executable, CHECKS, folder / "model", out, precision]
        done = subprocess.run(words, env=os.environ | {"USE_TORCH_XLA": "0"}, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return pickle.loads(out.read_bytes())

    with ThreadPoolExecutor(2) as pool:
        for part in pool.map(run, ("fp32", "bf16")):
            found |= part
    return found


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kept") / "compiled.jsonl"


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_every_graph_of_every_experiment_compiles(recorded, kept, chip):
    graphs = {
        graph.hash: (f"{name} {precision}, {phase}", graph)
        for (name, precision), phases in recorded.items()
        if name != "planted"
        for phase, graphs in phases.items()
        for graph in graphs
    }
    assert {graph.chips for _, graph in graphs.values()} == {1, 4, 8}
    largest_first = sorted(graphs.items(), key=lambda item: -len(item[1][1].code))
    for chips, topology, jobs in ((4, "2x2", 2), (8, "2x4", 1)):
        here = {key: both for key, both in largest_first if both[1].chips in (1, chips)}
        with Compiler(chip, topology, jobs, kept) as compiler:
            results = compiler.compile([graph for _, graph in here.values()])
        assert not [f"{where}: {r}" for (where, _), r in zip(here.values(), results) if isinstance(r, NotCompiled)]
        for (where, graph), found in zip(here.values(), results):
            assert found.collectives == ({} if graph.chips == 1 else {"all-reduce": 1}), where


def test_a_later_update_compiles_nothing_new(recorded):
    for (name, precision), phases in recorded.items():
        for phase, graphs in phases.items() if name != "planted" else ():
            if phase.endswith(": update"):
                before = {graph.hash for graph in phases[phase.replace("update", "first update")]}
                assert {graph.hash for graph in graphs} <= before, f"{name} {precision} {phase}"


def test_what_a_step_updates_is_donated(recorded):
    """Weights, gradients and both moments: nothing that outlives the step is stored twice."""
    last = recorded["recovery", "fp32"]["recovery: update"][-1]
    adapters = 2 * 6  # A and B, for all layers but k_proj
    assert len(last.donated) >= 4 * adapters


def test_figures_equal_those_computed_by_hand_and_are_the_same_again(recorded, tmp_path):
    (graph,) = recorded["planted", "linear"]["linear"]
    found = []
    for number in range(2):
        with Compiler("v6e", kept=tmp_path / str(number)) as compiler:
            found += compiler.compile([graph])
    one, two = ({k: v for k, v in vars(r).items() if k != "seconds"} for r in found)
    assert one == two
    weights, rows = 256 * 256 * 4, 64 * 256 * 4
    assert abs(one["arguments"] - (2 * weights + rows)) < 2**14 and abs(one["aliased"] - 2 * weights) < 2**14
    assert abs(one["flops"] / (2 * 2 * 64 * 256 * 256) - 1) < 0.1  # the product, and the gradient of the weight


@pytest.mark.parametrize("name, said", [("float64", "float64"), ("callback", "host_callback")])
def test_a_planted_fault_is_refused(recorded, kept, name, said):
    with Compiler("v5e", kept=kept) as compiler:
        results = compiler.compile(recorded["planted", name][name])
    assert any(isinstance(r, NotCompiled) and said in str(r) and "\n" not in str(r) for r in results)


def test_a_graph_that_does_not_fit_says_by_how_much(recorded, kept):
    with Compiler("v5e", kept=kept) as compiler:
        (refused,) = compiler.compile(recorded["planted", "too large"]["too large"])
    assert isinstance(refused, NotCompiled) and refused.need > refused.limit > 15 * 2**30
    said = r"it needs (\d+\.\d+) GB of HBM, (\d+\.\d+) GB more than the 16.91 GB that a program can use"
    need, more = map(float, re.fullmatch(said, str(refused)).groups())
    assert need == pytest.approx(16.91 + more, abs=0.011)


def test_tensors_that_a_graph_does_not_use_take_memory_too(recorded, kept):
    (graph,) = recorded["planted", "linear"]["linear"]
    with Compiler("v5e", kept=kept) as compiler:
        fits, refused = compiler.compile([graph, replace(graph, beside=16 * 2**30)])
    assert isinstance(fits, Compiled) and refused.need == fits.peak + 16 * 2**30


def test_a_host_read_in_a_step_is_named(recorded):
    assert re.match(r"aot_checks.py:\d+ reads a value of the device on the host \(item", recorded["planted", "read"])


def test_results_are_kept(recorded, tmp_path, monkeypatch):
    (graph,) = recorded["planted", "linear"]["linear"]
    file = tmp_path / "compiled.jsonl"
    with Compiler("v6e", kept=file) as compiler:
        (first,) = compiler.compile([graph])
    noise = '3\n[]\n{}\nnull\n{"key": "k", "peak": 1}\n{"key": "k", "error": 2}\n'
    file.write_text(noise + file.read_text() + '{"key": "cut sho')  # an interrupted write
    monkeypatch.setattr(aot, "_Child", lambda *_: pytest.fail("compiled again"))
    with Compiler("v6e", kept=file) as compiler:
        assert compiler.compile([graph]) == [first] and compiler.is_known(graph)


# -- bad input -------------------------------------------------------------------------------------------------------
def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(aot, "libtpu_version", lambda: None)
    with pytest.raises(UserError, match=r"not installed; pip install -r requirements-dev.txt"):
        Compiler("v6e")


def test_a_chip_that_this_libtpu_does_not_know_is_named(tmp_path):
    with pytest.raises(UserError, match=r"does not know tpu7x, which needs e.g. 0.0.52; use another --chip"):
        Compiler("tpu7x", kept=tmp_path / "k")


def test_a_compiler_that_dies_is_reported(recorded, tmp_path):
    (graph,) = recorded["planted", "linear"]["linear"]
    with Compiler("v6e", kept=tmp_path / "k") as compiler:
        child = aot._Child("v6e", "1x1", LIBTPU)
        child.open()
        child.process.kill()
        with pytest.raises(UserError, match="ended with exit code -9"):
            child.compile(graph)
        assert isinstance(compiler.compile([graph])[0], Compiled)


def test_a_libtpu_that_does_not_answer_times_out(recorded, tmp_path, monkeypatch):
    (graph,) = recorded["planted", "linear"]["linear"]
    monkeypatch.setattr(aot, "OPENING", 0.01)
    with Compiler("v6e", kept=tmp_path / "k") as compiler, pytest.raises(UserError, match="did not open within"):
        compiler.compile([graph])


def test_a_metadata_server_is_never_asked(recorded, tmp_path, monkeypatch):
    """Where the environment names none, libtpu would ask for minutes."""
    (graph,) = recorded["planted", "linear"]["linear"]
    for name in aot.ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(aot, "OPENING", 60)
    with Compiler("v6e", kept=tmp_path / "k") as compiler:
        assert isinstance(compiler.compile([graph])[0], Compiled)


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
