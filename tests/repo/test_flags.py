"""Every flag is used, every number has a range, and no preset is a duplicate."""

import ast
import dataclasses
from pathlib import Path
from typing import get_type_hints

import yaml

from qat_lora.errors import ROOT
from qat_lora.run.command_line import type_of
from qat_lora.run.options import GROUPS, JobConfig

COMMON = {field.name for field in dataclasses.fields(JobConfig)}
# Shared options are read in the modules that define them.
SHARED = [
    ROOT / "qat_lora" / name
    for name in ("data/options.py", "train/options.py", "experiments/low_bit.py", "kd/options.py", "quant/targets.py")
]
SHARED.append(ROOT / "qat_lora" / "experiments" / "stories" / "models.py")  # reads those of a finished run, too
VARIANTS = {"train_recovery_lora_multi", "train_v2_tpu_multi"}  # these use the options of another script
SCRIPTS = sorted({path.stem for path in (ROOT / "scripts").glob("*.py")} - VARIANTS)
UNBOUNDED = {  # numbers whose range is checked elsewhere
    "top_k", "top_p", "temperature",  # rl.rollout.Sampling
    "leak_min", "leak_max",  # min must not exceed max
    "least_blanks", "most_blanks", "stride", "length", "count", "heldout_fraction", "max_stories", "vocab_size",  # data
}  # fmt: skip


def attributes(path: Path) -> set[str]:
    """All attribute names that a file reads, and all strings that it could pass to getattr."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    return names | {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_every_flag_is_read_and_has_a_group_and_every_number_a_range(load_script):
    for name in SCRIPTS:
        config = load_script(name).Config
        own = {field.name for field in dataclasses.fields(config)} - COMMON
        own |= {"timeouts"} if issubclass(config, JobConfig) else set()  # it reads --host-timeout and --join-timeout
        read = set().union(*map(attributes, [ROOT / "scripts" / f"{name}.py", *SHARED]))
        assert own <= read, f"{name} parses and never uses {sorted(own - read)}"
        for field in dataclasses.fields(config):
            assert field.metadata["group"] in GROUPS, f"{name}: {field.name}"
            if type_of(get_type_hints(config)[field.name]) in (int, float) and field.name not in UNBOUNDED:
                assert field.metadata["bounds"], f"{name}: --{field.name} accepts any number"


def test_all_presets_of_a_script_differ():
    for folder in (ROOT / "configs").iterdir():
        contents = [yaml.safe_load(path.read_text()) for path in sorted(folder.glob("*.yaml"))]
        assert all(contents.count(content) == 1 for content in contents), folder.name
