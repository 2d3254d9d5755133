"""What a run would need on a TPU: its graphs, recorded from a script's options, and the TPU compiler's figures."""

import dataclasses
import math
import os
import sys
from collections import Counter
from dataclasses import dataclass

from qat_lora.ahead.aot import Chip, Compiled, Compiler, Graph, NotCompiled
from qat_lora.errors import load_package
from qat_lora.run.console import say


@dataclass(frozen=True)
class Phase:
    """One phase of a run, on one chip of several.

    counts: {graph: executions}, in the order of the first one; results: the compiler's answer to each graph. tokens:
    trained on by one execution of the phase, over all chips.
    """

    name: str
    tokens: int
    counts: dict[Graph, int]
    results: list[Compiled | NotCompiled]

    @property
    def refused(self) -> NotCompiled | None:
        return next((found for found in self.results if isinstance(found, NotCompiled)), None)

    @property
    def largest(self) -> Compiled:
        """The figures of the graph with the highest peak."""
        return max(self.results, key=lambda found: found.peak)

    @property
    def peak(self) -> int:
        """The most bytes of HBM in use during the phase, with what no graph touches."""
        return max(found.peak + graph.beside for graph, found in zip(self.counts, self.results))

    def total(self, name: str) -> float:
        """A figure of one execution of the whole phase."""
        return sum(getattr(found, name) * count for found, count in zip(self.results, self.counts.values()))

    @property
    def collectives(self) -> Counter:
        """{kind: number} of the collectives in one execution of the whole phase."""
        kinds = Counter()
        for found, count in zip(self.results, self.counts.values()):
            kinds.update({kind: number * count for kind, number in found.collectives.items()})
        return kinds

    def seconds(self, chip: Chip) -> float:
        """The roofline's time of the whole phase."""
        return sum(found.roofline(chip) * count for found, count in zip(self.results, self.counts.values()))


def record(rehearse, config, chips: int):
    """The backend that holds the graphs of every phase of a run. Runs in this process, on torch_xla's CPU device."""
    os.environ["PJRT_DEVICE"] = "CPU"
    load_package("torch_xla", "recording the graphs of a TPU")
    from qat_lora.ahead.recording import RecordingBackend

    backend = RecordingBackend("bf16" if config.precision == "auto" else config.precision, chips)
    backend.estimate = rehearse(config, backend)
    return backend


def compiled(backend, compiler: Compiler) -> list[Phase]:
    """Every phase with the compiler's figures. Says what is compiled, since a graph of a large model takes minutes."""
    everything = [graph for phase in backend.graphs.values() for graph in phase]
    new = {graph.hash for graph in everything if not compiler.is_known(graph)}
    if new:
        number = len({graph.hash for graph in everything})
        say(f"compiling {len(new)} of {number} graphs for {compiler.chip}:{compiler.topology}", sys.stderr)
    phases, answers = [], iter(compiler.compile(everything))
    for name, sequence in backend.graphs.items():
        counts, most = Counter(graph.hash for graph in sequence), {}
        for graph, answer in zip(sequence, answers):  # the execution with the most memory beside it counts
            if graph.hash not in most or graph.beside > most[graph.hash][0].beside:
                most[graph.hash] = graph, answer
        if counts:
            graphs, results = zip(*most.values())
            counts = dict(zip(graphs, counts.values()))
            phases.append(Phase(name, backend.tokens[name], counts, list(results)))
    return phases


def step(phases: list[Phase]) -> Phase | None:
    """The phase that a run spends its time in: its last update, or a teacher pass."""
    return next((phase for phase in reversed(phases) if phase.tokens), None)


def table(phases: list[Phase], chip: Chip) -> str:
    """Figures of every phase, in GB (10⁹ bytes) and TFLOP, aligned for a terminal."""
    head = (
        "phase", "graphs", "compile s", "arguments", "outputs", "aliased", "temporary", "code", "peak", "TFLOP",
        "moved", "accessed", "roofline ms", "tokens/s", "collectives",
    )  # fmt: skip
    rows = [head]
    for phase in phases:
        graphs = str(sum(phase.counts.values())) + ("" if len(phase.counts) == 1 else f" ({len(phase.counts)})")
        if phase.refused:
            rows.append((phase.name, graphs, f"does not fit or compile: {phase.refused}", *[""] * (len(head) - 3)))
            continue
        most, seconds = phase.largest, phase.seconds(chip)
        sizes = (most.arguments, most.outputs, most.aliased, most.temporary, most.code, phase.peak)
        rows.append((
            phase.name, graphs, f"{sum(found.seconds for found in phase.results):.0f}",
            *(f"{size / 1e9:.2f}" for size in sizes), f"{phase.total('flops') / 1e12:.3f}",
            f"{phase.total('moved') / 1e9:.2f}", f"{phase.total('accessed') / 1e9:.2f}", f"{seconds * 1e3:.2f}",
            f"{phase.tokens / seconds:,.0f}" if phase.tokens else "",
            ", ".join(f"{number} {kind}" for kind, number in phase.collectives.items()),
        ))  # fmt: skip
    widths = [max(len(row[i]) for row in rows if not row[2].startswith("does")) for i in range(len(head))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows)


def as_json(phases: list[Phase], chip: Chip) -> list[dict]:
    """The same figures for programs: bytes, operations, seconds."""
    return [
        {
            "phase": phase.name, "tokens": phase.tokens, "error": str(phase.refused) if phase.refused else None,
            "graphs": [
                {"hash": graph.hash, "times": count, "beside": graph.beside, "chips": graph.chips}
                | ({"error": str(found)} if isinstance(found, NotCompiled) else dataclasses.asdict(found))
                for (graph, count), found in zip(phase.counts.items(), phase.results)
            ],
            **({} if phase.refused else {"peak": phase.peak, "roofline_seconds": phase.seconds(chip)}),
        }
        for phase in phases
    ]  # fmt: skip


def chips_of(topology: str, chip: Chip) -> int:
    """How many workers a topology has."""
    size = math.prod(map(int, topology.split("x")))
    return size * chip.cores if size > 1 else 1
