"""Checks of the reservoir models on torch_xla's CPU device, run by xla_process.py."""

from functools import partial

import torch
import torch_xla
from loops import train_plain
from xla_process import CPU, XLA, on_both

from qat_lora.experiments.stories.evaluation import heldout, story_loss, tell
from qat_lora.experiments.stories.models import Shape, build
from qat_lora.experiments.stories.reservoir import ReservoirSpec, reservoir
from qat_lora.experiments.stories.text import Blocks, load_stories
from qat_lora.rl.rollout import Sampling
from qat_lora.run.session import Every
from qat_lora.train.loop import Plan

ESN = ReservoirSpec(12, "esn", radius=0.9, density=0.3, leak=(0.1, 0.9))
DIAGONAL = ReservoirSpec(12, leak=(0.1, 1.0))


def states(spec: ReservoirSpec) -> dict:
    """For texts of several lengths: the size of the graph of states and gradients, and their error against the CPU."""
    found = {"instructions": [], "states": [], "gradients": []}
    for steps in (30, 200, 300, 1000):  # no multiple of 16, so that all need padding
        given = torch.randn(3, steps, 8, generator=torch.Generator().manual_seed(0))
        results = []
        for backend in (CPU, XLA):
            cell = backend.place(reservoir(spec, 8))
            x = given.clone().to(backend.device).requires_grad_()
            out, last = cell(x, cell.begin(3))
            out.square().mean().backward()
            if backend is XLA:
                graph = torch_xla._XLAC._get_xla_tensors_hlo([out, last, x.grad])
                found["instructions"].append(graph.count(" = "))
            results.append([tensor.detach().cpu() for tensor in (out, last, x.grad)])
        (cpu, cpu_last, cpu_grad), (xla, xla_last, xla_grad) = results
        found["states"].append(max((xla - cpu).abs().max().item(), (xla_last - cpu_last).abs().max().item()))
        found["gradients"].append(((xla_grad - cpu_grad).abs().max() / cpu_grad.abs().max()).item())
    return found


states_of_esn, states_of_diagonal = partial(states, ESN), partial(states, DIAGONAL)


def training(kind: str) -> dict:
    """Six updates with evaluation and saving, then two generated stories on XLA."""
    stories = load_stories("embedded", 2, 0.1, "chars", 0)
    shape, trained, compiles = Shape(16, 1, 24, (DIAGONAL, ESN), heads=2, window=8), {}, []

    def train(backend, session) -> None:
        model = trained[backend] = backend.place(build(kind, stories.vocab, shape, 0))
        plan = Plan(6, 4, 1, 1e-2, 2, 1.0, 0)

        def evaluate(step: int) -> dict:
            return heldout(model, stories, 32, 64, backend)

        train_plain(model, Blocks(stories.train, 32), story_loss, plan, session, evaluate)

    found = on_both(kind, train, Every(log=1, evaluate=3, save=3))
    for count in (4, 9):
        before = XLA.counters()["compiles"]
        tell(trained[XLA], stories, stories.openings(1, 3)[0], count, Sampling(temperature=0.0), XLA)
        compiles.append(XLA.counters()["compiles"] - before)
    return found | {"telling": compiles, "new": 2}


reservoirs, mingru, transformer = (partial(training, kind) for kind in ("reservoir", "mingru", "transformer"))
