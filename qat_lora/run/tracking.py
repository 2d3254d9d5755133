"""The lines of metrics.jsonl, sent to Weights & Biases as well."""

import hashlib
from pathlib import Path

from qat_lora.run.files import read_json


def wandb_mirror(project: str, folder: Path, config: dict):
    """mirror(step, values) for a Run, which sends every line of metrics.jsonl there too: to the same curves after a
    resume, to new ones from another run in the same folder. Raises whatever wandb does."""
    import wandb

    name = f"{folder.resolve()} {read_json(folder / 'manifest.json').get('started')}"
    session = wandb.init(
        project=project, name=folder.name, dir=str(folder), resume="allow", config=config,
        id=hashlib.sha256(name.encode()).hexdigest()[:16],
    )  # fmt: skip
    return lambda step, values: session.log(values, step=step)
