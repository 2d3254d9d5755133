# PYTHON_ARGCOMPLETE_OK
"""Does a run fit a TPU, and how fast could it be? Asks the TPU's own compiler, without a TPU or weights.

    python scripts/compile_for_tpu.py train_qat --config v6e4 --chip v6e
    python scripts/compile_for_tpu.py train_recovery_lora --config v6e1 --chip v5e batch_size=2
    python scripts/compile_for_tpu.py pretrain --config cfg_pretrain_tpu --chip v3 --topology 2x2
    python scripts/compile_for_tpu.py train_cot_sft --config v5e8 --json

The first word is a training script, or build_kd_cache. --chip, --topology, --json, --jobs and --debug are this
command's options; all others, including those listed below, go to that script. Every phase of the run is recorded on
torch_xla's CPU device from the shapes in its options, and each graph is compiled for the chip. A graph of a large model
takes minutes. Results are kept in caches/tpu by the graph's hash, so an interrupted check resumes, and an unchanged
graph is not compiled again. The model's config comes from the hub, or from the repository for the presets' models.
The table has one row per phase: graphs (distinct ones in brackets), HBM by kind for the graph with the highest peak,
the peak of the phase including tensors that its graphs do not use, operations, bytes moved to and from HBM, bytes
accessed (HBM and on-chip memory), and the roofline's time: operations at the chip's peak, or bytes at its bandwidth,
whichever takes longer. That is an estimate and a lower bound. All figures are for each chip; tokens/s is for all.
docs/TPU.md has the figures of the presets.
"""

import sys
from dataclasses import dataclass, fields
from typing import Literal

from qat_lora.ahead.aot import CHIPS, TOPOLOGIES
from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import ScriptConfig

NAME = "compile_for_tpu"


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    chip: Literal[*CHIPS] = opt.device(
        "v6e", "TPU chip to compile for; on v3 and tpu7x a worker is one of a chip's two cores"
    )
    topology: Literal["auto", *TOPOLOGIES] = opt.device(
        "auto", "chips that train together; auto: 1x1, or as many as the script's --num-chips"
    )
    json: bool = opt.run(False, "print the figures as JSON, in bytes, operations and seconds")
    jobs: int = opt.run(
        1, "graphs to compile at the same time; one of 28 layers takes 14 GB of the host's memory", at_least=1
    )


OWN = ("chip", "topology", "json", "jobs", "debug", "help", "h")


def split(words: list[str]) -> tuple[list[str], list[str]]:
    """(this script's own options, the script to compile with its options)."""
    own, others, words = [], [], list(words)
    switches = {field.name for field in fields(Config) if field.type is bool} | {"help", "h"}
    while words:
        word = words.pop(0)
        name, equals, _ = word.lstrip("-").replace("-", "_").partition("=")
        mine = own if name in OWN and (equals or word.startswith("-")) else others
        mine.append(word)
        follows = name not in switches or (words and words[0].lower() in ("true", "false"))
        if mine is own and not equals and follows and words:
            own.append(words.pop(0))
    return own, others


if __name__ == "__main__":
    own, given = split(sys.argv[1:])
    sys.argv[1:] = own
    check_command_line(Config, NAME, __doc__)  # before the imports that take seconds

import dataclasses
import json
from contextlib import redirect_stdout

from qat_lora.ahead.aot import Chip, Compiler, NotCompiled
from qat_lora.errors import UserError
from qat_lora.run.console import say
from qat_lora.run.scripts import load_script, read_options
from qat_lora.run.tpu import Phase, as_json, chips_of, compiled, record, step, table
from qat_lora.train.memory import memory_line


def main(cfg: Config) -> None:
    if not given or given[0].startswith("-"):
        raise UserError(
            "which script? Give its name as the first word, e.g. compile_for_tpu.py train_qat --config v6e4"
        )
    chip, module = CHIPS[cfg.chip], load_script(given[0])
    options = read_options(module, given[1:], None if cfg.topology == "auto" else chips_of(cfg.topology, chip))
    workers = getattr(options, "num_chips", None) or 1
    topology = cfg.topology if cfg.topology != "auto" else fitting(workers, chip)
    # a script may print while it is rehearsed, and the table or the JSON should be all that a program reads
    with Compiler(cfg.chip, topology, cfg.jobs) as compiler, redirect_stdout(sys.stderr):
        backend = record(module.rehearse, options, workers)
        phases = compiled(backend, compiler)
        wrong = [phase for phase in phases if phase.refused]
        batch = largest(module, options, workers, wrong[0].refused, compiler) if wrong else None
    if cfg.json:
        print(json.dumps({"chip": cfg.chip, "topology": topology, "phases": as_json(phases, chip)}, indent=1))
    else:
        say(f"{module.__name__} on {workers} × {cfg.chip}, libtpu {compiler.version}; untested on hardware")
        size = f"{chip.hbm:g} GiB of HBM, {chip.usable / 1e9:.2f} GB of it usable"
        say(f"for each worker: {size}, at {chip.bandwidth:g} GB/s; {chip.teraflops:g} bf16 TFLOP/s")
        say(table(phases, chip))
        say(memory_line(backend.estimate, backend))
    if wrong:
        raise UserError(f"{wrong[0].name}: {wrong[0].refused}{batch or ''}")
    if not cfg.json:
        conclude(phases, chip)


def conclude(phases: list[Phase], chip: Chip) -> None:
    """Print the peak, and the speed that the roofline allows."""
    say(f"peak, by the compiler: {max(phase.peak for phase in phases) / 1e9:.2f} GB of {chip.usable / 1e9:.2f} GB")
    if update := step(phases):
        seconds = update.seconds(chip)
        rate = f"{update.tokens / seconds:,.0f} tokens/s"
        say(f"{update.name}: at least {seconds * 1e3:.1f} ms, so at most {rate} (estimates)")


def fitting(workers: int, chip: Chip) -> str:
    """The topology with this many workers."""
    for topology in TOPOLOGIES:
        if chips_of(topology, chip) == workers:
            return topology
    counts = [str(chips_of(topology, chip)) for topology in TOPOLOGIES]
    raise UserError(
        f"--num-chips {workers}: no topology has {workers} workers; use {', '.join(counts[:-1])} or {counts[-1]}"
    )


def largest(module, options, workers: int, why: NotCompiled, compiler: Compiler) -> str | None:
    """The largest batch size that fits, as the end of an error message; found by bisection."""
    name = next((each for each in ("batch_size", "global_batch_size") if hasattr(options, each)), None)
    if why.need is None or name is None:
        return None
    unit = workers if name == "global_batch_size" else 1
    low, high = 0, getattr(options, name) // unit
    while high - low > 1:
        middle = (low + high) // 2
        smaller = dataclasses.replace(options, **{name: middle * unit})
        say(f"trying {name} {middle * unit}", sys.stderr)
        fits = not any(phase.refused for phase in compiled(record(module.rehearse, smaller, workers), compiler))
        low, high = (middle, high) if fits else (low, middle)
    flag = "--" + name.replace("_", "-")
    return (
        f"; {flag} {low * unit} is the largest that fits" if low else f"; not even {flag} {unit} fits; use fewer tokens"
    )


if __name__ == "__main__":
    run_script(main, Config, NAME, __doc__)
