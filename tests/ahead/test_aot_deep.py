"""The TPU's own compiler on the graphs of every experiment, in the precision of the presets and without a TPU."""

import pytest

from qat_lora.ahead import aot
from qat_lora.ahead.aot import Compiler, NotCompiled

pytestmark = [
    pytest.mark.tpu,
    pytest.mark.skipif(aot.libtpu_version() is None, reason="libtpu and jax come with requirements-dev.txt"),
]
NAMES = "qat", "qat on 4", "recovery", "recovery on 8", "cache", "grpo", "grpo, int4", "legal", "stories", "athena"


@pytest.fixture(scope="module")
def recorded(record) -> dict:
    """{experiment: {phase: graphs}}"""
    return record("bf16", *NAMES)


def test_every_graph_of_every_experiment_compiles(recorded, tmp_path):
    graphs = {
        graph.hash: (f"{name}, {phase}", graph)
        for name, phases in recorded.items()
        for phase, graphs in phases.items()
        for graph in graphs
    }
    assert {graph.chips for _, graph in graphs.values()} == {1, 4, 8}
    largest_first = sorted(graphs.values(), key=lambda item: -len(item[1].code))
    for chips, topology, jobs in ((4, "2x2", 2), (8, "2x4", 1)):
        here = [(where, graph) for where, graph in largest_first if graph.chips in (1, chips)]
        with Compiler("v6e", topology, jobs, tmp_path / "kept") as compiler:
            results = compiler.compile([graph for _, graph in here])
        assert not [f"{where}: {r}" for (where, _), r in zip(here, results) if isinstance(r, NotCompiled)]
        for (where, graph), found in zip(here, results):
            assert found.collectives == ({} if graph.chips == 1 else {"all-reduce": 1}), where


def test_a_later_update_compiles_nothing_new(recorded):
    for name, phases in recorded.items():
        for phase in [phase for phase in phases if phase.endswith(": update")]:
            first = {graph.hash for graph in phases[phase.replace("update", "first update")]}
            assert {graph.hash for graph in phases[phase]} <= first, f"{name} {phase}"
