"""The KD cache: the same bytes after any interruption, an error for any fault, equal shares for workers."""

import dataclasses
import shutil

import pytest
import torch
from safetensors.torch import load_file

from qat_lora.backend import TorchBackend
from qat_lora.data.batches import batches
from qat_lora.data.packing import Rows, tokenizer_fingerprint
from qat_lora.errors import UserError
from qat_lora.kd.cache import CacheSpec, open_cache, write_cache
from qat_lora.kd.dataset import KDCacheDataset
from qat_lora.kd.training import kd_loss
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
V1_IDS = torch.arange(1, 37, dtype=torch.int32).view(6, 6)  # 6 rows of 6 tokens
V1_LENGTHS = (6, 4, 6, 2, 5, 6)
BY_FILE = {(1, 2), (1, 4), (2, 2), (3, 2), (3, 4), (4, 2), (5, 2)}  # (workers, rows a file)


@pytest.fixture(scope="module")
def teacher(sharp_model_dir):
    return load_model(str(sharp_model_dir))


@pytest.fixture(scope="module")
def write(teacher):
    """write(folder, spec, stop): write a cache of ROWS, stopping after `stop` batches."""

    def run(folder, spec=SPEC, stop=None, batch_size=3):
        for count, _ in enumerate(write_cache(folder, spec, ROWS, teacher, TorchBackend("cpu", "fp32"), batch_size)):
            if count + 1 == stop:
                return
        return

    return run


@pytest.fixture(scope="module")
def whole(write, tmp_path_factory):
    """A finished cache. Do not write to it."""
    folder = tmp_path_factory.mktemp("whole")
    write(folder)
    return folder


@pytest.fixture
def cache(whole, tmp_path):
    """A copy of it that tests may damage."""
    return shutil.copytree(whole, tmp_path / "cache")


@pytest.fixture
def v1(tmp_path):
    """Two shards of the original project: 6 rows of 6 tokens, some of which end in padding."""
    random = torch.Generator().manual_seed(2)
    (tmp_path / "meta.json").write_text('{"model": "m"}')
    for number, rows in enumerate((range(4), range(4, 6))):
        attention = torch.stack([torch.arange(6) < V1_LENGTHS[row] for row in rows]).to(torch.uint8)
        index = torch.randint(0, 512, (len(rows), 5, 3), generator=random, dtype=torch.int32)
        logits = torch.randn(len(rows), 5, 3, generator=random).half()
        shard = {"input_ids": V1_IDS[rows.start : rows.stop], "attention_mask": attention}
        torch.save(shard | {"topk_idx": index, "topk_logits": logits}, tmp_path / f"shard_{number:05d}.pt")
    return tmp_path


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
def test_rows_come_back_with_their_targets(whole, teacher):
    dataset = KDCacheDataset(whole)
    assert len(dataset) == 11 and dataset.length == LENGTH
    assert tokens_of(dataset) == [tuple(row) for row in TOKENS[:11].tolist()]
    with torch.no_grad():
        teacher_prob = teacher(TOKENS[:11].long()).logits.softmax(-1)
    for i in (0, 5, 10):
        item, wanted = dataset[i], teacher_prob[i].topk(K)
        assert item["index"].shape == item["prob"].shape == (LENGTH, K + DRAWS)
        assert torch.equal(item["index"][:, :K], wanted.indices)
        torch.testing.assert_close(item["prob"][:, :K], wanted.values, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(item["prob"].sum(1), torch.ones(LENGTH), rtol=0, atol=1e-3)
        assert item["mask"].all() and item["mask"].dtype == torch.uint8 and item["tokens"].dtype == torch.int64
        assert (item["prob"][:, K:] == item["prob"][:, K:].amax(1, keepdim=True)).all(), "all draws have equal weight"


def test_tail_draws_are_systematic_and_differ_by_position(whole, teacher):
    dataset, differ = KDCacheDataset(whole), set()
    with torch.no_grad():
        prob = teacher(TOKENS[:11].long()).logits.softmax(-1)
    for i in range(11):
        top, tail = dataset[i]["index"].split([K, DRAWS], dim=1)
        rest = prob[i].scatter(1, top, 0)
        counts = torch.zeros_like(rest).scatter_add_(1, tail, torch.ones(tail.shape))
        assert (counts - DRAWS * rest / rest.sum(1, keepdim=True)).abs().max() < 1 + 1e-3
        differ |= {tuple(row) for row in tail.tolist()}
    assert len(differ) == 11 * LENGTH


def test_heldout_rows_are_never_training_rows(whole):
    train, heldout = (tokens_of(KDCacheDataset(whole, split)) for split in ("train", "heldout"))
    assert heldout == [tuple(row) for row in TOKENS[11:].tolist()] and not set(train) & set(heldout)


@pytest.mark.parametrize("stop", [1, 2, 3, 4, 5, 6])
def test_an_interrupted_cache_ends_with_the_same_bytes(write, whole, tmp_path, stop):
    write(tmp_path, stop=stop)
    assert bytes_of(tmp_path) != bytes_of(whole)
    write(tmp_path)
    assert bytes_of(tmp_path) == bytes_of(whole)


def test_a_finished_cache_is_left_alone(whole, write):
    before = {path: path.stat().st_mtime_ns for path in whole.iterdir()}
    write(whole)
    assert {path: path.stat().st_mtime_ns for path in whole.iterdir()} == before


@pytest.mark.parametrize("damage", ["deleted", "truncated", "flipped"])
def test_a_missing_or_damaged_shard_is_written_again(cache, whole, write, damage):
    path = cache / "shard-00001.safetensors"
    data = path.read_bytes()
    path.unlink()
    if damage != "deleted":
        path.write_bytes(data[:-1] if damage == "truncated" else data[:-1] + bytes([data[-1] ^ 1]))
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


def test_rows_do_not_share_their_draws(write, tmp_path):
    """Equal rows of text, within a split and across splits, each draw from their own stream."""
    same = Rows(TOKENS[:1].expand(4, -1).contiguous(), torch.ones(4, LENGTH, dtype=torch.uint8))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ROWS, "train", same), patch.setitem(ROWS, "heldout", same)
        write(tmp_path, dataclasses.replace(SPEC, train_rows=4, heldout_rows=4))
    tails = [load_file(tmp_path / f"{name}-00000.safetensors")["tail"].long() for name in ("shard", "heldout")]
    assert len({tuple(tail.flatten().tolist()) for tail in torch.cat(tails)}) == 8


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(CacheSpec)])
def test_a_different_spec_is_refused_by_field(cache, field):
    value = getattr(SPEC, field)
    other = dataclasses.replace(SPEC, **{field: value + 1 if isinstance(value, int) else "other"})
    with pytest.raises(UserError, match=f"holds another cache: {field} is {value!r}, not "):
        open_cache(cache, other)


def test_bytes_per_position(whole):
    tensors = load_file(whole / "shard-00000.safetensors")
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    assert size == SPEC.bytes_per_position * 4 * LENGTH
    assert 0 < (whole / "shard-00000.safetensors").stat().st_size - size < 600, "the header"
    assert dataclasses.replace(SPEC, k=8, draws=12, vocab=49152).bytes_per_position <= 64
    assert dataclasses.replace(SPEC, k=8, draws=12, vocab=151936).bytes_per_position == 4 * 21 + 2 * 9


# -- faults -----------------------------------------------------------------------------------------------------------
def test_a_damaged_shard_is_named(cache):
    path = cache / "shard-00001.safetensors"
    content = path.read_bytes()
    for bad in (content[:-1], content[:100], b"", content[:-9] + bytes([content[-9] ^ 1]) + content[-8:]):
        path.write_bytes(bad)
        assert "shard-00001.safetensors is damaged" in refused(cache)
    path.unlink()
    assert "shard-00001.safetensors is missing" in refused(cache)


def test_without_preload_a_shard_is_verified_on_first_use(cache):
    (cache / "shard-00001.safetensors").write_bytes(b"")
    dataset = KDCacheDataset(cache, preload=False)
    assert len(dataset[3]["tokens"]) == LENGTH
    with pytest.raises(UserError, match="shard-00001"):
        dataset[4]


def test_a_cache_of_another_tokenizer_is_refused(sharp_cache, tiny_tokenizer):
    assert len(KDCacheDataset(sharp_cache, tokenizer=tokenizer_fingerprint(tiny_tokenizer))) == 40
    assert "another tokenizer" in refused(sharp_cache, tokenizer="other")


@pytest.mark.parametrize("stop", [1, 5])
def test_an_unfinished_cache_is_refused(write, tmp_path, stop):
    write(tmp_path, stop=stop)
    assert ("unfinished" if stop == 5 else "no manifest.json") in refused(tmp_path)


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
@pytest.mark.parametrize("rows_per_shard", [2, 4])
@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5])
def test_workers_share_the_rows(write, tmp_path, workers, rows_per_shard):
    """Six files of two rows, or three of four, the last one short: split by file if that drops < 1 row per worker."""
    write(tmp_path, dataclasses.replace(SPEC, rows_per_shard=rows_per_shard))
    rows = tokens_of(KDCacheDataset(tmp_path))
    files = [rows[start : start + rows_per_shard] for start in range(0, 11, rows_per_shard)]
    shares = [tokens_of(KDCacheDataset(tmp_path, rank=rank, world_size=workers)) for rank in range(workers)]
    together = [row for share in shares for row in share]
    assert len(set(together)) == len(together) and set(together) <= set(rows)
    wanted = [[row for file in files[rank::workers] for row in file] for rank in range(workers)]
    if (workers, rows_per_shard) not in BY_FILE:
        wanted = [rows[rank::workers] for rank in range(workers)]
    assert shares == [share[: min(map(len, wanted))] for share in wanted], "the same number of rows for every worker"
    assert len(rows) - len(together) < workers


@pytest.mark.parametrize("rows_per_shard", [4, 11])
@pytest.mark.parametrize("workers", [2, 3, 5])
def test_training_uses_every_row_once_per_epoch(write, tmp_path, workers, rows_per_shard):
    """Three uneven files, or a single one: 11 rows in updates of 2, 3 or 5, so that no update ends with an epoch."""
    write(tmp_path, dataclasses.replace(SPEC, rows_per_shard=rows_per_shard))
    data = KDCacheDataset(tmp_path)
    streams = [batches(data, 1, 1, seed=0, rank=rank, world_size=workers) for rank in range(workers)]
    seen = [tuple(next(stream)["tokens"][0].tolist()) for _ in range(-(-22 // workers)) for stream in streams]
    for epoch in (seen[:11], seen[11:22]):
        assert sorted(epoch) == sorted(map(tuple, tokens_of(data)))


def test_a_seed_permutes_the_rows(whole):
    plain, first, again, second = (tokens_of(KDCacheDataset(whole, seed=seed)) for seed in (None, 1, 1, 2))
    assert first == again and len({tuple(order) for order in (plain, first, second)}) == 3
    assert sorted(plain) == sorted(first) == sorted(second)


# -- the original project's shards ------------------------------------------------------------------------------------
def test_v1_shards_are_read(v1):
    dataset = KDCacheDataset(v1)
    raw = torch.load(v1 / "shard_00001.pt", weights_only=True)
    assert dataset.length == 6
    item = dataset[4]
    assert torch.equal(item["tokens"], raw["input_ids"][0].long())
    assert torch.equal(item["index"][:5], raw["topk_idx"][0].long())
    torch.testing.assert_close(item["prob"][:5], raw["topk_logits"][0].float().softmax(-1))
    torch.testing.assert_close(item["entropy"][:5], torch.distributions.Categorical(item["prob"][:5]).entropy())


def test_v1_padding_and_last_positions_have_no_target(v1, teacher):
    """The original's distillation loss had no mask, so it learned padding as text."""
    items = [item for split in ("train", "heldout") for item in KDCacheDataset(v1, split)]
    assert [item["mask"].tolist() for item in items] == [[1] * (n - 1) + [0] * (7 - n) for n in V1_LENGTHS]
    batch = {key: torch.stack([item[key] for item in items]) for key in items[0]}
    changed = {key: value.clone() for key, value in batch.items()}
    changed["prob"][batch["mask"] == 0] = 1.0
    changed["index"][batch["mask"] == 0] = 99
    assert torch.equal(kd_loss(teacher, batch), kd_loss(teacher, changed))


@pytest.mark.parametrize("workers", [1, 2])
def test_v1_rows_are_never_both_training_and_held_out(v1, workers):
    """The original evaluated on its training shards. Its format has no others, so a tenth of the rows is held out."""
    shares = [tokens_of(KDCacheDataset(v1, "train", rank=rank, world_size=workers)) for rank in range(workers)]
    train, heldout = [row for share in shares for row in share], tokens_of(KDCacheDataset(v1, "heldout"))
    rows = [tuple(row) for row in V1_IDS.tolist()]
    assert heldout == rows[5:] and set(train) <= set(rows[:5]) and len(train) == len(set(train)) >= 4


def test_a_damaged_v1_shard_is_named(v1):
    (v1 / "shard_00001.pt").write_bytes((v1 / "shard_00001.pt").read_bytes()[:300])
    assert "shard_00001.pt is damaged" in refused(v1)
