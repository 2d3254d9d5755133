"""How much memory Linux reports, and the error when a job needs more."""

from pathlib import Path

import pytest

from qat_lora.backend.machine import check_memory, host_memory
from qat_lora.errors import UserError

GB = 10**9


def machine(folder: Path, **files: str) -> Path:
    """A root with these files, 16 million kB of RAM and 2 million kB of swap."""
    texts = {"proc/meminfo": "MemTotal:       16000000 kB\nHugePages_Total:       0\nSwapTotal:       2000000 kB\n"}
    for name, text in (texts | files).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


WHOLE = 18_000_000 * 1024


@pytest.mark.parametrize(
    "files, wanted",
    [
        ({}, WHOLE),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{4 * GB}\n"}, 4 * GB + 2_000_000 * 1024),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": f"{4 * GB}\n",
          "sys/fs/cgroup/memory.swap.max": "0\n"}, 4 * GB),
        ({"proc/self/cgroup": "0::/job/step\n", "sys/fs/cgroup/job/step/memory.max": "max\n",
          "sys/fs/cgroup/job/memory.max": f"{3 * GB}", "sys/fs/cgroup/job/memory.swap.max": f"{GB}"}, 4 * GB),
        ({"proc/self/cgroup": "5:cpu:/a\n4:memory:/docker/1\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GB}",
          "sys/fs/cgroup/memory/memory.memsw.limit_in_bytes": f"{2 * GB}"}, 2 * GB),
        ({"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}"}, WHOLE),
        ({"proc/meminfo": "nothing\n"}, float("inf")),
    ],
)  # fmt: skip
def test_memory_is_limited_by_the_machine_or_its_control_group(tmp_path, files, wanted):
    assert host_memory(tmp_path) == float("inf"), "a system without /proc"
    assert host_memory(machine(tmp_path, **files)) == wanted


def test_a_need_for_more_memory_is_refused_with_both_numbers_and_the_options():
    check_memory(10 * GB, "all of it", "--nothing", 10 * GB)
    check_memory(1, "a byte", "--nothing")
    said = "a model needs at least 11.0 GB of memory, but there is only 10.0 GB; lower --size"
    with pytest.raises(UserError, match=said):
        check_memory(11 * GB, "a model", "--size", 10 * GB)
    with pytest.raises(UserError, match="at least 1,000,000,000,000,000,0"):
        check_memory(10**400, "too much for a float", "--size")
