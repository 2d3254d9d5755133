"""How long tests wait."""

import time
from collections.abc import Callable

# Seconds that a test waits for something that must happen. Only a hang takes this long, so tests do not fail on a slow
# or busy machine; speed is measured in benchmarks/.
PATIENCE = 1800


def wait_until(found: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.2)
