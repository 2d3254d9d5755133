"""Recovery LoRA: the student is unchanged, gradients reach the adapter in every block, and its file keeps alpha."""

import dataclasses
import itertools
import json

import pytest
import torch
from loops import train_recovery_lora
from peft.tuners.lora import LoraLayer

from qat_lora.data.batches import batches
from qat_lora.data.packing import Rows, TextDataset
from qat_lora.errors import UserError
from qat_lora.kd.anchor import Anchor
from qat_lora.kd.training import heldout_figures
from qat_lora.lora.adapter import Dropout, load_adapter, save_adapter
from qat_lora.lora.add import add_adapter, fit_to_error, low_rank
from qat_lora.lora.targets import PROJECTIONS
from qat_lora.models.loading import load_model
from qat_lora.quant.linear import quantized_layers
from qat_lora.quant.student import load_student
from qat_lora.run.files import sha256
from qat_lora.train.evaluation import text_figures
from qat_lora.train.loop import Plan

PLAN = Plan(steps=5, batch_size=4, accumulation=1, learning_rate=1e-2, warmup_steps=1, clip_grad_norm=1.0, seed=0)
ALL_BUT_K = tuple(p for p in PROJECTIONS if p != "k")


@pytest.fixture(scope="module")
def student_path(make_student, sharp_model_dir):
    return make_student(sharp_model_dir)


@pytest.fixture
def new_model(student_path):
    """new_model(rank, alpha, projections, seed): the frozen student with a fresh adapter."""

    def make(rank=4, alpha=4, projections=ALL_BUT_K, seed=0):
        return add_adapter(load_student(student_path)[0], rank, alpha, projections, seed)

    return make


@pytest.fixture
def train(new_model, make_session, data, backend):
    """train(plan, mode, anchor, train, name): (model, lines of metrics.jsonl)."""

    def run(plan=PLAN, mode="kd", anchor=None, train=data[0], name="run"):
        model, session = new_model(), make_session(name, backend)
        session.anchor = anchor
        train_recovery_lora(model, train, mode, plan, session, lambda step: {})
        return model, [line for line in session.run.metrics() if "loss" in line]

    return run


def lora_of(model, part=""):
    return {name: p for name, p in model.named_parameters() if f"lora_{part}" in name}


# -- initialisation ----------------------------------------------------------------------------------------------------
def test_low_rank_is_optimal_under_the_moment():
    torch.manual_seed(0)
    error, x = torch.randn(12, 20), torch.randn(300, 20) @ torch.randn(20, 20)
    moment = x.T @ x / len(x)

    def lost(left):
        return ((error - left) @ x.T).square().mean().item()

    b, a = low_rank(error, moment, 3)
    u, s, vh = torch.linalg.svd(error @ x.T, full_matrices=False)
    assert lost(b @ a) == pytest.approx(float(s[3:].square().sum()) / (12 * 300), rel=1e-3), "Eckart–Young"
    u, s, vh = torch.linalg.svd(error)
    assert lost(b @ a) < 0.95 * lost((u[:, :3] * s[:3]) @ vh[:3]), "the plain SVD ignores the inputs"
    b, a = low_rank(error, moment, 12)
    torch.testing.assert_close(b @ a, error, rtol=1e-2, atol=1e-2)


@torch.no_grad()
def test_an_adapter_fitted_to_the_error_starts_closer_to_the_teacher(new_model, sharp_model_dir, data, backend):
    base, calibration, kl = load_model(str(sharp_model_dir)), list(itertools.islice(batches(data[0], 4, 1, 0), 8)), []
    for rank in (0, 2, 16):
        model = new_model(rank or 1, 3)
        if rank:
            fit_to_error(model, base, calibration, "fp32")
        kl.append(heldout_figures(model, data[1], backend, 4, 8)["heldout_kl"])
    assert kl[2] < kl[1] < kl[0]


# -- the adapter ------------------------------------------------------------------------------------------------------
@torch.no_grad()
def test_a_new_adapter_changes_nothing(new_model, student_path):
    tokens = torch.arange(1, 41).reshape(2, 20)
    assert torch.equal(new_model()(tokens).logits, load_student(student_path)[0](tokens).logits)


def test_only_the_adapter_is_trainable(new_model):
    model = new_model()
    assert {n for n, p in model.named_parameters() if p.requires_grad} == lora_of(model).keys()
    outputs = 128 + 96 + 128 + 3 * (64 + 128)  # q, v and o; gate, up and down: in + out features
    assert len(lora_of(model)) == 2 * 2 * 6 and sum(p.numel() for p in lora_of(model).values()) == 2 * 4 * outputs


@pytest.mark.parametrize("projections", [("q", "qkv"), ("",), (), ("experts",)])
def test_unknown_targets_are_refused(new_model, projections):
    with pytest.raises(UserError, match=r"choose from q,k,v,o,gate,up,down,attn,mlp,all$"):
        new_model(projections=projections)


def test_initial_values_depend_only_on_the_seed(new_model):
    torch.manual_seed(5)
    first, state = lora_of(new_model(seed=1), "A"), torch.get_rng_state()
    torch.rand(100)
    again, other = lora_of(new_model(seed=1), "A"), lora_of(new_model(seed=2), "A")
    torch.manual_seed(5)
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left alone"
    for name, p in first.items():
        assert torch.equal(p, again[name]) and not torch.equal(p, other[name])


# -- training ---------------------------------------------------------------------------------------------------------
def test_it_recovers_in_every_block_and_leaves_the_student_unchanged(train, new_model, student_path, data, backend):
    """The original's base path was detached, so blocks below the last got no gradient."""
    model, lines = train(dataclasses.replace(PLAN, steps=30))
    kl = [line["kl"] for line in lines]
    assert sum(kl[-10:]) < 0.85 * sum(kl[:10])
    first = lora_of(new_model())
    assert not any(torch.equal(p, first[name]) for name, p in lora_of(model).items())
    student = load_student(student_path)[0]
    before, after = (heldout_figures(m, data[1], backend, 4, 8)["heldout_kl"] for m in (student, model))
    assert after < 0.95 * before
    below = {n.replace("base_model.model.", "").replace("base_layer.", ""): p for n, p in model.named_parameters()}
    for name, p in student.named_parameters():
        assert torch.equal(below[name], p), name
    codes = [layer.quantizer.codes for layer in quantized_layers(model).values()]
    assert all(torch.equal(c, layer.quantizer.codes) for c, layer in zip(codes, quantized_layers(student).values()))


def test_accumulation_equals_one_large_batch_with_an_anchor(train, data):
    _, whole = train(anchor=Anchor(data[1], 2.0))
    _, parts = train(dataclasses.replace(PLAN, batch_size=2, accumulation=2), anchor=Anchor(data[1], 2.0), name="parts")
    for one, other in zip(whole, parts):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-3)
        assert other["anchor_kl"] == pytest.approx(one["anchor_kl"], rel=1e-2)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=2e-2)
        assert other["lr"] == one["lr"]


def test_completions_only_ignores_prompt_and_padding(train, new_model):
    """Changing masked tokens that no target position sees does not change loss or gradient."""
    tokens = torch.randint(1, 512, (4, 16), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    mask = torch.zeros(4, 16, dtype=torch.uint8)
    mask[:, 5:9] = 1
    padded = tokens.clone()
    padded[:, 9:] = 0
    sets = [TextDataset(Rows(t, mask), completions_only=True) for t in (tokens, padded)]
    lines = [train(mode="sft", train=s, name=str(i))[1] for i, s in enumerate(sets)]
    for one, other in zip(*lines):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
    item = TextDataset(Rows(tokens, mask.fill_(1)), completions_only=True)[0]
    assert item["mask"].tolist() == [0] + [1] * 15 and mask.all(), "a row's first token has nothing before it"
    everything = TextDataset(Rows(tokens, torch.zeros_like(mask)), completions_only=False)[0]
    assert everything["mask"].tolist() == [0] + [1] * 15


# -- the anchor -------------------------------------------------------------------------------------------------------
def test_the_anchor_keeps_the_model_close_to_the_teacher(train, backend, data):
    """The same updates on noise with and without an anchor: with it, the KL to the cached teacher rises less."""
    tokens = torch.randint(1, 512, (8, 32), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    noise = TextDataset(Rows(tokens, torch.ones(8, 32, dtype=torch.uint8)), completions_only=False)
    before = heldout_figures(train(dataclasses.replace(PLAN, steps=0))[0], data[1], backend, 4, 16)["heldout_kl"]

    def risen(weight):
        anchor = Anchor(data[0], weight) if weight else None
        model, _ = train(dataclasses.replace(PLAN, steps=10), "recover", anchor, noise, name=str(weight))
        return heldout_figures(model, data[1], backend, 4, 16)["heldout_kl"] - before

    assert risen(10.0) < 0.5 * risen(0.0)


# -- the file ---------------------------------------------------------------------------------------------------------
def test_a_saved_adapter_measures_the_same(student_path, data, backend, tmp_path):
    """The original's perplexity ignored the saved alpha. Here alpha is 8 times the rank and must be applied."""
    model = add_adapter(load_student(student_path)[0], 2, 16, ("q", "down"), 0)
    for p in lora_of(model, "B").values():
        p.data.normal_(generator=torch.Generator().manual_seed(0)).mul_(0.02)
    save_adapter(model, tmp_path / "adapter", sha256(student_path))
    loaded = load_adapter(load_student(student_path)[0], tmp_path / "adapter", student_path)
    figures = [heldout_figures(m, data[1], backend, 4, 8) for m in (model, loaded)]
    assert figures[0] == figures[1]
    tokens = torch.arange(1, 33).repeat(2, 1)
    texts = [text_figures(m, tokens, torch.tensor([31, 31]), backend) for m in (model, loaded)]
    assert texts[0] == texts[1]
    adapted = [module for module in model.modules() if isinstance(module, LoraLayer)]
    assert [module.scaling["default"] for module in adapted] == [8] * 4
    for module in adapted:
        module.scaling["default"] = 1.0
    assert heldout_figures(model, data[1], backend, 4, 8)["heldout_kl"] != figures[1]["heldout_kl"]


def test_an_adapter_of_another_student_or_with_changes_is_refused(student_path, new_model, tmp_path):
    """Either would load and give plausible figures."""
    folder, student = tmp_path / "adapter", load_student(student_path)[0]
    save_adapter(new_model(), folder, sha256(student_path))
    other = tmp_path / "other.pt"
    other.write_bytes(student_path.read_bytes() + b" ")
    for checkpoint, reason in ((other, "another student"), (None, "quantised student")):
        with pytest.raises(UserError, match=f"{reason}.*--checkpoint"):
            load_adapter(student, folder, checkpoint)
    config = folder / "adapter_config.json"
    config.write_text(config.read_text().replace('"lora_alpha": ', '"lora_alpha": 1'))
    with pytest.raises(UserError, match="has changed since training"):
        load_adapter(student, folder, student_path)


def test_the_config_of_an_adapter_does_not_depend_on_the_order_of_sets(new_model, tmp_path):
    save_adapter(new_model(), tmp_path / "adapter", "s")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert len(config["target_modules"]) > 1 and config["target_modules"] == sorted(config["target_modules"])
    assert list(config) == sorted(config)


def test_a_folder_is_replaced_as_a_whole(new_model, tmp_path):
    folder = tmp_path / "adapter"
    save_adapter(new_model(rank=2), folder, "s")
    (folder / "stale").write_text("")
    save_adapter(new_model(rank=4), folder, "s")
    assert not (folder / "stale").exists() and {path.name for path in tmp_path.iterdir()} == {"adapter"}
    with pytest.raises(UserError, match="could not be written"):
        save_adapter(new_model(), tmp_path / "adapter" / "adapter_config.json" / "deeper", "s")


def test_a_resumed_run_equals_an_uninterrupted_one(new_model, make_session, data, backend, train, dies_at):
    whole, lines = train(name="whole")
    with dies_at(4):
        train_recovery_lora(new_model(), data[0], "kd", PLAN, make_session("run", backend, 2), lambda step: {})
    torch.manual_seed(99)
    resumed, again = train(name="run")
    assert [line["loss"] for line in again] == [line["loss"] for line in lines]
    assert all(torch.equal(p, q) for p, q in zip(resumed.parameters(), whole.parameters()))


def test_dropout_drops_its_share_and_keeps_the_mean():
    torch.manual_seed(0)
    layer, x = Dropout(0.05), torch.ones(333, 1001, requires_grad=True)
    out = layer(x)
    assert float((out == 0).float().mean()) == pytest.approx(0.05, abs=1e-3)
    assert float(out.mean().detach()) == pytest.approx(1, abs=1e-3) and len(out.unique()) == 2
    out.sum().backward()
    assert torch.equal(x.grad, out.detach()), "dropped values get no gradient"
    assert not torch.equal(layer(x), layer(x))
    assert layer.eval()(x) is x or torch.equal(layer(x), x)


def test_rslora_scales_by_the_root_of_the_rank(sharp_model_dir):
    model = add_adapter(load_model(str(sharp_model_dir)), 4, 8, ("q", "down"), 0, rslora=True)
    assert [module.scaling["default"] for module in model.modules() if isinstance(module, LoraLayer)] == [4.0] * 4
