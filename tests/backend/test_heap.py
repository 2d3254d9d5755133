"""Freed memory is kept between steps, and returned to the kernel between phases and while weights are loaded."""

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")

# Prints the resident MB after each action on 256 MB of blocks, in a process of its own because malloc's settings stay.
ACTS = """
import torch
from qat_lora.backend.machine import RESIDENT, giving_memory_back, hand_back_memory, keep_freed_memory, tidier

def resident():
    return int(RESIDENT.read_text().split()[1]) // 256

def blocks():
    return [torch.ones(2**20) for _ in range(64)]

torch.ones(2**22)  # after 16 MB are freed, glibc gives smaller blocks no mapping of their own, unless told to
keep_freed_memory()
tidy, before = tidier(), resident()

def say():
    print(resident() - before)

held = blocks()
last = torch.ones(8)  # above the others: without it they would be the heap's top
say()
del held
say()
tidy(2**29)
say()
tidy(2**26)
say()
with giving_memory_back():
    held = torch.ones(2**27)  # 512 MB, more than the heap has free
    del held
    say()
    held = blocks()
    del held
say()
held = blocks()
del held
say()
"""


def test_freed_memory_is_returned_when_it_should_be_and_not_before():
    done = subprocess.run([sys.executable, "-c", ACTS], capture_output=True, text=True, check=True)
    taken, freed, below_the_limit, tidied, in_loading, after_loading, afterwards = map(int, done.stdout.split())
    assert min(taken, freed, below_the_limit, afterwards) > 200, "a step reuses what the previous one freed"
    assert max(tidied, in_loading, after_loading) < 60
