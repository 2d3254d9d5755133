"""One flat frozen dataclass per script, read from flags, key=value and YAML presets."""

import dataclasses
import difflib
import itertools
import math
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, get_args, get_type_hints

import yaml
from transformers.hf_argparser import HfArgumentParser

from qat_lora.backend.relay import Timeouts
from qat_lora.errors import UserError, ignore_sigterm, open_output, report

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
LONGEST = 86400  # seconds of a timeout; sockets take no more than 24 days


def option(
    default: Any, help: str, *aliases: str, identity: bool | str = True, renamed: dict[Any, Any] | None = None
) -> Any:
    """A field of a script's config.

    aliases: other flags for it ("--from"), and other keys of a preset ("from").
    identity: whether the option is part of a run's identity: a run is resumed only with the same value. The name of a
    fact in the manifest ("base") means that this fact is compared instead: the option says where something is, the
    fact what it is.
    renamed: {value that earlier versions wrote into config.yaml: its current name}; a run may be resumed with either.
    """
    spelled = [name for alias in aliases for name in (alias, f"--{alias[2:].replace('-', '_')}")]
    metadata = {"help": help.replace("%", "%%"), "aliases": list(dict.fromkeys(spelled))}
    return field(default=default, metadata=metadata | {"identity": identity, "renamed": renamed or {}})


@dataclass(frozen=True, kw_only=True)
class ScriptConfig:
    """What every script takes.

    SECTIONS: fields that are also written section.field, in a preset as a block of that name. DEFAULT_CONFIG: the
    preset that is read when none is named.
    """

    SECTIONS: ClassVar[dict[str, tuple[str, ...]]] = {}
    DEFAULT_CONFIG: ClassVar[str | None] = None

    config: str | None = option(
        None, "preset NAME of configs/<script>/NAME.yaml, or a YAML file; flags win over it", identity=False
    )
    device: str = option(
        "auto", "auto, cpu, cuda, tpu or xla; auto: TPU chips, then CUDA, then CPU", "--device-type", identity=False
    )
    tpu: bool = option(False, "short for --device tpu", identity=False)
    precision: str = option(
        "auto", "fp32 or bf16 (autocast); auto: bf16 on TPU, CUDA and CPUs that multiply it", identity="precision"
    )
    seed: int = option(0, "seed of everything random")
    dry_run: bool = option(False, "print the resolved plan and stop", identity=False)
    debug: bool = option(False, "show the traceback of an error", identity=False)


@dataclass(frozen=True, kw_only=True)
class RunConfig(ScriptConfig):
    """What every script that trains takes on top."""

    output_dir: str | None = option(
        None, "run directory; default runs/<experiment>/<time>-<preset>-s<seed>-<sha>", identity=False
    )
    resume: str = option("off", "off, auto (newest unfinished run of this config), or a run directory", identity=False)


@dataclass(frozen=True, kw_only=True)
class JobConfig(RunConfig):
    """What every script that trains on several workers takes on top."""

    host_timeout: float = option(
        60.0, "seconds until the other hosts end after one is lost; a slow host that still responds is not lost",
        identity=False,
    )  # fmt: skip
    join_timeout: float = option(60.0, "seconds to wait for all hosts; raise it if hosts start slowly", identity=False)

    @property
    def timeouts(self) -> Timeouts:
        if not 10 <= self.host_timeout <= LONGEST:
            raise UserError(
                f"--host-timeout {self.host_timeout:g} must be at least 10 s, so that a short network pause does not "
                f"end the job, and at most {LONGEST} s (a day)"
            )
        if not 0 < self.join_timeout <= LONGEST:
            raise UserError(
                f"--join-timeout {self.join_timeout:g} must be more than 0 s and at most {LONGEST} s (a day)"
            )
        return Timeouts(self.host_timeout, self.join_timeout)


def parse(kind: type, script: str, argv: list[str], description: str = "", presets: str | None = None):
    """The config of `script` from its flags: `--key value`, `key=value`, and presets of configs/<script>/, or of the
    folder `presets` where another script has the same.

    Raises UserError naming the nearest key for an unknown one, and the value and type for a wrong value.
    """
    parser = _Parser(kind, prog=f"{script}.py", description=description, allow_abbrev=False)
    names = _names(kind)
    argv = _spelled_out(argv, kind)
    parser.set_defaults(**_preset(argv, kind, presets or script))
    config, unknown = parser.parse_args_into_dataclasses(argv, return_remaining_strings=True, look_for_args_file=False)
    if unknown:
        flags = {name.replace("_", "-") for name in names}
        raise UserError(_unknown_key(unknown[0].lstrip("-").split("=")[0], flags, "flag --", "--"))
    _check_values(config)
    return dataclasses.replace(config, device="tpu") if config.tpu else config


def _names(kind: type) -> dict[str, str]:
    """The field that each name means, the fields' own and the aliases."""
    fields = dataclasses.fields(kind)
    aliases = {alias.lstrip("-").replace("-", "_"): f.name for f in fields for alias in f.metadata.get("aliases", ())}
    return {f.name: f.name for f in fields} | aliases


def _check_values(config) -> None:
    """What no option of any script means: an empty text (an unset shell variable), NaN or infinity."""
    for name, value in vars(config).items():
        flag = f"--{name.replace('_', '-')}"
        if value == "":
            raise UserError(f"{flag} is empty; give it a value or leave it out")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{flag} {value} is not a finite number")
    if not 0 <= config.seed < 2**63:
        raise UserError(f"--seed {config.seed} must be from 0 to 2^63 - 1")


class _Parser(HfArgumentParser):
    def add_argument(self, *names, **settings):  # HfArgumentParser passes all of a field's metadata
        return super().add_argument(*names, **{k: v for k, v in settings.items() if k not in ("identity", "renamed")})

    def error(self, message):
        raise UserError(f"{message}; see {self.prog} --help")


def _spelled_out(argv: list[str], kind: type) -> list[str]:
    """key=value → --key value, except right after a flag that takes a value: it is that value; section.key → key."""
    hints = get_type_hints(kind)
    valued = {name for name, field in _names(kind).items() if hints[field] is not bool}
    spelled: list[str] = []
    for word in argv:
        flag = spelled[-1].lstrip("-").replace("-", "_") if spelled and spelled[-1].startswith("--") else ""
        if flag in valued:
            spelled.append(word)
            continue
        if match := re.fullmatch(r"(?:--)?([A-Za-z_][\w-]*)\.([\w-]+)(=.*)?", word, re.DOTALL):
            section, key, value = match[1], match[2], match[3] or ""
            if section in kind.SECTIONS:
                _check_in_section(key.replace("-", "_"), section, kind, "flag ", f"--{section}.")
                word = f"--{key}{value}" if word.startswith("--") else f"{key}{value}"
        match = re.fullmatch(r"([A-Za-z_][\w.-]*)=(.*)", word, re.DOTALL)
        spelled += [f"--{match[1]}", match[2]] if match else [word]
    return spelled


def _check_in_section(key: str, section: str, kind: type, what: str, mark: str) -> None:
    if key not in kind.SECTIONS[section]:
        raise UserError(_unknown_key(key, set(kind.SECTIONS[section]), what + mark, mark))


def _preset(argv: list[str], kind: type, script: str) -> dict:
    names = [word.split("=", 1)[1] for word in argv if word.startswith("--config=")]
    names += [name for word, name in itertools.pairwise(argv) if word == "--config"]
    if len(names) > 1:
        raise UserError(
            f"--config is given {len(names)} times ({', '.join(names)}); give one, `base:` in it builds on another"
        )
    name = names[0] if names else kind.DEFAULT_CONFIG
    return _read_preset(name, kind, script) if name else {}


def _read_preset(name: str, kind: type, script: str, above: tuple = ()) -> dict:
    """A preset's values, checked against the fields; `base: NAME` in it names a preset that it builds on."""
    folder = CONFIGS / script
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in folder.glob("*.yaml"))
        there = ", ".join(known) or "none"
        raise UserError(f"--config {name}: no such preset{_nearest(name, known)}; there are: {there}")
    try:
        values = yaml.safe_load(path.read_text()) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML ({' '.join(str(error).split())}); correct the file") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: a preset is a list of `key: value` lines; correct the file")
    base = values.pop("base", None)
    if base is not None and (not isinstance(base, str) or base in (*above, name)):
        raise UserError(f"{path}: base {base!r} is not the name of another preset; correct it, or leave it out")
    for section in kind.SECTIONS.keys() & values.keys():
        block = values.pop(section)
        if not isinstance(block, dict):
            raise UserError(f"{path}: {section} is a block of `key: value` lines; correct the file")
        for key in block:
            _check_in_section(str(key), section, kind, f"{path}: key ", f"{section}.")
        values |= block
    hints, known = get_type_hints(kind), _names(kind)
    checked = {}
    for key, value in values.items():
        if key not in known or key == "config":
            raise UserError(_unknown_key(str(key), set(known), f"{path}: key "))
        checked[known[key]] = _coerced(value, hints[known[key]], f"{path}: {key}")
    return (_read_preset(base, kind, script, (*above, name)) if base else {}) | checked


def _coerced(value: Any, hint: Any, where: str) -> Any:
    """`value` as the field's type; PyYAML reads 8e-5 as text, so numbers are read again by the type."""
    kinds = [k for k in get_args(hint) or (hint,) if k is not NoneType]
    if value is None and NoneType in get_args(hint):
        return None
    kind = kinds[0]
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    if kind in (int, float) and isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            number = float(value)
            if kind is float or number == int(number):
                return kind(number)
        except (ValueError, OverflowError):
            pass
    raise UserError(f"{where}: {value!r} is not {'an' if kind is int else 'a'} {kind.__name__}; correct the value")


def _unknown_key(key: str, names: set[str], what: str, mark: str = "") -> str:
    return f"{what}{key} is unknown{_nearest(key, names, mark) or '; see --help'}"


def _nearest(word: str, known, mark: str = "") -> str:
    near = difflib.get_close_matches(word, known, 1, 0.5)
    return f"; did you mean {mark}{near[0]}?" if near else ""


def run_script(main, kind: type, script: str, description: str, presets: str | None = None) -> None:
    """Parse the command line (see `parse`) and call main(config). Bad input is one line on stderr and exit code 2; so
    is, with exit code 1, whatever nobody foresaw. --debug shows the traceback."""
    debug = "--debug" in sys.argv
    open_output()
    try:
        try:
            config = parse(kind, script, sys.argv[1:], description, presets)
            debug = config.debug
            main(config)
        except SystemExit:  # --help, or nothing to do
            sys.stdout.flush()
            raise
        sys.stdout.flush()  # the end of the process would be too late to say what is wrong
    except (Exception, KeyboardInterrupt) as error:
        if debug and not isinstance(error, BrokenPipeError | KeyboardInterrupt):
            raise
        sys.exit(report(error))
    finally:
        ignore_sigterm()
