# PYTHON_ARGCOMPLETE_OK
"""Can this machine train the reservoir language model on a TPU, and does it fall back to a GPU or the CPU without one?

    python scripts/test_tpu_support.py
    python scripts/test_tpu_support.py --device xla

Runs the functions of train_tinystories_reservoir.py itself: choice of device and its fallback, batch size and learning
rate on TPU, data in blocks of one shape that contain each token once, updates on the device, and generation from a
carried state. Without a TPU all of it runs on a GPU or the CPU, with --device xla on torch_xla's CPU device. The exit
code is 0 if all checks pass. docs/reservoir.md is the runbook.
"""

from dataclasses import dataclass

from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import ScriptConfig


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    pass


if __name__ == "__main__":
    check_command_line(Config, "test_tpu_support", __doc__)  # before the imports that take seconds

from collections.abc import Callable
from itertools import islice
from unittest import mock

import torch

from qat_lora.backend import TorchBackend, open_backend, tpu_chips
from qat_lora.errors import UserError
from qat_lora.experiments.stories import evaluation as stories
from qat_lora.experiments.stories.evaluation import get_device, heldout, on_tpu, story_loss, tell
from qat_lora.experiments.stories.models import Shape, build
from qat_lora.experiments.stories.reservoir import ReservoirSpec
from qat_lora.experiments.stories.text import Blocks, load_stories
from qat_lora.kernels.optimizer import new_optimizer
from qat_lora.rl.rollout import Sampling
from qat_lora.run.console import say
from qat_lora.train.loop import Plan, row_stream

SMALL = Shape(32, 1, 32, (ReservoirSpec(32),))


def main(cfg: Config) -> None:
    kind = cfg.device if cfg.device != "auto" else get_device(use_tpu=True)
    backend = open_backend(kind, cfg.precision)
    checks = {
        "device": lambda: str(backend),
        "fallback without a TPU": check_fallback,
        "batch and learning rate on TPU": check_resolved,
        "data": check_data,
        "an update": lambda: check_update(backend),
        "a story": lambda: check_story(backend),
    }
    if cfg.dry_run:
        return say("\n".join(checks))
    failed = [name for name, check in checks.items() if not passes(name, check)]
    if failed:
        raise UserError(
            f"failed checks: {', '.join(failed)}; see the lines above, and docs/reservoir.md for what each needs"
        )
    say(f"All checks passed on {backend}{'' if tpu_chips() else '; there is no TPU here'}.")


def passes(name: str, check: Callable[[], str]) -> bool:
    try:
        say(f"ok      {name}: {check()}")
    except (AssertionError, RuntimeError, UserError) as error:
        say(f"FAILED  {name}: {error}")
        return False
    return True


def check_fallback() -> str:
    wanted = "cuda" if torch.cuda.device_count() else "cpu"
    with mock.patch.object(stories, "tpu_chips", list):
        for use_tpu in (True, False):
            found = get_device(use_tpu)
            assert found == wanted, f"with USE_TPU={use_tpu} and no chip the device is {found}, not {wanted}"
    return wanted


def check_resolved() -> str:
    batch, rate = on_tpu(64, 1e-3)
    assert (batch, round(rate, 9)) == (128, 0.0012), f"64 and 0.001 become {batch} and {rate}, not 128 and 0.0012"
    return "64 → 128, 0.001 → 0.0012"


def check_data() -> str:
    data = load_stories("embedded", 4, 0.1, "chars", 0)
    blocks = Blocks(data.train, 64)
    shapes = {blocks[i]["tokens"].shape for i in range(len(blocks))}
    seen = torch.cat([blocks[i]["tokens"][1:] for i in range(len(blocks))])
    assert shapes == {(65,)} and torch.equal(seen, data.train[1 : len(seen) + 1]), "a token is missing or appears twice"
    return f"{len(blocks)} blocks of one shape, each token once"


def check_update(backend: TorchBackend) -> str:
    data = load_stories("embedded", 4, 0.1, "chars", 0)
    model = backend.place(build("reservoir", data.vocab, SMALL, 0))
    plan = Plan(8, 4, 1, 1e-2, 0, 1.0, 0)
    optimizer = new_optimizer(model, plan.learning_rate, backend)
    losses = []
    for batch in islice(row_stream(Blocks(data.train, 64), plan, backend)(0), plan.steps):
        with backend.autocast():
            loss = story_loss(model, batch)
        backend.backward(loss)
        losses.append(loss.detach())
        backend.update(optimizer, plan.clip_grad_norm)
    first, *_, last = backend.fetch(*losses)
    assert last < first, f"the loss went from {first:.3f} to {last:.3f}"
    nll = heldout(model, data, 64, 4, backend)["heldout_nll"]
    return f"loss {first:.3f} → {last:.3f}, held out {nll:.3f}"


def check_story(backend: TorchBackend) -> str:
    data = load_stories("embedded", 4, 0.1, "chars", 0)
    model = backend.place(build("reservoir", data.vocab, SMALL, 0))
    told = tell(model, data, data.tokenizer.encode("The").ids, 8, Sampling(), backend)
    tokens = backend.to_device({"tokens": data.heldout[:40][None]})["tokens"]
    with torch.no_grad():
        whole, (first, state) = model(tokens)[0], model(tokens[:, :23])
        parts = torch.cat([first, model(tokens[:, 23:], state)[0]], 1)
    off = float(backend.to_host((whole - parts).abs().max()))
    assert off < 1e-3, f"hidden states computed in two parts, with the state carried over, are off by {off:.1e}"
    return f"{told!r}, two parts off by {off:.0e}"


if __name__ == "__main__":
    run_script(main, Config, "test_tpu_support", __doc__)
