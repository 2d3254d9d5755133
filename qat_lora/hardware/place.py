"""What the checks share: where they run, and how they end."""

import math
from dataclasses import dataclass
from pathlib import Path

from qat_lora.hardware import tiny

Figures = dict[str, float | str]


class Failed(Exception):
    """A check found a fault."""


class Skipped(Exception):
    """A check cannot run on this machine."""


@dataclass(frozen=True)
class Machine:
    """Where checks run. folder: of the report; device: as --device names it; size: tiny or real; until: the time (in
    seconds since 1970) at which the last check has to end."""

    folder: Path
    device: str
    size: str
    until: float = math.inf

    @property
    def model(self) -> Path:
        return tiny.save(self.folder / "model")


def apart(a: float, b: float) -> float:
    """Relative difference, infinite if a number is not finite."""
    if not (math.isfinite(a) and math.isfinite(b)):
        return math.inf
    return abs(a - b) / max(abs(a), abs(b), 0.05)
