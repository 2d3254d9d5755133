"""Helpers for placing a model on its device: zeros for tensors without storage, tied parameters, equal copies."""

import hashlib
from collections.abc import Callable

import torch
from torch import Tensor, nn

from qat_lora.backend.devices import is_shard
from qat_lora.hosts.group import Group

# Keys of a transformers config that say where a model is or how it was saved.
NO_SETTINGS = {"_name_or_path", "_commit_hash", "transformers_version", "dtype", "torch_dtype", "architectures"}


def tied_parameters(module: nn.Module) -> list[list[str]]:
    """Groups of parameter names that share one tensor, such as an embedding and its lm_head."""
    groups: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        groups.setdefault(id(parameter), []).append(name)
    return [names for names in groups.values() if len(names) > 1]


def retie(module: nn.Module, groups: list[list[str]]) -> None:
    """Make every group of names one parameter again."""
    for first, *others in groups:
        parameter = module.get_parameter(first)
        for name in others:
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, parameter)


def architecture(module: nn.Module) -> dict[str, tuple]:
    """Values for `Group.agree` that must be equal for two copies of a model to compute the same: the settings of its
    config, and the names and shapes of its tensors."""
    config = module.config.to_dict() if hasattr(getattr(module, "config", None), "to_dict") else {}
    found = {f"the model's {key}": (repr(value),) * 2 for key, value in config.items() if key not in NO_SETTINGS}
    tensors = [(name, tuple(t.shape)) for name, t in (*module.named_parameters(), *module.named_buffers())]
    shapes = hashlib.sha256(repr(sorted(tensors)).encode()).hexdigest()[:12]
    return found | {"the model's set of tensors": (shapes, f"{len(tensors)} tensors ({shapes})")}


def agree(module: nn.Module, group: Group) -> None:
    """Raise UserError in every worker unless all have the same `architecture`."""
    # another version of transformers may have extra settings
    group.agree(architecture(module), "give every host the same model folder", common=True)


def replace_tensors(module: nn.Module, make: Callable[[str, Tensor], Tensor]) -> None:
    """Replace every parameter and buffer of a module, which may have no storage (meta), with make(name, tensor), one at
    a time, so that the host never holds copies for all its workers. Tied parameters stay tied."""
    groups = tied_parameters(module)
    everything = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in everything:
        if is_shard(tensor):
            continue
        owner, _, leaf = name.rpartition(".")
        made = make(name, tensor)
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, requires_grad=tensor.requires_grad)
        setattr(module.get_submodule(owner), leaf, made)
    retie(module, groups)


def put_zeros(module: nn.Module, device: torch.device) -> None:
    """Replace every tensor of a module with zeros on `device`."""
    # made on the host, so that XLA gets data and not a constant
    replace_tensors(module, lambda _, tensor: torch.zeros(tensor.shape, dtype=tensor.dtype).to(device))
