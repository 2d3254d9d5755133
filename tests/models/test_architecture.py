"""Inferring a model's structure: its head, masks, blocks and their parts. Unsupported models are refused."""

import pytest
import torch
import torch.nn.functional as F
import transformers as tf
from torch import nn

from qat_lora.backend import TorchBackend
from qat_lora.errors import UserError
from qat_lora.kernels import tiles
from qat_lora.kernels.head import Head
from qat_lora.models.architecture import decoder_layers, hidden_states, is_recurrent, matrices, packs, part_of
from qat_lora.models.attention import Layout
from qat_lora.models.check import check
from qat_lora.models.head_form import HeadForm, head_form
from qat_lora.quant.blockwise import block_outputs, check_blocks, first_inputs
from qat_lora.quant.student import StudentSpec, head_of, quantize
from qat_lora.rl.rollout import check_answers
from qat_lora.train.language_memory import training_memory
from qat_lora.train.losses import sparse_loss, token_log_probs

SIZE = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
OPT = {"ffn_dim": 64, "word_embed_proj_dim": 32}
GEMMA = {"head_dim": 8, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}


def make(kind: str, **options) -> nn.Module:
    """A random model in which every parameter affects the logits."""
    torch.manual_seed(0)
    config = getattr(tf, f"{kind}Config")(**SIZE | options)
    model = tf.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for p in model.parameters():
        p.data = 0.3 * torch.randn(p.shape) if p.ndim > 1 else p.data + 0.2 * torch.randn(p.shape)
    return model


def tokens(rows: int = 2, length: int = 20) -> torch.Tensor:
    return torch.randint(1, 97, (rows, length), generator=torch.Generator().manual_seed(1))


# -- logits ----------------------------------------------------------------------------------------------------------
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
HEADS = {
    "Llama": ({}, (1.0, 1.0, None)),
    "Gemma2": (GEMMA | {"final_logit_softcapping": 3.0}, (1.0, 1.0, 3.0)),
    "NanoChat": ({"final_logit_softcapping": 2.0}, (1.0, 1.0, 2.0)),
    "Granite": ({"logits_scaling": 8.0}, (1.0, 0.125, None)),  # divides
    "HyperCLOVAX": ({"logits_scaling": 8.0}, (1.0, 8.0, None)),  # multiplies
    "Cohere": ({"logit_scale": 0.25}, (1.0, 0.25, None)),
    "MiniCPM3": (LATENT | {"dim_model_base": 8}, (0.25, 1.0, None)),
    "Phi": ({}, (1.0, 1.0, None)),  # with a bias
}


@pytest.mark.parametrize("kind", HEADS)
def test_logits_equal_the_models_own(kind):
    options, form = HEADS[kind]
    model = make(kind, **options)
    assert head_form(model) == HeadForm(*form, 97)
    with torch.no_grad():
        own, hidden = model(tokens()).logits, hidden_states(model, tokens())
        torch.testing.assert_close(head_of(model).logits(hidden), own, rtol=1e-5, atol=1e-5)
    nll = F.cross_entropy(own[:, :-1].flatten(0, 1), tokens()[:, 1:].flatten())
    labels = tokens()[:, 1:].unsqueeze(2)
    loss = sparse_loss(hidden[:, :-1], head_of(model), labels, torch.ones_like(labels), torch.ones(2, 19))
    assert float(loss.detach()) == pytest.approx(float(nll), rel=1e-5)


def test_head_form_needs_no_weights():
    with torch.device("meta"):
        model = tf.AutoModelForCausalLM.from_config(tf.GraniteConfig(**SIZE, logits_scaling=4.0))
    assert head_form(model) == HeadForm(1.0, 0.25, None, 97)


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("strip", [None, 4])
@pytest.mark.parametrize("trained", [False, True])
def test_head_gradients_equal_autograd(cap, with_bias, strip, trained, monkeypatch, kernels):
    if strip:  # so that the vocabulary is cut into strips
        monkeypatch.setattr(tiles, "POSITIONS", 6)
        monkeypatch.setattr(tiles, "STRIP_BYTES", 4 * 6 * strip)
    random = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(shape, generator=random) for shape in ((3, 5, 8), (11, 8), (11,)))
    index, prob = torch.randint(0, 11, (3, 5, 4), generator=random), torch.rand(3, 5, 4, generator=random).softmax(-1)
    found = []
    for dense in (True, False):
        given = [hidden.clone().requires_grad_(), *(t.clone().requires_grad_(trained) for t in (weight, bias))]
        head = Head(given[1], given[2] if with_bias else None, 0.5, 3.0, cap)
        if dense:
            target = torch.zeros(3, 5, 11).scatter_add(-1, index, prob)
            loss = -(target * head.logits(given[0]).log_softmax(-1)).sum(-1).mean()
        else:
            loss = sparse_loss(given[0], head, index, prob, torch.ones(3, 5))
        loss.backward()
        found.append([loss.detach(), *(tensor.grad for tensor in given if tensor.grad is not None)])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_head_log_probabilities_equal_autograd(temperature, trained):
    random = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(6, 8, generator=random), torch.randn(11, 8, generator=random)
    chosen, found = torch.randint(0, 11, (6,), generator=random), []
    for dense in (True, False):
        given, w, bias = hidden.clone().requires_grad_(), weight.clone(), torch.arange(11.0)
        head = Head(w.requires_grad_(trained), bias.requires_grad_(trained), 0.5, 2.0, 4.0)
        logp = (head.logits(given) / temperature).log_softmax(1).gather(1, chosen.unsqueeze(1)).squeeze(1)
        logp = logp if dense else token_log_probs(given, head, chosen, temperature)
        (logp * torch.arange(6.0)).sum().backward()
        found.append((logp.detach(), given.grad, *((w.grad, bias.grad) if trained else ())))
    torch.testing.assert_close(*found)


# -- masks -----------------------------------------------------------------------------------------------------------
WINDOWED = {
    "Mistral": {"sliding_window": 4},
    "Gemma3Text": GEMMA,
    "Gemma2": GEMMA,
    "GptOss": GEMMA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Llama4Text": {"attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 64, "head_dim": 8},
}


@pytest.mark.parametrize("kind", WINDOWED)
def test_windows_apply_under_every_mask(kind):
    """A plain row, an explicit mask, packed rows (examples together and one by one), and a padded prompt."""
    options = WINDOWED[kind]
    model = make(kind, **options)
    check(model)
    assert packs(model) == (kind != "Llama4Text")
    whole, parts = tokens(1, 20), (9, 11)
    with torch.no_grad():
        own = model(whole).logits
        texts = [model(part).logits for part in whole.split(parts, 1)]

        def logits(layout=None):
            return head_of(model).logits(hidden_states(model, whole, layout))

        torch.testing.assert_close(logits(), own, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits(Layout.causal(20, whole.device)), own, rtol=1e-4, atol=1e-4)
        segments = torch.tensor([[1] * parts[0] + [2] * parts[1]])
        positions = torch.cat([torch.arange(part) for part in parts]).unsqueeze(0)
        for one_by_one in (False, True):
            packed = logits(Layout.packed(segments, positions, one_by_one))
            torch.testing.assert_close(packed, torch.cat(texts, 1), rtol=1e-4, atol=1e-4)
        unlimited = make(kind, **options | {"sliding_window": 64, "attention_chunk_size": 64})
        assert not torch.allclose(unlimited(whole).logits, own, atol=1e-2), "the window must matter"
    check_answers(model, False)


def test_masks_at_the_same_address_are_not_confused():
    """A model may make several masks in turn, each at the memory address of the previous one."""
    positions = torch.arange(8).unsqueeze(0)
    layout = Layout.packed(torch.zeros_like(positions), positions, True)
    for window in (8, 2) * 20:
        mask = layout.mask(lambda batch, head, q, k, window=window: q - k < window)
        assert layout.is_plain(mask) == layout.is_plain(mask) == (window == 8)
        del mask
    assert not layout.plain


# -- blocks ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "kind, options",
    [("Gemma3Text", GEMMA), ("Mixtral", {"num_local_experts": 4}), ("OPT", OPT), ("GPTNeoX", {}), ("Bloom", {})],
)
def test_running_block_by_block_equals_the_model(kind, options):
    """Each block gets its own mask and rotary embedding."""
    model, backend = make(kind, **options), TorchBackend("cpu", "fp32")
    layers, seen = decoder_layers(model), []
    last = layers[-1].register_forward_hook(lambda _, args, out: seen.append(out if torch.is_tensor(out) else out[0]))
    model(tokens())
    last.remove()
    hidden, calls = first_inputs(model, [{"tokens": tokens()}, {"tokens": tokens() + 0}], backend)
    for index, layer in enumerate(layers):
        hidden = block_outputs(layer, hidden, calls[index], backend)
    torch.testing.assert_close(hidden[0], seen[0].detach(), rtol=1e-5, atol=1e-5)


def test_blocks_that_need_more_than_hidden_states_are_refused():
    model = make("Llama")
    layers = decoder_layers(model)

    class Coupled(type(layers[1])):
        def forward(self, hidden, *args, **kwargs):
            return super().forward(hidden, *args, **kwargs | {"attention_mask": None})

    class Coupling(type(model.model)):
        """The second block also gets the output of the first."""

        def forward(self, *args, **kwargs):
            with first.register_forward_hook(lambda _, args, out: seen.append(out)):
                return super().forward(*args, **kwargs)

    seen, first = [], layers[0]
    layers[1].register_forward_pre_hook(lambda _, args, kwargs: (args, kwargs | {"last": seen[-1]}), with_kwargs=True)
    layers[1].__class__, model.model.__class__ = Coupled, Coupling
    with pytest.raises(UserError, match="'llama' cannot be trained block by block: the arguments of a block"):
        check_blocks(model)


@pytest.mark.parametrize(("kind", "options", "parts"), [
    ("Llama", {}, {"self_attn.q_proj": "attn", "mlp.gate_proj": "mlp"}),
    ("OPT", OPT, {"self_attn.out_proj": "attn", "fc1": "mlp"}),
    ("GPTNeoX", {}, {"attention.query_key_value": "attn", "mlp.dense_4h_to_h": "mlp"}),
    ("Lfm2", {"layer_types": ["conv", "full_attention"]}, {"conv.in_proj": "attn", "feed_forward.w1": "mlp"}),
])  # fmt: skip
def test_parts_are_inferred_from_structure(kind, options, parts):
    block = decoder_layers(make(kind, **options))[0]
    found = {matrix.path: matrix.part for matrix in matrices(block)}
    assert parts.items() <= found.items()
    assert {name: part_of(block, f"{name}.weight") for name in parts} == parts


def test_experts_are_found_and_routers_are_left_alone():
    for kind, transposed in (("Mixtral", False), ("GptOss", True)):
        block = decoder_layers(make(kind, num_local_experts=4, head_dim=8))[0]
        found = {f"{m.path}.{m.name}": (m.shape, m.transposed) for m in matrices(block) if m.is_experts}
        shapes = {"gate_up_proj": (4, 128, 32), "down_proj": (4, 32, 64)}
        assert found == {f"mlp.experts.{name}": (shape, transposed) for name, shape in shapes.items()}
        assert not any("router" in m.path or "gate" in m.path.split(".") for m in matrices(block))


# -- refusals --------------------------------------------------------------------------------------------------------
def test_recurrent_models_do_not_pack():
    model = make("Qwen3_5Text", head_dim=8, layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2,
                 linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8)  # fmt: skip
    assert is_recurrent(model) and not packs(model)
    check(model)
    check_answers(model, False)
    with pytest.raises(UserError, match="'qwen3_5_text' carries a state from token to token, so on XLA"):
        check_answers(model, True)


class Shifted(tf.LlamaForCausalLM):
    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits.roll(1, -1)
        return out


class Doubled(tf.LlamaForCausalLM):
    def forward(self, input_ids=None, **kwargs):
        return super().forward(inputs_embeds=2 * self.get_input_embeddings()(input_ids), **kwargs)


@pytest.mark.parametrize(("changed", "words"), [
    (Shifted, r"\(Shifted\) is not supported: it computes logits"),
    (Doubled, "logits computed here differ from transformers' by"),
])  # fmt: skip
def test_a_forward_that_changes_logits_or_embeddings_is_refused(changed, words):
    model = make("Llama")
    model.__class__ = changed
    with pytest.raises(UserError, match=f"model type 'llama' .*{words}"):
        check(model)


# -- size ------------------------------------------------------------------------------------------------------------
def test_a_quantised_model_has_the_activation_memory_of_the_plain_one():
    model = make("Llama")
    before = training_memory(model, 2, 8, False, False)["activations"]
    assert before == training_memory(quantize(model, StudentSpec()), 2, 8, False, False)["activations"] > 0
