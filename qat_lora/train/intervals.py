"""Proportions with 95% confidence intervals."""

import math
from collections.abc import Callable, Sequence


def wilson(hits: int, count: int) -> tuple[float, float]:
    """The 95% confidence interval of a proportion (Wilson 1927)."""
    if not count:
        return 0.0, 1.0
    z = 1.959964
    share, spread = hits / count, z * math.sqrt(hits * (count - hits) / count**3 + z * z / (4 * count * count))
    centre, scale = share + z * z / (2 * count), 1 + z * z / count
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def share(answers: Sequence, hit: Callable[[object], bool]) -> dict:
    """The share of answers for which `hit` is true; see `rate`."""
    return rate(sum(bool(hit(answer)) for answer in answers), len(answers))


def rate(hits: int, count: int) -> dict:
    """hits/count as a rate (0 if count is 0), its 95% confidence interval and the count."""
    low, high = wilson(hits, count)
    return {"rate": hits / count if count else 0.0, "low": low, "high": high, "count": count}


def shown(rates: dict[str, dict]) -> str:
    """Rates by name with their intervals, for the log."""
    return ", ".join(f"{name} {r['rate']:.1%} ({r['low']:.1%}–{r['high']:.1%})" for name, r in rates.items())
