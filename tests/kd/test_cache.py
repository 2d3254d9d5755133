"""The KD cache: the same bytes after any interruption, an error for any fault, equal shares for workers."""

import dataclasses
import itertools
import shutil

import pytest
import torch
from safetensors.torch import load_file

from qat_lora.data.batches import batches
from qat_lora.data.packing import Rows, tokenizer_fingerprint
from qat_lora.errors import UserError
from qat_lora.kd.cache import CacheSpec, open_cache, write_cache
from qat_lora.kd.dataset import KDCacheDataset
from qat_lora.models.loading import load_model
from qat_lora.run.files import read_json, write_json

LENGTH, K, DRAWS = 12, 4, 6
SPEC = CacheSpec(
    teacher="t", tokenizer="tok", text="text", precision="fp32", length=LENGTH, k=K, draws=DRAWS, vocab=512, seed=1,
    rows_per_shard=4, train_rows=11, heldout_rows=3,
)  # fmt: skip
TOKENS = torch.randint(1, 512, (14, LENGTH), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
ROWS = {
    name: Rows(part, torch.ones(len(part), LENGTH, dtype=torch.uint8))
    for name, part in (("train", TOKENS[:11]), ("heldout", TOKENS[11:]))
}
BY_FILE = {(1, 2), (1, 4), (1, 11), (2, 2), (3, 2), (3, 4), (4, 2), (5, 2)}  # (workers, rows a file)


@pytest.fixture(scope="module")
def teacher(sharp_model_dir):
    return load_model(str(sharp_model_dir))


@pytest.fixture(scope="module")
def write(teacher, backend):
    """write(folder, spec, stop): write a cache of ROWS, stopping after `stop` batches."""

    def run(folder, spec=SPEC, stop=None, batch_size=3):
        written = write_cache(folder, spec, ROWS, teacher, backend, batch_size)
        list(itertools.islice(written, stop))

    return run


@pytest.fixture(scope="module")
def whole(write, tmp_path_factory):
    """A finished cache. Do not write to it."""
    folder = tmp_path_factory.mktemp("whole")
    write(folder)
    return folder


@pytest.fixture(scope="module")
@torch.no_grad()
def probs(teacher):
    """The teacher's probabilities [11, LENGTH, 512] for the training rows."""
    return teacher(TOKENS[:11].long()).logits.softmax(-1)


@pytest.fixture
def cache(whole, tmp_path):
    """A copy of it that tests may damage."""
    return shutil.copytree(whole, tmp_path / "cache")


def bytes_of(folder) -> dict:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tokens_of(dataset) -> list:
    return [tuple(item["tokens"].tolist()) for item in (dataset[i] for i in range(len(dataset)))]


def refused(folder, **options) -> str:
    with pytest.raises(UserError) as error:
        KDCacheDataset(folder, **options)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)
    return str(error.value)


# -- writing ----------------------------------------------------------------------------------------------------------
def test_rows_come_back_with_their_targets(whole, probs):
    dataset = KDCacheDataset(whole)
    assert len(dataset) == 11 and dataset.length == LENGTH
    assert tokens_of(dataset) + tokens_of(KDCacheDataset(whole, "heldout")) == [tuple(row) for row in TOKENS.tolist()]
    for i in (0, 5, 10):
        item, wanted = dataset[i], probs[i].topk(K)
        assert item["index"].shape == item["prob"].shape == (LENGTH, K + DRAWS)
        assert torch.equal(item["index"][:, :K], wanted.indices)
        torch.testing.assert_close(item["prob"][:, :K], wanted.values, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(item["prob"].sum(1), torch.ones(LENGTH), rtol=0, atol=1e-3)
        assert item["mask"].all() and item["mask"].dtype == torch.uint8 and item["tokens"].dtype == torch.int64
        assert (item["prob"][:, K:] == item["prob"][:, K:].amax(1, keepdim=True)).all(), "all draws have equal weight"


def test_tail_draws_are_systematic_and_differ_by_position(whole, probs):
    dataset, differ = KDCacheDataset(whole), set()
    for i in range(11):
        top, tail = dataset[i]["index"].split([K, DRAWS], dim=1)
        rest = probs[i].scatter(1, top, 0)
        counts = torch.zeros_like(rest).scatter_add_(1, tail, torch.ones(tail.shape))
        assert (counts - DRAWS * rest / rest.sum(1, keepdim=True)).abs().max() < 1 + 1e-3
        differ |= {tuple(row) for row in tail.tolist()}
    assert len(differ) == 11 * LENGTH


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5, 6])
def test_an_interrupted_cache_is_refused_and_ends_with_the_same_bytes(write, whole, tmp_path, stop):
    write(tmp_path, stop=stop)
    assert ("unfinished" if (tmp_path / "manifest.json").exists() else "no manifest.json") in refused(tmp_path)
    write(tmp_path)
    assert bytes_of(tmp_path) == bytes_of(whole)


def test_a_finished_cache_is_left_alone(whole, write):
    before = {path: path.stat().st_mtime_ns for path in whole.iterdir()}
    write(whole)
    assert {path: path.stat().st_mtime_ns for path in whole.iterdir()} == before


def test_a_missing_or_damaged_shard_is_named_and_written_again(cache, whole, write):
    path = cache / "shard-00001.safetensors"
    content = path.read_bytes()
    for bad in (content[:-1], b"", content[:-1] + bytes([content[-1] ^ 1]), None):
        path.unlink()
        if bad is not None:
            path.write_bytes(bad)
        assert f"shard-00001.safetensors is {'missing' if bad is None else 'damaged'}" in refused(cache)
        write(cache)
        assert bytes_of(cache) == bytes_of(whole)


def test_the_seed_determines_the_draws(write, whole, tmp_path):
    write(tmp_path, dataclasses.replace(SPEC, seed=2))
    for name in ("shard-00000.safetensors", "heldout-00000.safetensors"):
        first, second = load_file(whole / name), load_file(tmp_path / name)
        assert torch.equal(first["index"], second["index"]) and not torch.equal(first["tail"], second["tail"])


def test_the_batch_size_does_not_change_the_draws(write, whole, tmp_path):
    """Each row has its own stream; only rounding may depend on the batch shape."""
    write(tmp_path, batch_size=1)
    for path in whole.glob("*.safetensors"):
        first, second = load_file(path)["tail"], load_file(tmp_path / path.name)["tail"]
        assert (first.int() == second.int()).float().mean() > 0.98


def test_rows_do_not_share_their_draws(write, tmp_path, monkeypatch):
    """Equal rows of text, within a split and across splits, each draw from their own stream."""
    same = Rows(TOKENS[:1].expand(4, -1).contiguous(), torch.ones(4, LENGTH, dtype=torch.uint8))
    monkeypatch.setitem(ROWS, "train", same), monkeypatch.setitem(ROWS, "heldout", same)
    write(tmp_path, dataclasses.replace(SPEC, train_rows=4, heldout_rows=4))
    tails = [load_file(tmp_path / f"{name}-00000.safetensors")["tail"].long() for name in ("shard", "heldout")]
    assert len({tuple(tail.flatten().tolist()) for tail in torch.cat(tails)}) == 8


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(CacheSpec)])
def test_a_different_spec_is_refused_by_field(cache, field):
    value = getattr(SPEC, field)
    other = dataclasses.replace(SPEC, **{field: value + 1 if isinstance(value, int) else "other"})
    with pytest.raises(UserError, match=f"holds another cache: {field} is {value!r}, not "):
        open_cache(cache, other)


def test_the_tensors_of_a_shard_and_their_bytes(whole):
    tensors = load_file(whole / "shard-00000.safetensors")
    assert tensors.keys() == {"tokens", "index", "prob", "tail", "entropy"}
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    assert size == SPEC.bytes_per_position * 4 * LENGTH
    assert 0 < (whole / "shard-00000.safetensors").stat().st_size - size < 600, "the header"
    assert dataclasses.replace(SPEC, k=8, draws=12, vocab=49152).bytes_per_position <= 64
    assert dataclasses.replace(SPEC, k=8, draws=12, vocab=151936).bytes_per_position == 4 * 21 + 2 * 9


# -- faults -----------------------------------------------------------------------------------------------------------
def test_without_preload_a_shard_is_verified_on_first_use(cache):
    (cache / "shard-00001.safetensors").write_bytes(b"")
    dataset = KDCacheDataset(cache, preload=False)
    assert len(dataset[3]["tokens"]) == LENGTH
    with pytest.raises(UserError, match="shard-00001"):
        dataset[4]


def test_a_cache_of_another_tokenizer_is_refused(sharp_cache, tiny_tokenizer):
    assert len(KDCacheDataset(sharp_cache, tokenizer=tokenizer_fingerprint(tiny_tokenizer))) == 40
    assert "another tokenizer" in refused(sharp_cache, tokenizer="other")


def test_a_missing_or_foreign_cache_is_refused(cache, tmp_path):
    assert "no manifest.json" in refused(tmp_path / "none")
    manifest = read_json(cache / "manifest.json")
    write_json(cache / "manifest.json", manifest | {"format": "qat_lora.kd.2"})
    assert "'qat_lora.kd.2'" in refused(cache)
    with pytest.raises(UserError, match="another --cache-dir"):
        open_cache(cache, SPEC)
    write_json(cache / "manifest.json", manifest | {"spec": {"teacher": "t"}})
    assert "damaged" in refused(cache)
    (cache / "manifest.json").write_text("{")
    assert "damaged" in refused(cache)


def test_no_heldout_rows_and_fewer_rows_than_a_batch(write, tmp_path):
    write(tmp_path, dataclasses.replace(SPEC, heldout_rows=0))
    assert "no heldout rows" in refused(tmp_path, split="heldout")
    with pytest.raises(UserError, match="11 training rows are fewer than a batch of 12"):
        next(batches(KDCacheDataset(tmp_path), 12, 1, 0))


# -- workers ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rows_per_shard", [2, 4, 11])
def test_workers_share_the_rows(write, tmp_path, rows_per_shard):
    """Files of two, four or all rows, the last one short: split by file if that drops < 1 row per worker. Training uses
    every row once per epoch, also if updates of 2, 3 or 5 rows do not end with an epoch of 11."""
    write(tmp_path, dataclasses.replace(SPEC, rows_per_shard=rows_per_shard))
    data = KDCacheDataset(tmp_path)
    rows = tokens_of(data)
    files = [rows[start : start + rows_per_shard] for start in range(0, 11, rows_per_shard)]
    for workers in (1, 2, 3, 4, 5):
        shares = [tokens_of(KDCacheDataset(tmp_path, rank=rank, world_size=workers)) for rank in range(workers)]
        by_file = (workers, rows_per_shard) in BY_FILE
        wanted = [[row for file in files[rank::workers] for row in file] for rank in range(workers)]
        wanted = wanted if by_file else [rows[rank::workers] for rank in range(workers)]
        assert shares == [share[: min(map(len, wanted))] for share in wanted], "as many rows for every worker"
        assert 11 - workers < sum(map(len, shares)) <= 11
        streams = [batches(data, 1, 1, seed=0, rank=rank, world_size=workers) for rank in range(workers)]
        seen = [tuple(next(stream)["tokens"][0].tolist()) for _ in range(-(-22 // workers)) for stream in streams]
        assert sorted(seen[:11]) == sorted(seen[11:22]) == sorted(rows)


def test_a_seed_permutes_the_rows(whole):
    plain, first, again, second = (tokens_of(KDCacheDataset(whole, seed=seed)) for seed in (None, 1, 1, 2))
    assert first == again and len({tuple(order) for order in (plain, first, second)}) == 3
    assert sorted(plain) == sorted(first) == sorted(second)
