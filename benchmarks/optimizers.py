"""Does cautious AdamW (no step against the current gradient) beat torch's fused AdamW in the same training time?

    python benchmarks/optimizers.py --dataset wikitext2-valid.txt
    python benchmarks/optimizers.py --minutes 1 --seeds 0        # a quick look, on the embedded text

Each run starts from the same student (least-error scales), trains it for --minutes from one cache of its teacher, and
is measured on held-out rows: KL to the teacher and perplexity. A short trial of each optimiser estimates how many
updates fit into that time, and the cosine schedule spans exactly those. The two runs of a seed follow each other, so
that conditions are alike. Finished runs are recorded in results.jsonl of --output-dir and not repeated.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch
from one_update import update

from qat_lora.backend import TorchBackend, open_backend
from qat_lora.data.batches import batches
from qat_lora.data.options import TextOptions
from qat_lora.data.packing import Rows, fingerprint, tokenizer_fingerprint
from qat_lora.errors import UserError
from qat_lora.hosts.revision import revision
from qat_lora.kd.cache import CacheSpec, edges, write_cache
from qat_lora.kd.dataset import KDCacheDataset
from qat_lora.kd.training import heldout_figures, kd_loss
from qat_lora.kernels.optimizer import new_optimizer
from qat_lora.models.loading import EMBEDDED, load_config, load_model
from qat_lora.quant.init import initialise
from qat_lora.quant.student import StudentSpec, quantize
from qat_lora.run.command_line import run_script
from qat_lora.run.options import ScriptConfig, option
from qat_lora.train.loop import Plan, set_learning_rates

SIDES = ("cautious", "fused")
TRIAL = 4  # updates of the trial that estimates the time per update, after one that is not counted


@dataclass(frozen=True, kw_only=True)
class Config(TextOptions, ScriptConfig):
    model: str = option(EMBEDDED, "model to quantise and train; it is also the teacher")
    quantizer: str = option("balanced2/g32", "quantiser of MLP and attention")
    batch_size: int = option(4, "rows per update")
    heldout: int = option(48, "held-out rows, taken from the end of the text")
    learning_rate: float = option(5e-4, "peak learning rate of both optimisers")
    minutes: float = option(5.0, "training time per run, in minutes")
    seeds: str = option("0,1,2", "seeds for the order of the rows")
    output_dir: str = option("runs/bench_optimizers", "folder for the cache and the results")


def main(cfg: Config) -> None:
    if cfg.minutes <= 0 or cfg.heldout < 1:
        raise UserError(f"--minutes {cfg.minutes} must be above 0 and --heldout {cfg.heldout} at least 1")
    backend = open_backend(cfg.device, cfg.precision)
    print(f"{cfg.model}, {cfg.quantizer}, {cfg.minutes} minutes per run, {backend}, commit {revision()}", flush=True)
    if cfg.dry_run:
        return
    train, heldout = caches(cfg, backend)
    results = Path(cfg.output_dir) / "results.jsonl"
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()] if results.exists() else []
    for seed in map(int, cfg.seeds.split(",")):
        for side in SIDES:
            if not any((row["seed"], row["side"], row["minutes"]) == (seed, side, cfg.minutes) for row in rows):
                rows.append({"seed": seed, "side": side, "minutes": cfg.minutes, "commit": revision()})
                rows[-1] |= run(cfg, backend, side, seed, train, heldout)
                results.write_text("".join(json.dumps(row) + "\n" for row in rows))
                print(rows[-1], flush=True)
    for side in SIDES:
        kls = [row["heldout_kl"] for row in rows if row["side"] == side and row["minutes"] == cfg.minutes]
        print(f"{side}: KL {mean(kls):.4f} ({min(kls):.4f}–{max(kls):.4f}), {len(kls)} seeds")


def caches(cfg: Config, backend: TorchBackend) -> tuple[KDCacheDataset, KDCacheDataset]:
    """Training and held-out rows with the teacher's targets."""
    tokenizer = cfg.tokenizer(cfg.model)
    rows = cfg.rows(tokenizer)
    count = len(rows) - cfg.heldout
    if count < cfg.batch_size:
        raise UserError(f"the text has {len(rows)} rows, too few to hold out {cfg.heldout}; use a longer text")
    parts = {
        "train": Rows(rows.tokens[:count], rows.mask[:count]),
        "heldout": Rows(rows.tokens[count:], rows.mask[count:]),
    }
    spec = CacheSpec(
        teacher=cfg.model, tokenizer=tokenizer_fingerprint(tokenizer), text=fingerprint(rows),
        precision=backend.precision, length=cfg.length, k=8, draws=12, vocab=load_config(cfg.model).vocab_size,
        seed=0, rows_per_shard=256, train_rows=count, heldout_rows=cfg.heldout,
        **edges(cfg.bos_token(tokenizer), tokenizer),
    )  # fmt: skip
    folder = Path(cfg.output_dir) / f"cache-{spec.text[:16]}"
    teacher = backend.place(load_model(cfg.model)).requires_grad_(False)
    for _ in write_cache(folder, spec, parts, teacher, backend, cfg.batch_size):
        pass
    return KDCacheDataset(folder), KDCacheDataset(folder, split="heldout")


def run(cfg: Config, backend: TorchBackend, side: str, seed: int, train, heldout) -> dict:
    """Held-out figures of one run, its number of updates and its seconds of training."""
    _, each, _ = trained(cfg, backend, side, seed, train, TRIAL + 1)
    count = max(TRIAL, round(60 * cfg.minutes / each))
    model, _, seconds = trained(cfg, backend, side, seed, train, count)
    return {"updates": count, "seconds": seconds, **heldout_figures(model, heldout, backend, 4, len(heldout))}


def trained(cfg: Config, backend: TorchBackend, side: str, seed: int, train, count: int):
    """Train a student for `count` updates; return it, the seconds per update (without the first) and in total."""
    backend.seed(seed)
    model = quantize(load_model(cfg.model), StudentSpec(cfg.quantizer, cfg.quantizer))
    initialise(model)
    model = backend.place(model).train()
    if side == "cautious":
        optimizer = new_optimizer(model, cfg.learning_rate, backend)
    else:
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, cfg.learning_rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    plan = Plan(
        steps=count, batch_size=cfg.batch_size, accumulation=1, learning_rate=cfg.learning_rate,
        warmup_steps=10, clip_grad_norm=1.0, seed=seed,
    )  # fmt: skip
    stream = backend.prefetch(batches(train, cfg.batch_size, 1, seed))
    times = []
    for step in range(1, count + 1):
        started = time.perf_counter()
        set_learning_rates(optimizer, plan.factor(step))
        float(update(model, stream, kd_loss, optimizer, plan, backend)["loss"])
        times.append(time.perf_counter() - started)
    return model, mean(times[1:]), sum(times)


if __name__ == "__main__":
    run_script(main, Config, "optimizers", __doc__)
