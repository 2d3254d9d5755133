"""The cache on disk: manifest.json and shards of rows with their teacher targets.

A shard (safetensors) holds, for n rows of L tokens:
  tokens [n, L]; index [n, L, K]; tail [n, L, N]   uint16 where the vocabulary fits, else int32
  prob [n, L, K]; entropy [n, L]                   float16
Training rows are in shard-NNNNN, held-out rows in heldout-NNNNN. The targets are described in kd.targets.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from qat_lora.backend import TorchBackend
from qat_lora.backend.sharding import shards_of
from qat_lora.data.packing import Rows
from qat_lora.errors import UserError
from qat_lora.hosts.group import SIGTERM, notice_sigterm
from qat_lora.kd.targets import teacher_targets
from qat_lora.run.buckets import BucketPath, Damaged, put, sizes
from qat_lora.run.console import say
from qat_lora.run.files import as_json, read_json, sha256
from qat_lora.run.resuming import date_of, now

FORMAT = "qat_lora.kd.4"
MOST_SHARDS = 10**6  # a manifest with more is damaged
PREFIX = {"train": "shard", "heldout": "heldout"}


@dataclass(frozen=True)
class CacheSpec:
    """Everything that determines a cache's content: on one machine, caches with equal specs are equal byte for byte.

    bos, eos: the token that begins every row and document, and the one that ends a document; −1 if rows have no BOS, as
    in all caches from before BOS was an option.
    """

    teacher: str
    tokenizer: str  # fingerprint
    bos: int = field(default=-1, kw_only=True)
    eos: int = field(default=-1, kw_only=True)
    text: str  # fingerprint of all rows
    precision: str
    length: int
    k: int
    draws: int
    vocab: int
    seed: int
    rows_per_shard: int
    train_rows: int
    heldout_rows: int

    def shards(self) -> Iterator[tuple[str, str, range]]:
        """(file name, split, rows of that split) of every shard."""
        for split, count in (("train", self.train_rows), ("heldout", self.heldout_rows)):
            for number, start in enumerate(range(0, count, self.rows_per_shard)):
                rows = range(start, min(start + self.rows_per_shard, count))
                yield f"{PREFIX[split]}-{number:05d}.safetensors", split, rows

    @property
    def bytes_per_position(self) -> int:
        width = token_type(self.vocab).itemsize
        return width * (1 + self.k + self.draws) + 2 * (self.k + 1)


def edges(bos: int | None, tokenizer) -> dict[str, int]:
    """The fields bos and eos of a CacheSpec, for rows packed with `bos`."""
    return {} if bos is None else {"bos": bos, "eos": tokenizer.eos_token_id}


def token_type(vocab: int) -> torch.dtype:
    return torch.uint16 if vocab <= 2**16 else torch.int32


def read_manifest(directory: Path | BucketPath) -> tuple[CacheSpec, dict[str, dict]]:
    """A cache's spec and its shards so far ({file: {rows, sha256}}); raises UserError if the manifest is damaged."""
    manifest = read_json(directory / "manifest.json")
    fix = "delete that folder and build it again, or use another --cache-dir"
    if manifest.get("format") != FORMAT:
        raise UserError(f"cache {directory}: format {manifest.get('format')!r} is not {FORMAT}; {fix}")
    try:
        spec, shards = CacheSpec(**manifest["spec"]), manifest["shards"]
        _check_shards(spec, shards)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"cache {directory}: manifest.json is damaged ({error}); {fix}") from error
    return spec, shards


def _check_shards(spec: CacheSpec, shards: dict[str, dict]) -> None:
    """Raise ValueError, KeyError, TypeError, … if the spec is impossible or `shards` are not a subset of its shards."""
    for name, value in asdict(spec).items():
        kind, least = CacheSpec.__annotations__[name], {"rows_per_shard": 1, "bos": -1, "eos": -1}.get(name, 0)
        if type(value) is not kind or (kind is int and value < least):
            raise ValueError(f"{name} is {value!r}")
    if (spec.bos < 0) != (spec.eos < 0):
        raise ValueError(f"bos is {spec.bos} and eos {spec.eos}")
    count = -(-spec.train_rows // spec.rows_per_shard) + -(-spec.heldout_rows // spec.rows_per_shard)
    if count > MOST_SHARDS:
        raise ValueError(f"{count} shards are too many")
    sizes = {name: len(rows) for name, _, rows in spec.shards()}
    if any(sizes.get(name) != entry["rows"] or len(entry["sha256"]) != 64 for name, entry in shards.items()):
        raise ValueError("its shards do not match its rows")


def open_cache(
    directory: Path | BucketPath, spec: CacheSpec, teacher: str | None = None, dataset: str | None = None
) -> dict[str, dict]:
    """The shards already in `directory` ({file: {rows, sha256}}); raises UserError if it holds another cache.

    teacher: the teacher's fingerprint (models.loading.model_fingerprint), compared instead of its name unless it is
    None or the cache has none. dataset: where the text comes from, for messages.
    """
    if not (directory / "manifest.json").exists():
        return {}
    there, shards = read_manifest(directory)
    made = read_json(directory / "manifest.json").get("teacher_fingerprint")
    if made and teacher and made != teacher:
        raise UserError(
            f"{directory} holds another cache: its teacher is {there.teacher!r} (fingerprint {made[:12]}), not "
            f"{spec.teacher!r} ({teacher[:12]}); use another --cache-dir or delete that folder"
        )
    fields = asdict(spec)
    fields["text"] = fields.pop("text")  # last: the text's fingerprint depends on others, e.g. length
    for name, wanted in fields.items():
        if getattr(there, name) != wanted and not (name == "teacher" and made and teacher):
            source = f" (of --dataset {dataset})" if name == "text" and dataset else ""
            raise UserError(
                f"{directory} holds another cache: {name} is {getattr(there, name)!r}, not {wanted!r}{source}; "
                "use another --cache-dir or delete that folder"
            )
    return shards


def cache_date(directory: Path | BucketPath) -> datetime:
    """The date that chat templates print in the rows of a cache: the date when the cache was started, or the current
    date for a new one. Local time; raises UserError if the manifest is damaged."""
    path = directory / "manifest.json"
    return date_of(read_json(path), path) if path.exists() else now()


def write_cache(
    directory: Path | BucketPath, spec: CacheSpec, rows: dict[str, Rows], teacher: nn.Module, backend: TorchBackend,
    batch_size: int, facts: dict | None = None,
) -> Iterator[int]:  # fmt: skip
    """Write the missing shards, each worker one file at a time; yields the number of rows done by all after every
    batch, and ends early if a worker is asked to stop.

    rows: {"train": Rows, "heldout": Rows}. If the processes are killed at any point, the next call writes the missing
    or damaged shards. On any number of workers the result is the same byte for byte. Only one job may write: hold
    run.files.lock(directory) (a bucket has no lock). facts: stored in the manifest, e.g. the date that a chat template
    prints. Raises UserError if the teacher gives NaN, or worker 0 does not see what another worker wrote.
    """
    notice_sigterm()
    group, shards = backend.group, {name: (split, numbers) for name, split, numbers in spec.shards()}
    fingerprint, done = getattr(teacher, "fingerprint", None), {}
    manifest = {"format": FORMAT, "spec": asdict(spec), "teacher_fingerprint": fingerprint, **(facts or {})}

    def record(sums: dict[str, str]) -> None:
        """Add files, {name: checksum} in the order of the workers that wrote them, to the manifest."""
        for rank, (name, checksum) in enumerate(sums.items()):
            if not (directory / name).is_file():
                raise UserError(
                    f"{directory / name} of {group.name(rank)} is not here; give a --cache-dir that all hosts share"
                )
            done[name] = {"rows": len(shards[name][1]), "sha256": checksum}
        put(directory / "manifest.json", as_json(manifest | {"shards": done}))

    def unfinished() -> list[str]:
        done.update(open_cache(directory, spec, fingerprint))
        missing = _missing(directory, spec, done)
        if missing and isinstance(directory, BucketPath):  # fails now if the bucket cannot be written
            record({})
        return missing

    missing = group.on_main(unfinished)
    yield from (len(numbers) for name, (_, numbers) in shards.items() if name not in missing)
    for first in range(0, len(missing), group.world_size):
        turn = missing[first : first + group.world_size]  # each worker writes one of them
        name = turn[group.rank] if group.rank < len(turn) else None
        split, numbers = shards[name] if name else ("train", range(0))
        lengths, parts = [len(shards[each][1]) for each in turn], []
        for at in range(0, max(lengths), batch_size):
            if group.stop(SIGTERM.is_set()):
                return
            batch = numbers[at : at + batch_size]
            if batch:
                tokens = rows[split].tokens[batch.start : batch.stop]
                parts.append(_targets(teacher, backend, tokens, batch.start, split, spec, batch_size))
            elif shards_of(teacher):  # gathering its weights takes all workers
                tokens = torch.zeros(batch_size, spec.length, dtype=torch.long)
                teacher_pass(teacher, backend, tokens, spec.k, torch.zeros(*tokens.shape, spec.draws))
            yield sum(len(range(length)[at : at + batch_size]) for length in lengths)
        checksum = None
        if name:
            content = save({key: torch.cat([part[key] for part in parts]) for key in parts[0]})
            put(directory / name, content)
            checksum = hashlib.sha256(content).hexdigest()
        sums = dict(zip(turn, group.gather(checksum)))
        group.on_main(partial(record, sums))


def _missing(directory: Path | BucketPath, spec: CacheSpec, done: dict) -> list[str]:
    """The shards to write. Says which of those in the manifest must be written again: in a folder, if the checksum
    differs; in a bucket, where that would take a download, if the file is too short."""
    there = sizes(directory) if done else {}

    def is_whole(name: str, rows: range) -> bool:
        path, least = directory / name, len(rows) * spec.length * spec.bytes_per_position
        if name in there and (sha256(path) == done[name]["sha256"] if isinstance(path, Path) else there[name] > least):
            return True
        say(f"{path} is {'damaged' if name in there else 'missing'}; writing it again")
        return False

    return [name for name, _, rows in spec.shards() if name not in done or not is_whole(name, rows)]


def _targets(teacher, backend, tokens: Tensor, start: int, split: str, spec: CacheSpec, batch_size: int) -> dict:
    """One batch's shard tensors on the host. The batch is padded to `batch_size`: one shape, one graph on XLA."""
    count = len(tokens)
    full = tokens[torch.arange(batch_size) % count].long()
    uniforms = torch.stack([_uniforms(spec, split, start + i) for i in range(count)])[torch.arange(batch_size) % count]
    targets = teacher_pass(teacher, backend, full, spec.k, uniforms)
    if not all(targets[key].isfinite().all() for key in ("prob", "entropy")):
        raise UserError(
            f"the teacher {spec.teacher} gives NaN or infinity at {split} rows {start} to {start + count - 1}; "
            "check its weights, or use --precision fp32"
        )
    integer = token_type(spec.vocab)
    kinds = {"index": integer, "prob": torch.float16, "tail": integer, "entropy": torch.float16}
    return {"tokens": tokens.to(integer)} | {key: targets[key][:count].to(kind) for key, kind in kinds.items()}


def teacher_pass(teacher: nn.Module, backend: TorchBackend, tokens: Tensor, k: int, uniforms: Tensor) -> dict:
    """`teacher_targets` of a batch, from and to the host."""
    batch = backend.to_device({"tokens": tokens, "uniforms": uniforms})
    with backend.autocast():
        targets = teacher_targets(teacher, batch["tokens"], k, batch["uniforms"])
    backend.step_boundary()
    return backend.to_host(targets)


def _uniforms(spec: CacheSpec, split: str, row: int) -> Tensor:
    """Random numbers [L, N] in [0, 1) for one row's draws, from its own stream: independent of batch and worker.

    Systematic sampling: at each position, N points 1/N apart with one random offset. A token's expected count is that
    of independent draws, and its actual count differs from it by less than 1.
    """
    stream = np.random.default_rng([spec.seed, row, split == "heldout"])  # torch's generator uses 32 bits of a seed
    offset = stream.random((spec.length, 1), dtype=np.float32)
    points = (offset + np.arange(spec.draws, dtype=np.float32)) / spec.draws
    return torch.from_numpy(points.clip(max=np.nextafter(np.float32(1), np.float32(0))))  # a sum may round up to 1


def read_shard(directory: Path | BucketPath, name: str, expected: dict) -> dict[str, Tensor]:
    """A shard's tensors; raises UserError naming the file if it is missing or fails the manifest's checksum."""
    path, fix = directory / name, "run build_kd_cache.py again with the same flags"
    try:
        if isinstance(path, BucketPath):
            with path.copied(expected["sha256"]) as copy:
                return load_file(copy)  # memory-mapped, so its space is freed with the tensors
        if path.is_file() and sha256(path) != expected["sha256"]:
            raise UserError(f"cache shard {path} is damaged (checksum); {fix}")
        return load_file(path)
    except Damaged:
        raise UserError(f"cache shard {path} is damaged (checksum); delete it and {fix}") from None
    except (FileNotFoundError, IsADirectoryError):
        raise UserError(f"cache shard {path} is missing; {fix}") from None
