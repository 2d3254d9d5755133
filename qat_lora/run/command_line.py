"""The command line of a script: parses flags, key=value and YAML presets into its config, and reports errors."""

import argparse
import dataclasses
import difflib
import itertools
import os
import re
import runpy
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import yaml

from qat_lora.errors import ROOT, UserError, ignore_sigterm, load_package, open_output, report
from qat_lora.run.console import say
from qat_lora.run.options import GROUPS, choices, flag

METAVARS = {str: "TEXT", int: "N", float: "X"}  # placeholder of an option's value in --help
CONFIGS = ROOT / "configs"
YES, NO = ("true", "yes", "t", "y", "1"), ("false", "no", "f", "n", "0")


def parse(
    kind: type, script: str, argv: list[str], description: str = "", presets: str | None = None,
    defaults: dict[str, Any] | None = None,
):  # fmt: skip
    """Parse the command line of `script` into its config: `--key value`, `key=value`, and presets of configs/<script>/.
    With --resume RUN, options that are not given are those of the run.

    presets: the folder in configs/ to use instead, for a script that uses another one's presets. defaults: override the
    fields' own. Raises UserError for an unknown key, naming the nearest known one, and for a wrong value, saying what
    is allowed.
    """
    argv = _normalised(argv, kind)
    preset, run = _preset(argv, kind, presets or script), _of_run(argv, kind, script)
    values = (defaults or {}) | (run | preset if _values_of("--config", argv) else preset | run)
    found, unknown = _parser(kind, script, description, values).parse_known_args(argv)
    if unknown and unknown[0].startswith("-") and not unknown[0].startswith("--"):
        raise UserError(f"{unknown[0]} has one dash and options have two: use -{unknown[0]}, see --help")
    if unknown:
        flags = {name.replace("_", "-") for name in _names(kind)}
        raise UserError(_unknown_key(unknown[0].lstrip("-").split("=")[0], flags, "flag --", "--"))
    config = kind(**vars(found))
    return dataclasses.replace(config, device="tpu") if config.tpu else config


def _names(kind: type) -> dict[str, str]:
    """{name: field}, for the fields' own names and their aliases."""
    fields = dataclasses.fields(kind)
    aliases = {alias.lstrip("-").replace("-", "_"): f.name for f in fields for alias in f.metadata.get("aliases", ())}
    return {f.name: f.name for f in fields} | aliases


def type_of(hint: Any) -> type:
    """The type of a field's values other than None: bool, int, float or str."""
    if get_origin(hint) is Literal:
        return str
    kinds = [kind for kind in get_args(hint) if kind is not NoneType]
    return type_of(kinds[0]) if kinds else hint


class _Parser(argparse.ArgumentParser):
    def error(self, message):
        raise UserError(f"{message}; see {self.prog} --help")


class _Formatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the description as written, and lists each option's flags with a single placeholder."""

    def __init__(self, prog: str):
        width = min(shutil.get_terminal_size().columns, 120)
        super().__init__(prog, max_help_position=34, width=width)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        taken = f" {action.metavar}" if action.metavar else ""
        return ", ".join(action.option_strings) + taken


def _parser(kind: type, script: str, description: str, values: dict) -> argparse.ArgumentParser:
    """A parser with an option for each field, in its group. values: defaults that override the fields' own."""
    parser = _Parser(
        prog=f"{script}.py",
        usage=f"python {_program(script)} [--option VALUE …] [option=VALUE …]",
        description=description,
        allow_abbrev=False,
        add_help=False,
        formatter_class=_Formatter,
    )
    groups = {name: parser.add_argument_group(title) for name, title in GROUPS.items()}
    hints = get_type_hints(kind)
    for declared in dataclasses.fields(kind):
        group, hint = groups[declared.metadata["group"]], hints[declared.name]
        default = values.get(declared.name, declared.default)
        flags = [flag(declared.name), *declared.metadata["aliases"]]
        settings = {"default": default, "dest": declared.name, "help": declared.metadata["help"]}
        if type_of(hint) is bool:
            switches = group.add_argument(*flags, type=_bool, nargs="?", const=True, **settings)
            if default:  # --no-x turns the option off
                switches.help += f" [on; --no-{flags[0][2:]} turns it off]"
            if declared.default:
                off = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS, "dest": declared.name}
                group.add_argument(f"--no-{flags[0][2:]}", action="store_false", **off)
        else:
            if default is not None:
                settings["help"] += " [%(default)s]"
            known = "{" + ",".join(choices(hint)) + "}" if choices(hint) else METAVARS[type_of(hint)]
            group.add_argument(*flags, type=type_of(hint), metavar=known, **settings)
    groups["run"].add_argument("--help", "-h", action="help", help="show this page and exit")
    return parser


def _program(script: str) -> str:
    """The running script's path, relative to the repository root."""
    path = Path(sys.argv[0]).resolve()
    known = path.parent in (ROOT, ROOT / "scripts", ROOT / "benchmarks")
    return str(path.relative_to(ROOT)) if known else f"scripts/{script}.py"


def _bool(text: str) -> bool:
    if text.lower() not in YES + NO:
        raise argparse.ArgumentTypeError(f"{text!r} is not a bool; use true or false")
    return text.lower() in YES


def _normalised(argv: list[str], kind: type) -> list[str]:
    """Rewrite key=value as --key value (unless it is the value of the flag before it), section.key as key, and --a_b as
    --a-b. Raises UserError if an input (an option whose identity is a fact) is given under two names."""
    hints, names = get_type_hints(kind), _names(kind)
    switches = {*names, *(f"no_{each}" for each in names)}
    valued = {name for name, field in names.items() if hints[field] is not bool}
    spelled: list[str] = []
    inputs = {field.name for field in dataclasses.fields(kind) if isinstance(field.metadata["identity"], str)}
    given: dict[str, str] = {}  # {input: the name it is given under}
    for word in argv:
        last = spelled[-1].lstrip("-").replace("-", "_") if spelled and spelled[-1].startswith("--") else ""
        if last in valued:
            spelled.append(word)
            continue
        if match := re.fullmatch(r"(?:--)?([A-Za-z_][\w-]*)\.([\w-]+)(=.*)?", word, re.DOTALL):
            section, key, value = match[1], match[2], match[3] or ""
            if section in kind.SECTIONS:
                _check_in_section(key.replace("-", "_"), section, kind, "flag ", f"--{section}.")
                word = f"--{key}{value}" if word.startswith("--") else f"{key}{value}"
        match = re.fullmatch(r"([A-Za-z_][\w.-]*)=(.*)", word, re.DOTALL)
        spelled += [f"--{match[1]}", match[2]] if match else [word]
        at = len(spelled) - (2 if match else 1)
        name, equals, value = spelled[at].partition("=")
        bare = name.lstrip("-").replace("-", "_")
        if bare in switches:
            spelled[at] = name.replace("_", "-") + equals + value
        if name.startswith("--") and names.get(bare) in inputs and given.setdefault(names[bare], bare) != bare:
            raise UserError(f"{flag(given[names[bare]])} and {flag(bare)} are the same option; give it once")
    return spelled


def _check_in_section(key: str, section: str, kind: type, what: str, mark: str) -> None:
    if key not in kind.SECTIONS[section]:
        raise UserError(_unknown_key(key, set(kind.SECTIONS[section]), what + mark, mark))


# -- presets ---------------------------------------------------------------------------------------------------------
def _values_of(option: str, argv: list[str]) -> list[str]:
    """The values of an option on a command line."""
    joined = [word.split("=", 1)[1] for word in argv if word.startswith(f"{option}=")]
    return joined + [value for word, value in itertools.pairwise(argv) if word == option]


def _of_run(argv: list[str], kind: type, script: str) -> dict:
    """The options of the run that --resume names, except those that may differ on another machine."""
    names = [name for name, field in _names(kind).items() if field == "resume"]
    given = [value for name in names for value in _values_of(f"--{name.replace('_', '-')}", argv)]
    if not given or given[-1] in ("off", "auto") or "output_dir" not in _names(kind):
        return {}
    from qat_lora.run.resuming import options_of

    was, hints = options_of(Path(given[-1]), script), get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind) if field.name in was and not _own(field)]
    return {name: _coerced(was[name], hints[name], f"{given[-1]}/config.yaml: {name}") for name in names}


def _own(field: dataclasses.Field) -> bool:
    """Whether an option is of a process or a machine, not of a run."""
    of_device = field.metadata["group"] == "device" and not field.metadata["identity"]
    return of_device or field.name in ("resume", "output_dir", "dry_run", "debug")


def _preset(argv: list[str], kind: type, script: str) -> dict:
    names = _values_of("--config", argv)
    if len(names) > 1:
        raise UserError(
            f"--config is given {len(names)} times ({', '.join(names)}); give one; `base:` in a preset names another"
        )
    name = names[0] if names else kind.DEFAULT_CONFIG
    return _read_preset(name, kind, script) if name else {}


def _read_preset(name: str, kind: type, script: str, above: tuple = ()) -> dict:
    """A preset's values, checked against the fields; `base: NAME` in it names a preset that it builds on."""
    path = _preset_file(name, CONFIGS / script)
    values = _yaml(path)
    base = values.pop("base", None)
    if base is not None and (not isinstance(base, str) or base in (*above, name)):
        raise UserError(f"{path}: base {base!r} is not the name of another preset; correct it, or leave it out")
    for section in kind.SECTIONS.keys() & values.keys():
        block = values.pop(section)
        if not isinstance(block, dict):
            raise UserError(f"{path}: {section} must be a block of `key: value` lines; correct the file")
        for key in block:
            _check_in_section(str(key), section, kind, f"{path}: key ", f"{section}.")
        values |= block
    hints, known = get_type_hints(kind), _names(kind)
    checked = {}
    for key, value in values.items():
        if key not in known or key == "config":
            raise UserError(_unknown_key(str(key), set(known), f"{path}: key "))
        if known[key] in checked:
            raise UserError(f"{path}: {key} and another key both set {known[key]}; keep one")
        checked[known[key]] = _coerced(value, hints[known[key]], f"{path}: {key}")
    return (_read_preset(base, kind, script, (*above, name)) if base else {}) | checked


def _preset_file(name: str, folder: Path) -> Path:
    path = Path(name) if name.endswith((".yaml", ".yml")) else folder / f"{name}.yaml"
    if not path.is_file():
        known = presets(folder)
        there = ", ".join(known) or "none"
        raise UserError(f"--config {name}: no such preset{_nearest(name, known)}; available: {there}")
    return path


def presets(folder: Path) -> list[str]:
    """The names of the presets in a folder of configs/."""
    return sorted(path.stem for path in folder.glob("*.yaml"))


def _yaml(path: Path) -> dict:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid YAML ({' '.join(str(error).split())}); correct the file") from error
    if not isinstance(values, dict):
        raise UserError(f"{path}: a preset must be a mapping of `key: value` lines; correct the file")
    return values


def _coerced(value: Any, hint: Any, where: str) -> Any:
    """Convert `value` to the field's type. PyYAML reads 8e-5 as text, so numbers are parsed again."""
    if value is None and NoneType in get_args(hint):
        return None
    kind = type_of(hint)
    if kind is bool and isinstance(value, bool):
        return value
    if isinstance(value, bool) and {"on", "off"} <= {*choices(hint)}:  # as YAML reads these words
        return "on" if value else "off"
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


# -- scripts ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Variant:
    """A script that runs another script under its own name with different defaults."""

    name: str
    description: str
    defaults: dict[str, Any] = field(default_factory=dict)
    check: Callable[[Any], None] | None = None
    program: str | None = None  # its sys.argv[0]


_variant: Variant | None = None  # set if this process runs a variant


def check_command_line(kind: type, script: str, description: str) -> None:
    """Handle --help, shell completion and a bad command line, as `run_script` does.

    Scripts call this after defining their options and before slow imports, so that the answer comes at once.
    """
    if "_ARGCOMPLETE" in os.environ:
        _complete(kind, script, description)
    from qat_lora.backend import detect

    with _reporting():
        config = _config(kind, script, description)
        if os.environ.get("RANK", "0") != "0":  # under torchrun, worker 0 prints for all
            return sys.exit(0) if config.dry_run else None
        trains = hasattr(config, "resume")  # the other scripts do not need the device that PJRT_DEVICE names
        if trains and not config.dry_run and detect.plans_a_tpu(config.device):
            detect.resolve(config.device)  # says that there is none, before anything is loaded or asked of a hub
        line = f"{(_variant or Variant(script, description)).name}: loading PyTorch"
        if trains:  # a long job; programs may read the output of other scripts
            say(line)
        elif sys.stderr.isatty():
            say(line, sys.stderr)


def run_script(main: Callable[[Any], None], kind: type, script: str, description: str) -> None:
    """Parse the command line (see `parse`) and call main(config).

    Bad input ends the program with one line on stderr and exit code 2, an unexpected error with exit code 1; --debug
    shows the traceback.
    """
    try:
        with _reporting():
            config = _config(kind, script, description)
            try:
                main(config)
                if config.dry_run and "rehearse" in main.__globals__:
                    _name_compiler(script, config)
            except KeyboardInterrupt:
                if hasattr(config, "resume"):
                    say("interrupted; --resume auto resumes from the last checkpoint, if there is one")
                raise
    finally:
        ignore_sigterm()


def _name_compiler(script: str, config: Any) -> None:
    """For a dry run of a TPU: print the command that asks the TPU's compiler, which takes minutes for a large model."""
    from qat_lora.backend import detect

    if detect.plans_a_tpu(config.device) or (config.device != "cpu" and detect.tpu_chips()):
        words = [word for word in sys.argv[1:] if word not in ("--dry-run", "--tpu")]
        say(f"for the peak by the TPU's compiler: python scripts/compile_for_tpu.py {shlex.join([script, *words])}")


def _config(kind: type, script: str, description: str) -> Any:
    shown = _variant or Variant(script, description)
    sys.argv[0] = shown.program or sys.argv[0]  # runpy has set it to the other script
    config = parse(kind, shown.name, sys.argv[1:], shown.description, script, shown.defaults)
    if shown.check:
        shown.check(config)
    return config


@contextmanager
def _reporting() -> Iterator[None]:
    """End the program with one line on stderr if an error escapes."""
    words = [word.lstrip("-").partition("=") for word in sys.argv]
    debug = any(name == "debug" and value.lower() not in NO for name, _, value in words)
    open_output()
    try:
        try:
            yield
        except SystemExit:  # --help, or nothing to do
            sys.stdout.flush()
            raise
        sys.stdout.flush()  # at exit it would be too late to report a failure
    except (Exception, KeyboardInterrupt) as error:
        if debug and not isinstance(error, BrokenPipeError | KeyboardInterrupt):
            raise
        sys.exit(report(error))


def _complete(kind: type, script: str, description: str) -> None:
    """Print the completions that the shell asks for, and exit."""
    argcomplete = load_package("argcomplete", "shell completion")
    shown = _variant or Variant(script, description)
    parser = _parser(kind, shown.name, shown.description, shown.defaults)
    for action in parser._actions:
        if action.dest == "config":
            action.completer = argcomplete.ChoicesCompleter(presets(CONFIGS / script))
        elif str(action.metavar).startswith("{"):
            action.completer = argcomplete.ChoicesCompleter(action.metavar[1:-1].split(","))
    argcomplete.autocomplete(parser, default_completer=argcomplete.FilesCompleter())


def run_variant(
    script: str, name: str, description: str, check: Callable[[Any], None] | None = None, **defaults: Any
) -> None:
    """Run `script` under another name: with its presets, but with this description, these defaults and an additional
    check of the config."""
    global _variant
    _variant = Variant(name, description, defaults, check, sys.argv[0])
    runpy.run_path(str(ROOT / "scripts" / f"{script}.py"), run_name="__main__")
