"""What changes between updates is data: on XLA every update of a run has the same graph, also after 310 of them."""

import pytest

pytestmark = pytest.mark.xla
NAMES = ("qat on 4", "recovery", "recovery on 8", "grpo", "grpo, int4", "legal", "stories", "athena")


@pytest.fixture(scope="module")
def found(record) -> dict:
    return record("fp32", *(f"{name} late" for name in NAMES), "recovery planted", "athena planted")


def graphs(found: dict, name: str) -> list[set]:
    """For each stage, the different lists of graphs of an update."""
    assert found[name]
    return [{tuple(hashes) for hashes in updates.values()} for updates in found[name].values()]


@pytest.mark.parametrize("name", NAMES)
def test_an_update_has_the_same_graphs_at_any_time_in_a_run(found, name):
    assert all(len(each) == 1 for each in graphs(found, f"{name} late")), found[f"{name} late"]


@pytest.mark.parametrize("name", ["recovery", "athena"])
def test_numbers_that_are_constants_are_noticed(found, name):
    assert all(len(each) > 1 for each in graphs(found, f"{name} planted"))
