"""--help: shows the docstring as written and each option once, without slow imports. Shell completion."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qat_lora.errors import ROOT
from qat_lora.run.command_line import check_command_line
from qat_lora.run.options import GROUPS, JobConfig

SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
LAUNCHED = [*SCRIPTS, ROOT / "pretrain.py"]


def light(*commands: tuple, python=(sys.executable,)) -> list[tuple[int, str, str]]:
    """(exit code, standard output, standard error) of each (path, flags, environment), without heavy packages."""
    asked = json.dumps([(str(path), *rest) for path, *rest in commands])
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"COLUMNS": "120"}
    program = [*python, Path(__file__).with_name("light.py")]
    done = subprocess.run(program, input=asked, env=variables, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def shown() -> dict[str, tuple[int, str, str]]:
    """What --help of each script answers."""
    return dict(zip((path.stem for path in SCRIPTS), light(*((path, ["--help"], {}) for path in SCRIPTS))))


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_help_shows_docstring_and_each_option_once_without_heavy_imports(path, shown):
    code, page, errors = shown[path.stem]
    assert code == 0 and not errors, errors
    docstring = ast.get_docstring(ast.parse(path.read_text()), clean=False)
    assert docstring.strip() in page, "--help does not show the docstring as written"
    options = re.findall(r"^  (--[\w-]+)", page, re.MULTILINE)
    assert "--config" in options and len(options) == len(set(options))
    titles = re.findall(r"^(\w[\w ]*):$", page, re.MULTILINE)
    assert set(titles) <= set(GROUPS.values()) and len(titles) == len(set(titles))
    assert f"usage: python scripts/{path.name} " in page


def test_every_default_is_shown(shown):
    page = shown["train_qat"][1]
    assert re.search(r"--max-steps N .*\[300\]", page) and "[the cache's teacher]" in page
    assert "None" not in page and "[False]" not in page


def test_a_bad_command_line_is_refused_before_heavy_imports(tmp_path):
    heavy = tmp_path / "heavy.py"
    heavy.write_text("import torch")
    bad = {"train_qat": "--no-such", "pretrain": "epochs=many", "train_cot_sft": "--config=nothing"}
    commands = [(ROOT / "scripts" / f"{name}.py", [flag], {}) for name, flag in bad.items()]
    (_, _, failed), *refused = light((heavy, [], {}), *commands)
    assert "AssertionError: torch is imported" in failed
    for code, _, said in refused:
        assert code == 2 and said.startswith("error: ") and said.count("\n") == 1, said


def test_a_script_can_be_terminated_while_it_loads_packages(monkeypatch, capsys):
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["toy.py", "--seed", "1"])
    check_command_line(JobConfig, "toy", "A toy.")
    assert signal.getsignal(signal.SIGTERM) == before and "toy: loading PyTorch" in capsys.readouterr().out


# -- shell completion ------------------------------------------------------------------------------------------------
def completions(folder: Path, *asked: tuple[Path, str]) -> list[set[str]]:
    """The completions after `python SCRIPT …` of each (script, …), requested as argcomplete's shell code does."""
    commands = []
    for number, (path, end) in enumerate(asked):
        line = f"python {path.relative_to(ROOT)} {end}"
        request = {"_ARGCOMPLETE": "2", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line, "COMP_POINT": str(len(line))}
        commands.append((path, [], request | {"_ARGCOMPLETE_STDOUT_FILENAME": str(folder / str(number))}))
    assert [errors for _, _, errors in light(*commands)] == [""] * len(asked)
    return [set(map(str.strip, (folder / str(number)).read_text().splitlines())) for number in range(len(asked))]


def test_options_are_completed(tmp_path):
    for path, words in zip(LAUNCHED, completions(tmp_path, *((path, "--de") for path in LAUNCHED))):
        assert "PYTHON_ARGCOMPLETE_OK" in path.read_text()[:1024], f"argcomplete ignores {path.name} without this mark"
        assert {"--device", "--debug"} <= words, path.name


def test_presets_and_choices_are_completed(tmp_path):
    script = ROOT / "scripts" / "train_qat.py"
    found = completions(tmp_path, (script, "--config q2_g"), (script, "--init "))
    assert found == [{"q2_g32", "q2_g64"}, {"rtn", "mse", "gptq", "own"}]


# -- incomplete installations ----------------------------------------------------------------------------------------
def test_missing_packages_give_one_line_that_says_how_to_install_them():
    for code, _, said in light(*((path, [], {}) for path in LAUNCHED), python=(sys.executable, "-S")):
        assert code == 1 and said.count("\n") == 1, said
        assert "No module named '" in said and "make setup" in said


def test_a_broken_package_gives_one_line_and_a_traceback_with_debug(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('torch is broken')")
    command = [sys.executable, ROOT / "scripts" / "train_qat.py", "--cache-dir", "none"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    plain, debug = (
        subprocess.run([*command, *flags], env=environment, capture_output=True, text=True)
        for flags in ([], ["--debug"])
    )
    assert plain.returncode == 1 and plain.stderr.count("\n") == 1
    assert "torch is broken: the installation" in plain.stderr and "Traceback" in debug.stderr


def test_a_program_of_ones_own_keeps_its_traceback():
    """Also one without a file, in a folder of the checkout."""
    done = subprocess.run([sys.executable, "-c", "import qat_lora.run; import no_such_package"], cwd=ROOT / "scripts",
                          env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 1 and "Traceback" in done.stderr and "make setup" not in done.stderr


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_dry_run_under_torchrun_is_printed_once(rank):
    place = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500", "LOCAL_RANK": rank}
    command = [sys.executable, ROOT / "scripts" / "pretrain.py", "--dry-run", "--config", "tiny", "--device", "cpu"]
    done = subprocess.run(command, env=os.environ | place, capture_output=True, text=True, check=True)
    assert bool(done.stdout) is (rank == "0")
