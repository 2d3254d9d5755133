"""Rows of a KD cache with their sparse targets, sharded over workers."""

import hashlib
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from qat_lora.data.batches import SameRows, epoch_order, order_by_file
from qat_lora.data.packing import tokenizer_fingerprint
from qat_lora.errors import UserError
from qat_lora.kd import DRAWS
from qat_lora.kd.cache import PREFIX, CacheSpec, read_manifest, read_shard
from qat_lora.kd.shelf import WINDOW, Shelf
from qat_lora.models.loading import EMBEDDED, load_config
from qat_lora.run.buckets import BucketPath, path_of
from qat_lora.run.console import command


class KDCacheDataset(Dataset):
    """Items: tokens [L] int64; index, prob [L, K+N] (top K, then the tail draws; prob sums to 1); mask [L] uint8, 1
    where there is a target; entropy [L], so that sparse_loss − entropy estimates the KL to the teacher.

    A position followed by a BOS from packing has no target: the teacher cannot know what follows the end of a document.
    vocab: rows of the student's embedding. If the teacher has more (same tokenizer, padded differently), targets beyond
    them are dropped and the rest renormalised to a distribution over the shared ids; a position that loses all its
    targets is masked.

    cache_dir: a folder, or the URL of one in a bucket, of which kd.shelf holds some shards at a time.
    split: "train" or "heldout". preload: read every shard of a folder now; otherwise each is read, and its checksum
    verified, on first use. Shards are memory-mapped, so that the workers of a host share one copy.
    rank, world_size: for custom loops. Worker k gets files k, k+W, … if that drops fewer than W rows, otherwise
    examples k, k+W, …; every worker has the same number of items. The project's own training drops none: every worker
    opens the whole cache, and data.batches distributes the rows of each update.
    seed: put the items in a fixed random order, for a loader that does not shuffle; None keeps the order of the text.
    Raises UserError for a cache that is missing, unfinished, damaged or made with another tokenizer (`tokenizer`: its
    data.packing.tokenizer_fingerprint; None skips the check).
    """

    def __init__(
        self,
        cache_dir,
        split="train",
        preload=True,
        rank=0,
        world_size=1,
        seed: int | None = None,
        tokenizer: str | None = None,
        vocab: int | None = None,
    ):
        self.directory, self.vocab = path_of(cache_dir), vocab
        self.spec, shards = _manifest(self.directory, tokenizer)
        self.shards = {name: entry for name, entry in shards.items() if name.startswith(PREFIX[split])}
        if not self.shards:
            raise UserError(f"cache {self.directory} has no {split} rows; build it with a larger --heldout-fraction")
        self.loaded: dict[str, dict[str, Tensor]] = {}
        self.items = self._own_items(rank, world_size)
        if seed is not None:
            self.items = [self.items[i] for i in self.epoch_order(seed, 0)]
        if preload and isinstance(self.directory, Path):
            for name, _ in self.items:
                self._shard(name)

    def _own_items(self, rank: int, world_size: int) -> list[tuple[str, int]]:
        files = [[(name, row) for row in range(entry["rows"])] for name, entry in self.shards.items()]
        every = [item for file in files for item in file]
        shares = [[item for file in files[worker::world_size] for item in file] for worker in range(world_size)]
        if len(every) - min(map(len, shares)) * world_size >= world_size:  # splitting by example drops fewer
            shares = [every[worker::world_size] for worker in range(world_size)]
        return shares[rank][: min(map(len, shares))]

    @cached_property
    def shelf(self) -> Shelf:
        """What this process holds of a cache in a bucket."""
        return Shelf(lambda name: read_shard(self.directory, name, self.shards[name]), len({n for n, _ in self.items}))

    def _shard(self, name: str) -> dict[str, Tensor]:
        if not isinstance(self.directory, Path):
            return self.shelf.get(name)
        if name not in self.loaded:
            self.loaded[name] = read_shard(self.directory, name, self.shards[name])
        return self.loaded[name]

    @property
    def length(self) -> int:
        """Tokens in a row."""
        return self.spec.length

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the cache's text and targets, for a run's manifest."""
        sums = "".join(entry["sha256"] for entry in self.shards.values())
        return hashlib.sha256(sums.encode()).hexdigest()[:16]

    def epoch_order(self, seed: int, epoch: int) -> Tensor:
        """The order of the items in an epoch: random, but with more than WINDOW shards, those of WINDOW at a time."""
        if len(self.shards) <= WINDOW:
            return epoch_order(seed, epoch, len(self))
        numbers = {name: number for number, name in enumerate(self.shards)}
        return order_by_file(seed, epoch, np.array([numbers[name] for name, _ in self.items]), WINDOW)

    def read_ahead(self, updates: Iterator[list[int]]) -> Iterator[list[int]]:
        """The items of each update, while the shards of the next ones are fetched from a bucket."""
        local = isinstance(self.directory, Path)
        return updates if local else self.shelf.ahead(updates, lambda i: self.items[i][0])

    @property
    def _clips(self) -> bool:
        """Whether targets may lie beyond the student's embedding."""
        return self.vocab is not None and self.spec.vocab > self.vocab

    def kept(self, i: int) -> int:
        """The number of positions of item i that have a target."""
        every = self.spec.bos < 0 and not self._clips
        return self.spec.length if every else int(self[i]["mask"].sum())

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        name, row = self.items[i]
        item = {key: value[row] for key, value in self._shard(name).items()}
        tokens, prob, tail = item["tokens"].long(), item["prob"].float(), item["tail"].long()
        rest = (1 - prob.sum(1, keepdim=True)).clamp(min=0) / tail.shape[1]
        targets = {
            "tokens": tokens,
            "index": torch.cat([item["index"].long(), tail], 1),
            "prob": torch.cat([prob, rest.expand(-1, tail.shape[1])], 1),
            "mask": has_next(tokens, self.spec.bos, self.spec.eos),
            "entropy": item["entropy"].float(),
        }
        return clipped(targets, prob.shape[1], self.vocab) if self._clips else targets


def open_splits(cache_dir: str, model: str, tokenizer) -> tuple[KDCacheDataset, KDCacheDataset]:
    """The training and held-out rows of a cache, for a model and its tokenizer."""
    return tuple(open_split(cache_dir, split, model, tokenizer) for split in ("train", "heldout"))


def open_split(cache_dir: str, split: str, model: str, tokenizer) -> KDCacheDataset:
    """The rows of one split of a cache, for a model and its tokenizer."""
    check_built(cache_dir, None if model == EMBEDDED else model)
    facts = {"tokenizer": tokenizer_fingerprint(tokenizer), "vocab": load_config(model).vocab_size}
    return KDCacheDataset(cache_dir, split, **facts)


def teacher_of(cache_dir: str) -> str:
    """The name of the model that made a cache; of the embedded one if the cache does not exist yet."""
    made = (path_of(cache_dir) / "manifest.json").exists()
    return read_manifest(path_of(cache_dir))[0].teacher if made else EMBEDDED


def planned_rows(cache_dir: str, count: int) -> SameRows:
    """`count` equal rows with a cache's shapes, to plan a run. If the cache does not exist yet, length and K come from
    its name, which contains e.g. _L1024_K128, and it is taken to have DRAWS draws.

    Raises UserError if the name does not tell them.
    """
    if (path_of(cache_dir) / "manifest.json").exists():
        spec, _ = read_manifest(path_of(cache_dir))
        length, width = spec.length, spec.k + spec.draws
    elif match := re.search(r"_L(\d+)_K(\d+)", path_of(cache_dir).name):
        length, width = int(match[1]), int(match[2]) + DRAWS
    else:
        raise UserError(
            f"cache {cache_dir} has no manifest.json, and its name does not tell its length and K; build it, or name "
            "it e.g. caches/text_L1024_K128"
        )
    return SameRows(
        count, tokens=torch.zeros(length, dtype=torch.long), index=torch.zeros(length, width, dtype=torch.long),
        prob=torch.full((length, width), 1 / width), mask=torch.ones(length, dtype=torch.uint8),
        entropy=torch.zeros(length),
    )  # fmt: skip


def has_next(tokens: Tensor, bos: int, eos: int) -> Tensor:
    """mask uint8 [L]: 0 at positions where a text ends, i.e. before a BOS inside the row and at an EOS at its end. All
    1 if rows have no BOS (−1), or if BOS and EOS are one token, which then ends a text and begins the next."""
    mask = torch.ones(len(tokens), dtype=torch.uint8)
    if bos not in (-1, eos):
        mask[:-1] = tokens[1:] != bos
        mask[-1] = tokens[-1] != eos
    return mask


def clipped(item: dict[str, Tensor], k: int, vocab: int) -> dict[str, Tensor]:
    """Restrict an item's targets to ids below `vocab`: others get probability 0 (and index 0), the rest are scaled to
    the same sum as before, and the entropy becomes that of the teacher renormalised in the same way.

    index, prob [L, K+N], the first `k` columns exact. The log-probability of each draw is not stored, so a dropped draw
    is assumed to have the mean of all draws at its position.
    """
    index, prob, entropy = item["index"], item["prob"], item["entropy"]
    keep = index < vocab
    if keep.all():
        return item
    surprise = -prob * prob.clamp(min=torch.finfo(prob.dtype).tiny).log()
    drawn = entropy - surprise[:, :k].sum(1)
    width = index.shape[1] - k
    share = keep[:, k:].float().mean(1) if width else torch.zeros_like(entropy)
    left, whole = (prob * keep).sum(1), prob.sum(1)
    some = left > 0
    scale = torch.where(some, whole / left.clamp(min=1e-30), 0.0)
    kept_entropy = ((surprise * keep)[:, :k].sum(1) + drawn * share) * scale - whole * scale.clamp(min=1e-30).log()
    return item | {
        "index": index.where(keep, 0),
        "prob": prob * keep * scale.unsqueeze(1),
        "mask": item["mask"] * some,
        "entropy": torch.where(keep.all(1), entropy, kept_entropy * some),
    }


def check_built(directory: str | Path | BucketPath, model: str | None = None) -> None:
    """Raise UserError, with the command that builds a cache for `model`, if there is none."""
    if not (path_of(directory) / "manifest.json").exists():
        build = command("build_kd_cache", model=model, dataset="TEXT", cache_dir=directory)
        raise UserError(f"cache {directory} has no manifest.json; build it with {build}")


def _manifest(directory: Path | BucketPath, tokenizer: str | None) -> tuple[CacheSpec, dict]:
    check_built(directory)
    spec, shards = read_manifest(directory)
    if tokenizer not in (None, spec.tokenizer):
        raise UserError(
            f"cache {directory} was made with another tokenizer (of {spec.teacher!r}); build one for this model"
        )
    missing = [name for name, _, _ in spec.shards() if name not in shards]
    if missing:
        raise UserError(
            f"cache {directory} is unfinished: {len(missing)} shards are missing; "
            "finish it with scripts/build_kd_cache.py --resume auto"
        )
    return spec, shards
