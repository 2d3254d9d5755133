"""Checksums of the files of a finished run, so that later readers notice if a file has changed."""

import hashlib
from pathlib import Path

from qat_lora.errors import UserError
from qat_lora.run.files import read_json, sha256, write_json

SUMS = "checksums.json"
# Not covered: they have their own checksums or may change later.
ASIDE = {SUMS, "summary.json", "checkpoints", "plots", "report.html", "tensorboard", "wandb"}


def write_sums(path: Path, unwritten: dict[str, bytes]) -> None:
    """Record the sha256 of each file of a run directory. unwritten: {name: content} of files still to be written."""
    files = [file.relative_to(path) for file in path.rglob("*") if file.is_file()]
    sums = {str(file): sha256(path / file) for file in files if file.parts[0] not in ASIDE and file.name[0] != "."}
    sums |= {name: hashlib.sha256(content).hexdigest() for name, content in unwritten.items()}
    write_json(path / SUMS, dict(sorted(sums.items())))


def check_files(path: Path, *names: str) -> None:
    """Raise UserError if a file or folder of a finished run has changed since the run wrote it. Files that the run did
    not have are not checked, nor are unfinished runs."""
    if not (path / SUMS).exists():
        return
    for name, wanted in read_json(path / SUMS).items():
        if name not in names and not name.startswith(tuple(f"{folder}/" for folder in names)):
            continue
        if not (path / name).is_file():
            raise UserError(f"{path / name} is missing; restore it, or train again with another --output-dir")
        if sha256(path / name) != wanted:
            raise UserError(
                f"{path / name} has changed since the run wrote it (checksum); restore it, or train again with "
                "another --output-dir"
            )
