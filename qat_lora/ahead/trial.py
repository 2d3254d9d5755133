"""A backend that runs what a script rehearses: real updates at a run's shapes, on random weights and random tokens."""

import gc
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from qat_lora.ahead.rehearsal import Rehearsing
from qat_lora.backend.eager import TorchBackend
from qat_lora.backend.opening import open_backend
from qat_lora.backend.placing import replace_tensors

MEANS = {"scale": 0.05, "a": 0.2, "b": 0.2, "g": 1.0}  # of the parameters of a quantiser's scales, which are positive


class Trial(Rehearsing):
    """Mixed into a device's backend, see `open_trial`.

    figures: [(phase, {name: figure})] of every update and evaluation, in order; said, fetched: the integers and the
    other numbers that were fetched, such as generated tokens. trained: {phase: tokens of an update}; seconds, peaks:
    {phase: the mean time of the updates after the first, which may compile, and the most bytes in use during them}.
    placed: the modules that were placed; batch: the last one with targets.
    """

    updates = 10

    def start(
        self, updates: int, same_draws: bool = False, around: Callable | None = None,
        static_shapes: bool | None = None, nudge: float = 0.0,
    ) -> None:  # fmt: skip
        """same_draws: draw weights and tokens on the host, so that they are equal on every device, and generate answers
        to their full length. around: a context manager for the last update of every stage, for example a profiler.
        static_shapes: the device's by default. nudge: change every weight at random by this share of it, to see how
        much rounding matters."""
        self.updates, self.same_draws, self.around, self.nudge = updates, same_draws, around, nudge
        if static_shapes is not None:
            self.static_shapes = static_shapes
        self.figures: list[tuple[str, dict[str, Any]]] = []
        self.said: list[list] = []
        self.fetched: list[list] = []
        self.seconds: dict[str, float] = {}
        self.trained: dict[str, int] = {}
        self.placed: list[nn.Module] = []
        self.batch: dict[str, Tensor] = {}
        self.peaks: dict[str, float] = {}
        self._filled: dict[tuple, dict[str, Tensor]] = {}
        self._vocabulary, self._name, self.is_last = 1, "", False
        self._mark, self._count = None, 0  # when the timed updates began, and how many there were
        self.draws = torch.Generator().manual_seed(0)

    @property
    def steps_between_reads(self) -> int:
        return 10**6 if self.same_draws else super().steps_between_reads

    # -- what a script calls ---------------------------------------------------------------------------------------
    @contextmanager
    def phase(self, name: str, tokens: int = 0) -> Iterator[None]:
        is_first = name.endswith("first update") or name not in self.trained
        self._name, self.trained[name] = name, tokens
        if not tokens or (is_first and not name.endswith(": update")):
            yield
        elif self.around and self.is_last:  # the profiled update is not timed
            self._end(name)
            with self.around():
                yield
                self.wait()
        else:
            if self._mark is None:
                self.wait()
                self.forget_peak()
                self._mark, self._count = time.perf_counter(), 0
            yield
            self._count += 1
            if self.is_last:
                self._end(name)

    def _end(self, name: str) -> None:
        """Updates are timed together: waiting for each of them would leave the device idle."""
        if self._mark is not None:
            self.wait()
            self.seconds[name] = (time.perf_counter() - self._mark) / self._count
            self.peaks[name], self._mark = self.peak_memory_mb() * 2**20, None

    def noted(self, figures: dict) -> None:
        self.figures.append((self._name, figures))

    def place(self, module: nn.Module) -> nn.Module:
        with torch.no_grad():
            replace_tensors(module, self._filled_in)
        sizes = [layer.num_embeddings for layer in module.modules() if isinstance(layer, nn.Embedding)]
        self._vocabulary = max([self._vocabulary, *sizes])
        self.placed.append(module)
        if self.nudge:
            random = torch.Generator().manual_seed(0)
            for weight in module.parameters():
                noise = torch.randn(weight.shape, generator=random).to(weight.device)
                weight.data.mul_(1 + self.nudge * noise)
        return super().place(module)

    def to_device(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch with random tokens and targets; equal shapes get the same ones."""
        key = tuple((name, tuple(value.shape)) for name, value in batch.items())
        if key not in self._filled:
            batch, draws = dict(batch), torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))
            for name in sorted({"tokens", "index"} & batch.keys()):
                batch[name] = torch.randint(self._vocabulary, batch[name].shape, generator=draws)
            if "prob" in batch:
                batch["prob"] = torch.randn(batch["prob"].shape, generator=draws).softmax(-1)
                batch["entropy"] = -(batch["prob"] * batch["prob"].log()).sum(-1)
            self._filled[key] = super().to_device(batch)
        self.batch = self._filled[key] if len(key) > 2 else self.batch
        return dict(self._filled[key])

    def to_host(self, state):
        found = super().to_host(state)
        for value in found if isinstance(found, list | tuple) else [found]:
            if isinstance(value, Tensor):
                (self.fetched if value.is_floating_point() else self.said).append(value.tolist())
        return found

    # -- measuring -------------------------------------------------------------------------------------------------
    def wait(self) -> None:
        """Wait until the device has finished."""
        self.fetch(torch.zeros((), device=self.device))

    def free_memory(self) -> list[tuple[int, int]]:
        """(free, all) bytes of each GPU's memory."""
        return [torch.cuda.mem_get_info(n) for n in range(torch.cuda.device_count())] if self.kind == "cuda" else []

    def allocator(self) -> dict[str, str]:
        """Whether the segments of a GPU's memory can grow, as qat_lora asks torch for."""
        if self.kind != "cuda":
            return {}
        asked = torch.cuda.memory._snapshot().get("allocator_settings", {})
        return {"expandable segments": str(asked.get("expandable_segments", "unknown"))}

    def release(self) -> None:
        """Free what earlier modules have used."""
        self.placed.clear()
        gc.collect()
        if self.kind == "cuda":
            torch.cuda.empty_cache()

    def forget_peak(self) -> None:
        if self.kind == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)

    def numbers(self) -> list[tuple[str, dict[str, float]]]:
        """`figures` as plain numbers."""
        found = []
        for name, figures in self.figures:
            values = {}
            for key, metric in figures.items():
                value = getattr(metric, "value", getattr(metric, "total", metric))
                if isinstance(value, Tensor | float | int) and not isinstance(value, bool):
                    values[key] = float(value)
            found.append((name, values))
        return found

    # -- random values ---------------------------------------------------------------------------------------------
    def _filled_in(self, name: str, tensor: Tensor) -> Tensor:
        """Random values of a plausible size for a tensor without values."""
        owner, _, leaf = name.rpartition(".")
        if not tensor.is_meta and not owner.endswith("quantizer"):  # a quantiser's scales are not initialised
            return tensor.data
        at = torch.device("cpu") if self.same_draws else self.device
        source = {"device": at, "generator": self.draws if at.type == "cpu" else None}
        if not tensor.is_floating_point():
            return torch.randint(4, tensor.shape, dtype=tensor.dtype, **source)
        noise = torch.randn(tensor.shape, dtype=tensor.dtype, **source)
        if owner.endswith("quantizer"):
            return noise.mul_(0.1).add_(1).abs_().mul_(MEANS.get(leaf, 1.0))
        if tensor.ndim < 2:
            return noise.mul_(0.1).add_(0.0 if leaf == "bias" else 1.0)
        return noise.mul_(tensor.shape[-1] ** -0.5)


def open_exact(device: str) -> TorchBackend:
    """The backend of one device in fp32, whose products are not rounded to TF32 or bf16."""
    backend = open_backend(device, "fp32")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    if backend.kind == "xla":
        backend.exact_products()
    return backend


def open_trial(device: str, precision: str) -> Trial:
    """The backend of one device, which runs trials; see `open_exact` for fp32."""
    backend = open_exact(device) if precision == "fp32" else open_backend(device, precision)
    backend.__class__ = type(f"Trial{type(backend).__name__}", (Trial, type(backend)), {})
    backend.start(Trial.updates)
    return backend


@contextmanager
def same_noise() -> Iterator[None]:
    """Within this context torch.rand_like draws on the host, so that every device gets the same noise."""
    random = torch.Generator().manual_seed(0)

    def draw(tensor: Tensor, **options) -> Tensor:
        return torch.rand(tensor.shape, dtype=tensor.dtype, generator=random).to(tensor.device)

    with patch.object(torch, "rand_like", draw):
        yield
