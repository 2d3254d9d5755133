"""Checksums of a finished run, so that whatever reads it notices when a file has changed since."""

import hashlib
from pathlib import Path

from qat_lora.errors import UserError
from qat_lora.run.files import read_json, sha256, write_json

SUMS = "checksums.json"
# Have checksums of their own, or may change later.
ASIDE = {SUMS, "summary.json", "checkpoints", "plots", "report.html", "tensorboard", "wandb"}


def write_sums(path: Path, unwritten: dict[str, bytes]) -> None:
    """Note the sha256 of each file of a run directory, and of files that are `unwritten`: their content by name."""
    files = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
    sums = {str(file): sha256(path / file) for file in files if file.parts[0] not in ASIDE and file.name[0] != "."}
    sums |= {name: hashlib.sha256(content).hexdigest() for name, content in unwritten.items()}
    write_json(path / SUMS, dict(sorted(sums.items())))


def check_files(path: Path, *names: str) -> None:
    """Raise UserError if a file or folder of a finished run is not what the run has written. Not checked: files that
    the run did not have, and runs without checksums, which are unfinished or were made by an earlier version."""
    if not (path / SUMS).exists():
        return
    for name, wanted in read_json(path / SUMS).items():
        if name not in names and not name.startswith(tuple(f"{folder}/" for folder in names)):
            continue
        if not (path / name).is_file():
            raise UserError(f"{path / name} is gone; restore it, or train again with another --output-dir")
        if sha256(path / name) != wanted:
            raise UserError(
                f"{path / name} is not what the run has written (checksum); restore it, or train again with another "
                "--output-dir"
            )
