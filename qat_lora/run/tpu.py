"""What a run would need on a TPU: its graphs, recorded from a script's options, and the TPU compiler's figures."""

import ctypes
import dataclasses
import json
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any

from qat_lora.ahead.aot import CHIPS, DETECTED, Chip, Compiled, Compiler, Graph, NotCompiled
from qat_lora.errors import ROOT, load_package
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


def planned_peak(script: str, config: Any, chips: list[str]) -> str:
    """The line in a dry run that tells the peak of HBM, computed by the TPU's compiler in a process of its own.

    chips: the machine's TPU chips, if it has any; otherwise the preset's name tells which chip is meant (v6e4), and
    without one it is v6e. Graphs that were never compiled take minutes if the model is large.
    """
    names = [DETECTED.get(chip, chip) for chip in chips] + [(config.config or "")[:3], "v6e"]
    chip = next(name for name in names if name in CHIPS)
    given = {field.name: getattr(config, field.name) for field in dataclasses.fields(config) if field.name != "debug"}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value not in (None, "")]
    command = [sys.executable, ROOT / "scripts" / "compile_for_tpu.py", script, *words, "--chip", chip, "--json"]
    environment = {name: value for name, value in os.environ.items() if name != "PJRT_DEVICE"}
    end_with_this = partial(ctypes.CDLL(None).prctl, 1, signal.SIGTERM)  # PR_SET_PDEATHSIG: when this process ends
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=end_with_this
    ) as process:
        try:
            out, errors = process.communicate()
        except BaseException:
            process.terminate()
            raise
    if not out:
        reason = (errors.strip() or f"exit code {process.returncode}").splitlines()[-1]
        return f"peak by the TPU's compiler: unknown ({reason.removeprefix('error: ')})"
    figures = json.loads(out)
    size = CHIPS[chip].usable / 1e9
    if wrong := next((phase for phase in figures["phases"] if phase["error"]), None):
        return f"does not fit a {chip} chip, by the TPU's compiler: {wrong['phase']}: {wrong['error']}"
    most = max(figures["phases"], key=lambda phase: phase["peak"])
    peak = f"{most['peak'] / 1e9:.2f} GB of {size:.2f} GB, in {most['phase']}"
    return f"peak on a {chip} chip, by the TPU's compiler: {peak}"


def chips_of(topology: str, chip: Chip) -> int:
    """How many workers a topology has."""
    size = math.prod(map(int, topology.split("x")))
    return size * chip.cores if size > 1 else 1
