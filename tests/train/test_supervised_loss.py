"""Fine-tuning on packed examples: same loss as unpacked, no leaks between examples, exact weights and accumulation."""

import math

import numpy as np
import pytest
import torch
import transformers as tf

from qat_lora.data.batches import batches
from qat_lora.data.supervised import Example, PackedExamples
from qat_lora.models.architecture import packs
from qat_lora.models.check import check
from qat_lora.models.loading import load_model
from qat_lora.train import supervised
from qat_lora.train.supervised import heldout_sections, packed_loss, packed_states

LENGTHS = (9, 5, 12, 7, 3)
VOCAB = 512


@pytest.fixture(scope="module")
def examples() -> list[Example]:
    """Random tokens; the last two thirds of each example are targets, in two sections."""
    random = np.random.default_rng(0)
    made = []
    for number, length in enumerate(LENGTHS):
        sections = np.zeros(length, np.uint8)
        sections[length // 3 :], sections[-1] = 1, 2
        sections[0] = 0
        made.append(Example(str(number), random.integers(3, VOCAB, length).astype(np.int32), sections))
    return made


@pytest.fixture
def model(sharp_model_dir):
    return load_model(str(sharp_model_dir))


def batch_of(data: PackedExamples, rows=None) -> dict:
    items = [data[row] for row in (range(len(data)) if rows is None else rows)]
    return {name: torch.stack([item[name] for item in items]) for name in items[0]}


def gradients(model, loss) -> dict:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def alone(model, example: Example, weights=(1.0, 1.0)) -> tuple[torch.Tensor, float]:
    """Σ weight·NLL of one example by the model's own forward pass, and the sum of the weights."""
    tokens = torch.from_numpy(example.tokens).long().unsqueeze(0)
    logp = model(input_ids=tokens).logits[0, :-1].log_softmax(-1)
    nll = -logp.gather(1, tokens[0, 1:].unsqueeze(1)).squeeze(1)
    weight = torch.tensor((0.0, *weights))[torch.from_numpy(example.sections[1:]).long()]
    return (nll * weight).sum(), float(weight.sum())


def separate(model, examples, weights) -> torch.Tensor:
    """The loss of separate examples, by the model's own forward pass."""
    parts, counts = zip(*(alone(model, example, weights) for example in examples))
    return sum(parts) / sum(counts)


# -- packed against unpacked -----------------------------------------------------------------------------------------
@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.5, 3.0), (0.0, 1.0)])
def test_packed_loss_and_gradients_equal_those_of_separate_examples(examples, model, weights):
    wanted = separate(model, examples, weights)
    expected = gradients(model, wanted)
    for length in (12, 21, 40):
        loss = packed_loss(model, batch_of(PackedExamples(examples, length, weights, 2)))
        assert loss.item() == pytest.approx(wanted.item(), abs=1e-5)
        torch.testing.assert_close(gradients(model, loss), expected, rtol=0, atol=1e-5)


def test_one_mask_per_row_gives_the_same_gradients(examples, model, monkeypatch):
    """CUDA and XLA use one mask per row; here it runs on the CPU."""
    batch = batch_of(PackedExamples(examples, 21, (1.0, 1.0), 2))
    wanted = gradients(model, packed_loss(model, batch))
    monkeypatch.setattr(supervised, "on_host", lambda _: False)
    torch.testing.assert_close(gradients(model, packed_loss(model, batch)), wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize("masked", [False, True])
def test_an_example_never_attends_to_another(examples, model, masked, monkeypatch):
    """Its hidden states stay bit-identical when all other examples change."""
    data = PackedExamples(examples, 21, (1.0, 1.0), 2)
    batch = batch_of(data)
    if masked:
        monkeypatch.setattr(supervised, "on_host", lambda _: False)
    before, _ = packed_states(model, batch)
    for row in range(len(data)):
        for segment in range(1, int(data.segments[row].max()) + 1):
            own = torch.from_numpy(data.segments[row] == segment)
            changed = batch["tokens"].clone()
            changed[row, ~own] = (changed[row, ~own] + 7) % VOCAB
            after, _ = packed_states(model, batch | {"tokens": changed})
            mine = own[batch["places"][row]] & (batch["sections"][row] > 0)
            assert mine.any()
            assert torch.equal(after[row, mine], before[row, mine])
            others = ~own[batch["places"][row]] & (batch["sections"][row] > 0)
            assert not torch.equal(after[row, others], before[row, others]) or not others.any()


def test_only_the_ratio_of_weights_matters(examples, model):
    found = []
    for size in (1.0, 1e-3):
        data = PackedExamples(examples, 12, (size, 2 * size), 2)
        found.append(float(packed_loss(model, next(batches(data, 2, 1, seed=3))).detach()))
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_accumulation_does_not_change_the_gradient(examples, model):
    """All tokens of an update have the same weight, however they are split into micro-batches."""
    data = PackedExamples(examples * 2, 12, (1.0, 2.0), 2)
    found = []
    for size, accumulation in ((4, 1), (2, 2), (1, 4)):
        stream = batches(data, size, accumulation, seed=3)
        loss = sum(packed_loss(model, next(stream)) for _ in range(accumulation))
        found.append({"loss": loss.detach(), **gradients(model, loss)})
    for parts in found[1:]:
        torch.testing.assert_close(parts, found[0], rtol=0, atol=1e-6)


# -- held-out figures ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("batch_size", [1, 3, 4])
def test_heldout_figures_by_section(examples, model, backend, batch_size):
    data = PackedExamples(examples, 21, (1.0, 1.0), 2)
    assert len(data) % 3
    found = heldout_sections(model, data, backend, batch_size, {"first": 1, "second": 2, "third": 3})
    for name, weights in (("heldout", (1.0, 1.0)), ("first", (1.0, 0.0)), ("second", (0.0, 1.0))):
        with torch.no_grad():
            nll = float(separate(model, examples, weights))
        assert found[f"{name}_nll"] == pytest.approx(nll, rel=1e-5)
        assert found[f"{name}_ppl"] == pytest.approx(math.exp(nll), rel=1e-4)
    assert "third_nll" not in found, "it has no tokens"


# -- other architectures ---------------------------------------------------------------------------------------------
SIZE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
OTHERS = {
    "scaled logits": tf.GraniteConfig(**SIZE, logits_scaling=8.0),
    "a window": tf.MistralConfig(**SIZE, sliding_window=4),
    "windows, a cap": tf.Gemma2Config(**SIZE, sliding_window=4, final_logit_softcapping=3.0),
    "experts": tf.Qwen3MoeConfig(**SIZE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "a state": tf.Qwen3_5TextConfig(
        **SIZE, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=8, linear_value_head_dim=8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", OTHERS)
def test_other_architectures_give_the_loss_of_separate_examples(examples, kind):
    """Examples share a row if the model can keep them apart; otherwise each has its own row."""
    torch.manual_seed(0)
    model = tf.AutoModelForCausalLM.from_config(OTHERS[kind], dtype=torch.float32).eval()
    for p in model.parameters():
        p.data = 0.3 * torch.randn(p.shape) if p.ndim > 1 else p.data + 0.1 * torch.randn(p.shape)
    check(model)
    assert packs(model) == (kind != "a state")
    data = PackedExamples(examples, 24, (1.0, 2.0), 2, together=packs(model))
    assert len(data.rows) < len(examples) or not packs(model)
    wanted = separate(model, examples, (1.0, 2.0))
    expected = gradients(model, wanted)
    loss = packed_loss(model, batch_of(data))
    assert float(loss.detach()) == pytest.approx(float(wanted.detach()), rel=1e-5)
    torch.testing.assert_close(gradients(model, loss), expected, rtol=1e-3, atol=1e-4)
