"""Which weights of the decoder blocks get an adapter: `--targets` resolved and checked block by block."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn

from qat_lora.errors import UserError
from qat_lora.models.architecture import Matrix, decoder_layers, experts_of, matrices, uncalled, unwrap

PEFTS = {"base_layer", "lora_A", "lora_B"}  # modules that PEFT adds
PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")  # short for q_proj …
GROUPS: dict[str, Callable[[Matrix], bool]] = {
    "attn": lambda matrix: not matrix.is_experts and matrix.part == "attn",
    "mlp": lambda matrix: not matrix.is_experts and matrix.part == "mlp",
    "all": lambda matrix: not matrix.is_experts,
    # q, v, o, gate, up and down if they are separate layers, else the layers that the model has instead
    "auto": lambda matrix: not matrix.is_experts and _name(matrix.path) != "k_proj",
    "experts": lambda matrix: matrix.is_experts,
}


def choose(model: nn.Module, targets: Sequence[str]) -> tuple[list[str], list[str]]:
    """The linear layers (names of modules) and the experts (names of parameters) of a model that `targets` select.

    A target is a short name (q k v o gate up down), the name of a linear layer in the blocks ("qkv_proj", "mlp.fc1"),
    or a group: attn, mlp, all (every linear layer), auto (all but k_proj), experts (all expert weights that are stacked
    in one parameter; no other target selects them). Routers are never adapted, nor are layers whose weight the model
    reads without calling them.

    A group selects the layers that exist; it is an error only if no block has any of them. A name must be in every
    block, or another target must adapt the same part (attention or MLP) of each block that has that part but lacks the
    name: otherwise q,v would silently adapt a quarter of the blocks of a hybrid model. Raises UserError with the
    possible targets.
    """
    base = unwrap(model)
    places = {id(module): name for name, module in base.named_modules()}
    layers = decoder_layers(model)
    blocks = [list(matrices(block)) for block in layers]
    if not any(blocks):
        raise UserError("the model's blocks hold no plain linear layers that could have an adapter; use another model")
    tests = {target: GROUPS.get(target) or _named(target) for target in targets}
    wanted = [[m for m in block if any(test(m) for test in tests.values())] for block in blocks]
    if not tests:
        raise UserError(f"--targets is empty; choose from {_there_is(blocks)}")
    for target, test in tests.items():
        _check(target, test, blocks, wanted)
    _check_shared(wanted)
    names: dict[bool, list[str]] = {True: [], False: []}
    for block, chosen in zip(layers, wanted):
        for matrix in chosen:
            path = f"{places[id(block)]}.{matrix.path}".removesuffix(".")
            names[matrix.is_experts].append(f"{path}.{matrix.name}" if matrix.is_experts else path)
    return names[False], names[True]


def _named(target: str) -> Callable[[Matrix], bool]:
    name = f"{target}_proj" if target in PROJECTIONS else target
    return lambda matrix: not matrix.is_experts and f".{matrix.path}".endswith(f".{name}")


def _name(path: str) -> str:
    """The last part of a module's path that is not a number, with everything after it."""
    parts = path.split(".")
    last = max((at for at, part in enumerate(parts) if not part.isdigit()), default=0)
    return ".".join(parts[last:])


def _check(target: str, test: Callable, blocks: list[list[Matrix]], wanted: list[list[Matrix]]) -> None:
    matching = [[m for m in block if test(m)] for block in blocks]
    if not any(matching):
        raise UserError(f"--targets {target!r} matches nothing; choose from {_there_is(blocks)}")
    parts = {m.part for found in matching for m in found}
    bare = [
        {m.path for m in block if m.part in parts - {m.part for m in chosen}} if not found else set()
        for block, chosen, found in zip(blocks, wanted, matching)
    ]
    if any(bare) and target not in GROUPS:
        raise UserError(
            f"--targets {target!r} matches {sum(map(bool, matching))} of {len(blocks)} blocks and leaves "
            f"{sum(map(bool, bare))} others without an adapter on that part; add a target for them: {_there_is(blocks)}"
        )


def _check_shared(wanted: list[list[Matrix]]) -> None:
    """Raise UserError if blocks share a weight: merging would add each block's adapter to all of them."""
    counts = Counter(id(m.module._parameters[m.name]) for block in wanted for m in block)
    shared = {_name(m.path) for block in wanted for m in block if counts[id(m.module._parameters[m.name])] > 1}
    if shared:
        raise UserError(
            f"blocks share the weights of {', '.join(sorted(shared))}, so an adapter for each could not be merged; "
            "leave them out of --targets"
        )


def _there_is(blocks: list[list[Matrix]]) -> str:
    """The possible targets, and how many blocks have them."""
    short = {f"{name}_proj": name for name in PROJECTIONS}
    linear = [[short.get(name := _name(m.path), name) for m in block if not m.is_experts] for block in blocks]
    groups = [group for group, test in GROUPS.items() if group != "auto" and any(test(m) for b in blocks for m in b)]
    found = _by_blocks(linear)
    if len(found) == 1 and found[0][1] == len(blocks):
        return ",".join([*found[0][0], *groups])
    return ", ".join(f"{','.join(names)} ({count} of {len(blocks)} blocks)" for names, count in found) + (
        ", " * bool(found) + ",".join(groups)
    )


def _by_blocks(names: list[list[str]]) -> list[tuple[list[str], int]]:
    """Group the names in all blocks by the blocks they occur in; returns (names, number of blocks) for each group."""
    where: dict[str, list[int]] = {}
    for at, block in enumerate(names):
        for name in dict.fromkeys(block):
            where.setdefault(name, []).append(at)
    together: dict[tuple, list[str]] = {}
    for name, blocks in where.items():
        together.setdefault(tuple(blocks), []).append(name)
    return [(found, len(blocks)) for blocks, found in together.items()]


# -- in PEFT's terms ---------------------------------------------------------------------------------------------------
def peft_targets(model: nn.Module, linear: list[str], experts: list[str]) -> dict[str, list[str]]:
    """target_modules and target_parameters that make PEFT adapt these linear layers and experts, and nothing else, here
    and wherever it loads the adapter.

    In models whose experts used to be linear layers, PEFT mistakes gate_proj and the like for experts, so such a layer
    outside the experts is targeted by its weight parameter.
    """
    base = unwrap(model)
    modules, parameters = ([name for name, _ in found] for found in (base.named_modules(), base.named_parameters()))
    taken = {leaf for leaf in {name.rpartition(".")[2] for name in linear} if _taken_for_experts(base, leaf)}
    weights = [f"{name}.weight" for name in linear if name.rpartition(".")[2] in taken]
    plain = [name for name in linear if name.rpartition(".")[2] not in taken]
    return {
        "target_modules": _suffixes(plain, modules),
        "target_parameters": _suffixes([*weights, *experts], parameters),
    }


def _taken_for_experts(base: nn.Module, name: str) -> bool:
    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, base, None)
    except ValueError:  # one of two layers that it would fuse
        return True
    return name not in config.target_modules


def _suffixes(wanted: Iterable[str], names: Iterable[str]) -> list[str]:
    """The shortest dotted suffixes that match all of `wanted` and no other of `names`."""

    def ends(name: str) -> Iterable[str]:
        parts = name.split(".")
        return (".".join(parts[-n:]) for n in range(1, len(parts) + 1))

    wanted = list(wanted)
    among, all_of = (Counter(end for name in found for end in ends(name)) for found in (wanted, names))
    return sorted({next(end for end in ends(name) if among[end] == all_of[end]) for name in wanted})


def adapted(block: nn.Module) -> dict[str, LoraLayer]:
    """The adapters below a module, by the path of the linear layer or experts' parameter that each one adapts."""
    found = {}
    for path, module in block.named_modules():
        if isinstance(module, LoraLayer):
            place = path.replace(".base_layer", "")  # wrappers of several parameters of one module are nested
            linear = isinstance(module.get_base_layer(), nn.Linear)
            found[place if linear else f"{place}.{module.parameter_name}"] = module
    return found


def coverage(model: nn.Module) -> str:
    """A readable summary of which layers have adapters, in how many blocks."""
    blocks = [adapted(block) for block in decoder_layers(model)]
    found = _by_blocks([[_label(path, layer) for path, layer in block.items()] for block in blocks])
    shares = {len(blocks): f"each of {len(blocks)}"}
    told = "; ".join(f"{', '.join(n)} in {shares.get(count, f'{count} of {len(blocks)}')} blocks" for n, count in found)
    return f"{sum(map(len, blocks))} layers ({told})"


def _label(path: str, layer: LoraLayer) -> str:
    return _name(path) if isinstance(layer.get_base_layer(), nn.Linear) else ".".join(path.split(".")[-2:])


def left_out(model: nn.Module, how: str = "") -> list[str]:
    """Messages about experts without an adapter (how: hint on adapting them) and layers that cannot have one."""
    experts, layers = False, {}
    for block in decoder_layers(model):
        places = adapted(block)
        for path, module in block.named_modules():
            place = path.replace(".base_layer", "")
            experts |= any(f"{place}.{name}" not in places for name in experts_of(module))
        layers |= {_name(path): None for path in uncalled(block) if not PEFTS & {*path.split(".")}}
    lines = [f"experts are left as they are{how}"] if experts else []
    if layers:
        lines.append(f"{', '.join(layers)} cannot have an adapter: the model reads their weight without calling them")
    return lines
