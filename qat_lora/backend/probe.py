"""Alarms of the XLA path: compilations, and operations that fell back to the host."""

import torch_xla.debug.metrics as met


def counters() -> dict[str, int]:
    """compiles: graphs compiled so far; fallbacks: calls of operators that XLA ran on the host (any `aten::` name)."""
    fallbacks = fallback_names()
    return {
        "compiles": int(met.counter_value("UncachedCompile") or 0),
        "fallbacks": int(sum(met.counter_value(name) for name in fallbacks)),
    }


def fallback_names() -> list[str]:
    return sorted(name for name in met.counter_names() if name.startswith("aten::"))
