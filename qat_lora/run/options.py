"""Options of scripts: default, help, group, range, choices, and whether an option is part of a run's identity.

A script's options are the fields of one flat frozen dataclass; `command_line.parse` reads them from flags, key=value
and YAML presets, and `check_options` checks them.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from functools import partial
from types import NoneType
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from qat_lora.backend.detect import DEVICES
from qat_lora.errors import UserError, load_package
from qat_lora.hosts.environment import Timeouts

GROUPS = {
    "model": "Model",
    "data": "Data",
    "quantiser": "Quantisation",
    "optimisation": "Training",
    "run": "Run",
    "device": "Device and workers",
}  # group: its title, in the order of --help
TRACKERS = ("wandb", "tensorboard", "none")
BOUNDS = ("at_least", "above", "at_most", "below")
LONGEST = 86400  # longest timeout in seconds; sockets accept at most 24 days
MOST_UPDATES = 10**9  # most updates of a stage; more would take years
MOST_RATE = 1e3  # largest learning rate or weight decay
MOST_MICRO_BATCHES = 10_000  # most micro-batches of an update
LARGEST = 3.4e38  # larger numbers overflow fp32
MOST_WEIGHT = 1e6  # largest weight of a term of a loss, and largest LoRA alpha
# Bounds that several options share.
COUNT, SHARE = {"at_least": 1}, {"at_least": 0, "at_most": 1}
UPDATES = {"at_least": 0, "at_most": MOST_UPDATES}
RATE = {"above": 0, "at_most": MOST_RATE, "fix": "use e.g. 1e-3"}  # of a learning rate
DECAY, WEIGHT = {"at_least": 0, "at_most": MOST_RATE}, {"at_least": 0, "at_most": MOST_WEIGHT}
HELDOUT = {"above": 0, "below": 1, "fix": "use e.g. 0.1"}  # of a held-out share


def option(
    default: Any, help: str, *aliases: str, group: str = "run", identity: bool | str = True,
    fix: str = "", **bounds: float,
) -> Any:  # fmt: skip
    """A field of a script's config; a field of type Literal takes only the listed values.

    aliases: other flags for it ("--from"), and other keys of a preset ("from").
    group: one of GROUPS, under which --help lists it.
    identity: whether the option is part of a run's identity: a run is resumed only with the same value. If it is the
    name of a fact in the manifest ("base"), the fact is compared instead: the option says where an input is,
    the fact identifies its content.
    bounds: at_least, above, at_most, below. fix: how to fix a value outside them, for the message.
    """
    assert group in GROUPS and bounds.keys() <= {*BOUNDS}, (group, bounds)
    return field(
        default=default,
        metadata={
            "help": help.replace("%", "%%"), "aliases": aliases, "group": group, "identity": identity,
            "bounds": bounds, "fix": fix,
        },
    )  # fmt: skip


def with_default(kind: type, name: str, default: Any) -> Any:
    """A copy of an option that another config declares, with a different default."""
    declared = next(each for each in dataclasses.fields(kind) if each.name == name)
    return field(default=default, metadata=dict(declared.metadata))


model = partial(option, group="model")
data = partial(option, group="data")
quantiser = partial(option, group="quantiser")
training = partial(option, group="optimisation")
run = partial(option, group="run", identity=False)
device = partial(option, group="device", identity=False)


_run, _device = run, device  # an option below is called `device`


@dataclass(frozen=True, kw_only=True)
class ScriptConfig:
    """The options of every script.

    SECTIONS: options that can also be written as section.option, or in a preset in a block of that name.
    DEFAULT_CONFIG: the preset that is used without --config.
    """

    SECTIONS: ClassVar[dict[str, tuple[str, ...]]] = {}
    DEFAULT_CONFIG: ClassVar[str | None] = None

    config: str | None = _run(
        None, "preset: NAME of configs/<script>/NAME.yaml, or a YAML file; options on the command line override it"
    )
    device: Literal[*DEVICES] = _device(
        "auto",
        "device to run on; auto takes TPU chips, else CUDA, else the CPU; xla is torch_xla, on the CPU without a chip",
        "--device-type",
    )
    tpu: bool = _device(False, "short for --device tpu")
    precision: Literal["auto", "fp32", "bf16"] = _device(
        "auto",
        "arithmetic: fp32, or bf16 autocast; auto is bf16 on TPU, CUDA and CPUs that support it",
        identity="precision",
    )
    seed: int = option(0, "random seed", at_least=0, below=2**63)
    dry_run: bool = _run(False, "print the plan and the memory it needs, then stop")
    debug: bool = _run(False, "show the traceback if an error occurs")

    def __post_init__(self):
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class WorkerConfig(ScriptConfig):
    """The additional options of every script that can run on several workers."""

    num_chips: int | None = _device(
        None, "TPU chips, GPUs or CPU processes on this host; 0 is every chip or GPU, and one if not given", at_least=0
    )
    host_timeout: float = _device(
        60.0,
        "seconds after which the other hosts stop when one no longer responds",
        at_least=10,
        at_most=LONGEST,
        fix="a short network pause must not end the job: use e.g. 60 seconds",
    )
    join_timeout: float = _device(
        60.0, "seconds to wait at the start until all hosts have joined", above=0, at_most=LONGEST
    )

    @property
    def timeouts(self) -> Timeouts:
        return Timeouts(self.host_timeout, self.join_timeout)


@dataclass(frozen=True, kw_only=True)
class RunConfig(ScriptConfig):
    """The additional options of every training script."""

    output_dir: str | None = _run(None, "run directory [runs/<experiment>/<time>-<preset>-s<seed>-<sha>]")
    resume: str = _run(
        "off",
        "resume a run: off, auto (the newest unfinished run with these options), or a run directory, whose options are "
        "then the defaults; a larger --max-steps extends a finished run",
    )
    report_to: Literal[*TRACKERS] = _run(
        "none", "also send every line of metrics.jsonl to Weights & Biases or TensorBoard"
    )

    def __post_init__(self):
        super().__post_init__()
        if self.report_to != "none":
            load_package(self.report_to, f"--report-to {self.report_to}", ", or leave the option out")


@dataclass(frozen=True, kw_only=True)
class JobConfig(RunConfig, WorkerConfig):
    """The additional options of every script that can train on several workers."""


# -- checks ----------------------------------------------------------------------------------------------------------
def flag(name: str) -> str:
    """The flag of an option."""
    return f"--{name.replace('_', '-')}"


def check_options(config) -> None:
    """Raise UserError for a value outside its option's range or choices, and for values that are always mistakes: empty
    text (an unset shell variable), NaN or infinity."""
    hints = get_type_hints(type(config))
    for declared in dataclasses.fields(config):
        name, value = flag(declared.name), getattr(config, declared.name)
        if value == "":
            raise UserError(f"{name} is empty; give it a value or leave it out")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{name} {value} is not a finite number; give one")
        if value is None:
            continue
        if (known := choices(hints[declared.name])) and value not in known:
            raise UserError(f"{name} {value!r} is not one of {', '.join(known)}")
        if bounds := declared.metadata.get("bounds"):
            check_range(name, value, declared.metadata["fix"], **bounds)


def choices(hint: Any) -> tuple[str, ...]:
    """The values that a field of type Literal may take; () for other types."""
    kinds = [kind for kind in (get_args(hint) if get_origin(hint) is not Literal else (hint,)) if kind is not NoneType]
    return next((get_args(kind) for kind in kinds if get_origin(kind) is Literal), ())


def check_range(name: str, value: float, fix: str = "", **bounds: float) -> None:
    """Raise UserError for a value outside its bounds (at_least, above, at_most, below). fix: how to fix it."""
    inside = (
        value >= bounds.get("at_least", value)
        and value <= bounds.get("at_most", value)
        and not value <= bounds.get("above", -math.inf)
        and not value >= bounds.get("below", math.inf)
    )
    if not inside:
        raise UserError(f"{name} {value} must be {_range(bounds)}{f'; {fix}' if fix else ''}")


def _range(bounds: dict[str, float]) -> str:
    """Bounds in words: "at least 1", "at least 0 and below 1", "from 1 to 10"."""
    words = {name: f"{name.replace('_', ' ')} {shown(bound)}" for name, bound in bounds.items()}
    if {"at_least", "at_most"} <= words.keys():
        return f"from {shown(bounds['at_least'])} to {shown(bounds['at_most'])}"
    return " and ".join(words[name] for name in BOUNDS if name in words)


def shown(value: float) -> str:
    """A number as readable text."""
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 1e12:
        return f"{value:.3g}"
    return f"{value:,.12g}" if abs(value) >= 1000 else f"{value:.12g}"
