"""What runs left behind, for comparing them."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file


def lines(run: Path) -> list[dict]:
    """metrics.jsonl without the one figure that depends on time."""
    found = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "tokens_per_s"} for line in found]


def curve(run: Path, figure: str, stage: str | None = None) -> list[float]:
    """The values of a figure that a run logged, in all stages or in one."""
    return [line[figure] for line in lines(run) if figure in line and stage in (None, line["stage"])]


def summary(run: Path) -> dict:
    return json.loads((run / "summary.json").read_text())


def newest(run: Path) -> Path:
    """The folder of the run's newest checkpoint."""
    return run / "checkpoints" / (run / "checkpoints" / "LATEST").read_text()


def apart(one: Path, other: Path) -> float:
    """The mean difference between the tensors in two files."""
    ours, theirs = load_file(one), load_file(other)
    assert ours.keys() == theirs.keys()
    return torch.cat([(ours[name] - theirs[name]).abs().flatten() for name in ours]).mean().item()


def assert_same_files(one: Path, other: Path, *names: str) -> None:
    for name in names:
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
