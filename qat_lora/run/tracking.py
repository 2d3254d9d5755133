"""Sends the lines of metrics.jsonl to Weights & Biases or TensorBoard as well."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qat_lora.run.files import read_json

PROJECT = "qat_lora"  # project at Weights & Biases, unless WANDB_PROJECT names another
Mirror = Callable[[int, dict[str, Any]], None]


def open_tracker(name: str, folder: Path, config: dict[str, Any]) -> Mirror:
    """A function mirror(step, values) that sends a line of the run in `folder` to the tracker.

    A resumed run continues its curves; another run in the same folder gets its own. Raises whatever the tracker raises.
    """
    return {"wandb": _wandb, "tensorboard": _tensorboard}[name](folder, config)


def _wandb(folder: Path, config: dict[str, Any]) -> Mirror:
    import wandb

    name = f"{folder.resolve()} {read_json(folder / 'manifest.json').get('started')}"
    session = wandb.init(
        project=config.get("wandb") or os.environ.get("WANDB_PROJECT") or PROJECT,
        name=folder.name,
        id=hashlib.sha256(name.encode()).hexdigest()[:16],
        dir=str(folder),
        config=config,
        resume="allow",
    )
    return lambda step, values: session.log(values, step=step)


def _tensorboard(folder: Path, config: dict[str, Any]) -> Mirror:
    from torch.utils.tensorboard import SummaryWriter

    writer = None

    def mirror(step: int, values: dict[str, Any]) -> None:
        nonlocal writer
        if writer is None:  # hides what an interrupted process logged from this step on
            writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step)
            writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in config.items()), step)
        for key, value in values.items():
            if isinstance(value, int | float):
                writer.add_scalar(key, value, step)
        writer.flush()

    return mirror
