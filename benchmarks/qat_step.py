"""What does distillation from a cache cost? Four ratios, both sides of each in one run, pair by pair.

    python benchmarks/qat_step.py

1. A QAT step from the cache over a step of plain cross-entropy fine-tuning: time, and peak memory (own processes).
2. A QAT step with the teacher online (full-vocabulary KL, logits of both models held) over the step from the cache.
3. The cosine between the gradient of full-vocabulary KL and the cached loss's, for one draw and averaged over draws.
4. Bytes a position of the cache, and the speed of building it over the teacher's bare forward pass.

The same model, batch, precision, optimiser (fused AdamW; embedding and head frozen) and allocator on both sides.
"""

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

from qat_lora.backend import TorchBackend, open_backend
from qat_lora.data.batches import batches
from qat_lora.data.options import TextOptions
from qat_lora.data.packing import Rows, fingerprint, tokenizer_fingerprint
from qat_lora.errors import UserError
from qat_lora.evaluate import kd_loss
from qat_lora.kd.cache import CacheSpec, write_cache
from qat_lora.kd.dataset import KDCacheDataset
from qat_lora.models.loading import EMBEDDED, load_model, load_tokenizer
from qat_lora.qat import Plan, parameter_groups, update
from qat_lora.quant.init import initialise
from qat_lora.quant.student import StudentSpec, quantize
from qat_lora.run.config import ScriptConfig, option, run_script
from qat_lora.run.rundir import revision


@dataclass(frozen=True, kw_only=True)
class Config(TextOptions, ScriptConfig):
    model: str = option(EMBEDDED, "model to train, and its own teacher")
    quantizer: str = option("balanced2/g32", "quantiser of MLP and attention")
    batch_size: int = option(4, "rows in a batch")
    steps: int = option(7, "timed pairs, after one that is not counted")
    cosine_draws: int = option(16, "independent caches whose gradients are averaged")
    side: str = option("all", "all, or only the memory of one: plain, cached")


def main(cfg: Config) -> None:
    backend = open_backend(cfg.device, cfg.precision)
    backend.seed(cfg.seed)
    print(f"{cfg.model}, {cfg.quantizer}, {cfg.batch_size}×{cfg.length} tokens, {backend}, commit {revision()}")
    print(f"{torch.get_num_threads()} threads, medians of {cfg.steps} pairs (min–max; seconds of each side)")
    if cfg.dry_run:
        return
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(cfg, backend, Path(folder))
        if cfg.side in ("plain", "cached"):
            step = {"plain": bench.plain, "cached": bench.cached}[cfg.side]()
            bench.teacher = None  # neither side keeps one while it trains
            for _ in range(3):
                step()
            print(json.dumps({"peak_memory_mb": backend.peak_memory_mb()}))
            return
        if cfg.side != "all":
            raise UserError(f"--side {cfg.side!r} is not one of all, plain, cached")
        pair("cache building speed / bare teacher forward", *bench.building(), cfg.steps, invert=True)
        pair("QAT step from the cache / plain fine-tuning step", bench.cached(), bench.plain(), cfg.steps)
        memory = [peak_of(side) for side in ("cached", "plain")]
        print(f"peak memory, cached / plain: {memory[0] / memory[1]:.3f} ({memory[0]:.0f} / {memory[1]:.0f} MB)")
        pair("QAT step with the teacher online / from the cache", bench.online(), bench.cached(), cfg.steps)
        print(f"bytes a position: {bench.spec.bytes_per_position} at K={bench.spec.k}, {bench.spec.draws} draws")
        one, averaged = bench.gradient_cosines(cfg.cosine_draws)
        print(
            f"gradient cosine with full-vocabulary KL: {one:.4f} for one draw, {averaged:.4f} over {cfg.cosine_draws}"
        )


class Bench:
    """The sides, each as a function that takes one step on the same rows."""

    def __init__(self, cfg: Config, backend: TorchBackend, folder: Path):
        self.cfg, self.backend, self.folder = cfg, backend, folder
        tokenizer = load_tokenizer(cfg.model)
        rows = cfg.rows(tokenizer)
        self.rows = Rows(rows.tokens[: 8 * cfg.batch_size], rows.mask[: 8 * cfg.batch_size])
        self.spec = CacheSpec(
            teacher=cfg.model, tokenizer=tokenizer_fingerprint(tokenizer), text=fingerprint(self.rows),
            precision="bf16" if backend.bf16 else "fp32", length=cfg.length, k=8, draws=12, vocab=len(tokenizer),
            seed=cfg.seed, rows_per_shard=len(self.rows), train_rows=len(self.rows), heldout_rows=0,
        )  # fmt: skip
        self.teacher = backend.place(load_model(cfg.model)).requires_grad_(False)
        self.plan = Plan(
            steps=1000, batch_size=cfg.batch_size, accumulation=1, learning_rate=1e-5, warmup_steps=0,
            clip_grad_norm=1.0, seed=cfg.seed,
        )  # fmt: skip

    def student(self):
        model = quantize(load_model(self.cfg.model), StudentSpec(self.cfg.quantizer, self.cfg.quantizer))
        initialise(model, "absmax")
        return self.backend.place(model).train()

    def cache(self, seed: int = 0, count: int | None = None) -> KDCacheDataset:
        """A cache of the first `count` rows (all of them by default), its tail drawn by `seed`."""
        count = count or len(self.rows)
        spec = CacheSpec(**vars(self.spec) | {"seed": seed, "train_rows": count})
        folder = self.folder / f"seed{seed}-{count}"
        for _ in write_cache(folder, spec, {"train": self.rows}, self.teacher, self.backend, self.cfg.batch_size):
            pass
        return KDCacheDataset(folder)

    def stepper(self, model, loss_of, dataset):
        optimizer = self.backend.adamw(parameter_groups(model, 1e-5, 1e-5))
        stream = self.backend.prefetch(batches(dataset, self.cfg.batch_size, 1, self.cfg.seed))
        return lambda: update(model, stream, loss_of, optimizer, self.plan, self.backend)["loss"].item()

    def cached(self):
        model = self.student()
        return self.stepper(model, kd_loss, self.cache())

    def plain(self):
        """Fine-tuning of the same parameters as anyone would write it: HF's own loss on [B, L, V] logits."""
        model = self.backend.place(load_model(self.cfg.model)).train()
        model.get_input_embeddings().weight.requires_grad_(False)  # tied to the head in the default model
        return self.stepper(model, lambda m, b: m(input_ids=b["tokens"], labels=b["tokens"]).loss, self.cache())

    def online(self):
        model = self.student()
        return self.stepper(model, self.dense_kl, self.cache())

    def dense_kl(self, model, batch):
        with torch.no_grad():
            target = self.teacher(input_ids=batch["tokens"]).logits.float().log_softmax(-1)
        logp = model(input_ids=batch["tokens"]).logits.float().log_softmax(-1)
        return F.kl_div(logp, target, reduction="sum", log_target=True) / batch["total"]

    def building(self):
        """(write one shard of the cache, the teacher's bare forward over the same rows)."""
        count = iter(range(10**6, 2 * 10**6))
        inputs = self.rows.tokens.long().split(self.cfg.batch_size)

        def bare():
            with torch.no_grad(), self.backend.autocast():
                for tokens in inputs:
                    self.teacher(input_ids=tokens.to(self.backend.device)).logits[0, 0, 0].item()

        return lambda: self.cache(next(count)), bare

    def gradient_cosines(self, draws: int) -> tuple[float, float]:
        """Cosine with the dense gradient, of the first draw's and of the mean over draws, on one batch."""
        model = self.student()

        def gradient(loss_of, dataset) -> torch.Tensor:
            batch = next(self.backend.prefetch(batches(dataset, self.cfg.batch_size, 1, 0)))
            with self.backend.autocast():
                loss_of(model, batch).backward()
            parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            model.zero_grad(set_to_none=True)
            return torch.cat(parts)

        dense = gradient(self.dense_kl, self.cache(0, self.cfg.batch_size))
        first = mean = None
        for seed in range(draws):
            one = gradient(kd_loss, self.cache(seed, self.cfg.batch_size))
            first, mean = (one, one / draws) if first is None else (first, mean + one / draws)
        return cosine(dense, first), cosine(dense, mean)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Cosine of two long vectors, summed in double precision: in fp32 10^8 terms lose two digits."""

    def dot(x, y):
        return sum((u.double() * v.double()).sum().item() for u, v in zip(x.split(2**24), y.split(2**24)))

    return dot(a, b) / (dot(a, a) * dot(b, b)) ** 0.5


def pair(title: str, a, b, count: int, invert: bool = False) -> None:
    """Time a and b in turn and print the ratio a/b (b/a when the figure is a speed), pair by pair."""
    times = []
    for _ in range(count + 1):
        row = []
        for step in (a, b):
            started = time.perf_counter()
            step()
            row.append(time.perf_counter() - started)
        times.append(row)
    ratios = [y / x if invert else x / y for x, y in times[1:]]
    first, second = (median(column) for column in zip(*times[1:]))
    spread = f"{min(ratios):.3f}–{max(ratios):.3f}; {first:.2f} s, {second:.2f} s"
    print(f"{title}: {median(ratios):.3f} ({spread})", flush=True)


def peak_of(side: str) -> float:
    """Peak memory in MB of one side in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["peak_memory_mb"]


if __name__ == "__main__":
    run_script(main, Config, "qat_step", __doc__)
