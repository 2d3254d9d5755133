# PYTHON_ARGCOMPLETE_OK
"""What does the teacher predict? Stores its next-token distributions over a text in a cache, once for all later runs.

    python scripts/build_kd_cache.py --dataset text.txt --cache-dir caches/text_L256
    python scripts/build_kd_cache.py --model Qwen/Qwen3-0.6B --dataset wikitext --dataset-config wikitext-103-raw-v1 \\
        --length 1024 --max-rows 20000 --cache-dir caches/wikitext103_L1024

Low-bit students are trained from this cache (train_qat.py, train_recovery_lora.py) instead of the full-precision
teacher. Each position holds the exact probabilities of the --top-k most likely tokens and --draws tokens sampled from
the rest, which together give an unbiased target: 60 bytes per position at the defaults if token ids fit in 16 bits,
else 102. You can interrupt it at any moment: the same command resumes and writes exactly the same bytes. With
--num-chips, or on several hosts that share the folder or write to one bucket, each worker writes every N-th file.
It shows a progress bar in rows, then prints the size of the cache and the speed in tokens/s.
caches/README.md lists the files of a cache, docs/qat-recovery.md is the runbook.
"""

from dataclasses import dataclass
from typing import Literal

from qat_lora.data.options import TextOptions
from qat_lora.kd import DRAWS
from qat_lora.models.packaged import CHOICES, EMBEDDED
from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class Config(TextOptions, WorkerConfig):
    model: str = opt.model(EMBEDDED, f"the teacher: {CHOICES}")
    cache_dir: str | None = opt.data(
        None,
        "folder or URL (gs://, s3://) to write the cache to, e.g. caches/wikitext_L256",
        "--kd-cache-dir",
        identity=False,
    )
    top_k: int = opt.data(8, "exact probabilities stored per position", at_least=1)
    draws: int = opt.data(DRAWS, "tail tokens sampled per position", at_least=1)
    heldout_fraction: float = opt.data(
        0.1, "share of the rows, from the end, held out for evaluation", at_least=0, below=1, fix="use e.g. 0.05"
    )
    rows_per_shard: int = opt.data(128, "rows per shard file", at_least=1)
    batch_size: int = opt.run(4, "rows per forward pass of the teacher", at_least=1)
    shard: Literal["auto", "on", "off"] = opt.device(
        "auto", "each worker holds a part of the teacher's weights; auto: if the whole teacher does not fit"
    )
    resume: Literal["auto", "off"] = opt.run("auto", "auto resumes an unfinished cache; off refuses to touch one")


if __name__ == "__main__":
    check_command_line(Config, "build_kd_cache", __doc__)  # before the imports that take seconds

import time
from contextlib import nullcontext
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
from torch import nn

from qat_lora.backend import TorchBackend, open_planned, planned_workers
from qat_lora.backend.opening import launch
from qat_lora.data.packing import Rows, fingerprint, split_heldout, tokenizer_fingerprint
from qat_lora.data.templates import template_facts
from qat_lora.errors import UserError
from qat_lora.kd.cache import CacheSpec, cache_date, edges, open_cache, teacher_pass, write_cache
from qat_lora.models.compiling import placed
from qat_lora.models.loading import check_headers, check_length, empty_model, load_config, load_model, model_fingerprint
from qat_lora.models.packaged import notes
from qat_lora.models.source import is_hub, planned_name
from qat_lora.run.buckets import path_of, put, sizes
from qat_lora.run.console import command, say, summarise, watched
from qat_lora.run.files import as_json, lock, read_json
from qat_lora.run.hosts import agree_on_facts, agree_on_options
from qat_lora.train.language_memory import evaluation_memory, least_teacher_memory, loading_memory, sizes_of
from qat_lora.train.memory import Parts, check_fits, logits_memory, memory_line, shares_out


# -- the experiment --------------------------------------------------------------------------------------------------
def main(cfg: Config) -> None:
    if not cfg.cache_dir:
        raise UserError("--cache-dir is missing; give the folder to write, e.g. --cache-dir caches/wikitext_L256")
    if cfg.dry_run:
        return work(open_planned(cfg.device, cfg.precision), cfg)
    launch(work, (cfg,), cfg.device, cfg.precision, cfg.num_chips, cfg.debug, cfg.timeouts)


def work(backend: TorchBackend, cfg: Config) -> None:
    """Build the cache, as each worker does."""
    group, directory = backend.group, path_of(cfg.cache_dir)
    workers = planned_workers(backend.kind, cfg.num_chips) if cfg.dry_run else backend.world_size
    agree_on_options(cfg, group)
    backend.seed(cfg.seed)
    date = group.on_main(lambda: cache_date(directory))
    with group.main_first():
        spec, rows, facts = read_text(cfg, backend, date)
    agree_on_facts(cfg, {"text": spec.text, "tokenizer": spec.tokenizer, "precision": spec.precision}, group)
    known = not cfg.dry_run or not is_hub(cfg.model)  # a dry run downloads no weights
    mark = group.on_main(lambda: model_fingerprint(cfg.model) if known else None)
    group.on_main(lambda: check_folder(cfg, spec, mark))
    shared = shares_teacher(cfg, backend, workers)
    if cfg.dry_run:
        return

    # Loaded before the folder is made, so that an error leaves none. Frozen, because autocast caches bf16 copies of
    # trainable weights.
    teacher = (load_model if backend.is_main else empty_model)(cfg.model).requires_grad_(False)
    with lock(directory) if backend.is_main and isinstance(directory, Path) else nullcontext():
        before = group.on_main(lambda: open_cache(directory, spec, mark))
        teacher, started = placed(teacher, backend, shared), time.monotonic()
        counts = write_cache(directory, spec, rows, teacher, backend, cfg.batch_size, facts)
        for _ in watched(counts, "rows of the cache", sum(map(len, rows.values())), int, backend.is_main):
            pass
        if backend.is_main:
            report(cfg, spec, before, open_cache(directory, spec, mark), time.monotonic() - started)


# -- the steps -------------------------------------------------------------------------------------------------------
def read_text(cfg: Config, backend: TorchBackend, date: datetime) -> tuple[CacheSpec, dict[str, Rows], dict]:
    """What the cache will hold, its rows by split, and facts for the manifest. date: for chat templates that print it.
    Prints the plan. Raises UserError for options that do not suit the teacher."""
    tokenizer = cfg.tokenizer(cfg.model, date)
    check_headers(cfg.model)
    check_length(cfg.model, cfg.length)
    rows, bos = cfg.rows(tokenizer), cfg.bos_token(tokenizer)
    train, heldout = split_heldout(rows, cfg.heldout_fraction)
    spec = CacheSpec(
        teacher=cfg.model, tokenizer=tokenizer_fingerprint(tokenizer), text=fingerprint(rows),
        precision=backend.precision, length=cfg.length, k=cfg.top_k, draws=cfg.draws,
        vocab=load_config(cfg.model).vocab_size, seed=cfg.seed, rows_per_shard=cfg.rows_per_shard,
        train_rows=len(train), heldout_rows=len(heldout), **edges(bos, tokenizer),
    )  # fmt: skip
    if cfg.top_k >= spec.vocab:
        raise UserError(f"--top-k {cfg.top_k} must be below the vocabulary of {spec.vocab}")
    say(f"{cfg.model} on {backend} → {cfg.cache_dir}")
    say(
        f"{len(train)} training and {len(heldout)} held-out rows of {cfg.length} tokens"
        + (f", each beginning with {tokenizer.bos_token}" if bos is not None else "")
    )
    say(f"top {cfg.top_k} and {cfg.draws} draws: {spec.bytes_per_position} bytes per position")
    if note := notes(cfg.model):
        say(note)
    return spec, {"train": train, "heldout": heldout}, template_facts(tokenizer, cfg.chat_template)


def check_folder(cfg: Config, spec: CacheSpec, mark: str | None) -> None:
    """Raise UserError if the folder holds another cache, or any that --resume off must not touch. mark: the teacher's
    fingerprint, if it is known."""
    done = open_cache(path_of(cfg.cache_dir), spec, mark, cfg.dataset)
    if done and cfg.resume == "off":
        raise UserError(
            f"{cfg.cache_dir} already holds {len(done)} shards; resume with --resume auto, or give another folder"
        )


def memory(cfg: Config, teacher: nn.Module, backend: TorchBackend, workers: int = 1) -> dict[str, Parts]:
    """The memory that each phase takes. workers: how many share the teacher out."""
    positions = cfg.batch_size * cfg.length
    more = {"draws": 3 * 4 * cfg.draws * positions}
    if backend.static_shapes:  # the logits that are compared are in fp32, twice as large
        more["top K"] = logits_memory(positions, len(teacher.get_output_embeddings().weight), backend.bf16)
    batch = cfg.batch_size, cfg.length, backend.bf16
    a_pass = evaluation_memory(teacher, *batch, compiled=backend.static_shapes, workers=workers)
    return {"loading": loading_memory(teacher), "a teacher pass": a_pass | more}


def shares_teacher(cfg: Config, backend: TorchBackend, workers: int) -> bool:
    """Whether the workers share the teacher out. Prints a worker's memory in a teacher pass, computed from shapes.
    Raises UserError if this machine has less; a dry run, which may plan for another machine, skips this check."""
    teacher = empty_model(cfg.model).requires_grad_(False)
    need = partial(least_teacher_memory, teacher, cfg.batch_size, cfg.length, cfg.draws, backend.bf16)
    shared = shares_out(cfg.shard, backend, workers, need)
    say(memory_line(memory(cfg, teacher, backend, workers if shared else 1), backend))
    if not cfg.dry_run:
        what = f"a teacher pass of {sizes_of(teacher)} over --batch-size {cfg.batch_size} rows with --draws {cfg.draws}"
        least = need(workers if shared else 1)
        check_fits(backend, {"--batch-size or --draws, or take a smaller model": least}, what, workers)
    return shared


def report(cfg: Config, spec: CacheSpec, before: dict, after: dict, seconds: float) -> None:
    """Add this job's tokens and seconds to summary.json, the only file of a cache that depends on time. before, after:
    the finished shards."""
    directory = path_of(cfg.cache_dir)
    path, written = directory / "summary.json", sum(after[name]["rows"] for name in after.keys() - before.keys())
    count = len([*spec.shards()])
    was = read_json(path) if path.exists() else {}
    if not written and len(after) == count:
        say(f"{directory} was complete already; its first figures were:")
    tokens, seconds = was.get("tokens", 0) + written * spec.length, was.get("seconds", 0.0) + seconds * bool(written)
    if written:
        put(path, as_json({"tokens": tokens, "seconds": round(seconds, 1)}))
    size = sum(size for name, size in sizes(directory).items() if name.endswith(".safetensors"))
    say(f"{size / 1e6:.1f} MB; {tokens} tokens in {seconds:.0f} s ({tokens / max(seconds, 1e-9):.0f} tokens/s)")
    if len(after) < count:
        return say(f"stopped: {count - len(after)} of {count} shards are missing; run the same command to resume")
    model = None if cfg.model == EMBEDDED else cfg.model
    summarise({"cache": directory}, [], command("train_qat", model=model, config="q2_g64", cache_dir=directory))


def rehearse(cfg: Config, backend: TorchBackend) -> dict[str, Parts]:
    """Record the graph of a teacher pass, for compile_for_tpu.py, and estimate its memory. Only shapes matter: the
    teacher has no weights."""
    teacher = backend.place(empty_model(planned_name(cfg.model)).requires_grad_(False))
    tokens = torch.zeros(cfg.batch_size, cfg.length, dtype=torch.long)
    for _ in backend.repeated("a teacher pass", tokens.numel()):
        teacher_pass(teacher, backend, tokens, cfg.top_k, torch.zeros(*tokens.shape, cfg.draws))
    return memory(cfg, teacher, backend)


if __name__ == "__main__":
    run_script(main, Config, "build_kd_cache", __doc__)
