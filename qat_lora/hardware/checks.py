"""The checks of a machine's accelerator, run by `runner` in a process of their own.

python -m qat_lora.hardware.checks FOLDER DEVICE tiny|real UNTIL NAME…    # appends to FOLDER/results.jsonl
"""

import copy
import gc
import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from qat_lora.ahead.trial import open_exact, open_trial
from qat_lora.ahead.watching import WatchingBackend
from qat_lora.backend import TorchBackend, open_backend
from qat_lora.errors import UserError, first_line
from qat_lora.hardware import jobs, speed, tiny
from qat_lora.hardware.experiments import SCRIPTS, options, tried
from qat_lora.hardware.kernels import check_kernels, every_size
from qat_lora.hardware.place import Failed, Figures, Machine, Skipped, apart
from qat_lora.kd.training import kd_loss
from qat_lora.rl.policy import Prompts, log_probs
from qat_lora.train.losses import text_loss
from qat_lora.train.supervised import packed_loss

UPDATES = 10  # of each experiment in a parity check
CLOSE = 2e-3  # largest relative difference of a figure within ten updates in fp32
NUDGE, ROOM, MOST = 1e-6, 10, 0.05  # of the weights; a device may differ ROOM times as much as the nudged run, or MOST


@dataclass(frozen=True)
class Check:
    """run(place) returns figures, or raises Failed, Skipped or anything else. limit: seconds that it may take. sizes:
    those at which it is run."""

    stage: str
    run: Callable[[Machine], Figures]
    limit: float = 60
    sizes: tuple[str, ...] = ("tiny", "real")


# -- does it compute the same? ---------------------------------------------------------------------------------------
def check_device(place: Machine) -> Figures:
    """A product of matrices, and what the device is."""
    backend = open_trial(place.device, "fp32")
    a = torch.arange(4096.0).view(64, 64) / 4096
    there = backend.to_device({"a": a})["a"]
    if not torch.allclose(backend.to_host(there @ there), a @ a, rtol=1e-2):
        raise Failed(f"a product of two matrices on {backend.device} is wrong")
    found: Figures = {"device": backend.name}
    for number, (free, whole) in enumerate(backend.free_memory()):
        found |= {"free GB": free / 1e9, "memory GB": whole / 1e9}
        if free < 0.8 * whole:
            raise Failed(
                f"only {free / 1e9:.1f} of {whole / 1e9:.1f} GB are free on GPU {number}, a {backend.name}; end the "
                "other processes that nvidia-smi lists"
            )
    return found | backend.allocator()


def check_losses(place: Machine) -> Figures:
    """The losses of language models and their gradients equal those of plain transformers in double precision on the
    CPU."""
    backend = open_exact(place.device)
    own = tiny.model(tiny.tokenizer())
    reference = copy.deepcopy(own).double()
    reference.config._attn_implementation = tiny.PLAIN
    model = backend.place(own)
    worst = 0.0
    for name, (ours, plain) in loss_pairs(backend, model, reference).items():
        model.zero_grad()
        reference.zero_grad()
        loss, wanted = ours(), plain()
        backend.backward(loss)
        wanted.backward()
        backend.step_boundary()
        found, expected = float(backend.to_host(loss)), float(wanted.detach())
        gap = abs(found / expected - 1)
        ours_back = [backend.to_host(p.grad).double().flatten() for p in model.parameters()]
        theirs = [p.grad.flatten() for p in reference.parameters()]
        back = max(float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in zip(ours_back, theirs))
        if not gap < 1e-4:
            raise Failed(f"the loss of {name} is {found:.6g}, plain transformers gives {expected:.6g}")
        if not back < 1e-3:
            raise Failed(f"the gradient of {name} differs from plain transformers' by {back:.1e} of its norm")
        worst = max(worst, gap, back)
    return {"largest relative difference": worst}


def loss_pairs(backend: TorchBackend, model: nn.Module, reference: nn.Module) -> dict[str, tuple[Callable, Callable]]:
    """{name: (our loss of a placed model, the same of plain transformers on the CPU)}."""
    random = torch.Generator().manual_seed(0)
    vocab, rows, length = model.config.vocab_size, 4, 24
    tokens = torch.randint(vocab, (rows, length), generator=random)
    soft = torch.randn(rows, length, vocab, generator=random).softmax(-1)
    every = torch.arange(vocab).expand(rows, length, vocab)
    ones = torch.ones(rows, length, dtype=torch.uint8)
    positions = torch.arange(length // 2).repeat(rows, 2)
    segments = torch.ones(rows, length, dtype=torch.long)
    segments[:, length // 2 :] = 2
    places = torch.cat([torch.arange(1, length // 2), torch.arange(length // 2 + 1, length)]).expand(rows, -1)
    packed = {"tokens": tokens, "segments": segments, "positions": positions, "places": places,
              "weights": torch.ones(places.shape), "total": torch.tensor(float(places.numel()))}  # fmt: skip
    prompts = Prompts(*backend.to_device({"tokens": tokens[:, :8], "mask": torch.ones(rows, 8, dtype=bool)}).values())
    answers = tokens[:, None, 8:]

    def plain_kd() -> Tensor:
        return -(soft.double() * reference(input_ids=tokens).logits.log_softmax(-1)).sum(-1).mean()

    def plain_packed() -> Tensor:
        halves = tokens.view(2 * rows, length // 2)
        return reference(input_ids=halves, labels=halves).loss

    def plain_answers() -> Tensor:
        logp = reference(input_ids=tokens).logits[:, 7:-1].log_softmax(-1)
        return logp.gather(2, tokens[:, 8:, None]).mean()

    def batch(**tensors: Tensor) -> dict[str, Tensor]:
        return backend.to_device(tensors)

    return {
        "cached distillation": (
            lambda: kd_loss(model, batch(tokens=tokens, index=every, prob=soft, mask=ones)), plain_kd
        ),
        "next-token cross-entropy": (
            lambda: text_loss(model, batch(tokens=tokens, mask=ones)),
            lambda: reference(input_ids=tokens, labels=tokens).loss,
        ),
        "packed examples": (lambda: packed_loss(model, backend.to_device(packed)), plain_packed),
        "log-probabilities of answers": (
            lambda: log_probs(model, prompts, backend.to_device({"t": answers})["t"]).mean(), plain_answers
        ),
    }  # fmt: skip


def check_parity(name: str, place: Machine) -> Figures:
    """Ten updates of an experiment equal those on the CPU in fp32, and answers are the same, token for token.

    Where rounding grows from update to update, as in a recursive model, the CPU's own difference after a nudge of the
    size of rounding errors is the measure.
    """
    how = {"updates": UPDATES, "same_draws": True}
    ours = tried(name, "tiny", place.model, place.device, "fp32", **how)  # the device first: XLA needs that
    how["static_shapes"] = ours.static_shapes
    plain, nudged = (tried(name, "tiny", place.model, "cpu", "fp32", nudge=nudge, **how) for nudge in (0.0, NUDGE))
    worst, room = same_figures(ours.numbers(), plain.numbers(), nudged.numbers())
    tokens = same_tokens(ours.said, plain.said, min(0.25, room) if room > CLOSE else 0.0)
    worst = max(worst, same_values(ours.fetched, plain.fetched, nudged.fetched))
    return {"largest relative difference": worst, "figures": len(ours.figures), "fetched tokens": tokens}


def same_figures(here: list, there: list, nudged: list) -> tuple[float, float]:
    """(the largest relative difference between two runs' figures, the largest that the nudge allows). Raises Failed if
    it is too large."""
    worst, rooms = 0.0, {}
    if [phase for phase, _ in here] != [phase for phase, _ in there]:
        raise Failed(f"the device made {len(here)} updates and evaluations, the CPU {len(there)}")
    for number, ((phase, mine), (_, wanted), (_, other)) in enumerate(zip(here, there, nudged)):
        if mine.keys() != wanted.keys():
            raise Failed(f"{phase} (line {number}): the figures are {sorted(mine)}, on the CPU {sorted(wanted)}")
        for name, value in wanted.items():
            if not math.isfinite(value):
                raise Failed(f"{phase} (line {number}): {name} is {value} on the CPU itself")
            rooms[name] = max(rooms.get(name, 0.0), min(MOST, ROOM * apart(other[name], value)))
            gap = apart(mine[name], value)
            if not gap <= max(CLOSE, rooms[name]):
                raise Failed(f"{phase} (line {number}): {name} is {mine[name]:.6g}, on the CPU {value:.6g}")
            worst = max(worst, gap)
    return worst, max(rooms.values(), default=0.0)


def same_values(here: list, there: list, nudged: list) -> float:
    """The largest relative difference of fetched tensors of numbers. Raises Failed if it is too large."""
    worst = 0.0
    if len(here) != len(there):
        raise Failed(f"the device fetched {len(here)} tensors, the CPU {len(there)}")
    for number, (mine, wanted, other) in enumerate(zip(here, there, nudged)):
        a, b, c = (torch.tensor(values) for values in (mine, wanted, other))
        if a.shape != b.shape:
            raise Failed(f"fetched tensor {number} has shape {list(a.shape)}, on the CPU {list(b.shape)}")
        gap, room = (float((x - b).norm() / b.norm().clamp(min=1e-3)) for x in (a, c))
        if not gap <= max(CLOSE, min(MOST, ROOM * room)):
            raise Failed(f"fetched tensor {number} differs from the CPU's by {gap:.1e} of its norm")
        worst = max(worst, gap)
    return worst


def same_tokens(here: list, there: list, share: float) -> int:
    """The number of fetched tokens. Raises Failed if more than this share of them differ."""
    if len(here) != len(there):
        raise Failed(f"the device fetched {len(here)} lists of tokens, the CPU {len(there)}")
    count = 0
    for number, (mine, wanted) in enumerate(zip(here, there)):
        a, b = torch.tensor(mine).flatten(), torch.tensor(wanted).flatten()
        count += len(b)
        if a.shape != b.shape:
            raise Failed(f"fetched tokens {number}: {len(a)} of them, on the CPU {len(b)}")
        if (a != b).float().mean() > share:
            raise Failed(f"fetched tokens {number} differ from the CPU's at position {int((a != b).nonzero()[0])}")
    return count


def check_syncs(name: str, place: Machine) -> Figures:
    """No call in an update makes the host wait for the device."""
    module, config = options(name, "tiny", place.model)
    backend = WatchingBackend(place.device == "cuda")
    try:
        module.rehearse(config, backend)
    except UserError as error:  # on meta tensors the first one ends the rehearsal
        raise Failed(str(error)) from error
    if not backend.notices():
        raise Failed("torch does not report a planted host sync")
    if found := [sync for syncs in backend.steps.values() for sync in syncs]:
        raise Failed("; ".join(dict.fromkeys(found)))
    if not backend.steps:
        raise Failed("no update was watched")
    return {"updates watched": len(backend.steps), "on": str(backend.device)}


CHECKS = {  # the most important first
    "device": Check("parity", check_device, 60),
    "losses": Check("parity", check_losses, 60),
    "kernels": Check("parity", check_kernels, 60),
    **{f"parity: {name}": Check("parity", partial(check_parity, name), 60) for name in SCRIPTS},
    **{f"host syncs: {name}": Check("parity", partial(check_syncs, name), 30) for name in SCRIPTS},
    "resume": Check("workers", jobs.check_resume, 120),
    "workers": Check("workers", jobs.check_workers, 120),
    "killed worker": Check("workers", jobs.check_killed, 120),
    "shared model": Check("workers", jobs.check_shards, 240),
    "gradient reduction": Check("workers", jobs.check_smoke, 120),
    **{f"speed: {name}": Check("speed", partial(speed.measure, name), 150) for name in SCRIPTS},
    "speed: torch.compile": Check("speed", speed.measure_compiled, 240, ("real",)),
    "quality": Check("quality", jobs.check_quality, math.inf),
}


def main(folder: str, device: str, size: str, until: str, *names: str) -> None:
    """Run checks one after the other, and write a line before and after each. After a failure that may have left the
    device unusable the process ends, and its parent starts another for the rest."""
    place = Machine(Path(folder), device, size, float(until))
    if device in ("tpu", "xla") and CHECKS[names[0]].stage in ("parity", "speed"):
        open_backend(device)  # before any other backward pass, which would break XLA's in this process
    with open(place.folder / "results.jsonl", "a", encoding="utf-8") as file:

        def write(**line) -> None:
            print(json.dumps(line), file=file, flush=True)

        for name in names:
            write(check=name, begun=time.time())
            began, result, why = time.monotonic(), "passed", ""
            figures: Figures = {}
            try:
                # at tiny size most tensors are too small for the kernels that a real run uses
                with every_size() if CHECKS[name].stage == "parity" else nullcontext():
                    figures = CHECKS[name].run(place)
            except Skipped as reason:
                result, why = "skipped", str(reason)
            except BaseException as error:
                result, why = "failed", first_line(error) or type(error).__name__
                if not isinstance(error, Failed):
                    traceback.print_exc()
            shown = {key: value if isinstance(value, str) or math.isfinite(value) else str(value)
                     for key, value in figures.items()}  # fmt: skip
            write(check=name, result=result, why=why, figures=shown, seconds=time.monotonic() - began)
            gc.collect()
            if result == "failed" and device != "cpu":
                break
    os._exit(0)  # a lost device may keep the process from ending


if __name__ == "__main__":
    from qat_lora.hardware import checks

    checks.main(*sys.argv[1:])
