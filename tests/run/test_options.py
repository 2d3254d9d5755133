"""Flags, key=value and presets give one config; an error is one line with the bad value and how to fix it."""

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar

import pytest

from qat_lora.errors import UserError
from qat_lora.run import command_line as config
from qat_lora.run.command_line import parse, run_script
from qat_lora.run.options import RunConfig, option


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    learning_rate: float = option(1e-3, "peak, 100% of it")
    scale_rate: float | None = option(None, "peak of scales")
    max_steps: int = option(10, "updates")
    dataset: str = option("embedded", "text")
    limit: int | None = option(None, "rows")
    frozen: bool = option(False, "train nothing")


@pytest.fixture
def presets(tmp_path, monkeypatch):
    """presets(NAME="yaml text"): files in configs/toy/."""
    monkeypatch.setattr(config, "CONFIGS", tmp_path)
    (tmp_path / "toy").mkdir()

    def write(**texts):
        for name, text in texts.items():
            (tmp_path / "toy" / f"{name}.yaml").write_text(text)

    return write


def toy(*argv: str) -> Config:
    return parse(Config, "toy", list(argv))


def said(*argv: str) -> str:
    with pytest.raises(UserError) as error:
        toy(*argv)
    return str(error.value)


# -- flags -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "argv",
    [
        ["--max-steps", "3"], ["--max_steps", "3"], ["--max-steps=3"], ["max_steps=3"], ["max-steps=3"],
        ["--frozen", "false", "max_steps=3"], ["--dry-run", "false", "--max_steps=3"],
        ["--max-steps", "4", "max_steps=3"],
    ],
)  # fmt: skip
def test_spellings_of_one_flag_of_which_the_last_wins(argv):
    assert toy(*argv) == Config(max_steps=3) and toy() == Config()


def test_bool_flags():
    assert toy("--frozen") == toy("--frozen", "true") == Config(frozen=True)
    assert toy("--frozen", "max_steps=3") == Config(frozen=True, max_steps=3)
    assert toy("frozen=false") == Config()


def test_a_value_may_look_like_key_value_and_have_several_lines():
    assert toy("--dataset", "split=3") == Config(dataset="split=3")
    assert toy("dataset=a=b") == toy("--dataset=a=b") == Config(dataset="a=b")
    assert toy("--dataset", "x", "max_steps=3") == Config(dataset="x", max_steps=3)
    assert toy("dataset=one\ntwo") == Config(dataset="one\ntwo")


def test_optional_fields_are_parsed_as_their_type():
    assert toy("--limit", "4", "--scale-rate", "8e-5") == Config(limit=4, scale_rate=8e-5)


def test_the_tpu_flag_means_device_tpu():
    assert toy("--tpu").device == toy("--device", "tpu").device == toy("--device=cpu", "--tpu").device == "tpu"
    assert toy("tpu=false").device == "auto"


@pytest.mark.parametrize("argv", [["--max-steps", "many"], ["max_steps=1.5"], ["--learning-rate", "fast"], ["--limit"]])
def test_a_wrong_type_names_the_flag_and_the_value(argv):
    message = said(*argv)
    assert argv[0].lstrip("-").split("=")[0].replace("_", "-") in message.replace("_", "-")
    assert argv[-1].split("=")[-1] in message and "toy.py --help" in message


@pytest.mark.parametrize(
    "argv, wrong, near",
    [(["--learning_rat=3"], "learning_rat", "learning-rate"), (["max_stesp=3"], "max_stesp", "max-steps")],
)
def test_an_unknown_flag_names_the_nearest_one_if_there_is_one(argv, wrong, near):
    assert said(*argv) == f"flag --{wrong} is unknown; did you mean --{near}?"
    assert said("--qqqq") == "flag --qqqq is unknown; see --help"


def test_help_prints_percent_signs(capsys):
    with pytest.raises(SystemExit) as stop:
        toy("--help")
    assert stop.value.code == 0 and "peak, 100% of it" in capsys.readouterr().out


# -- presets ---------------------------------------------------------------------------------------------------------
def test_flags_override_a_preset_and_a_preset_the_defaults(presets):
    presets(slow="learning_rate: 0.5\nmax_steps: 7\nfrozen: true\nlimit: null\n")
    assert toy("--config", "slow") == Config(config="slow", learning_rate=0.5, max_steps=7, frozen=True)
    for argv in (["--max-steps", "2", "--config=slow"], ["config=slow", "max_steps=2"]):
        assert toy(*argv) == Config(config="slow", learning_rate=0.5, max_steps=2, frozen=True)
    assert toy("--config", "slow", "--frozen", "false").frozen is False


def test_a_preset_can_be_a_file_and_must_be_text(tmp_path):
    (tmp_path / "mine.yaml").write_text("max_steps: 7\n")
    assert toy("--config", str(tmp_path / "mine.yaml")).max_steps == 7
    (tmp_path / "p.yaml").write_bytes(b"max_steps: \xff\xfe3")
    assert "p.yaml" in said("--config", str(tmp_path / "p.yaml"))


def test_preset_builds_on_its_base(presets):
    presets(a="max_steps: 1\nlimit: 1\n", b="base: a\nlimit: 2\ndataset: x\n", c="base: b\ndataset: y\n", empty="")
    made = toy("--config", "c")
    assert (made.max_steps, made.limit, made.dataset) == (1, 2, "y")
    assert toy("--config", "empty") == Config(config="empty")


def test_numbers_are_parsed_by_the_type_of_the_field(presets):
    presets(p="learning_rate: 8e-5\nscale_rate: 1\nmax_steps: 1e3\ndataset: 17\n")
    made = toy("--config", "p")
    assert (made.learning_rate, made.scale_rate, made.max_steps, made.dataset) == (8e-5, 1.0, 1000, "17")
    assert isinstance(made.scale_rate, float) and isinstance(made.max_steps, int)


@pytest.mark.parametrize(
    "text, parts",
    [
        ("max_steps: 1.5", ["max_steps", "1.5", "int"]), ("max_steps: many", ["max_steps", "'many'", "int"]),
        ("max_steps: .inf", ["max_steps", "inf", "int"]), ("max_steps: null", ["max_steps", "None"]),
        ("learning_rate: true", ["learning_rate", "True"]), ("frozen: 1", ["frozen", "1", "bool"]),
        ("dataset: {a: 1}", ["dataset", "str"]), ("max_stesp: 3", ["p.yaml: key max_stesp is unknown"]),
        ("max_steps: [3", []), ("- max_steps", []), ("\0", []), ("base: q", ["base"]), ("base: 5", ["base"]),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_preset_is_named(presets, text, parts):
    presets(p=text, q="base: p")
    message = said("--config", "p")
    assert all(part in message for part in parts) and ("p.yaml" in message or "base" in parts)


def test_an_unknown_preset_names_the_nearest_one_and_lists_all(presets):
    presets(q2_g32="", q4_r32="")
    message = said("--config", "q2_g23")
    assert "--config q2_g23: no such preset; did you mean q2_g32?" in message and "q2_g32, q4_r32" in message
    presets(p="base: q4_r3")
    assert "did you mean q4_r32?" in said("--config", "p")


# -- run_script ------------------------------------------------------------------------------------------------------
def refuse(cfg):
    raise UserError(f"seed={cfg.seed} is\nbad; use 4")


@pytest.mark.parametrize(
    "main, flags, code, line",
    [
        (refuse, ["seed=3"], 2, "seed=3 is bad; use 4"),
        (refuse, ["--max-steps", "many"], 2, "many"),
        (lambda cfg: 1 / 0, [], 1, "ZeroDivisionError: division by zero"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(monkeypatch, capsys, main, flags, code, line):
    monkeypatch.setattr(sys, "argv", ["toy.py", *flags])
    with pytest.raises(SystemExit) as stop:
        run_script(main, Config, "toy", "A toy.")
    out, err = capsys.readouterr()
    assert stop.value.code == code and out == ""
    assert err.startswith("error: ") and line in err and err.count("\n") == 1


@pytest.mark.parametrize("main, error", [(refuse, UserError), (lambda cfg: 1 / 0, ZeroDivisionError)])
def test_debug_shows_the_traceback(monkeypatch, main, error):
    monkeypatch.setattr(sys, "argv", ["toy.py", "--debug"])
    with pytest.raises(error):
        run_script(main, Config, "toy", "A toy.")


@pytest.mark.parametrize("flags", [["learning_rate=nan"], ["learning_rate=-inf"], ["limit="], [f"seed={2**63}"]])
def test_empty_not_finite_and_huge_values_are_refused_by_name(flags):
    assert f"--{flags[0].split('=')[0].replace('_', '-')}" in said(*flags)


def test_two_presets_are_refused():
    assert "--config is given 2 times" in said("--config", "a", "--config=b")


# -- sections and a default preset -----------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Sectioned(RunConfig):
    SECTIONS: ClassVar = {"arch": ("hidden_size", "deep")}
    DEFAULT_CONFIG: ClassVar = "usual"

    hidden_size: int = option(512, "width")
    deep: bool = option(False, "more layers")
    lr: float = option(8e-5, "rate", "--learning-rate")


def sectioned(*argv: str) -> Sectioned:
    return parse(Sectioned, "toy", list(argv))


@pytest.mark.parametrize(
    "argv",
    [
        ["arch.hidden_size=64"], ["arch.hidden-size=64"], ["--arch.hidden_size", "64"], ["--arch.hidden-size=64"],
        ["hidden_size=64"], ["--config", "small"],
    ],
)  # fmt: skip
def test_a_key_of_a_section(presets, argv):
    presets(usual="", small="arch:\n  hidden_size: 64\n")
    assert sectioned(*argv).hidden_size == 64
    assert sectioned("arch.deep=true").deep and sectioned("--arch.deep").deep


def test_the_default_preset_is_used_unless_another_is_named(presets):
    presets(usual="lr: 8e-4\narch:\n  hidden_size: 8\n", small="base: usual\narch:\n  deep: true\n", bare="lr: 1")
    assert sectioned() == Sectioned(lr=8e-4, hidden_size=8)
    assert sectioned("arch.hidden_size=9") == Sectioned(lr=8e-4, hidden_size=9)
    assert sectioned("--config", "small") == Sectioned(config="small", lr=8e-4, hidden_size=8, deep=True)
    assert sectioned("--config", "bare") == Sectioned(config="bare", lr=1.0)


def test_a_preset_may_use_an_alias_of_a_key(presets):
    presets(usual="learning_rate: 1e-3\ndevice_type: cpu\n")
    assert sectioned() == Sectioned(lr=1e-3, device="cpu")
    assert sectioned("device_type=cuda").device == sectioned("--device-type", "cuda").device == "cuda"
    assert sectioned("--learning-rate", "2").lr == 2.0


@pytest.mark.parametrize(
    "preset, argv, wanted",
    [
        ("", ["arch.hiden_size=3"], "flag --arch.hiden_size is unknown; did you mean --arch.hidden_size?"),
        ("", ["--arch.lr", "3"], "flag --arch.lr is unknown"),
        ("", ["art.deep=true"], "flag --art.deep is unknown"),
        ("arch:\n  hiden_size: 3\n", [], "key arch.hiden_size is unknown; did you mean arch.hidden_size?"),
        ("arch: 3\n", [], "arch must be a block of `key: value` lines"),
        ("arch:\n  hidden_size: wide\n", [], "hidden_size: 'wide' is not an int"),
    ],
)
def test_wrong_keys_and_values_of_a_section_are_named(presets, preset, argv, wanted):
    presets(usual=preset)
    with pytest.raises(UserError) as error:
        sectioned(*argv)
    assert wanted in str(error.value)


# -- standard output -------------------------------------------------------------------------------------------------
PROGRAM = """
from qat_lora.run.command_line import run_script
from qat_lora.run.options import ScriptConfig
run_script(lambda cfg: print("worked →"), ScriptConfig, "toy", "")
"""
FULL = "error: standard output could not be written (No space left on device); send it elsewhere and run the command"


@pytest.mark.parametrize(
    "redirection, unbuffered, code, said",
    [
        (">&-", "", 0, ""), (">&- 2>&-", "", 0, ""), (">/dev/full", "", 2, FULL),
        (">/dev/full", "1", 2, FULL), (">/dev/full 2>/dev/full", "", 2, ""), (">/dev/full 2>&-", "", 2, ""),
    ],
)  # fmt: skip
def test_standard_output_that_is_closed_or_full(redirection, unbuffered, code, said):
    command = ["sh", "-c", f'"$0" -c "$1" {redirection}', sys.executable, PROGRAM]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == code and done.stderr.startswith(said) and done.stderr.count("\n") == bool(said)
