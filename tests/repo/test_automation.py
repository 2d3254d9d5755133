"""What people expect beside a test suite: a workflow, pre-commit hooks and a changelog that fit the project."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WORKFLOW, HOOKS, CHANGES = ".github/workflows/tests.yml", ".pre-commit-config.yaml", "CHANGELOG.md"


@pytest.mark.parametrize("name", [WORKFLOW, HOOKS, CHANGES])
def test_it_stays_short(name):
    assert len((ROOT / name).read_text().splitlines()) < 40


def test_the_workflow_runs_what_ci_runs():
    job = yaml.safe_load((ROOT / WORKFLOW).read_text())["jobs"]["tests"]
    assert job["steps"][-1]["run"] == "make ${{ matrix.target }}"
    targets = re.findall(r"^make (\S+)", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert job["strategy"]["matrix"]["target"] == targets
    assert all(f"\n{target}:" in (ROOT / "Makefile").read_text() for target in targets)


def test_the_hooks_run_the_pinned_ruff():
    hooks = yaml.safe_load((ROOT / HOOKS).read_text())["repos"][0]["hooks"]
    (pin,) = re.findall(r"^ruff==\S+", (ROOT / "requirements-dev.txt").read_text(), re.MULTILINE)
    assert [hook["additional_dependencies"] for hook in hooks] == [[pin]] * len(hooks)
    assert {hook["entry"].split(" --")[0] for hook in hooks} == {"ruff format", "ruff check"}


def test_the_changelog_lists_this_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    titles = re.findall(r"^## (\S+)", (ROOT / CHANGES).read_text(), re.MULTILINE)
    assert titles[0] == "Unreleased" and version in titles
