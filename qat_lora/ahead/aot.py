"""Compiles recorded graphs with the TPU's own compiler, which needs no chip, for what they cost and whether they fit.

The compiler is part of libtpu. We reach it through jaxlib, which is well maintained: jax opens a topology that is not
there, jaxlib's MLIR marks the arguments whose memory results may reuse, and its client returns the memory and cost
figures. jax's fully public way, a jitted function, cannot take torch_xla's programs, whose collectives run over
replicas. pypjrt returns no memory figures for a topology, and ctypes would tie us to the struct layouts of one libtpu.
jax runs in a process of its own, so that a crash inside libtpu does not end the program.
"""

import contextlib
import hashlib
import json
import os
import re
import select
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from qat_lora.errors import ROOT, UserError, installed_version

LIBTPU = "0.0.21"  # the version that torch_xla 2.9.0 runs with, pinned in requirements-dev.txt
OPENING = 120  # seconds that libtpu may take to open a topology
KNOWN = ROOT / "docs" / "tpu" / "compiled.jsonl"  # the results that `make tpu-check` keeps in the repository
FOUND = ROOT / "caches" / "tpu" / "compiled.jsonl"  # and those of this machine
ENVIRONMENT = {  # without the first, libtpu asks a metadata server for minutes; the last lets several processes load it
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_PLATFORMS": "cpu",
}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
USED = re.compile(r"Used ([\d.]+)([KMG]) of ([\d.]+)([KMG]) hbm")
USABLE = 15.75 / 16  # of HBM, as libtpu's own refusals say; it does not count a graph's arguments and results itself
UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class Chip:
    """What one worker has: a chip, or one of the two cores of a v3 or tpu7x chip.

    teraflops: peak bf16 TFLOP/s; bandwidth: HBM GB/s; hbm: GiB of HBM. flat: whether its topologies have two
    dimensions, not three; cores: workers per chip; libtpu: a version that knows it.
    Source: docs.cloud.google.com/tpu/docs, the page of each version (read in November 2026), halved where a worker is a
    core.
    """

    teraflops: float
    bandwidth: float
    hbm: float
    flat: bool = True
    cores: int = 1
    libtpu: str = LIBTPU

    @property
    def usable(self) -> float:
        """Bytes of HBM that a program can use."""
        return self.hbm * 2**30 * USABLE

    def topology(self, name: str, shape: str) -> tuple[str, list[int] | None]:
        """libtpu's name for a topology such as 2x2, and the chips of a host where it has to be told."""
        sizes = [int(size) for size in shape.split("x")] + ([] if self.flat else [1])
        bounds = [*sizes, 1][:3] if sizes[:2] != [2, 2] else None
        return f"{name}:{'x'.join(map(str, sizes))}", bounds


CHIPS = {
    "v5e": Chip(197, 819, 16),
    "v6e": Chip(918, 1638, 32),
    "v5p": Chip(459, 2765, 95, flat=False),
    "v4": Chip(275, 1200, 32, flat=False),
    "v3": Chip(123 / 2, 900 / 2, 16, cores=2),
    "tpu7x": Chip(2307 / 2, 7380 / 2, 96, flat=False, cores=2, libtpu="0.0.52"),
}
DETECTED = {"v2/v3": "v3", "v7x": "tpu7x"}  # names in detect.py that differ from those above
TOPOLOGIES = ("1x1", "2x2", "2x4")


@dataclass(frozen=True)
class Graph:
    """One graph as it goes to the compiler.

    code: StableHLO bytecode. donated: the numbers of the arguments whose buffers results may reuse, because the step
    updates them in place. chips: how many chips run it together. beside: bytes of the tensors that are on the device
    meanwhile and are not its arguments.
    """

    code: bytes = field(repr=False)
    donated: tuple[int, ...]
    chips: int = 1
    beside: int = 0

    @property
    def hash(self) -> str:
        """Identifies the program. Donated arguments do not count: torch_xla compiles a graph once, with those of its
        first execution."""
        return hashlib.sha256(self.code + repr(self.chips).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Compiled:
    """The compiler's figures for one graph on one chip: bytes of HBM by kind, and what one execution costs.

    arguments, outputs: a graph's inputs and results; aliased: results in the memory of an argument; temporary: memory
    for intermediate values; code: the program.
    peak: the most bytes of arguments, results and temporaries that live at the same time. flops: floating-point
    operations; accessed: bytes that instructions read and write, in HBM or the chip's vector memory, as the compiler
    counts them; moved: those that cross to or from HBM (`traffic.hbm_bytes`). collectives: {kind: number}. seconds:
    what compiling took. All are for each chip.
    """

    arguments: int
    outputs: int
    aliased: int
    temporary: int
    code: int
    peak: int
    flops: float
    accessed: float
    moved: float
    collectives: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    def roofline(self, chip: Chip) -> float:
        """An estimated lower bound on the seconds of one execution: the operations at the peak rate, or the traffic of
        HBM at full bandwidth, whichever takes longer."""
        return max(self.flops / (chip.teraflops * 1e12), self.moved / (chip.bandwidth * 1e9))


class NotCompiled(UserError):
    """The compiler refused a graph. need, limit: bytes of HBM, if it does not fit."""

    need: float | None = None
    limit: float | None = None


def libtpu_version() -> str | None:
    """The installed libtpu's version; None if libtpu or jax, which opens it, is missing."""
    return installed_version("jax") and installed_version("jaxlib") and installed_version("libtpu")


class Compiler:
    """Compiles graphs for one chip and topology, in `jobs` processes at a time.

    Results are kept by the graph's hash, chip, topology and libtpu version: no graph is compiled twice, and an
    interrupted check continues where it stopped. A graph that runs on one chip is compiled for one, whatever the
    topology. Raises UserError if libtpu is missing or does not know the chip.
    """

    def __init__(self, chip: str, topology: str = "1x1", jobs: int = 1, file: Path = FOUND):
        self.version = libtpu_version()
        if self.version is None:
            raise UserError("libtpu or jax is not installed; pip install -r requirements-dev.txt (Linux on x86-64)")
        if CHIPS[chip].libtpu != LIBTPU and self.version == LIBTPU:
            raise UserError(
                f"libtpu {LIBTPU} does not know {chip}, which needs e.g. {CHIPS[chip].libtpu}; use another --chip"
            )
        self.chip, self.topology, self.file = chip, topology, file
        self.known = _read(KNOWN) | _read(file)
        self.pool, self.local = ThreadPoolExecutor(jobs), threading.local()
        self.children: list[_Child] = []
        self.ended = False
        self.writing = threading.Lock()

    def __enter__(self) -> "Compiler":
        return self

    def __exit__(self, *error) -> None:
        self.ended = True
        self.pool.shutdown(wait=False, cancel_futures=True)
        for child in self.children:
            child.end()
        self.pool.shutdown()

    def is_known(self, graph: Graph) -> bool:
        """Whether the graph was compiled before."""
        return self.key(graph) in self.known

    def compile(self, graphs: list[Graph]) -> list["Compiled | NotCompiled"]:
        """The figures of each graph, or why it was refused: by the compiler, or because it does not fit beside the
        other tensors on the device."""
        first = {}
        for graph in graphs:
            first.setdefault(graph.hash, graph)
        found = dict(zip(first, self.pool.map(self._compile, first.values())))
        return [self._judged(found[graph.hash], graph.beside) for graph in graphs]

    def key(self, graph: Graph) -> str:
        """What a graph's result is kept under."""
        return f"{graph.hash} {self.chip}:{self._topology(graph)} libtpu {self.version}"

    def _topology(self, graph: Graph) -> str:
        return self.topology if graph.chips > 1 else "1x1"

    def _compile(self, graph: Graph) -> dict:
        key = self.key(graph)
        if key not in self.known:
            found = self._child(self._topology(graph)).compile(graph)
            self.known[key] = found
            if "error" not in found or USED.search(found["error"]):  # other refusals may be ours, and change
                self._keep({"key": key, **found})
        return self.known[key]

    def _keep(self, entry: dict) -> None:
        """Add a result to the file; a file that cannot be written costs the next check its time, not this one."""
        with self.writing:
            try:
                self.file.parent.mkdir(parents=True, exist_ok=True)
                with open(self.file, "a+b") as file:
                    file.seek(max(0, file.seek(0, os.SEEK_END) - 1))
                    whole = file.read() in (b"", b"\n")  # otherwise an interruption cut the last line short
                    file.write(b"" if whole else b"\n")
                    file.write(json.dumps(entry).encode() + b"\n")
            except OSError as error:
                print(f"warning: {self.file}: {error.strerror}; the result is not kept", file=sys.stderr)

    def _judged(self, found: dict, beside: int) -> "Compiled | NotCompiled":
        if "error" in found:
            return refusal(found["error"])
        compiled, limit = Compiled(**found), CHIPS[self.chip].usable
        need = compiled.peak + beside
        return compiled if need <= limit else too_large(need, limit)

    def _child(self, topology: str) -> "_Child":
        """This thread's process for a topology."""
        mine = vars(self.local)
        if topology not in mine or mine[topology].ended:
            if self.ended:
                raise UserError("the compiler was ended")
            mine[topology] = _Child(self.chip, topology, self.version)
            self.children.append(mine[topology])
            mine[topology].open()
        return mine[topology]


def too_large(need: float, limit: float) -> NotCompiled:
    """The error for a graph that needs `need` bytes of HBM on a chip that has `limit`."""
    error = NotCompiled(
        f"it needs {need / 1e9:.2f} GB of HBM, {(need - limit) / 1e9:.2f} GB more than the {limit / 1e9:.2f} GB that "
        "a program can use"
    )
    error.need, error.limit = need, limit
    return error


def refusal(text: str) -> NotCompiled:
    """The compiler's message as an error of one line."""
    if match := USED.search(text):
        return too_large(float(match[1]) * UNITS[match[2]], float(match[3]) * UNITS[match[4]])
    return NotCompiled(" ".join(text.split())[:200])


def _read(path: Path) -> dict[str, dict]:
    """The results in a file, without those that have other figures; their graphs are compiled again."""
    found, whole = {}, {"key", *(each.name for each in fields(Compiled))}
    for line in path.read_text(errors="replace").splitlines() if path.is_file() else ():
        with contextlib.suppress(ValueError):  # a line that an interruption cut short
            entry = json.loads(line)
            if entry.keys() in (whole, {"key", "error"}):
                found[entry.pop("key")] = entry
    return found


class _Child:
    """A process that holds libtpu with one topology, once it is open. It ends with this one."""

    def __init__(self, chip: str, topology: str, libtpu: str):
        name, bounds = CHIPS[chip].topology(chip, topology)
        self.what, self.ended = f"libtpu {libtpu} for {name}", False
        self.process = subprocess.Popen(
            [sys.executable, "-m", "qat_lora.ahead.aot", name, json.dumps(bounds)], cwd=ROOT,
            env=os.environ | ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    def open(self) -> None:
        """Wait until the topology is open. Raises UserError if it cannot be opened."""
        if not select.select([self.process.stdout], [], [], OPENING)[0]:
            self.end()
            raise UserError(f"{self.what} did not open within {OPENING} s; another process may be using libtpu; end it")
        answer = self._answer()
        if "error" in answer:
            self.end()
            missing = "pip install -r requirements-dev.txt again"
            fix = missing if answer.get("import") else "use another --chip or --topology"
            raise UserError(f"{self.what} cannot be opened ({answer['error'][:120]}); {fix}")

    def compile(self, graph: Graph) -> dict:
        head = {"size": len(graph.code), "donated": graph.donated, "chips": graph.chips}
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(head).encode() + b"\n" + graph.code)
            self.process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            self.ended = True
            raise UserError(
                f"{self.what} ended with exit code {self.process.wait()}; if memory ran out (-9), free some or lower "
                "--jobs, then run the command again"
            )
        return json.loads(line)

    def end(self) -> None:
        self.ended = True
        self.process.kill()
        self.process.wait()


# -- the child process -----------------------------------------------------------------------------------------------
def _serve(name: str, bounds: list[int] | None) -> None:
    """Open a topology, then compile the graphs that come in: a line of JSON, then the graph's bytecode."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libtpu prints to standard output

    def say(**answer) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        from jax.experimental import topologies

        options = {} if bounds is None else {"chips_per_host_bounds": bounds}
        devices = topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices
    except Exception as error:
        return say(error=" ".join(str(error).split()), **{"import": isinstance(error, ImportError)})
    say(devices=len(devices))
    while line := sys.stdin.buffer.readline():
        head = json.loads(line)
        try:
            say(**_compiled(sys.stdin.buffer.read(head["size"]), head["donated"], devices[: head["chips"]]))
        except Exception as error:
            say(error=" ".join(str(error).split())[:2000])


def _end_with_parent(parent: int) -> None:
    """End this process soon after the one that started it, even in the middle of a graph."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _compiled(code: bytes, donated: list[int], devices: list) -> dict:
    import io

    from jax.extend.backend import get_compile_options
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo
    from jaxlib.xla_client import DeviceList

    from qat_lora.ahead.traffic import hbm_bytes

    started, text = time.monotonic(), io.BytesIO()
    with ir.Context() as context:
        stablehlo.register_dialect(context)
        module = stablehlo.deserialize_portable_artifact(context, code)
        main = next(op for op in module.body.operations if op.operation.name == "func.func")
        given = ir.BoolAttr.get(True)
        marks = [{"jax.buffer_donor": given} if i in set(donated) else {} for i in range(len(main.arguments))]
        main.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(mark) for mark in marks])
        module.operation.write_bytecode(text)
        # single numbers are allowed: that is how torch_xla passes Python's floats
        if found := re.search(r"tensor<\d[\dx]*xf64>", str(module)):
            raise ValueError(f"it holds float64 ({found[0]}), which a TPU does not support; use float32")
    options = get_compile_options(num_replicas=len(devices), num_partitions=1)
    made = devices[0].client.compile(text.getvalue(), DeviceList(tuple(devices)), options)
    memory, cost = made.get_compiled_memory_stats(), made.cost_analysis()
    program = made.hlo_modules()[0].to_string()
    counts = {kind: len(re.findall(rf" {kind}(?:-start)?\(", program)) for kind in COLLECTIVES}
    return asdict(Compiled(
        arguments=memory.argument_size_in_bytes, outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes, temporary=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes, peak=memory.peak_memory_in_bytes, flops=cost.get("flops", 0.0),
        accessed=cost.get("bytes accessed", 0.0), moved=hbm_bytes(program),
        collectives={kind: number for kind, number in counts.items() if number},
        seconds=round(time.monotonic() - started, 1),
    ))  # fmt: skip


if __name__ == "__main__":
    _serve(sys.argv[1], json.loads(sys.argv[2]))
