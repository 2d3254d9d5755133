"""The backend on CPU and CUDA, and the interface that the XLA backend specialises."""

import functools
import os
import queue
import random
import resource
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from qat_lora.backend import machine
from qat_lora.backend.devices import check_usable, cpu_has_bf16, is_shard, local
from qat_lora.backend.placing import agree, put_zeros, retie, tied_parameters
from qat_lora.errors import UserError, to_stderr
from qat_lora.hosts.group import ALONE, Group

# Gradients of at least this many bytes are reduced in place; smaller ones are copied together and reduced at once.
# docs/benchmarks.md has the cost of the reduction.
SMALL_BYTES = 256 * 2**10


class Phases:
    """Prints what an update is doing, if it is on: on XLA its first phases compile for minutes without a sign."""

    def __init__(self, on: bool):
        self.on, self.step, self.running, self.since = on, 0, "", 0.0

    def tell(self, what: str) -> None:
        if self.on:
            print(f"[Step {self.step}] {what}", flush=True)

    def start(self, step: int) -> None:
        self.step = step
        self.tell("Starting...")

    def begin(self, phase: str) -> None:
        """End the phase that is running, and begin another."""
        self.end()
        self.running, self.since = phase, time.monotonic()
        self.tell(f"{phase} starting...")

    def end(self) -> None:
        if self.running:
            self.tell(f"{self.running} done ({time.monotonic() - self.since:.1f}s)")
        self.running = ""


class TorchBackend:
    """One worker on CPU or CUDA.

    device: where models and batches live. group: this worker's place among the workers, a single one by default; with
    several, torch.distributed's default process group carries the tensors.
    """

    _tidy: Callable[[int], None] | None = None  # on the CPU, once weights are placed

    def __init__(self, kind: str, precision: str = "auto", group: Group = ALONE):
        self.kind, self.group = kind, group
        self.device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        self.bf16 = self._wants_bf16(precision)
        if kind == "cuda":
            check_usable(self.device)

    @property
    def rank(self) -> int:
        return self.group.rank

    @property
    def world_size(self) -> int:
        return self.group.world_size

    # -- capabilities that a loop may query -----------------------------------------------------------------------
    on_tpu = False
    can_share = True  # whether workers can share a model out, see sharding.py
    static_shapes = False  # whether each shape compiles its own graph, so all batches should have one shape

    @property
    def steps_between_reads(self) -> int:
        """How many tokens to generate between checks whether every answer has ended: a check waits for a device."""
        return 1 if self.kind == "cpu" else 16

    @property
    def wants_recomputation(self) -> bool:
        """Whether to recompute activations of rollouts: where memory is limited and no compiler plans its use."""
        return self.kind == "cuda"

    @property
    def shares_host_memory(self) -> bool:
        """Whether models live in host memory, in the same process as everything else."""
        return self.kind == "cpu"

    def memory(self) -> float | None:
        """Memory in bytes of this device, or of the host if the device uses host memory; None if it is unknown."""
        if self.kind == "cuda":
            return torch.cuda.get_device_properties(self.device).total_memory
        return machine.host_memory()

    @functools.cached_property
    def phases(self) -> Phases:
        """Tells the phases of every update if PT_XLA_DEBUG is set."""
        return Phases(self.is_main and os.environ.get("PT_XLA_DEBUG", "0") not in ("", "0"))

    @property
    def is_main(self) -> bool:
        """Whether this is worker 0, which writes the run directory and prints."""
        return self.group.rank == 0

    def _wants_bf16(self, precision: str) -> bool:
        if precision not in ("auto", "fp32", "bf16"):
            raise UserError(f"precision={precision!r} is not one of auto, fp32, bf16")
        if precision != "auto":
            return precision == "bf16"
        return torch.cuda.is_bf16_supported(False) if self.kind == "cuda" else cpu_has_bf16()

    @property
    def name(self) -> str:
        """The device's readable name."""
        return torch.cuda.get_device_name(self.device) if self.kind == "cuda" else self.kind

    def __str__(self):
        return f"{self.name} ({'bf16 autocast' if self.bf16 else 'fp32'})"

    @property
    def precision(self) -> str:
        """The precision in use, as --precision names it."""
        return "bf16" if self.bf16 else "fp32"

    @property
    def facts(self) -> dict[str, str]:
        """Entries for a run's manifest."""
        return {"device": str(self), "precision": self.precision}

    def check_world(self, wanted: int) -> None:
        """Check with a sum over all workers that they found each other. Raises UserError if they did not: each would
        train its own model, the most common silent failure."""
        one = torch.ones((), device=self.device)
        self.reduce([one])
        self.step_boundary()
        found = int(self.fetch(one)[0])
        if found != wanted:
            raise UserError(
                f"{wanted} workers were started, but {found} found each other; start the script itself, with the same "
                "command on every host (docs/TPU.md)"
            )

    # -- placement and precision ---------------------------------------------------------------------------------
    def autocast(self):
        """bf16 autocast if it is in use; parameters remain fp32 master weights."""
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self.bf16 else nullcontext()

    def place(self, module: nn.Module) -> nn.Module:
        """Move a module to the device and keep tied parameters tied. Build the optimiser afterwards.

        With several workers all of them get worker 0's values; on the others the module may have no storage (meta).
        """
        groups = tied_parameters(module)
        if not self.is_main:
            put_zeros(module, self.device)
        module.to(self.device)
        retie(module, groups)
        if self.world_size > 1:
            agree(module, self.group)
            self.broadcast([*module.parameters(), *module.buffers()])
        if self.kind == "cpu":
            machine.hand_back_memory()
            machine.keep_freed_memory()
            self._tidy = machine.tidier()
        return module

    def tidy(self, most: int = machine.BETWEEN) -> None:
        """Call this before a new phase. On the CPU it returns freed memory to the kernel if more than `most` bytes of
        it are unused."""
        if self._tidy:
            self._tidy(most)

    def to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: value.to(self.device, non_blocking=True) for name, value in batch.items()}

    def staged(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """A batch in page-locked memory on CUDA, so that copying it to the device overlaps with other work."""
        return {name: value.pin_memory() for name, value in batch.items()} if self.kind == "cuda" else batch

    def gradient_checkpointing(self, model: nn.Module) -> None:
        """Recompute each decoder layer of an HF model in the backward pass."""
        model.enable_input_require_grads()
        # the method's name depends on the version of transformers
        (getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable)()

        def recomputed(function, *args):
            def block(*given):
                self.tidy(machine.PIECES)
                result = function(*given)
                self.tidy(machine.PIECES)
                return result

            return self.checkpoint(block, *args)

        for module in model.modules():
            if hasattr(module, "_gradient_checkpointing_func"):
                module._gradient_checkpointing_func = recomputed

    @staticmethod
    def checkpoint(function, *args):
        return torch_checkpoint.checkpoint(function, *args, use_reentrant=False)

    def compiles(self, choice: str, auto: bool | None = None) -> bool:
        """Whether --compile `choice` (auto, on or off) means torch.compile on this device. auto: what "auto" means;
        by default, yes on a GPU only: for a language model on the CPU, native.c fuses the same operations. If something
        is missing, worker 0 says so and nothing is compiled."""
        wanted = choice == "on" or (choice == "auto" and (self.kind == "cuda" if auto is None else auto))
        lacking = self._compiler_lacks() if wanted else None
        if lacking and self.is_main:
            to_stderr(f"not compiled, so slower: this machine lacks {lacking}")
        return wanted and not lacking

    def _compiler_lacks(self) -> str | None:
        """What torch.compile needs and this machine lacks; None if torch.compile can be used."""
        compiler = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        if not shutil.which(compiler) or subprocess.run([compiler, "--version"], capture_output=True).returncode:
            return f"a C++ compiler ({compiler})"
        if not Path(sysconfig.get_path("include"), "Python.h").exists():
            return "Python's headers (python3-dev)"
        return "triton" if self.kind == "cuda" and not find_spec("triton") else None

    # -- one update ----------------------------------------------------------------------------------------------
    def prepare(self, optimizer: torch.optim.Optimizer) -> None:
        """Call this once for an optimiser of placed parameters, before the first step."""

    def backward(self, loss: Tensor) -> None:
        """Compute gradients. Raises UserError if the loss depends on no trained parameter."""
        if not loss.requires_grad:
            raise UserError("no gradient reaches the parameters to train in this model; train other parts of it")
        self.phases.begin("Backward pass")
        loss.backward()
        self.phases.end()

    def update(
        self, optimizer: torch.optim.Optimizer, clip: float, after: Callable[[], None] | None = None,
        also: Iterable[Tensor] = (),
    ) -> Tensor:  # fmt: skip
        """reduce → clip to a global L2 norm of `clip` (0: no clipping) → step → zero gradients → step boundary.

        after: other work of the step, such as a moving average; on XLA it is then part of the same graph.
        also: other tensors to sum over workers, in place, in the same collective; `after` may use them.

        Returns the gradient norm before clipping as a device scalar.
        """
        gradients = [local(p.grad) for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        shards = is_shard(optimizer.param_groups[0]["params"][0])  # whose backward pass has reduced them
        if not shards:
            self.reduce([*gradients, *also])
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
        if shards:
            self.reduce([norm.square_(), *also])
            norm.sqrt_()
        scale = (clip / (norm + 1e-6)).clamp(max=1.0) if clip > 0 else None
        if scale is not None and (self.kind != "cpu" or scale < 1):  # elsewhere the host would have to wait for it
            torch._foreach_mul_(gradients, scale)
        optimizer.step()
        optimizer.zero_grad(set_to_none=self.kind != "xla")  # on XLA a changing set of gradients changes the graph
        if after is not None:
            after()
        self.step_boundary()
        return norm

    @torch.no_grad()
    def reduce(self, tensors: list[Tensor]) -> None:
        """Sum over workers, in place. Gradients are reduced only here. With one worker it does nothing."""
        if self.world_size > 1:
            with self.group.losing_none():
                self._reduce(tensors)

    def _reduce(self, tensors: list[Tensor]) -> None:
        small: dict[torch.dtype, list[Tensor]] = {}
        waiting = []
        for tensor in tensors:
            if tensor.nbytes < SMALL_BYTES or not tensor.is_contiguous():
                small.setdefault(tensor.dtype, []).append(tensor)
            else:
                waiting.append(dist.all_reduce(tensor, async_op=True))
        copies = {dtype: torch.cat([tensor.reshape(-1) for tensor in group]) for dtype, group in small.items()}
        waiting += [dist.all_reduce(copy, async_op=True) for copy in copies.values()]
        for work in waiting:
            work.wait()
        for dtype, group in small.items():
            for tensor, part in zip(group, copies[dtype].split([tensor.numel() for tensor in group])):
                tensor.copy_(part.view_as(tensor))

    @torch.no_grad()
    def broadcast(self, tensors: list[Tensor]) -> None:
        """Give every worker the values of worker 0, in place. With one worker it does nothing."""
        if self.world_size > 1:
            with self.group.losing_none():
                for tensor in tensors:
                    dist.broadcast(tensor, 0)

    def step_boundary(self) -> None:
        """On XLA, compile and run what was recorded; on CPU and CUDA, do nothing."""

    def fetch(self, *tensors: Tensor) -> list[float]:
        """Values of device scalars on the host, in one transfer: the only host synchronisation of a training loop."""
        with self.group.waiting():  # a collective may still run on the device
            return torch.stack([t.detach().float().reshape(()) for t in tensors]).tolist() if tensors else []

    # -- randomness and state ------------------------------------------------------------------------------------
    def seed(self, seed: int) -> None:
        random.seed(seed)
        torch.manual_seed(seed)

    def rng_state(self) -> dict:
        """Every generator's state, as tensors and plain values (loads with weights_only=True)."""
        _, words, waiting = random.getstate()
        state = {"torch": torch.get_rng_state(), "python": [list(words), waiting]}
        if self.kind == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def set_rng_state(self, state: dict) -> None:
        torch.set_rng_state(state["torch"])
        words, waiting = state["python"]
        random.setstate((3, tuple(words), waiting))
        if "cuda" in state and self.kind == "cuda":
            torch.cuda.set_rng_state(state["cuda"], self.device)

    def to_host(self, state):
        """A nested state on the host. Save it before the next step: on the CPU backend it holds the tensors themselves,
        not copies. Call this after a step boundary."""
        if isinstance(state, Tensor):
            return state.detach().cpu()
        if isinstance(state, dict):
            return {key: self.to_host(value) for key, value in state.items()}
        if isinstance(state, list | tuple):
            return [self.to_host(value) for value in state]
        return state

    # -- data ----------------------------------------------------------------------------------------------------
    def prefetch(self, batches: Iterable[dict], depth: int = 2) -> Iterator[dict]:
        """Batches on the device, read ahead by a thread. An exception in the source is raised at its position."""
        ready, stop = queue.Queue(depth), threading.Event()

        def work() -> None:
            try:
                for batch in batches:
                    ready.put((self.staged(batch), None))
                    if stop.is_set():
                        return
                ready.put((None, StopIteration()))
            except BaseException as error:
                ready.put((None, error))

        def end() -> None:
            stop.set()
            while thread.is_alive():  # the thread may be waiting for room in the queue
                with suppress(queue.Empty):
                    ready.get_nowait()
                thread.join(0.001)

        thread = threading.Thread(target=work, daemon=True)
        thread.stop = stop  # what it waits for may look at this, see run.buckets
        thread.start()
        # runs once, at exit at the latest: a thread still inside torch at interpreter shutdown aborts the process
        ended = weakref.finalize(stop, end)
        try:
            while True:
                batch, error = ready.get()
                if isinstance(error, StopIteration):
                    return
                if error is not None:
                    raise error
                yield self.to_device(batch)
        finally:
            ended()

    # -- costs ---------------------------------------------------------------------------------------------------
    def counters(self) -> dict[str, int]:
        """Compilations and host fallbacks so far; only XLA has any."""
        return {}

    def peak_memory_mb(self) -> float:
        if self.kind == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / 2**20
        # getrusage would report at least what the parent held when it forked
        if (status := Path("/proc/self/status")).exists():
            lines = status.read_text(encoding="utf-8").splitlines()
            return next(int(line.split()[1]) for line in lines if "VmHWM" in line) / 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
