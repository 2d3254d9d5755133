"""The published checkpoints of the Tiny Recursive Model (arXiv 2510.04871): their names, and reading them.

A published checkpoint is a state dict saved by torch.save, alone or as "model" in a dict. all_config.yaml beside it has
the sizes that its shapes do not show, in `arch`. docs/athena.md has the table of names and shapes.
"""

from pathlib import Path

import torch
import yaml
from torch import Tensor

from qat_lora.errors import UserError, first_line
from qat_lora.experiments.athena import puzzles
from qat_lora.experiments.athena.model import RecursiveModel, RecursiveSpec

SETTINGS, TABLE = "all_config.yaml", "inner.puzzle_emb.weights"
EMBEDDING = "inner.embed_tokens.embedding_weight"
SIZES = ("num_heads", "H_cycles", "L_cycles", "expansion", "puzzle_emb_len")  # no shape shows them
LARGEST = 10_000
SHOWN = 6  # differences listed in a message


def names(spec: RecursiveSpec) -> dict[str, list[str]]:
    """The names of a model's state as published, each with our names of the tensors that form it, one below the
    other: gate and value share a published matrix."""
    found = {
        "inner.H_init": ["H_init"], "inner.L_init": ["L_init"], TABLE: ["identity"],
        EMBEDDING: ["embedding"], "inner.lm_head.weight": ["head"],
        "inner.q_head.weight": ["halt_weight"], "inner.q_head.bias": ["halt_bias"],
    }  # fmt: skip
    for number in range(spec.L_layers):
        layer, block = f"inner.L_level.layers.{number}", f"blocks.{number}"
        if spec.mlp_t:
            found[f"{layer}.mlp_t.gate_up_proj.weight"] = [f"{block}.mix.0", f"{block}.mix.1"]
            found[f"{layer}.mlp_t.down_proj.weight"] = [f"{block}.mix.2"]
        else:
            found[f"{layer}.self_attn.qkv_proj.weight"] = [f"{block}.mix.0"]
            found[f"{layer}.self_attn.o_proj.weight"] = [f"{block}.mix.1"]
        found[f"{layer}.mlp.gate_up_proj.weight"] = [f"{block}.mlp.0", f"{block}.mlp.1"]
        found[f"{layer}.mlp.down_proj.weight"] = [f"{block}.mlp.2"]
    return found


def renamed(spec: RecursiveSpec, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state of a model under the published names."""
    return {
        name: state[parts[0]] if len(parts) == 1 else torch.cat([state[part] for part in parts])
        for name, parts in names(spec).items()
    }


def state_of(model: RecursiveModel) -> dict[str, Tensor]:
    return renamed(model.spec, model.state_dict())


def load_state(model: RecursiveModel, state: dict[str, Tensor], source: str) -> None:
    """Copy a state with the published names into a model of its sizes. Raises UserError that lists the names and shapes
    in which they differ; source: what the state was read from, for the message."""
    wanted = {name: tuple(tensor.shape) for name, tensor in state_of(model).items()}
    there = {name: tuple(tensor.shape) for name, tensor in state.items()}
    lines = [
        f"{name} is {there.get(name, 'missing')} there and {wanted.get(name, 'absent')} here"
        for name in sorted(wanted.keys() | there.keys())
        if wanted.get(name) != there.get(name)
    ]
    if lines:
        more = f"; and {len(lines) - SHOWN} more" if len(lines) > SHOWN else ""
        raise UserError(f"{source} is a checkpoint of another network: {'; '.join(lines[:SHOWN])}{more}")
    ours = {}
    for name, parts in names(model.spec).items():
        ours |= zip(parts, state[name].chunk(len(parts)))
    model.load_state_dict(ours)


def read_state(path: Path) -> dict[str, Tensor]:
    """The state dict of a published checkpoint, its names from "inner." on. Code in a pickle is never run. Raises
    UserError if it is not one."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); give a checkpoint file") from error
    except Exception as error:  # a damaged file may raise anything
        raise UserError(f"{path} is not a PyTorch checkpoint of plain tensors ({first_line(error)})") from error
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        content = content["model"]
    state = {
        name[name.index("inner.") :]: tensor
        for name, tensor in (content.items() if isinstance(content, dict) else ())
        if isinstance(name, str) and "inner." in name and isinstance(tensor, Tensor)
    }
    if not state:
        raise UserError(f"{path} has no tensor named inner.…; give a checkpoint of the Tiny Recursive Model")
    return state


def open_published(path: Path, length: int) -> tuple[RecursiveModel, int]:
    """The model of a published checkpoint for rows of `length` tokens, and its maximum of segments. Raises UserError
    that names what is missing in all_config.yaml beside it, what we do not have, or what differs."""
    state, arch = read_state(path), _settings(path)
    for name in (EMBEDDING, TABLE):
        if name not in state or state[name].ndim != 2:
            raise UserError(f"{path} has no matrix {name}; give a checkpoint of the Tiny Recursive Model")
    mlp_t = any(".mlp_t." in name for name in state)
    ours = {"no_ACT_continue": True} | ({} if mlp_t else {"pos_encodings": "rope"})
    for name, has in ours.items():
        if arch.get(name, has) != has:
            raise UserError(f"{path.with_name(SETTINGS)}: arch.{name} is {arch[name]!r}; only {has!r} is supported")
    vocab, width = state[EMBEDDING].shape
    identifiers, puzzle_width = state[TABLE].shape
    layers = len({name.split(".")[3] for name in state if name.startswith("inner.L_level.layers.")})
    spec = RecursiveSpec(
        vocab, length, width, L_layers=layers, mlp_t=mlp_t, puzzle_emb_ndim=puzzle_width, identifiers=identifiers,
        **{name: arch[name] for name in SIZES if name != "puzzle_emb_len"},
        puzzle_emb_len=arch["puzzle_emb_len"] or -(-puzzle_width // width),  # 0: as many as the embedding fills
    )  # fmt: skip
    model = RecursiveModel(spec)
    load_state(model, state, str(path))
    return model.eval(), arch["halt_max_steps"]


def _settings(path: Path) -> dict:
    """`arch` in the all_config.yaml beside a checkpoint, with the sizes that no shape shows."""
    settings = path.with_name(SETTINGS)
    try:
        arch = yaml.safe_load(settings.read_text(encoding="utf-8"))["arch"]
        sizes = {name: arch[name] for name in (*SIZES, "halt_max_steps")}
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise UserError(
            f"{settings} does not give the sizes of {path.name} ({first_line(error)}); it needs arch: with "
            f"{', '.join(SIZES)} and halt_max_steps"
        ) from error
    for name, size in sizes.items():
        least, types = name != "puzzle_emb_len", (int, float) if name == "expansion" else (int,)
        if type(size) not in types or not least <= size <= LARGEST:
            raise UserError(f"{settings}: arch.{name} is {size!r}, not a number from {least:d} to {LARGEST:,}; fix it")
    return arch


def kind_of(spec: RecursiveSpec) -> str | None:
    """The kind of Sudoku that has a published model's vocabulary and length, if there is one."""
    sizes = spec.vocab, spec.length
    return next((kind for kind in puzzles.BOXES if (puzzles.vocab(kind), puzzles.side(kind) ** 2) == sizes), None)
