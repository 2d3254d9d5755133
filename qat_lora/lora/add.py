"""A new LoRA on a frozen model."""

import warnings

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import ParamWrapper
from torch import nn

from qat_lora.backend.machine import check_memory
from qat_lora.errors import UserError, first_line
from qat_lora.lora.adapter import Dropout
from qat_lora.lora.layer import in_one_step
from qat_lora.lora.targets import adapted, choose, peft_targets
from qat_lora.models.architecture import unwrap
from qat_lora.models.norms import norms_in_one_step


def add_adapter(
    student: nn.Module, rank: int, alpha: float, targets: tuple[str, ...], seed: int, dropout: float = 0.0,
    rslora: bool = False,
) -> nn.Module:  # fmt: skip
    """The frozen student inside a PEFT model with a new LoRA on what `targets` mean (see `targets.choose`).

    The adapter starts as the identity (B = 0) and is seeded: its A does not depend on what was drawn before. rslora:
    scaled by alpha/√rank instead of alpha/rank (arXiv 2312.03732). Experts, each with an A and a B of its own, and
    whatever else PEFT adapts by its weight have no dropout.
    """
    linear, experts = choose(student, targets)
    sizes = [unwrap(student).get_submodule(place).weight.shape for place in linear]
    need = 4 * rank * sum(rows + columns for rows, columns in sizes)
    check_memory(need, f"an adapter of rank {rank}", "its rank")
    places = peft_targets(student, linear, experts)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, **places, task_type="CAUSAL_LM",
        lora_dropout=0.0 if places["target_parameters"] else dropout, use_rslora=rslora,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers for an attribute it has renamed
        torch.manual_seed(seed)
        try:
            model = get_peft_model(student, config)
        except ValueError as error:
            raise UserError(f"--targets {','.join(targets)}: {first_line(error)}; choose other layers") from error
    found = adapted(unwrap(model))
    if found.keys() != {*linear, *experts}:
        odd = min(found.keys() ^ {*linear, *experts})
        raise UserError(f"--targets {','.join(targets)}: PEFT does not keep to them at {odd}; choose other layers")
    for layer in found.values():
        if dropout and not isinstance(layer, ParamWrapper):
            layer.lora_dropout["default"] = Dropout(dropout)
        in_one_step(layer)
    norms_in_one_step(model)
    return model
