"""The result of a run, for comparing two runs: everything except times, paths and how the run came about."""

import hashlib
import json
import re
import zipfile
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

TIMES = {"tokens_per_s", "seconds", "peak_memory_mb"}
# How a run came about, and plots and a page of times, are not part of its result. `manifest.json` records every resume.
ASIDE = ("manifest.json", "config.yaml", "checkpoints", "plots", "report.html", ".lock", "checksums.json")


def result(folder: Path, base: Path, cache: bool = False) -> dict[str, Any]:
    """The contents of a folder (a run directory, a cache, any other) by file name, wherever below `base` it is: paths
    down to the second folder below `base`, the trial's, are cut out."""
    aside = {"summary.json", ".lock"} if cache else ASIDE  # a cache's summary.json holds only times
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    names = [(path, path.relative_to(folder)) for path in files]
    place = re.compile(rf"{re.escape(str(base))}/\w+/[^/\"']+")
    return {str(name): _readable(path, place) for path, name in names if not {*name.parts} & {*aside}}


def difference(one: dict[str, Any], other: dict[str, Any]) -> str | None:
    """A description of the first difference between two results; None if they are equal."""
    for name in sorted(one.keys() | other.keys()):
        if name not in one or name not in other:
            return f"{name} is {'missing' if name not in one else 'not in the reference'}"
        if one[name] != other[name]:
            return f"{name} differs{_where(one[name], other[name])}"
    return None


def _where(one: Any, other: Any) -> str:
    """The first lines that differ, of both written as JSON."""
    ours, theirs = (json.dumps(each, indent=0, sort_keys=True, default=str).splitlines() for each in (one, other))
    pairs = zip_longest(ours, theirs, fillvalue="nothing")
    return next((f": {a[:60]}, not {b[:60]}" for a, b in pairs if a != b), "")


def _readable(path: Path, place: re.Pattern) -> Any:
    try:
        return _content(path, place)
    except Exception as error:  # a damaged file; the reference has none
        return f"unreadable: {error}"


def _content(path: Path, place: re.Pattern) -> Any:
    if path.name == "metrics.jsonl":
        return [_timeless(json.loads(line)) for line in path.read_text().splitlines()]
    if path.name == "summary.json":
        return _timeless(json.loads(path.read_text()))
    if path.suffix == ".safetensors":
        return {name: _digest(tensor) for name, tensor in load_file(path).items()}
    if path.suffix == ".pt" and zipfile.is_zipfile(path):
        return _plain(torch.load(path, weights_only=True, map_location="cpu"), place)
    if path.suffix == ".png":
        return "a picture"
    if path.name == "export.json":
        return {key: value for key, value in json.loads(path.read_text()).items() if key != "commit"}
    if path.name == "origin.json":  # the rest are checksums of files that contain paths
        return json.loads(path.read_text())["base"]
    return hashlib.sha256(_cut(path.read_bytes(), place)).hexdigest()


def _cut(data: bytes, place: re.Pattern) -> bytes:
    try:
        return place.sub("", data.decode()).encode()
    except UnicodeDecodeError:
        return data


def _timeless(values: dict) -> dict:
    return {key: value for key, value in values.items() if key not in TIMES}


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tensor.dtype} {list(tensor.shape)} ".encode() + data).hexdigest()


def _plain(value: Any, place: re.Pattern) -> Any:
    if isinstance(value, Tensor):
        return _digest(value)
    if isinstance(value, dict):
        return {str(key): _plain(entry, place) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry, place) for entry in value]
    return place.sub("", value) if isinstance(value, str) else value
