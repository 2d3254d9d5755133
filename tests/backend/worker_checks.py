"""Functions that test_launch.py and xla_workers.py run in every worker; a new process can import them."""

import os
import sys
import time
from pathlib import Path

import torch

from qat_lora.errors import UserError

STEPS, GLOBAL_BATCH = 5, 4
CLOSE = 1e-6  # tolerance of weights after five steps in fp32


def train(backend, model: str, cache: str, out: Path, watch=lambda gradients: None) -> None:
    """Five steps of QAT with one global batch; every worker writes its weights. watch sees the reduced gradients."""
    from safetensors.torch import save_file  # slow to import, and most workers do not train

    from qat_lora.kd.dataset import KDCacheDataset
    from qat_lora.kd.training import QATPlan, train_qat
    from qat_lora.models.loading import empty_model, load_model
    from qat_lora.quant.init import initialise
    from qat_lora.quant.student import StudentSpec, quantize
    from qat_lora.run.rundir import Run
    from qat_lora.run.session import Every, Session

    spec = StudentSpec(mlp="balanced2/g32", attn="lut4/r4")
    student = quantize(load_model(model) if backend.is_main else empty_model(model), spec)
    if backend.is_main:
        initialise(student)
    backend.place(student)
    reduce = backend.reduce

    def watched(gradients):
        reduce(gradients)
        watch(gradients)

    backend.reduce = watched
    out.mkdir(exist_ok=True)
    session = Session(Run(out, resumed=False, writes=backend.is_main), backend, Every(log=1, save=0))
    plan = QATPlan(
        steps=STEPS, batch_size=GLOBAL_BATCH // backend.world_size, accumulation=1, learning_rate=1e-4, warmup_steps=1,
        clip_grad_norm=0.1, seed=0, scale_learning_rate=1e-4,
    )  # fmt: skip
    train_qat(student, KDCacheDataset(cache), plan, session, evaluate=lambda step, model: {})
    trained = {name: p for name, p in student.named_parameters() if p.requires_grad}
    save_file(backend.to_host(trained), out / f"worker{backend.rank}.safetensors")


def apart(one: Path, other: Path) -> float:
    """The largest difference between the weights that two workers wrote."""
    from safetensors.torch import load_file

    one, other = load_file(one), load_file(other)
    assert one.keys() == other.keys()
    return max((one[name] - other[name]).abs().max().item() for name in one)


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
