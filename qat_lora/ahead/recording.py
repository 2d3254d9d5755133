"""A backend that records the graphs of a run on torch_xla's CPU device instead of running them.

Nothing is compiled or computed, and no tensor has storage: each step boundary keeps the graph that torch_xla would have
handed to the compiler, and replaces its results with placeholders. So the graphs of a model of any size can be recorded
on any machine, for `ahead.aot` to compile. That a TPU would record the same graphs is not proved.
"""

import gc
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor, nn

from qat_lora.ahead.aot import Graph
from qat_lora.ahead.rehearsal import Rehearsing
from qat_lora.ahead.watching import NoReads, ones
from qat_lora.backend.placing import replace_tensors
from qat_lora.backend.xla import XlaBackend

_XLA = torch_xla._XLAC


class RecordingBackend(Rehearsing, XlaBackend):
    """Records what one worker of `chips` would run on a TPU.

    graphs: {phase: its graphs in the order of their execution}; tokens: {phase: the tokens that an execution of all of
    them trains on, over all chips}, see `phase`. estimate: {phase: parts in bytes}, the memory that a dry run would
    print.
    """

    on_tpu = True  # decides the precision and what a step contains
    steps_between_reads = 2  # the second token of an answer has the graph of all that follow

    def __init__(self, precision: str = "auto", chips: int = 1):
        os.environ["XLA_ALWAYS_ALLREDUCE"] = "1" if chips > 1 else "0"  # here torch_xla sees one device
        super().__init__(precision)
        gc.freeze()  # what exists so far holds no tensor of this device, and need not be searched at every step
        self.chips = chips
        self.graphs: dict[str, list[Graph]] = {}
        self.tokens: dict[str, int] = {}
        self.estimate: dict[str, dict[str, int]] = {}
        self._phase: list[Graph] = []

    @property
    def world_size(self) -> int:
        return self.chips

    @contextmanager
    def phase(self, name: str, tokens: int = 0) -> Iterator[None]:
        """Record the graphs of this block under `name`. tokens: how many it trains on, over all chips."""
        self.step_boundary()
        self._phase = self.graphs[name] = []
        self.tokens[name] = tokens
        with NoReads():
            yield
        self.step_boundary()
        self._phase = []

    def noted(self, figures: dict) -> None:
        pass

    def memory(self) -> None:
        return None

    def place(self, module: nn.Module) -> nn.Module:
        def placeholder(_: str, tensor: Tensor) -> Tensor:
            here = torch.zeros(tensor.shape, dtype=tensor.dtype).to(self.device)
            here.zero_()  # pending, so that its storage can be dropped
            self._drop()
            return here

        replace_tensors(module, placeholder)
        return module

    def step_boundary(self) -> None:
        pending, held = _live()
        if not pending:
            return
        tensors, updated = [t for t, _ in pending.values()], {alias for _, alias in pending.values()}
        sources, _ = _XLA._get_tensors_xla_device_data_node(tensors)
        donated = tuple(number for number, source in enumerate(sources) if source in updated)
        beside = sum(size for number, size in held.items() if number not in sources)
        code = xm.get_stablehlo_bytecode(tensors)
        with torch.no_grad():  # otherwise a copy of a tensor would keep sharing its placeholder
            for tensor in (t for t, _ in pending.values() if "xla::device_data" in _XLA._get_xla_tensor_debug_info(t)):
                tensor.zero_()
        together = self.world_size if b"all_reduce" in code or b"collective" in code else 1
        self._phase.append(Graph(code, donated, together, beside))
        self._drop()

    def fetch(self, *tensors: Tensor) -> list[float]:
        self.step_boundary()
        return [1.0] * len(tensors)

    def to_host(self, state):
        """Tensors of ones: there are no values."""
        self.step_boundary()
        return ones(state)

    def _drop(self) -> None:
        """Replace all pending results with placeholders."""
        _XLA._clear_pending_irs(str(self.device))
        # as torch_xla does at every boundary; else the expression for the seed grows from graph to graph
        xm.set_rng_state(xm.get_rng_state(str(self.device)), str(self.device))


def _device_type(tensor: Tensor) -> str:
    try:
        return tensor.device.type
    except RuntimeError:  # a tensor without a device
        return ""


def _live() -> tuple[dict[int, tuple[Tensor, int]], dict[int, int]]:
    """Every tensor on the device: {id: (tensor, the id of the one that it updates in place, or its own)} of those not
    computed yet, and {id: bytes} of the others."""
    pending, held = {}, {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # objects that warn when they are looked at
        for thing in gc.get_objects():
            if issubclass(type(thing), Tensor) and _device_type(thing) == "xla":
                for tensor in (thing, thing.grad if thing.is_leaf else None):
                    if tensor is None:
                        continue
                    text = _XLA._get_xla_tensor_debug_info(tensor)
                    number, alias = (int(re.search(rf"{key}: (\d+)", text)[1]) for key in ("TensorID", "AliasID"))
                    if "XLAData: None" not in text:
                        held[number] = tensor.nbytes
                    elif "IR: None" not in text:
                        pending[number] = tensor, alias
    return dict(sorted(pending.items())), held  # in torch_xla's order, so that equal steps give equal graphs
