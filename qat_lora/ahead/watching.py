"""Finds host synchronisations inside a step: calls that make the host wait for the device."""

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qat_lora.ahead.rehearsal import Rehearsing
from qat_lora.backend.devices import on_host
from qat_lora.backend.eager import TorchBackend
from qat_lora.backend.placing import put_zeros
from qat_lora.errors import ROOT, UserError
from qat_lora.hosts.group import ALONE

READS = {  # functions that read values of a tensor
    Tensor.item, Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__bool__, Tensor.__int__, Tensor.__float__,
    Tensor.__index__, Tensor.nonzero, torch.nonzero, Tensor.masked_select, torch.masked_select, Tensor.equal,
    torch.equal, Tensor.unique, Tensor.unique_consecutive, Tensor.bincount,
}  # fmt: skip
REPORT = "called a synchronizing CUDA operation"  # what torch's sync debug mode says of each
MAKERS = {torch.tensor, torch.as_tensor}  # functions that copy values of the host to a device, and wait for it


class NoReads(TorchFunctionMode):
    """Refuses every call that reads a value of an accelerator (or of a meta tensor, which has none) on the host, with
    a UserError that names the line. (A TorchDispatchMode would see more, but loses writes through views on XLA.)

    copies: refuse copies from the host to the device that wait for it, too. XLA has none.
    """

    def __init__(self, copies: bool = False):
        super().__init__()
        self.copies = copies

    def __torch_function__(self, function, kinds, args=(), kwargs=None):
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Tensor) and _reads(function, first, args[1:], kwargs):
            raise UserError(
                f"{where()} reads a value of the device on the host ({function.__name__}), a host sync within a step; "
                "keep it in a tensor, or use backend.fetch"
            )
        if self.copies and _copies(function, args, kwargs):
            raise UserError(
                f"{where()} copies values of the host to the device and waits for it ({function.__name__}), a host "
                "sync within a step; make the tensor on the device, or copy with non_blocking"
            )
        return function(*args, **kwargs)


def where() -> str:
    """The innermost line of this repository that is not part of the watching."""
    ours = [f for f in traceback.extract_stack() if str(ROOT) in f.filename and f.filename != __file__]
    ours = [f for f in ours if "site-packages" not in f.filename]
    return f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "a step"


def ones(state):
    """A nested state on the host with ones for the values of its tensors, for backends that compute none."""
    if isinstance(state, Tensor):
        return torch.ones(state.shape, dtype=state.dtype)
    if isinstance(state, dict):
        return {key: ones(value) for key, value in state.items()}
    if isinstance(state, list | tuple):
        return [ones(value) for value in state]
    return state


def _reads(function, first: Tensor, others: tuple, options: dict) -> bool:
    """Whether a call reads a value: also one whose result has a shape that depends on values, as with a mask."""
    if on_host(first):  # a copy to the host
        return function is Tensor.copy_ and isinstance(others[0], Tensor) and not on_host(others[0])
    if function in (Tensor.__getitem__, Tensor.__setitem__):
        places = others[0] if isinstance(others[0], tuple) else (others[0],)
        return any(isinstance(place, Tensor) and place.dtype == torch.bool for place in places)
    if function is Tensor.to:
        return any(isinstance(x, str | torch.device) and str(x) == "cpu" for x in (*others, *options.values()))
    return function in READS


def _copies(function, args: tuple, options: dict) -> bool:
    """Whether a call copies from the host to a device and waits."""
    first = args[0] if args else None
    if function in MAKERS:
        device = options.get("device")
        return device is not None and torch.device(device).type != "cpu"
    if function is Tensor.new_tensor:
        return not on_host(first)
    if options.get("non_blocking") or not isinstance(first, Tensor) or not on_host(first):
        return False
    if function is Tensor.to:
        wanted = [x for x in (*args[1:], *options.values()) if isinstance(x, str | torch.device | Tensor)]
        kinds = [x.device.type if isinstance(x, Tensor) else torch.device(x).type for x in wanted]
        return any(kind != "cpu" for kind in kinds)
    return function is Tensor.cuda


class WatchingBackend(Rehearsing, TorchBackend):
    """Runs the steps that a script rehearses, and refuses host synchronisations in them: on a GPU those that torch
    itself reports, and without one on meta tensors, which take the path of a GPU and hold no values.

    steps: {phase: the host syncs in it, by line}; those of evaluations and of generated answers are not recorded.
    """

    steps_between_reads = 2

    def __init__(self, cuda: bool):
        if cuda:
            super().__init__("cuda")
        else:
            self.kind, self.group, self.device, self.bf16 = "cuda", ALONE, torch.device("meta"), False
        self.steps: dict[str, list[str]] = {}
        self.seen: set[str] = set()

    @contextmanager
    def phase(self, name: str, tokens: int = 0) -> Iterator[None]:
        """Watch this block if it is an update, on a GPU only after the first one, which initialises libraries. On meta
        tensors, raises UserError for a sync."""
        known = name.endswith(": update") or name in self.seen or self.device.type == "meta"
        self.seen.add(name)
        if not tokens or not known:
            yield
            return
        found = self.steps[name] = []
        with self._reported(found) if self.device.type == "cuda" else NoReads(copies=True):
            yield

    @contextmanager
    def _reported(self, found: list[str]) -> Iterator[None]:
        """Collect torch's own reports of synchronising calls."""

        def shown(message, category, filename, lineno, *rest) -> None:
            if REPORT in str(message):
                found.append(f"{where()} makes the host wait for the device ({Path(filename).name}:{lineno})")

        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always")
                warnings.showwarning = shown
                yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def notices(self) -> bool:
        """Whether a synchronisation would be noticed; on a GPU that depends on torch's own reports."""
        if self.device.type != "cuda":
            return True
        found: list[str] = []
        with self._reported(found):
            torch.zeros((), device=self.device).item()
        return bool(found)

    def place(self, module: nn.Module) -> nn.Module:
        put_zeros(module, self.device)
        return module

    def noted(self, figures: dict) -> None:
        pass

    def compiles(self, choice: str, auto: bool | None = None) -> bool:
        return False

    def fetch(self, *tensors: Tensor) -> list[float]:
        """Ones: the intended synchronisation of a loop, which is not reported."""
        return [1.0] * len(tensors)

    def to_host(self, state):
        return ones(state)

    def rng_state(self) -> dict:
        return {}

    def set_rng_state(self, state: dict) -> None:
        pass

    def prefetch(self, batches, depth: int = 2):
        """Without a thread, whose copies would be watched too."""
        for batch in batches:
            yield self.to_device(self.staged(batch) if self.device.type == "cuda" else batch)
