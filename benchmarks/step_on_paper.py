"""What does an update cost on 1 to 1,024 devices, and what limits it? On paper: nothing here has run on a GPU or TPU.

    python benchmarks/step_on_paper.py
    python benchmarks/step_on_paper.py --part binds --length 2048
    unshare --net sh -c 'ip link set lo up; python benchmarks/step_on_paper.py --part check'

Prints which model fits which devices (fits), how many tokens a worker needs before computing takes as long as the
network (tokens), and what takes the longest at a fixed batch (binds). S: the workers share the model out (--shard on);
C: blocks are recomputed (--gradient-checkpointing). What binds, if it is not computing: inside or between (the network
in or between boxes), hops (of rings) or the optimiser. Speeds of devices and assumed efficiencies are in step_cost.py.

--part check measures the same formulas in CPU processes (step_check.py); with `unshare`, as root, it has a loopback
interface of its own, so that other programs are not counted.
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
def head(title: str, *columns: str) -> None:
    print(f"\n{title}\n\n| " + " | ".join(columns) + " |\n|" + "---|" * len(columns))


def line(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |", flush=True)


def ways(shard: bool, recompute: bool) -> str:
    return " S" * shard + " C" * recompute


def fits(cfg: Config, models: dict) -> None:
    """For each place and stage the largest model that fits, in the first way that does."""
    head(
        f"largest model whose worker fits in {FILL:.0%} of a device; micro-batches of {sizes(cfg)}", "devices", *STAGES
    )
    for device, count in PLACES:
        box, cells = BOXES[device], []
        for stage in STAGES:
            found = {n: way_to_fit(models[n, stage], box, count, cfg.batch_size, cfg.length) for n in MODELS}
            name = max((n for n in found if found[n]), key=list(MODELS).index, default=None)
            cells.append("none" if name is None else f"{name}{ways(*found[name][:2])}: {found[name][2] / 1e9:.0f} GB")
        line(f"{count} × {device}, {box.memory / 1e9:.0f} GB", *cells)


def tokens(cfg: Config, models: dict) -> None:
    """How many tokens a worker must process until computing has taken as long as the network, without hops: per update
    for a whole model, per micro-batch for one that is shared out and recomputed."""
    kinds = [f"{what}, {where}" for what in ("whole", "S C") for where in ("one box", "boxes")]
    head(f"tokens at which computing takes as long as the network; rows of {cfg.length}", "devices", "model", *kinds)
    for device in ("L4", "A100", "H100", "v6e"):
        for name, stage in (("qwen3-0.6b", "QAT"), ("qwen3-8b", "QAT"), ("qwen3-8b", "recovery")):
            box, cells = BOXES[device], []
            for shard in (False, True):
                for boxes, workers in ((False, box.per_box), (True, box.most)):
                    found = step(models[name, stage], box, workers, 1, cfg.length, 1, shard, recompute=shard)
                    needed = cfg.length * max(found.inside, found.between) / found.compute
                    known = (box.between or not boxes) and not (shard and box.kind == "xla")
                    cells.append(f"{needed:,.0f}" if known else "–")
            line(device, f"{name}, {stage}", *cells)


def binds(cfg: Config, models: dict) -> None:
    """The share of an update that is spent computing, and what takes the longest where that is not computing."""
    title = f"share of an update of {cfg.rows} rows that is spent computing; micro-batches of at most {sizes(cfg)}"
    head(title, "devices", "model", *(f"{count:,}" for count in COUNTS))
    for device in ("A100", "H100", "v6e"):
        for stage in ("QAT", "recovery"):
            for name in MODELS:
                cells = [cell(cfg, models[name, stage], BOXES[device], count) for count in COUNTS]
                if any(text != "–" for text in cells):
                    line(device, f"{name}, {stage}", *cells)


def cell(cfg: Config, model: nn.Module, box: Box, workers: int) -> str:
    """One entry of the table, e.g. "61% inside S C"."""
    each = cfg.rows // workers
    rows = min(cfg.batch_size, each)
    if workers > box.most or not each or (way := way_to_fit(model, box, workers, rows, cfg.length)) is None:
        return "–"
    shard, recompute, _ = way
    found = step(model, box, workers, rows, cfg.length, -(-each // rows), shard, recompute)
    limit = "" if found.binds == "compute" else f" {found.binds}"
    return f"{found.compute / found.seconds:.0%}{limit}{ways(shard, recompute)}"


def sizes(cfg: Config) -> str:
    return f"{cfg.batch_size}×{cfg.length} tokens"


if __name__ == "__main__":
    run_script(main, Config, "step_on_paper", __doc__)
