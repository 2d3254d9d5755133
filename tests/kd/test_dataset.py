"""Targets read from a cache: none before a BOS from packing, none beyond the student's embedding."""

import dataclasses

import pytest
import torch

from qat_lora.data.chat import Document
from qat_lora.data.packing import fingerprint, pack
from qat_lora.errors import UserError
from qat_lora.kd.cache import CacheSpec, edges, open_cache, write_cache
from qat_lora.kd.dataset import KDCacheDataset, clipped, has_next
from qat_lora.kd.training import heldout_figures, kd_loss
from qat_lora.models.loading import load_model
from qat_lora.run.files import read_json, write_json

BOS, EOS, LENGTH = 1, 2, 12
TEXTS = ["the first of them", "a", "the second is longer than the first", "x y", "and the last of all"] * 12


@pytest.fixture(scope="module")
def teacher(sharp_model_dir):
    return load_model(str(sharp_model_dir))


@pytest.fixture(scope="module")
def write(teacher, backend, tiny_tokenizer, tmp_path_factory):
    """write(bos): the folder of a small cache of rows packed with `bos`, and the rows."""

    def make(bos):
        rows = pack([Document(text, None) for text in TEXTS], tiny_tokenizer, LENGTH, 16, bos)
        spec = CacheSpec(
            teacher="t", tokenizer="tok", text=fingerprint(rows), precision="fp32", length=LENGTH, k=4, draws=6,
            vocab=512, seed=0, rows_per_shard=8, train_rows=12, heldout_rows=4, **edges(bos, tiny_tokenizer),
        )  # fmt: skip
        folder = tmp_path_factory.mktemp("cache")
        parts = zip(("train", "heldout"), rows.tokens.split((12, 4)), rows.mask.split((12, 4)))
        split = {name: dataclasses.replace(rows, tokens=tokens, mask=mask) for name, tokens, mask in parts}
        list(write_cache(folder, spec, split, teacher, backend, 4))
        return folder, rows

    return make


# -- BOS --------------------------------------------------------------------------------------------------------------
def test_positions_before_a_bos_have_no_target():
    tokens = torch.tensor([BOS, 7, 8, EOS, BOS, 9, EOS])
    assert has_next(tokens, BOS, EOS).tolist() == [1, 1, 1, 0, 1, 1, 0]
    assert has_next(tokens[:-1], BOS, EOS).tolist() == [1, 1, 1, 0, 1, 1]
    assert has_next(tokens, -1, -1).all() and has_next(tokens, EOS, EOS).all()


def test_a_cache_with_bos_masks_the_ends_of_documents(write):
    folder, rows = write(BOS)
    data = KDCacheDataset(folder)
    assert (data.spec.bos, data.spec.eos) == (BOS, EOS)
    for i in range(len(data)):
        assert torch.equal(data[i]["tokens"], rows.tokens[i].long())
        assert torch.equal(data[i]["mask"], (rows.tokens[i] != EOS).byte())  # after EOS: BOS or the end of the row
        assert data.kept(i) == int(data[i]["mask"].sum())
    assert sum(data.kept(i) for i in range(len(data))) < LENGTH * len(data)


def test_the_heldout_nll_covers_the_text_but_not_bos(write, teacher, backend):
    folder, rows = write(BOS)
    tokens = rows.tokens[12:].long()
    logp = teacher(input_ids=tokens).logits.log_softmax(-1)[:, :-1].gather(2, tokens[:, 1:, None]).squeeze(2)
    figures = heldout_figures(teacher, KDCacheDataset(folder, "heldout"), backend, 2, 4)
    assert figures["heldout_nll"] == pytest.approx(-float(logp[tokens[:, 1:] != BOS].mean().detach()), rel=1e-5)
    assert abs(figures["heldout_kl"]) < 0.01


def test_an_older_cache_without_a_bos_field_has_no_bos(write):
    folder, _ = write(None)
    data = KDCacheDataset(folder)
    manifest = read_json(folder / "manifest.json")
    for name in ("bos", "eos"):
        assert manifest["spec"].pop(name) == -1
    write_json(folder / "manifest.json", manifest)
    old = KDCacheDataset(folder)
    assert old.spec == data.spec and open_cache(folder, data.spec) and old.kept(0) == LENGTH
    assert all(torch.equal(old[0][key], data[0][key]) for key in data[0])
    with pytest.raises(UserError, match=f"bos is -1, not {BOS}"):
        open_cache(folder, dataclasses.replace(data.spec, bos=BOS, eos=EOS, text="another"))


@pytest.mark.parametrize("change", [{"bos": 1}, {"bos": -2, "eos": 2}, {"bos": "on", "eos": 2}, {"begin": 1}])
def test_a_manifest_with_an_invalid_bos_or_eos_is_damaged(write, change):
    folder, _ = write(None)
    manifest = read_json(folder / "manifest.json")
    write_json(folder / "manifest.json", manifest | {"spec": manifest["spec"] | change})
    with pytest.raises(UserError, match=r"manifest\.json is damaged"):
        KDCacheDataset(folder)


# -- an embedding with fewer rows than the teacher's -------------------------------------------------------------------
def targets(probs: torch.Tensor, k: int, draws: int, generator) -> dict:
    """An item whose teacher is `probs` [L, V]: exact top k, and independent draws from the rest."""
    top = probs.topk(k)
    tail = torch.multinomial(probs.scatter(1, top.indices, 0), draws, replacement=True, generator=generator)
    mass = 1 - top.values.sum(1, keepdim=True)
    entropy = -(top.values * top.values.log()).sum(1) - mass[:, 0] * probs.gather(1, tail).log().mean(1)
    index, prob = torch.cat([top.indices, tail], 1), torch.cat([top.values, (mass / draws).expand(-1, draws)], 1)
    return {"index": index, "prob": prob, "mask": torch.ones(len(probs), dtype=torch.uint8), "entropy": entropy}


@pytest.mark.parametrize("place", [0, 19])
def test_targets_beyond_the_embedding_are_dropped_and_the_rest_renormalised(place):
    probs = torch.full((20,), 0.02)
    probs[[3, place]] = torch.tensor([0.34, 0.3])  # place 19 is beyond the embedding and in the top k
    first = targets(probs[None], 4, 6, torch.Generator().manual_seed(0))
    assert clipped(first, 4, 20) is first
    before = first["prob"].clone()
    item = clipped(first, 4, 18)
    assert item["index"].max() < 18 and item["prob"].sum() == pytest.approx(1) and item["mask"].all()
    kept = item["prob"] > 0
    ratio = item["prob"][kept] / before[kept]
    assert torch.allclose(ratio, ratio[0])


def test_the_estimate_of_the_kl_has_little_bias():
    """The mean over many draws is close to the KL over the shared ids; the renormalisation adds about 1%."""
    generator = torch.Generator().manual_seed(0)
    probs = torch.randn(40, generator=generator).mul(1.5).softmax(0)
    vocab = 36
    student = torch.randn(vocab, generator=generator).log_softmax(0)
    common = probs[:vocab] / probs[:vocab].sum()
    kl = (common * (common.log() - student)).sum()
    item = clipped(targets(probs.expand(5000, -1), 6, 24, generator), 6, vocab)
    found = -(item["prob"] * student[item["index"]]).sum(1) - item["entropy"]
    assert float(found.mean()) == pytest.approx(float(kl), rel=0.03)


def test_a_position_that_loses_all_targets_is_masked():
    item = {"index": torch.tensor([[30, 31]]), "prob": torch.tensor([[0.5, 0.5]]), "entropy": torch.tensor([0.7]),
            "mask": torch.ones(1, dtype=torch.uint8)}  # fmt: skip
    item = clipped(item, 1, 20)
    assert not item["mask"].any() and not item["prob"].any() and not item["index"].any() and not item["entropy"].any()


def test_a_smaller_student_learns_from_a_larger_teacher(sharp_cache, sharp_model_dir, backend):
    """500 of the teacher's 512 ids: the loss is finite, every index is valid, and `kept` counts the mask."""
    student = load_model(str(sharp_model_dir))
    student.resize_token_embeddings(500)
    data, whole = KDCacheDataset(sharp_cache, vocab=500), KDCacheDataset(sharp_cache, vocab=512)
    items = [data[i] for i in range(8)]
    assert max(int(item["index"].max()) for item in items) < 500
    assert all(torch.allclose(item["prob"].sum(1), torch.ones(32), atol=1e-3) for item in items)
    assert [data.kept(i) for i in range(8)] == [int(item["mask"].sum()) for item in items]
    assert any(whole[i]["index"].max() >= 500 for i in range(8)) and whole.kept(0) == 32
    batch = {key: torch.stack([item[key] for item in items]) for key in items[0]}
    batch["tokens"] = batch["tokens"].clamp(max=499)
    assert kd_loss(student, batch).isfinite()
