"""What does distillation from a cache cost? Ratios whose two sides alternate in one run.

    python benchmarks/qat_step.py
    python benchmarks/qat_step.py --parts qat,recovery --model /tmp/qwen3   # e.g. made by benchmarks/shapes.py

--parts (default: all) are ratios of times, unless they say otherwise:
  building  speed of building a cache / speed of the teacher's bare forward pass
  qat       QAT step from the cache / plain fine-tuning step
  compiled  QAT step / plain fine-tuning step through torch.compile
  recovery  step of the recovery LoRA (frozen student, from the cache) / plain fine-tuning step
  head      forward and backward pass of our LM head and loss / of plain logits and cross-entropy, with the head's
            weight frozen and trained
  optimizer step of our optimiser / step of torch's fused AdamW, on the student's weights and scales
  memory    peak memory of QAT / of plain fine-tuning, each in its own process
  online    QAT step with the teacher online (full-vocabulary KL, logits of both models in memory) / from the cache
  cosine    no ratio: cosine between the gradients of the full-vocabulary KL and of the cached loss, for one cache and
            for the mean over several, on rows not trained on, with least-error scales and after --cosine-steps updates

Plain fine-tuning is the usual code: Hugging Face's own loss on [B, L, V] logits, torch's fused AdamW and torch's
clipping. It trains the same parameters (embedding and head frozen) of the same model on the same rows, with the same
precision and allocator.
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
from one_update import update

from qat_lora.backend import TorchBackend, open_backend
from qat_lora.data.batches import batches
from qat_lora.data.options import TextOptions
from qat_lora.data.packing import Rows, fingerprint, tokenizer_fingerprint
from qat_lora.errors import UserError
from qat_lora.hosts.revision import revision
from qat_lora.kd.cache import CacheSpec, edges, write_cache
from qat_lora.kd.dataset import KDCacheDataset
from qat_lora.kd.training import kd_loss
from qat_lora.kernels.optimizer import new_optimizer
from qat_lora.lora.add import add_adapter
from qat_lora.models.loading import EMBEDDED, load_config, load_model
from qat_lora.quant.init import initialise
from qat_lora.quant.linear import freeze
from qat_lora.quant.student import StudentSpec, freeze_plain_tables, quantize
from qat_lora.run.command_line import run_script
from qat_lora.run.options import ScriptConfig, option
from qat_lora.train.loop import Plan
from qat_lora.train.losses import sparse_loss

PARTS = ("building", "qat", "compiled", "recovery", "head", "optimizer", "memory", "online", "cosine")


@dataclass(frozen=True, kw_only=True)
class Config(TextOptions, ScriptConfig):
    model: str = option(EMBEDDED, "model to quantise and train; it is also the teacher")
    quantizer: str = option("balanced2/g32", "quantiser of MLP and attention")
    batch_size: int = option(4, "rows per batch")
    steps: int = option(7, "timed pairs, after one that is not counted")
    cosine_caches: int = option(8, "caches with independent draws, whose gradients are averaged")
    cosine_steps: int = option(40, "updates before the second pair of cosines")
    parts: str = option("all", "parts to measure, see above")
    side: str | None = option(None, "only take three steps of one side, plain or cached, and print its peak memory")


def main(cfg: Config) -> None:
    for name in ("batch_size", "steps", "cosine_caches", "cosine_steps"):
        if getattr(cfg, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(cfg, name)} must be at least 1")
    parts = PARTS if cfg.parts == "all" else cfg.parts.split(",")
    for part in parts:
        if part not in PARTS:
            raise UserError(f"--parts {part!r} is not one of {', '.join(PARTS)}")
    if cfg.side not in (None, "plain", "cached"):
        raise UserError(f"--side {cfg.side!r} is not one of plain, cached")
    backend = open_backend(cfg.device, cfg.precision)
    backend.seed(cfg.seed)
    print(f"{cfg.model}, {cfg.quantizer}, {cfg.batch_size}×{cfg.length} tokens, {backend}, commit {revision()}")
    print(f"{torch.get_num_threads()} threads, medians of {cfg.steps} pairs (min–max; seconds of each side)")
    if cfg.dry_run:
        return
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(cfg, backend, Path(folder))
        if cfg.side:
            step = {"plain": bench.plain, "cached": bench.cached}[cfg.side]()
            bench.teacher = None  # neither side holds the teacher while it trains
            for _ in range(3):
                step()
            print(json.dumps({"peak_memory_mb": backend.peak_memory_mb()}))
            return
        for part in parts:
            measure(part, bench, cfg.steps)


def measure(part: str, bench: "Bench", steps: int) -> None:
    """Measure one of PARTS and print it."""
    if part == "building":
        pair("building: cache building speed / bare teacher forward", *bench.building(), steps, invert=True)
    elif part == "qat":
        pair("qat: QAT step from the cache / plain fine-tuning step", bench.cached(), bench.plain(), steps)
    elif part == "compiled":
        pair("compiled: QAT step / compiled plain step", bench.cached(), bench.plain(compiled=True), steps)
    elif part == "recovery":
        pair("recovery: recovery step / plain fine-tuning step", bench.recovery(), bench.plain(), steps)
    elif part == "head":
        for trained in (False, True):
            pair(f"head: LM head {'trained' if trained else 'frozen'} / plain", *bench.heads(trained), steps)
    elif part == "optimizer":
        pair("optimizer: ours / torch's fused AdamW", *bench.optimizers(), steps)
    elif part == "memory":
        memory = [peak_of(side) for side in ("cached", "plain")]
        print(f"memory: peak of QAT / plain: {memory[0] / memory[1]:.3f} ({memory[0]:.0f} / {memory[1]:.0f} MB)")
    elif part == "online":
        pair("online: QAT step with the teacher online / from the cache", bench.online(), bench.cached(), steps)
    else:
        print(f"bytes per position: {bench.spec.bytes_per_position} at K={bench.spec.k}, {bench.spec.draws} draws")
        for updates, kl, one, averaged in bench.gradient_cosines():
            print(
                f"cosine with the full-vocabulary gradient after {updates} updates (KL {kl:.2f}): {one:.4f} for one "
                f"cache, {averaged:.4f} for the mean over {bench.cfg.cosine_caches}"
            )


class Bench:
    """The two sides of each ratio, as functions that take one step on the same rows."""

    def __init__(self, cfg: Config, backend: TorchBackend, folder: Path):
        self.cfg, self.backend, self.folder = cfg, backend, folder
        tokenizer = cfg.tokenizer(cfg.model)
        self.text = cfg.rows(tokenizer)
        self.rows = self.some(range(8 * cfg.batch_size))
        self.spec = CacheSpec(
            teacher=cfg.model, tokenizer=tokenizer_fingerprint(tokenizer), text=fingerprint(self.rows),
            precision=backend.precision, length=cfg.length, k=8, draws=12,
            vocab=load_config(cfg.model).vocab_size, seed=cfg.seed, rows_per_shard=len(self.rows),
            train_rows=len(self.rows), heldout_rows=0, **edges(cfg.bos_token(tokenizer), tokenizer),
        )  # fmt: skip
        self.teacher = backend.place(load_model(cfg.model)).requires_grad_(False)
        self.plan = Plan(
            steps=1000, batch_size=cfg.batch_size, accumulation=1, learning_rate=1e-5, warmup_steps=0,
            clip_grad_norm=1.0, seed=cfg.seed,
        )  # fmt: skip

    def some(self, numbers: range) -> Rows:
        if numbers.stop > len(self.text):
            raise UserError(f"the text has {len(self.text)} rows, fewer than {numbers.stop}; use a longer text")
        return Rows(self.text.tokens[numbers.start : numbers.stop], self.text.mask[numbers.start : numbers.stop])

    def student(self, search: bool = False):
        model = quantize(load_model(self.cfg.model), StudentSpec(self.cfg.quantizer, self.cfg.quantizer))
        initialise(model, search)
        return self.backend.place(model).train()

    def cache(self, seed: int = 0, rows: Rows | None = None) -> KDCacheDataset:
        """A cache of `rows` (by default self.rows), with tail draws from `seed`."""
        rows = self.rows if rows is None else rows
        changes = {"seed": seed, "text": fingerprint(rows), "train_rows": len(rows)}
        spec = CacheSpec(**vars(self.spec) | changes)
        folder = self.folder / f"seed{seed}-{spec.text[:16]}"
        for _ in write_cache(folder, spec, {"train": rows}, self.teacher, self.backend, self.cfg.batch_size):
            pass
        return KDCacheDataset(folder)

    def stepper(self, model, loss_of, dataset, learning_rate=1e-5):
        optimizer = new_optimizer(model, learning_rate, self.backend)
        stream = self.backend.prefetch(batches(dataset, self.cfg.batch_size, 1, self.cfg.seed))
        return lambda: update(model, stream, loss_of, optimizer, self.plan, self.backend)["loss"].item()

    def cached(self):
        model = self.student()
        return self.stepper(model, kd_loss, self.cache())

    def plain(self, compiled: bool = False):
        """Plain fine-tuning of the same parameters."""
        model = self.backend.place(freeze_plain_tables(load_model(self.cfg.model))).train()
        trained = [p for p in model.parameters() if p.requires_grad]
        model = torch.compile(model) if compiled else model
        optimizer = torch.optim.AdamW(trained, lr=1e-5, fused=True)
        stream = self.backend.prefetch(batches(self.cache(), self.cfg.batch_size, 1, self.cfg.seed))

        def step() -> float:
            tokens = next(stream)["tokens"]
            with self.backend.autocast():
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss.item()

        return step

    def recovery(self):
        """A LoRA of rank 8 on the frozen student."""
        student = self.student()
        freeze(student)
        adapted = add_adapter(student.requires_grad_(False), 8, 8.0, ("auto",), self.cfg.seed)
        return self.stepper(self.backend.place(adapted).train(), kd_loss, self.cache())

    def heads(self, trained: bool):
        """Forward and backward pass of (our loss over 20 targets per position, plain logits and cross-entropy)."""
        vocab, width = (table := self.teacher.get_output_embeddings().weight).shape
        count, random = self.cfg.batch_size * self.cfg.length, torch.Generator().manual_seed(self.cfg.seed)
        place = self.backend.to_device
        given = place({
            "hidden": torch.randn(count, width, generator=random), "prob": torch.full((count, 20), 0.05),
            "index": torch.randint(vocab, (count, 20), generator=random), "mask": torch.ones(count),
        })  # fmt: skip
        hidden, weight = given["hidden"].requires_grad_(), table.detach().clone().requires_grad_(trained)

        def run(loss_of) -> float:
            hidden.grad = weight.grad = None
            with self.backend.autocast():
                loss = loss_of()
            loss.backward()
            return loss.item()

        def ours():
            return sparse_loss(hidden, weight, given["index"], given["prob"], given["mask"])

        def plain():
            return F.cross_entropy(F.linear(hidden, weight).float(), given["index"][:, 0])

        return lambda: run(ours), lambda: run(plain)

    def optimizers(self):
        """(a step of our optimiser, one of torch's fused AdamW), on equal parameters and gradients."""
        students = [self.student() for _ in range(2)]
        for student in students:
            random = torch.Generator(self.backend.device).manual_seed(self.cfg.seed)
            for p in (p for p in student.parameters() if p.requires_grad):
                p.grad = torch.randn(p.shape, generator=random, device=p.device).mul_(1e-3)
        theirs = [p for p in students[1].parameters() if p.requires_grad]
        return new_optimizer(students[0], 1e-5, self.backend).step, torch.optim.AdamW(theirs, 1e-5, fused=True).step

    def online(self):
        model = self.student()
        return self.stepper(model, self.dense_kl, self.cache())

    def dense_kl(self, model, batch):
        with torch.no_grad():
            target = self.teacher(input_ids=batch["tokens"]).logits.float().log_softmax(-1)
        logp = model(input_ids=batch["tokens"]).logits.float().log_softmax(-1)
        return F.kl_div(logp, target, reduction="sum", log_target=True) / batch["total"]

    def building(self):
        """(build a cache of one shard, the teacher's bare forward pass over the same rows)."""
        count = iter(range(10**6, 2 * 10**6))
        inputs = self.rows.tokens.long().split(self.cfg.batch_size)

        def bare():
            with torch.no_grad(), self.backend.autocast():
                for tokens in inputs:
                    self.teacher(input_ids=tokens.to(self.backend.device)).logits[0, 0, 0].item()

        return lambda: self.cache(next(count)), bare

    def gradient_cosines(self):
        """Yields (updates so far, KL, cosine with the dense gradient for one cache, for the mean over caches)."""
        size, model = self.cfg.batch_size, self.student(search=True)
        probe = self.some(range(size))
        caches = [self.cache(seed, probe) for seed in range(self.cfg.cosine_caches)]

        def gradient(loss_of, dataset) -> tuple[float, torch.Tensor]:
            batch = next(self.backend.prefetch(batches(dataset, size, 1, 0)))
            with self.backend.autocast():
                loss = loss_of(model, batch)
            loss.backward()
            parts = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
            model.zero_grad(set_to_none=True)
            return loss.item(), torch.cat(parts)

        def cosines() -> tuple[float, float, float]:
            kl, dense = gradient(self.dense_kl, caches[0])
            first = mean = None
            for dataset in caches:
                _, one = gradient(kd_loss, dataset)
                first, mean = (one, one / len(caches)) if first is None else (first, mean + one / len(caches))
            return kl, cosine(dense, first), cosine(dense, mean)

        yield 0, *cosines()
        rows = self.some(range(size, size * (self.cfg.cosine_steps + 1)))
        step = self.stepper(model, kd_loss, self.cache(rows=rows), learning_rate=5e-4)
        for _ in range(self.cfg.cosine_steps):
            step()
        yield self.cfg.cosine_steps, *cosines()


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Cosine of two long vectors, summed in double precision: in fp32 a sum of 10^8 terms loses two digits."""

    def dot(x, y):
        return sum((u.double() * v.double()).sum().item() for u, v in zip(x.split(2**24), y.split(2**24)))

    return dot(a, b) / (dot(a, a) * dot(b, b)) ** 0.5


def pair(title: str, a, b, count: int, invert: bool = False) -> None:
    """Time a and b alternately; print the median over pairs of a/b, or of b/a (a ratio of speeds) with `invert`."""
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
    """Peak memory of one side in MB, measured in its own process."""
    command = [sys.executable, __file__, *sys.argv[1:], "--parts", "memory", "--side", side]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])["peak_memory_mb"]


if __name__ == "__main__":
    run_script(main, Config, "qat_step", __doc__)
