"""Functions that test_launch.py and xla_workers.py run in every worker; a new process can import them."""

import os
import sys
import time
from pathlib import Path

import torch

from qat_lora.errors import UserError


def describe(backend, out: Path) -> None:
    """Write this worker's place and the results of a sum and a broadcast, and print a line."""
    one = torch.full((3,), float(backend.rank + 1))
    many = [one, torch.full((2, 2), 10.0 * backend.rank), torch.ones((), dtype=torch.float64)]
    large = [torch.full((2**17,), backend.rank + 1.0), torch.full((2, 2**17), backend.rank + 1.0).T]
    backend.reduce([*many, *large])
    many += [tensor.flatten()[[0, -1]] for tensor in large]
    given = torch.arange(4.0) if backend.is_main else torch.full((4,), float("nan"))
    backend.broadcast([given])
    print(f"worker {backend.rank} speaks")
    (out / f"{backend.rank}.txt").write_text(
        repr([backend.world_size, backend.is_main, [t.tolist() for t in many], given.tolist(), torch.get_num_threads()])
    )


def fail(backend, how: str, where: str = "reduction") -> None:
    """Worker 1 ends as `how` says while worker 0 waits for it in a reduction or on the host."""
    if backend.rank == 1:
        if how == "bad input":
            raise UserError("shard 3 is damaged; build it again")
        if how == "fault":
            raise ZeroDivisionError("of worker 1")
        if how == "exit":
            sys.exit(7)
        if how == "hard exit":
            os._exit(5)
    if where == "host":
        backend.group.gather(None)
    backend.reduce([torch.ones(1)])
    time.sleep(60)


def fail_all(backend, *_) -> None:
    raise UserError("the cache is too small")


def fail_first(backend, _) -> None:
    """For torch_xla's threads, which must leave no collective waiting."""
    if backend.rank == 0:
        raise UserError("not on this chip; take another")
    time.sleep(60)
