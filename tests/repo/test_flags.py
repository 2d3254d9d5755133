"""Every flag does something, and every preset is written down once."""

import ast
import dataclasses
from pathlib import Path

import pytest
import yaml

from qat_lora.run.options import JobConfig

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.stem for path in (ROOT / "scripts").glob("*.py"))
COMMON = {field.name for field in dataclasses.fields(JobConfig)}
# Options that several scripts share are read beside their definition.
SHARED = [ROOT / "qat_lora" / "data" / "options.py", ROOT / "qat_lora" / "qat.py"]
EXPERIMENT = {
    "train_qat": "qat", "train_v2_tpu_multi": "qat", "train_recovery_lora": "recovery",
    "train_recovery_lora_multi": "recovery", "pretrain": "athena", "train_cot_sft": "cot_sft",
}  # fmt: skip


def attributes(path: Path) -> set[str]:
    """Every name that a file reads as an attribute, and every string that it could pass to getattr."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    return names | {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_flag_of_a_script_is_read(name, load_script):
    config = load_script(name).Config
    own = {field.name for field in dataclasses.fields(config)} - COMMON
    own |= {"timeouts"} if issubclass(config, JobConfig) else set()  # which reads --host-timeout and --join-timeout
    files = [ROOT / "scripts" / f"{name}.py", *SHARED]
    if name in EXPERIMENT:
        files.append(ROOT / "qat_lora" / "experiments" / f"{EXPERIMENT[name]}.py")
    read = set().union(*map(attributes, files))
    assert own <= read, f"parsed and never used: {sorted(own - read)}"


def test_no_two_presets_of_a_script_are_the_same():
    for folder in (ROOT / "configs").iterdir():
        contents = [yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml"))]
        assert all(contents.count(content) == 1 for content in contents), folder.name
