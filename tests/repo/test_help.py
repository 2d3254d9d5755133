"""--help: shows the docstring as written and each option once, without slow imports. Shell completion."""

import ast
import dataclasses
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from qat_lora.run.command_line import check_command_line
from qat_lora.run.options import GROUPS, JobConfig

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
HEAVY = ("torch", "transformers", "numpy", "datasets", "peft", "matplotlib", "pyarrow")
REFUSE = f"""
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {HEAVY}:
            raise AssertionError(f"{{name}} is imported")

sys.meta_path.insert(0, Refuse())
"""


def started(path: Path, *flags: str, **environment: str) -> subprocess.CompletedProcess:
    """Run a script with these flags and additional environment variables."""
    variables = os.environ | {"COLUMNS": "120"} | environment
    return subprocess.run([sys.executable, path, *flags], env=variables, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def without_heavy(tmp_path_factory) -> dict[str, str]:
    """An environment in which importing a heavy package fails."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "sitecustomize.py").write_text(REFUSE)
    return {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}


def test_heavy_imports_fail_in_this_environment(without_heavy, tmp_path):
    (tmp_path / "heavy.py").write_text("import torch")
    assert "AssertionError: torch is imported" in started(tmp_path / "heavy.py", **without_heavy).stderr


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_help_shows_docstring_and_each_option_once_without_heavy_imports(path, without_heavy):
    done = started(path, "--help", **without_heavy)
    assert done.returncode == 0 and not done.stderr, done.stderr
    docstring = ast.get_docstring(ast.parse(path.read_text()), clean=False)
    assert docstring.strip() in done.stdout, "--help does not show the docstring as written"
    options = re.findall(r"^  (--[\w-]+)", done.stdout, re.MULTILINE)
    assert "--config" in options and len(options) == len(set(options))
    titles = re.findall(r"^(\w[\w ]*):$", done.stdout, re.MULTILINE)
    assert set(titles) <= set(GROUPS.values()) and len(titles) == len(set(titles))
    assert "usage: python scripts/" in done.stdout


def test_every_default_is_shown():
    shown = started(ROOT / "scripts" / "train_qat.py", "--help").stdout
    assert re.search(r"--max-steps N .*\[300\]", shown) and "[smollm2-135m]" in shown
    hidden = {field.name for field in dataclasses.fields(JobConfig) if field.default in (None, False)}
    assert "None" not in shown and "[False]" not in shown and hidden


@pytest.mark.parametrize(
    "script, flag", [("train_qat", "--no-such"), ("pretrain", "epochs=many"), ("train_cot_sft", "--config=nothing")]
)
def test_a_bad_command_line_is_refused_before_heavy_imports(script, flag, without_heavy):
    done = started(ROOT / "scripts" / f"{script}.py", flag, **without_heavy)
    assert done.returncode == 2 and len(done.stderr.splitlines()) == 1 and "error: " in done.stderr


def test_a_script_can_be_terminated_while_it_loads_packages(monkeypatch, capsys):
    """Checking the command line does not change the SIGTERM handler."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(sys, "argv", ["toy.py", "--seed", "1"])
    check_command_line(JobConfig, "toy", "A toy.")
    assert signal.getsignal(signal.SIGTERM) == before and "toy: loading PyTorch" in capsys.readouterr().out


# -- shell completion ------------------------------------------------------------------------------------------------
def completions(path: Path, line: str, output: Path, **environment: str) -> list[str]:
    """The completions at the end of `line`, requested in the way of argcomplete's shell code."""
    asked = {
        "_ARGCOMPLETE": "2",
        "COMP_LINE": line,
        "COMP_POINT": str(len(line)),
        "_ARGCOMPLETE_STDOUT_FILENAME": str(output),
    }
    done = started(path, **asked | {"_ARGCOMPLETE_IFS": "\n"} | environment)
    assert not done.stderr, done.stderr
    return [word.strip() for word in output.read_text().splitlines()]


@pytest.mark.parametrize("path", [*SCRIPTS, ROOT / "pretrain.py"], ids=lambda path: path.stem)
def test_options_are_completed(path, without_heavy, tmp_path):
    assert "PYTHON_ARGCOMPLETE_OK" in path.read_text()[:1024], "argcomplete ignores scripts without this mark"
    words = completions(path, f"python {path.relative_to(ROOT)} --de", tmp_path / "words", **without_heavy)
    assert {"--device", "--debug"} <= set(words)


def test_presets_and_choices_are_completed(without_heavy, tmp_path):
    script = ROOT / "scripts" / "train_qat.py"
    ask = lambda end: completions(script, f"python scripts/train_qat.py {end}", tmp_path / "words", **without_heavy)  # noqa: E731
    assert ask("--config q2_g") == ["q2_g32", "q2_g64"]
    assert set(ask("--scope ")) == {"all", "mlp", "attn", "weights"}


# -- incomplete installations ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", [*SCRIPTS, ROOT / "pretrain.py"], ids=lambda path: path.stem)
def test_missing_packages_give_one_line_that_says_how_to_install_them(path):
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-S", path], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    assert "No module named '" in done.stderr and "make setup" in done.stderr


def test_a_broken_package_gives_one_line_and_a_traceback_with_debug(without_heavy, tmp_path):
    (tmp_path / "sitecustomize.py").write_text(REFUSE.replace("AssertionError", "ImportError"))
    script, broken = ROOT / "scripts" / "train_qat.py", {"PYTHONPATH": str(tmp_path)}
    done = started(script, "--cache-dir", "none", **broken)
    assert (
        done.returncode == 1 and done.stderr.count("\n") == 1 and "torch is imported: the installation" in done.stderr
    )
    assert "Traceback" in started(script, "--cache-dir", "none", "--debug", **broken).stderr
