"""The backend on torch_xla: TPU chips, or torch_xla's CPU device. Imported only when the device resolved to XLA.

Every torch_xla name of the project is in this file and in probe.py.
"""

import os
import threading
from collections.abc import Callable

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.runtime as xr
from torch_xla.utils.checkpoint import checkpoint as xla_checkpoint
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from qat_lora.backend import probe
from qat_lora.backend.environment import LOOPBACK, master_port
from qat_lora.backend.group import ALONE, Group
from qat_lora.backend.optim import CautiousAdamW
from qat_lora.backend.relay import Relay, Timeouts
from qat_lora.backend.rendezvous import join, serve
from qat_lora.backend.torch import TorchBackend

_SERVING = threading.Lock()
_served: list[Relay] = []  # the relay that this process serves


def _attention_of_one_type(module, query, key, value, *args, **kwargs):
    return sdpa_attention_forward(module, query.to(value.dtype), key.to(value.dtype), value, *args, **kwargs)


def connect(timeouts: Timeouts) -> Group:
    """This worker's place in a job that torch_xla.launch started; the first host serves the relay.

    MASTER_PORT (default 29500) is its port. In a job on one host, no other host can reach it. Raises UserError if the
    port is bad or in use, or if not all workers arrive.
    """
    one_host, port = hosts() == 1, master_port()
    host = LOOPBACK if one_host else _addresses()[0].rsplit(":", 1)[0]
    rank, relay = xr.global_ordinal(), None
    if os.environ.get("CLOUD_TPU_TASK_ID", "0") == "0":
        with _SERVING:  # a process may run several workers, each in a thread
            if not _served:
                _served.append(serve(port, one_host, xr.world_size(), timeouts, f"{host}:{port}", tensors=False))
        relay = _served[0]
    link = join(lambda: (host, port), rank, xr.world_size(), timeouts, f"{host}:{port}")
    return Group(rank, xr.world_size(), link, relay)


def hosts() -> int:
    """Hosts of the slice, as torch_xla.launch has found them."""
    return len({address.rsplit(":", 1)[0] for address in _addresses()})


def _addresses() -> list[str]:
    return os.environ.get("TPU_PROCESS_ADDRESSES", "localhost:0").split(",")


class XlaBackend(TorchBackend):
    """One worker on one XLA device. Untested on hardware: proved on torch_xla's CPU device."""

    def __init__(self, precision: str = "auto", group: Group = ALONE):
        self.kind, self.group = "xla", group
        self.device = torch_xla.device()
        self.bf16 = self._wants_bf16(precision)
        if self.bf16:  # autocast("xla") leaves attention out, and rope gives fp32 queries and keys beside bf16 values
            ALL_ATTENTION_FUNCTIONS["sdpa"] = _attention_of_one_type

    @property
    def on_tpu(self) -> bool:
        """Whether the device is a TPU chip, not torch_xla's CPU device."""
        return os.environ.get("PJRT_DEVICE") == "TPU"

    def _wants_bf16(self, precision: str) -> bool:
        if precision == "auto":  # torch_xla's CPU device emulates bf16 slowly
            precision = "bf16" if self.on_tpu else "fp32"
        return super()._wants_bf16(precision)

    def __str__(self):
        return f"{self.device} on {os.environ.get('PJRT_DEVICE')} ({'bf16 autocast' if self.bf16 else 'fp32'})"

    @staticmethod
    def checkpoint(function, *args):
        return xla_checkpoint(function, *args)

    def compiled(self, function: Callable) -> Callable:
        return function

    def compiler_lacks(self) -> None:
        return None

    def optimizer(self, groups: list[dict]) -> CautiousAdamW:
        optimizer = super().optimizer(groups)
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.zeros_like(p)  # the first step then adds to a gradient as every later one does
        torch_xla.sync()  # or the zeros would be part of the first step's graph
        return optimizer

    def step_boundary(self) -> None:
        torch_xla.sync()

    def fetch(self, *tensors: torch.Tensor) -> list[float]:
        torch_xla.sync()  # then each value is at hand and no new graph is needed to read it
        with self.group.waiting():
            return [float(t.detach().cpu()) for t in tensors]

    def seed(self, seed: int) -> None:
        super().seed(seed)
        torch_xla.manual_seed(seed)

    def rng_state(self) -> dict:
        return super().rng_state() | {"xla": xm.get_rng_state(str(self.device))}

    def set_rng_state(self, state: dict) -> None:
        super().set_rng_state(state)
        if "xla" in state:
            xm.set_rng_state(state["xla"], str(self.device))

    def reduce(self, tensors: list[torch.Tensor]) -> None:
        if self.world_size > 1:
            xm.all_reduce(xm.REDUCE_SUM, tensors)  # a list: one collective for all of them

    def broadcast(self, tensors: list[torch.Tensor]) -> None:
        if self.world_size == 1:
            return
        torch_xla.sync()  # everything is data by now, so that all workers run one and the same graph
        xm.collective_broadcast(tensors)
        torch_xla.sync()

    def counters(self) -> dict[str, int]:
        return probe.counters()

    def peak_memory_mb(self) -> float:
        if self.on_tpu:
            return xm.get_memory_info(self.device)["peak_bytes_used"] / 2**20
        return super().peak_memory_mb()
