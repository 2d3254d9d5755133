"""A KD cache in a bucket: the same rows as from a folder, few shards here at a time, one line for every fault."""

import itertools
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import fsspec
import numpy as np
import pytest
import s3
import torch

from qat_lora.data.batches import batches, epoch_order, first_batches, order_by_file
from qat_lora.data.packing import Rows
from qat_lora.errors import ROOT, UserError
from qat_lora.kd import dataset as datasets
from qat_lora.kd import shelf
from qat_lora.kd.cache import CacheSpec, write_cache
from qat_lora.kd.dataset import KDCacheDataset, check_built, planned_rows, teacher_of
from qat_lora.models.loading import load_model
from qat_lora.run import buckets
from qat_lora.run.buckets import BucketPath, path_of

SHARDS, ROWS = 24, 3  # training shards and rows in each


@pytest.fixture(scope="module")
def server():
    with s3.served() as server:
        yield server


@pytest.fixture(autouse=True)
def soon(server, monkeypatch):
    """No faults at first, and short waits."""
    server.fault = lambda *_: None
    server.requests.clear()
    monkeypatch.setattr(buckets, "SILENCE", 5.0)
    monkeypatch.setattr(buckets, "PAUSES", (0.01, 0.01))


@pytest.fixture(scope="module")
def local(sharp_model_dir, backend, tmp_path_factory):
    """A cache in a folder, with BOS, so that the number of targets of a row is known only from its tokens."""
    tokens = torch.randint(1, 512, (SHARDS * ROWS + 8, 10), generator=torch.Generator().manual_seed(0))
    parts = dict(zip(("train", "heldout"), tokens.int().split((SHARDS * ROWS, 8))))
    spec = CacheSpec(
        teacher="t", tokenizer="tok", text="text", precision="fp32", length=10, k=4, draws=6, vocab=512, seed=1,
        rows_per_shard=ROWS, train_rows=SHARDS * ROWS, heldout_rows=8, bos=1, eos=2,
    )  # fmt: skip
    rows = {name: Rows(part, torch.ones_like(part, dtype=torch.uint8)) for name, part in parts.items()}
    folder = tmp_path_factory.mktemp("cache_L10_K4")
    list(write_cache(folder, spec, rows, load_model(str(sharp_model_dir)), backend, ROWS))
    return folder


@pytest.fixture
def url(local, server):
    """The same cache in a bucket."""
    url = s3.new_folder() + "/cache_L10_K4"
    fsspec.filesystem("s3").put(str(local), url, recursive=True)
    return url


@pytest.fixture
def few(monkeypatch):
    """Windows of 4 shards, and at most 8 of them here."""
    for module in (shelf, datasets):
        monkeypatch.setattr(module, "WINDOW", 4)
    monkeypatch.setattr(shelf, "MOST", 8)


def same(one: list[dict], other: list[dict]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a) for a, b in pairs)


def take(stream, count: int) -> list[dict]:
    return list(itertools.islice(stream, count))


def mapped() -> int:
    """How many shards this process maps."""
    return len({line.split()[-2] for line in Path("/proc/self/maps").read_text().splitlines() if "shard-" in line})


def refused(function) -> str:
    with pytest.raises(UserError) as error:
        function()
    assert "\n" not in str(error.value)
    return str(error.value)


# -- the same rows -----------------------------------------------------------------------------------------------------
def test_what_is_known_of_a_cache_is_known_of_its_copy(local, url):
    for split in ("train", "heldout"):
        here, there = KDCacheDataset(local, split), KDCacheDataset(url, split)
        assert here.fingerprint == there.fingerprint and here.spec == there.spec and len(here) == len(there)
        assert same([here[i] for i in range(len(here))], [there[i] for i in range(len(there))])
    assert teacher_of(url) == "t" and teacher_of(s3.new_folder()) == "smollm2-135m"
    assert same([planned_rows(url, 1)[0]], [planned_rows(str(local), 1)[0]])
    assert len(planned_rows("s3://bucket/none_L32_K7", 1)[0]["tokens"]) == 32
    assert str(path_of(Path("caches/x"))) == "caches/x" and path_of("file:///caches/x") == Path("/caches/x")
    for half in ("gs://", "gs:/x", "s3:///x", "://x", "file://x/y"[:7]):
        with pytest.raises(UserError, match=r"is not the URL of a folder; give e\.g\. gs://BUCKET/FOLDER"):
            path_of(half)


def test_rows_come_in_the_same_order_from_a_bucket_and_few_shards_are_here(local, url, few, monkeypatch):
    """Three epochs, from several places on; the space of shards that are let go of is freed."""
    here, most, fetch = KDCacheDataset(local), [], shelf.Shelf.get
    there = KDCacheDataset(url)
    monkeypatch.setattr(shelf.Shelf, "get", lambda self, name: (most.append(mapped()), fetch(self, name))[1])
    updates = SHARDS * ROWS // 4
    base = mapped()
    whole = take(batches(here, 2, 2, seed=5), 6 * updates)
    assert same(whole, take(batches(there, 2, 2, seed=5), 6 * updates))
    assert len(most) > SHARDS and max(most) - base <= 8
    for start in (1, updates + 3):
        assert same(whole[2 * start : 2 * start + 9], take(batches(KDCacheDataset(url), 2, 2, 5, start), 9))
    pair = [batches(KDCacheDataset(url), 1, 2, 5, 0, rank, 2) for rank in (0, 1)]
    for batch in whole[:6]:
        assert torch.equal(batch["tokens"], torch.cat([next(stream)["tokens"] for stream in pair]))


def test_every_shard_is_read_once_an_epoch(server, url, few):
    data = KDCacheDataset(url)
    server.requests.clear()
    peak = 0
    for _ in take(batches(data, 4, 1, seed=0, updates=SHARDS * ROWS // 4), 10**6):
        peak = max(peak, len(data.shelf.held) + len(data.shelf.fetching))
    assert server.got("shard-") == SHARDS and peak <= 8


def test_the_next_shards_are_read_ahead(server, url, few):
    """While the first update is in work, the shards of the window and of the next one arrive, and no more."""
    data = KDCacheDataset(url)
    stream = batches(data, 1, 1, seed=0)
    next(stream)
    until(lambda: len(data.shelf.held) == 8)
    time.sleep(0.3)
    assert server.got("shard-") == 8
    server.fault = lambda *_: "denied"
    take(stream, 3 * 4)  # all rows of the first window
    stream.close()
    assert not data.shelf.needed and threading.active_count() < 30


def test_what_needs_few_rows_reads_few_shards(server, url, few, monkeypatch):
    data = KDCacheDataset(url)
    assert server.got("shard-") == 0
    rows = first_batches(data, 4, 2, seed=3)
    assert server.got("shard-") <= 4 and not data.shelf.needed
    assert same(rows, first_batches(KDCacheDataset(url), 4, 2, seed=3))
    server.requests.clear()
    heldout = KDCacheDataset(url, "heldout")
    heldout[0], heldout[1], heldout.kept(2)
    assert server.got("shard-") == 0 and server.got("heldout-") == 1


def until(found) -> None:
    deadline = time.monotonic() + 60
    while not found():
        assert time.monotonic() < deadline
        time.sleep(0.02)


# -- the order ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("sizes, window", [([3] * 10, 4), ([5, 1, 7, 2, 2, 9, 1], 3), ([2] * 130, 64)])
def test_rows_are_shuffled_within_windows_of_files(sizes, window):
    files = np.repeat(np.arange(len(sizes)), sizes)
    orders = [order_by_file(seed, epoch, files, window).tolist() for seed in (0, 1) for epoch in (0, 1)]
    assert len({tuple(order) for order in orders}) == 4 and orders[0] == order_by_file(0, 0, files, window).tolist()
    for order in orders:
        assert sorted(order) == list(range(len(files)))
        turns, left = [files[row] for row in order], set(range(len(sizes)))
        while left:  # the rows of each window come before those of the next
            now = set(dict.fromkeys(turns)) if len(left) <= window else set(list(dict.fromkeys(turns))[:window])
            count = sum(sizes[file] for file in now)
            assert set(turns[:count]) == now
            turns, left = turns[count:], left - now
    assert any(np.diff([files[row] for row in orders[0]]))


def test_a_cache_of_few_shards_keeps_its_order(local, few, monkeypatch):
    data = KDCacheDataset(local)
    assert not torch.equal(data.epoch_order(3, 1), epoch_order(3, 1, len(data)))
    for module in (shelf, datasets):
        monkeypatch.setattr(module, "WINDOW", SHARDS)
    assert torch.equal(data.epoch_order(3, 1), epoch_order(3, 1, len(data)))


# -- faults ------------------------------------------------------------------------------------------------------------
FAULTS = {
    "denied": r"shard-00000\.safetensors cannot be used \(PermissionError: .*; check the address and your permissions",
    "half": r"cache shard s3://\S+/shard-00000\.safetensors is damaged \(checksum\); delete it and run build_kd_cache",
    "cut": r"shard-00000\.safetensors (cannot be used \(ClientPayloadError|has not answered for 5 s)",
    "busy": r"shard-00000\.safetensors (has not answered for 5 s; check the address|cannot be used \(.*slow)",
    30.0: r"s3://\S+/shard-00000\.safetensors has not answered for 5 s; check the address and the network",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_shard_that_cannot_be_read_is_one_line(server, url, fault):
    data = KDCacheDataset(url)
    server.only(fault, "shard-00000")
    started = time.monotonic()
    assert re.search(FAULTS[fault], refused(lambda: data[0]))
    assert time.monotonic() - started < 15
    server.fault = lambda *_: None
    assert len(data[0]["tokens"]) == 10, "the next try succeeds"


@pytest.mark.parametrize("fault", ["half", "cut", "busy"])
def test_a_fault_that_passes_is_not_noticed(server, local, url, fault):
    server.only(fault, "shard-00000", times=1)
    assert same([KDCacheDataset(url)[0]], [KDCacheDataset(local)[0]])


def test_a_missing_shard_or_manifest_is_one_line(url):
    data = KDCacheDataset(url)
    fsspec.filesystem("s3").rm(f"{url}/shard-00000.safetensors")
    assert refused(lambda: data[0]).startswith(f"cache shard {url}/shard-00000.safetensors is missing; run build_kd")
    said = refused(lambda: check_built("s3://bucket/none", "MODEL"))
    assert said == (
        "cache s3://bucket/none has no manifest.json; build it with python scripts/build_kd_cache.py --model MODEL "
        "--dataset TEXT --cache-dir s3://bucket/none"
    )
    assert "has no manifest.json" in refused(lambda: KDCacheDataset("s3://no-such-bucket/c"))


def test_a_fault_of_the_manifest_is_one_line(server, url):
    for fault in ("denied", 30.0):
        server.only(fault, "manifest.json")
        assert re.search(r"manifest\.json (cannot be used|has not answered)", refused(lambda: KDCacheDataset(url)))
    server.only("half", "manifest.json")
    assert f"{url}/manifest.json is damaged" in refused(lambda: KDCacheDataset(url))


def test_a_missing_package_or_a_closed_port_is_one_line(monkeypatch):
    assert refused(lambda: KDCacheDataset("gs://bucket/c")).startswith(
        "gs://bucket/c/manifest.json: the package for gs:// is missing; pip install gcsfs, or use a folder"
    )
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3")
    assert "the package for s3:// is missing; pip install s3fs" in refused(lambda: KDCacheDataset("s3://bucket/c"))
    monkeypatch.undo()
    monkeypatch.setattr(buckets, "PAUSES", ())
    monkeypatch.setattr(buckets, "SILENCE", 20.0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    said = refused(lambda: KDCacheDataset("s3://bucket/c"))
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    assert said.startswith("s3://bucket/c/manifest.json cannot be used (EndpointConnectionError: Could not connect")


def test_a_full_disk_names_the_folder(url, monkeypatch):
    data = KDCacheDataset(url)
    monkeypatch.setattr(fsspec.filesystem("s3"), "get_file", lambda *_, **__: _full())
    assert "has no room for a copy of s3://" in (said := refused(lambda: data[0])) and "set TMPDIR" in said


def _full():
    raise OSError(28, "No space left on device")


HANG = """
import signal, threading, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background inherits that it is ignored
from qat_lora.backend import TorchBackend
from qat_lora.data.batches import batches
from qat_lora.kd.dataset import KDCacheDataset
stream = TorchBackend("cpu", "fp32").prefetch(batches(KDCacheDataset({url!r}), 1, 1, 0))
{then}
"""


WAITING = "threading.Thread(target=next, args=(stream,), daemon=True).start(); time.sleep(3)"


@pytest.mark.parametrize("then", [WAITING, "next(stream)"])
def test_a_process_ends_at_once_while_a_bucket_is_silent(server, url, then):
    """Also on Ctrl-C while it waits for a row."""
    server.only(60.0, "shard-")
    process = subprocess.Popen(
        [sys.executable, "-c", HANG.format(url=url, then=then)], cwd=ROOT, stderr=subprocess.PIPE
    )
    until(lambda: server.got("shard-"))
    started = time.monotonic()
    if then == "next(stream)":
        time.sleep(1)
        process.send_signal(2)
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - started < 20
    assert (process.returncode == 0) == (then == WAITING), said.decode()[-500:]


def test_a_fault_while_reading_ahead_is_forgotten(server, local, url, few, monkeypatch):
    """It is raised only if it is still there in the update that needs the shard."""
    monkeypatch.setattr(shelf, "RETRY", 0.01)
    data = KDCacheDataset(url)
    last = data.items[int(data.epoch_order(0, 0)[8 * ROWS - 1])][0]
    server.only("denied", last)
    stream = batches(data, 3, 1, seed=0)
    first = next(stream)
    until(lambda: server.got(last) > 2)
    server.fault = lambda *_: None
    assert same([first, *take(stream, 20)], take(batches(KDCacheDataset(local), 3, 1, seed=0), 21))


def test_a_bucket_path_writes_and_lists(server):
    folder = path_of(s3.new_folder())
    assert isinstance(folder, BucketPath) and folder.name and not (folder / "a").exists() and folder.sizes() == {}
    (folder / "a").write_bytes(b"123")
    assert (folder / "a").exists() and folder.sizes() == {"a": 3} and (folder / "a").read_text() == "123"
    for fault, said in (("denied", "PermissionError"), (30.0, "has not answered for 5 s")):
        server.only(fault, "/a", "PUT")
        assert said in refused(lambda: (folder / "a").write_bytes(b"4"))
        assert (folder / "a").read_text() == "123"
    server.only("busy", "/a", "PUT", times=1)
    (folder / "a").write_bytes(b"5")
    assert (folder / "a").read_text() == "5"
