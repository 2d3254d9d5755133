"""A model shared out over the workers, block by block: each holds a part of every parameter, of its gradient and of the
optimiser's state. torch's FSDP2 gathers a block's parameters just before the block needs them."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import MethodType

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method

from qat_lora.backend import machine
from qat_lora.backend.devices import is_shard
from qat_lora.backend.eager import TorchBackend
from qat_lora.backend.placing import agree, put_zeros, tied_parameters
from qat_lora.errors import UserError, first_line

SPARE = 2**25  # bytes of freed memory that a CPU worker keeps: it shares the model out because memory is short


def place_shards(backend: TorchBackend, base: nn.Module, stack: nn.Module, blocks: nn.ModuleList) -> None:
    """Place a model that worker 0 holds on the host, part by part, so that no worker has more than one of them whole.

    base: the model, with its head. stack: its decoder, which `base._decode` then calls. blocks: the decoder's blocks.
    Raises UserError if a block shares a parameter with another part.
    """
    inside = next(f"{name}." for name, module in base.named_modules() if module is blocks)
    for names in tied_parameters(base):
        if len({name.removeprefix(inside).split(".")[0] if name.startswith(inside) else "" for name in names}) > 1:
            raise UserError(f"--shard on: {names[0]} and {names[1]} are one parameter; leave --shard out")
    agree(base, backend.group)
    mesh = init_device_mesh(backend.kind, (backend.world_size,))
    for part in (*blocks, base):
        if not backend.is_main:
            put_zeros(part, backend.device)
        part.to(backend.device)
        backend.broadcast([t for t in (*part.parameters(), *part.buffers()) if not is_shard(t)])
        fully_shard(part, mesh=mesh)
        part.set_gradient_divide_factor(1.0)  # losses are shares of one sum
        part.set_force_sum_reduction_for_comms(True)
    if backend.kind == "cpu":
        machine.return_freed_memory()
        tidy = machine.tidier()
        backend._tidy = lambda _: tidy(SPARE)
    base._decode = MethodType(lambda _, **inputs: stack(**inputs), base)
    register_fsdp_forward_method(base, "_decode")  # otherwise only base's own forward gathers embedding and head


def shards_of(module: nn.Module) -> list[FSDPModule]:
    """The parts of a model that are gathered one at a time; none if it is not shared out."""
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def as_shards(module: nn.Module) -> None:
    """Let go of the parameters that the last forward pass gathered, so that `parameters()` are this worker's shards."""
    for part in shards_of(module):
        part.reshard()


@contextmanager
def whole(module: nn.Module):
    """Context in which the parameters below `module` are whole on every worker, also while it runs; changes that all
    workers make are kept. Without shards it does nothing."""
    parts = shards_of(module)
    as_shards(module)
    shards = dict(module.named_parameters()) if parts else {}
    for part in parts:
        part.set_reshard_after_forward(False, recurse=False)
        part.unshard()
    try:
        yield
        with torch.no_grad():
            for name, parameter in module.named_parameters() if parts else ():
                shards[name].to_local().copy_(_part_of(parameter))
    finally:
        for part in parts:  # the head is used after the forward pass; after one that did not end, reshard() asks
            part.set_reshard_after_forward(not hasattr(part, "_decode"), recurse=False)
            part.reshard()


def _part_of(value: Tensor) -> Tensor:
    """This worker's rows of a whole parameter."""
    rows = -(-len(value) // dist.get_world_size())
    return value[rows * dist.get_rank() : rows * (dist.get_rank() + 1)]


def each_whole(model: nn.Module) -> Iterator[set[int]]:
    """Yield the ids of the parameters that are whole now, until each has been: all of them at once, or part by part if
    the model is shared out. Then every worker has to iterate, and only worker 0 is given any."""
    parts = shards_of(model)
    if not parts:
        yield {id(p) for p in model.parameters()}
    for part in parts:
        as_shards(part)
        part.unshard()
        if dist.get_rank() == 0:
            yield {id(p) for p in part.parameters() if not is_shard(p)}
        part.reshard()


def whole_values(model: nn.Module, wanted: Callable[[str, nn.Parameter], bool]) -> dict[str, Tensor]:
    """The parameters for which wanted(name, parameter) is true, whole and on the host, see `each_whole`."""
    found, shared = {}, bool(shards_of(model))
    for there in each_whole(model):
        chosen = ((name, p) for name, p in model.named_parameters() if id(p) in there and wanted(name, p))
        found |= {name: p.detach().to("cpu", copy=shared) for name, p in chosen}
    return found


def takes_part(model: nn.Module, backend: TorchBackend) -> bool:
    """Whether this worker takes part in saving a model: the first one, or all if the model is shared out."""
    return backend.is_main or bool(shards_of(model))


def writes(model: nn.Module) -> bool:
    """Whether this worker, which takes part in saving a model, is the one that writes the file."""
    return not shards_of(model) or dist.get_rank() == 0


def save_shards(state: dict, folder: Path) -> None:
    """Write a nested state of shards, each worker its own. Every worker calls this."""
    import torch.distributed.checkpoint as dcp  # takes a fraction of a second

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # by torch's own code
            dcp.save(state, checkpoint_id=folder)
    except dcp.api.CheckpointException as error:
        raise OSError(_reason(error)) from error


def load_shards(state: dict, folder: Path) -> None:
    """Read a state that any number of workers has saved into `state`, in place. Every worker calls this. Raises
    UserError if it is another model's."""
    import torch.distributed.checkpoint as dcp

    try:
        dcp.load(state, checkpoint_id=folder)
    except dcp.api.CheckpointException as error:
        raise UserError(
            f"checkpoint {folder.parent} is from another model or preset ({_reason(error)}); start again with another "
            "--output-dir"
        ) from error


def _reason(error) -> str:
    return first_line(next(iter(error.failures.values()))[0])
