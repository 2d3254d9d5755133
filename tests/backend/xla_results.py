"""How the processes that run xla_*.py compile, and what must hold for the results of their trainings."""

import pytest

QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"  # compiles in half the time
NOT_FIGURES = {"step", "compiles", "fallbacks", "tokens_per_s", "seconds", "peak_memory_mb"}
DIFFERENCES = {"kl", "heldout_kl", "grad_norm"}  # of nearly equal numbers, whose rounding errors remain


def assert_same_figures(found: dict, relative: float, absolute: float = 0.0) -> None:
    """Every figure that XLA logged equals the CPU's; differences may be ten times as far apart."""
    assert len(found["xla"]) == len(found["cpu"]) > 4
    for ours, theirs in zip(found["xla"], found["cpu"]):
        names = [name for name, value in theirs.items() if name not in NOT_FIGURES and isinstance(value, int | float)]
        assert names
        for name in names:
            close = relative * (10 if name in DIFFERENCES else 1)
            assert ours[name] == pytest.approx(theirs[name], rel=close, abs=absolute), (ours["step"], name)


def assert_compiled_once(found: dict) -> None:
    """After the first updates nothing is compiled, through warm-up, decay, evaluation, the last batch of an epoch and
    saving; and no operation falls back to the host. found["new"] updates may compile, one if it is absent."""
    compiles = [line["compiles"] for line in found["xla"] if "loss" in line][found.get("new", 1) - 1 :]
    assert len(compiles) > 2 and compiles[0] > 0 and {*compiles, found["compiles"]} == {compiles[0]}
    assert found["fallbacks"] == 0


def assert_micro_batches_are_one_graph(found: dict) -> None:
    """Between two losses of an update; from the second to the next update's first, if nothing is evaluated, the
    optimiser's step is another."""
    assert set(found["graphs"][::2]) == {1} and min(found["graphs"][1::2]) == 2


def assert_halts_as_on_the_cpu_and_updates_are_one_graph(found: dict) -> None:
    assert found["halts"]["xla"] == found["halts"]["cpu"] and set(found["graphs"]) == {1}
    assert any(0 < sum(rows) < len(rows) for rows in found["halts"]["xla"]), (
        "otherwise no update refills only some rows"
    )
