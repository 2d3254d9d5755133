"""What does an update cost on 1 to 1,024 devices, and what limits it? On paper: nothing here has run on a GPU or TPU.

    python benchmarks/step_on_paper.py
    python benchmarks/step_on_paper.py --part binds --length 2048
    unshare --net sh -c 'ip link set lo up; python benchmarks/step_on_paper.py --part check'

Prints which model fits which devices, how many tokens a worker needs before computing takes as long as the network, and
what binds at a fixed batch. Speeds of devices and assumed efficiencies are in step_cost.py. --part check measures the
same formulas in CPU processes (step_check.py); with `unshare` (as root) it has a network interface of its own, so that
other programs are not counted.
"""

from dataclasses import dataclass
from typing import Literal

from step_cost import BOXES, FILL, LINK, MFU, MODELS, STAGES, Box, config_of, empty, step, trained, way_to_fit
from torch import nn

from qat_lora.hosts.revision import revision
from qat_lora.run.command_line import run_script
from qat_lora.run.options import ScriptConfig, option

PLACES = (("L4", 1), ("L4", 8), ("H100", 1), ("H100", 8), ("H200", 8), ("H100", 64), ("v6e", 1), ("v6e", 8))
COUNTS = (1, 8, 16, 64, 256, 1024)


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    part: Literal["all", "fits", "tokens", "binds", "check"] = option("all", "which table; all: all but check")
    batch_size: int = option(4, "rows per micro-batch", at_least=1)
    length: int = option(1024, "tokens per row", at_least=2)
    rows: int = option(1024, "rows per update in the table of what binds", at_least=1)
    rank: int = option(8, "rank of the recovery adapter", at_least=1)
    layers: int = option(4, "check: blocks of SmolLM2-135M's shape", at_least=1)
    steps: int = option(3, "check: timed updates of each kind", at_least=1)
    workers: str = option("1,2,4", "check: numbers of workers, of which the first is 1")


def main(cfg: Config) -> None:
    if cfg.part == "check":
        from step_check import check

        return check(cfg)
    print(
        f"on paper, untested on hardware; commit {revision()}; {MFU:.0%} of peak FLOP/s, {LINK:.0%} of a link's speed"
    )
    if cfg.dry_run:
        return None
    models = {(name, stage): trained(empty(config_of(name)), stage, cfg.rank) for name in MODELS for stage in STAGES}
    tables = {"fits": fits, "tokens": tokens, "binds": binds}
    for name, table in tables.items():
        if cfg.part in ("all", name):
            table(cfg, models)
    return None


# -- tables ----------------------------------------------------------------------------------------------------------
def fits(cfg: Config, models: dict) -> None:
    """For each place and stage the largest model that fits, in the first way that does."""
    print(f"\nlargest model that fits {FILL:.0%} of a device, micro-batches of {cfg.batch_size}×{cfg.length} tokens\n")
    print("| devices | " + " | ".join(STAGES) + " |\n|---|" + "---|" * len(STAGES))
    for device, count in PLACES:
        box, cells = BOXES[device], []
        for stage in STAGES:
            ways = {n: way_to_fit(models[n, stage], box, count, cfg.batch_size, cfg.length) for n in MODELS}
            name = max((n for n in ways if ways[n]), key=list(MODELS).index, default=None)
            cells.append("none" if name is None else f"{name}{flags(*ways[name][:2])}: {ways[name][2] / 1e9:.0f} GB")
        print(f"| {count} × {device}, {box.memory / 1e9:.0f} GB | " + " | ".join(cells) + " |")


def flags(shard: bool, recompute: bool) -> str:
    return " S" * shard + " C" * recompute


def tokens(cfg: Config, models: dict) -> None:
    """How many tokens a worker must process until computing has taken as long as the network."""
    print(
        f"\ntokens of a worker at which computing takes as long as the network, rows of {cfg.length} tokens: per update"
    )
    print("for a whole model, per micro-batch for one that is shared out and recomputed; hops not counted\n")
    print("| devices | model | whole, one box | whole, boxes | shared out, one box | shared out, boxes |")
    print("|---|---|---:|---:|---:|---:|")
    for device in ("L4", "A100", "H100", "v6e"):
        for name, stage in (("qwen3-0.6b", "QAT"), ("qwen3-8b", "QAT"), ("qwen3-8b", "recovery")):
            box, cells = BOXES[device], []
            for shard in (False, True):
                for workers in (box.per_box, box.most):
                    known = (workers == box.per_box or box.between) and not (shard and box.kind == "xla")
                    found = step(models[name, stage], box, workers, 1, cfg.length, 1, shard, shard)
                    needed = cfg.length * max(found.inside, found.between) / found.compute
                    cells.append(f"{needed:,.0f}" if known else "–")
            print(f"| {device} | {name}, {stage} | " + " | ".join(cells) + " |")


def binds(cfg: Config, models: dict) -> None:
    """The share of an update that is spent computing, and what takes the longest where that is not computing."""
    print(
        f"\nshare of an update of {cfg.rows} rows of {cfg.length} tokens that is spent computing, micro-batches of at"
    )
    print(
        f"most {cfg.batch_size} rows; S: shared out, C: recomputed blocks; what takes longest, unless it is computing\n"
    )
    print(
        "| devices | model | " + " | ".join(f"{count:,}" for count in COUNTS) + " |\n|---|---|" + "---|" * len(COUNTS)
    )
    for device in ("A100", "H100", "v6e"):
        for stage in ("QAT", "recovery"):
            for name in MODELS:
                cells = [cell(cfg, models[name, stage], BOXES[device], count) for count in COUNTS]
                if any(text != "–" for text in cells):
                    print(f"| {device} | {name}, {stage} | " + " | ".join(cells) + " |")


def cell(cfg: Config, model: nn.Module, box: Box, workers: int) -> str:
    """One entry of the table: e.g. "61% inside S C"."""
    each = cfg.rows // workers
    rows = min(cfg.batch_size, each)
    if workers > box.most or not each or (way := way_to_fit(model, box, workers, rows, cfg.length)) is None:
        return "–"
    shard, recompute, _ = way
    found = step(model, box, workers, rows, cfg.length, each // rows, shard, recompute)
    limit = "" if found.binds == "compute" else f" {found.binds}"
    return f"{found.compute / found.seconds:.0%}{limit}{flags(shard, recompute)}"


if __name__ == "__main__":
    run_script(main, Config, "step_on_paper", __doc__)
