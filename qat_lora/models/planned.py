"""Models of which only the shapes are needed, to plan a run: without weights, and without the hub for the presets'."""

from pathlib import Path

from qat_lora.models.source import is_hub
from qat_lora.run.hub import hub_fault

PUBLISHED = Path(__file__).with_name("published")  # the sizes of the models that presets name


def planned_name(name: str) -> str:
    """Where the config of a model is: `name` itself, or our own copy of its sizes if the hub cannot be reached."""
    copy = PUBLISHED / name.replace("/", "--")
    unreachable = name not in ("", ".") and (copy / "config.json").is_file() and is_hub(name) and hub_fault("model", name)
    return str(copy) if unreachable else name
