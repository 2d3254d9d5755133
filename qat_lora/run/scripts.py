"""Training scripts as modules, with their options, for programs that rehearse them."""

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from qat_lora.errors import ROOT, UserError
from qat_lora.run.command_line import parse

PROGRAMS = {path.stem: path for path in sorted((ROOT / "scripts").glob("*.py"))}


def load_script(name: str) -> ModuleType:
    """A training script as a module, without running it. Raises UserError if it does not define `rehearse`."""
    name = Path(name).stem
    known = [each for each, path in PROGRAMS.items() if "def rehearse(" in path.read_text(encoding="utf-8")]
    if name not in known:
        why = "cannot be compiled for a TPU" if name in PROGRAMS else "is not a script"
        raise UserError(f"{name} {why}; give one of {', '.join(known)}")
    spec = importlib.util.spec_from_file_location(name, PROGRAMS[name])
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_options(module: ModuleType, words: list[str], chips: int | None) -> Any:
    """The script's options, with `chips` workers if given."""
    config = parse(module.Config, module.__name__, words)
    if chips is not None and hasattr(config, "num_chips"):
        config = dataclasses.replace(config, num_chips=chips)
    return config
