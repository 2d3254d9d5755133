"""Bits where they matter: which quantiser each layer of a model gets, for a given number of bits altogether."""

import heapq
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from qat_lora.backend import TorchBackend
from qat_lora.errors import UserError
from qat_lora.kd.training import kd_loss
from qat_lora.models.architecture import decoder_layers, hidden_states
from qat_lora.quant.init import input_moments, set_scale
from qat_lora.quant.linear import Quantizer, full_precision, quantized_layers, rows_of
from qat_lora.quant.spec import QuantSpec
from qat_lora.quant.student import StudentSpec, quantize
from qat_lora.run.console import watched


class Choice(NamedTuple):
    """A quantiser for a layer, the bits of its codes and scales, and the KL that it costs alone, in nats/token."""

    quantiser: str
    bits: int
    kl: float


@torch.no_grad()
def sensitivities(
    model: nn.Module, menu: list[QuantSpec], batches: list[dict], backend: TorchBackend
) -> dict[str, list[Choice]]:
    """What each quantiser of `menu` that fits a layer costs there, the fewest bits first, by block and path
    ("0.mlp.down_proj").

    batches: of a KD cache. model: the teacher on the CPU, which is changed. The first quantiser that fits is measured:
    the rise of the distillation loss with this layer alone quantised. For the others, that rise is scaled by their
    squared error over that of the first, each weight's error weighted by the mean square of its input.
    """
    text = "|".join(map(str, menu))
    student = quantize(model, StudentSpec(text, text))
    layers, choices = quantized_layers(student), {}
    with full_precision(student):
        moments = input_moments(student, lambda: [hidden_states(student, batch["tokens"]) for batch in batches])
    for name, layer in watched(layers.items(), "scales of every quantiser", len(layers)):
        choices[name] = _candidates(layer, menu, moments.get(name))
    backend.place(student)
    with full_precision(student):
        before = _loss(student, batches, backend)
        for name, layer in watched(layers.items(), "one layer at a time", len(layers)):
            layer.quantizer.enabled = True
            rise = max(0.0, _loss(student, batches, backend) - before)
            layer.quantizer.enabled = False
            first = choices[name][0].kl
            found = [choice._replace(kl=rise * choice.kl / first) for choice in choices[name]]
            choices[name] = sorted(found, key=lambda choice: choice.bits)
    blocks = {id(block): f"{number}." for number, block in enumerate(decoder_layers(student))}
    prefixes = {f"{name}.": blocks[id(module)] for name, module in student.named_modules() if id(module) in blocks}
    return {
        number + name.removeprefix(prefix): found
        for name, found in choices.items()
        for prefix, number in prefixes.items() if name.startswith(prefix)
    }  # fmt: skip


def _candidates(layer, menu: list[QuantSpec], moment: Tensor | None) -> list[Choice]:
    """The quantisers that fit a layer, with their squared errors in place of the KL. The first is the layer's own,
    whose scales are set."""
    found, weight = [], rows_of(layer).detach().float()
    for spec in menu:
        own = spec == layer.quantizer.spec
        try:
            quantizer = layer.quantizer if own else Quantizer(spec, *layer.quantizer.shape)
        except UserError:  # it does not fit the shape
            continue
        set_scale(SimpleNamespace(weight=weight, quantizer=quantizer), moment=moment)
        error = (weight - quantizer.decode(quantizer.encode(weight))).square()
        error = float((error if moment is None else error * moment).sum())
        found.append(Choice(str(spec), quantizer.bits, max(error, 1e-30)))
    return found


def _loss(student: nn.Module, batches: list[dict], backend: TorchBackend) -> float:
    total = 0.0
    for batch in batches:
        with backend.autocast():
            total += float(kd_loss(student, backend.to_device(batch)))
        backend.step_boundary()
    return total / len(batches)


def allocate(choices: dict[str, list[Choice]], budget: float) -> dict[str, Choice]:
    """The choice of each layer for `budget` bits altogether, with about the least sum of KLs: from the fewest bits on,
    the step that saves the most KL per bit is taken next. Raises ValueError with the fewest bits if the budget is
    below them."""
    chosen = {name: found[0] for name, found in choices.items()}
    spent = sum(choice.bits for choice in chosen.values())
    if spent > budget:
        raise ValueError(spent)
    steps = [step for name in choices if (step := _next(name, chosen, choices))]
    heapq.heapify(steps)
    while steps:
        _, name, choice = heapq.heappop(steps)
        more = choice.bits - chosen[name].bits
        if spent + more <= budget:
            spent, chosen[name] = spent + more, choice
            if step := _next(name, chosen, choices):
                heapq.heappush(steps, step)
    return chosen


def _next(name: str, chosen: dict[str, Choice], choices: dict[str, list[Choice]]) -> tuple[float, str, Choice] | None:
    """The layer's step to more bits that saves the most KL per bit, as (minus the saving per bit, name, choice)."""
    now = chosen[name]
    steps = [((c.kl - now.kl) / (c.bits - now.bits), name, c) for c in choices[name] if c.bits > now.bits]
    return min((step for step in steps if step[0] < 0), default=None)
