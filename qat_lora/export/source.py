"""The source of an export: a frozen student with its base model and adapter, or a full-precision model."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from peft.tuners.lora import LoraLayer
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn

from qat_lora.errors import UserError
from qat_lora.lora.adapter import BEYOND_PRODUCT, load_adapter, weight_file
from qat_lora.models.loading import load_model, plain_state
from qat_lora.models.writing import logits_on_cpu, probe
from qat_lora.quant.student import load_student
from qat_lora.run.files import sha256


@dataclass(frozen=True)
class Lora:
    """One layer's part of an adapter: it adds factor · b @ a to the weight; a [r, in], b [out, r], fp32."""

    a: Tensor
    b: Tensor
    factor: float


@dataclass
class Source:
    """The source of an export: a frozen student, the rest of its file, and the parts of its adapter; or a model in full
    precision, without a checkpoint.

    loras: the adapter parts of linear layers, by module name. updates: functions that compute what merging adds to a
    weight, by parameter name. adapted: the logits with the adapter, for `probe` of the student.
    """

    checkpoint: Path | None
    student: nn.Module
    made: dict
    adapter: Path | None = None
    alpha: float = 0.0
    loras: dict[str, Lora] = field(default_factory=dict)
    updates: dict[str, Callable[[], Tensor]] = field(default_factory=dict)
    adapted: Tensor | None = None

    @property
    def name(self) -> str:
        return self.made["model"]


def load_source(checkpoint: str | None, adapter: str | None = None, model: str | None = None) -> Source:
    """Read a student file and the adapter that was trained on it. model: where the student's base is now, or without a
    checkpoint the model itself.

    Raises UserError for missing or damaged files, an untrained student, and the adapter of another student.
    """
    if checkpoint is None:
        return Source(None, load_model(model), {"model": model, "spec": None, "info": {}})
    student, made = load_student(checkpoint, model)
    if made["info"].get("trained") is False:
        raise UserError(
            f"checkpoint {checkpoint} is untrained: the best of its run was step 0, before any update; train it, or "
            "use the layerwise.pt of a run with --layer-steps"
        )
    for name, value in plain_state(student).items():
        if not value.isfinite().all():
            raise UserError(f"checkpoint {checkpoint} is damaged: {name} holds NaN or infinity; train it again")
    source = Source(Path(checkpoint), student, made)
    if adapter:
        _take_adapter(source, Path(adapter).expanduser())
    return source


def _take_adapter(source: Source, folder: Path) -> None:
    adapted = load_adapter(source.student, folder, source.checkpoint)
    config = adapted.peft_config["default"]
    for name in BEYOND_PRODUCT:
        if (value := getattr(config, name)) not in (False, "none"):
            raise UserError(f"adapter {folder} has {name}={value}, which cannot be exported; train a plain LoRA")
    for name, module in adapted.get_base_model().named_modules():
        if isinstance(module, LoraLayer):
            _take_layer(source, folder, name, module)
    source.adapted = logits_on_cpu(adapted, probe(source.student))
    source.student, source.adapter, source.alpha = adapted.unload(), folder, float(config.lora_alpha)


def _take_layer(source: Source, folder: Path, name: str, module: LoraLayer) -> None:
    a, b = (part["default"].weight.detach().float() for part in (module.lora_A, module.lora_B))
    if not (a.isfinite().all() and b.isfinite().all()):
        raise UserError(f"adapter {folder} is damaged: {name} holds NaN or infinity; train it again")
    if isinstance(module, ParamWrapper):  # experts: the wrappers of one module's parameters are nested
        parameter = f"{name.replace('.base_layer', '')}.{module.parameter_name}"
    elif isinstance(module.get_base_layer(), nn.Linear):
        parameter = f"{name}.weight"
        source.loras[name] = Lora(a, b, float(module.scaling["default"]))
    else:
        raise UserError(f"adapter {folder} changes {name}, which is not a linear layer; train one without it")
    source.updates[parameter] = partial(module.get_delta_weight, "default")


@torch.no_grad()
def weight_of(source: Source, parameter: str, merged: bool) -> Tensor:
    """A parameter in fp32, with the adapter added if it is merged."""
    weight, update = source.student.get_parameter(parameter).detach(), source.updates.get(parameter)
    return weight + update() if merged and update else weight


def provenance(source: Source) -> dict:
    """What an export was made from, for its export.json."""
    made, adapter = source.made, source.adapter
    return {
        "model": made["model"],
        "quantisers": made["spec"],
        "info": made["info"],
        "student": sha256(source.checkpoint) if source.checkpoint else None,
        "adapter": sha256(weight_file(adapter)) if adapter else None,
    }
