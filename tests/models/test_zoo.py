"""Every causal-LM config class of transformers: our logits equal its own, or the model is refused in one line."""

import copy

import pytest
import torch
from torch import Tensor
from zoo import VOCAB, config, model, names

from qat_lora.errors import UserError
from qat_lora.models.architecture import hidden_states, packs
from qat_lora.models.attention import Layout
from qat_lora.models.check import CHECKED, check
from qat_lora.quant.student import head_of
from qat_lora.train.language_memory import cache_memory

CLOSE = 1e-5  # relative to the largest logit
LENGTH = 24  # three windows, and longer than the texts of the check at load
NOT_CAUSAL = "its logits depend on later tokens"
REASONS = {
    "layers of its own between the last hidden states and the LM head": """
        bert big_bird camembert data2vec-text electra ernie megatron-bert modernbert-decoder roberta
        roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod""",
    "its logits cannot be computed from its last hidden states alone": "prophetnet rembert",
    "it fails with an explicit mask": "blt",
    NOT_CAUSAL: "cpmant xlnet",
}
REFUSED = {name: reason for reason, types in REASONS.items() for name in types.split()}
# Models that cannot keep the examples of a packed row apart, because they carry a state from token to token, or make
# their own positions or masks.
ALONE = """
    afmoe axk2 bailing_hybrid bamba bart bigbird_pegasus blenderbot blenderbot-small deepseek_v32 deepseek_v4 doge
    dots3_note dots3_note_text falcon falcon_h1 falcon_mamba glm_moe_dsa granitemoehybrid
    inkling2_text inkling_text jamba kimi_linear lfm2 lfm2_moe lfm3 llama4 llama4_text mamba mamba2 marian mbart
    minimax mvp nemotron_h olmo_hybrid openai-gpt pegasus plbart qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text
    qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma reformer rwkv trocr xlm xlstm zamba zamba2 zaya
"""
BLOWN_UP = "hrm_text"  # amplifies fp32 rounding, so its check depends on the CPU in fp32, but not in fp64
# One of each kind that test_architecture.py lacks, for `make test`; `make test-zoo` tests all.
FEW = ["bert", "cohere2", "falcon_h1", "gemma4_text", "mixtral", "phi3", "qwen3_moe", "qwen3_next"]


def assert_ours_are_its_own(made) -> None:
    """Compare plain rows, rows with an explicit mask (as on XLA) and, if they can be kept apart, two texts in one
    row."""
    tokens = torch.randint(1, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    assert LENGTH > CHECKED
    rows = [(None, tokens), (Layout.causal(LENGTH, tokens.device), tokens)]
    if packs(made):
        positions = torch.arange(LENGTH).repeat(1, 2)
        segments = torch.arange(2).repeat_interleave(LENGTH).unsqueeze(0)
        rows += [(Layout.packed(segments, positions, one), tokens.view(1, -1)) for one in (False, True)]
    with torch.no_grad():
        own = made(input_ids=tokens, use_cache=False).logits
        assert own.isfinite().all() and own.std() > 0.05
        if max(gaps(made, rows, own)) < CLOSE:
            return
        made.double()  # random weights can amplify fp32 rounding beyond CLOSE
        assert max(gaps(made, rows, made(input_ids=tokens, use_cache=False).logits)) < CLOSE / 10


def gaps(made, rows: list, own: Tensor) -> list[float]:
    """The largest difference of our logits for rows (layout, tokens) from the model's own, relative to the largest
    logit."""
    ours = [head_of(made).logits(hidden_states(made, tokens, layout)).view(own.shape) for layout, tokens in rows]
    return [((logits - own).abs().max() / own.abs().max()).item() for logits in ours]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in FEW else pytest.mark.zoo) for name in names()])
def test_logits_equal_the_models_own_or_the_model_is_refused_in_one_line(name):
    made = model(name)
    if name not in REFUSED:
        check(made)
        measured = made
        if name == BLOWN_UP:
            check(measured := copy.deepcopy(made).double())
        assert packs(measured) == (name not in ALONE.split())
        assert cache_memory(made, 2, LENGTH, True) > 0
        return assert_ours_are_its_own(made)
    with pytest.raises(UserError) as refusal:
        check(made)
    said = str(refusal.value)
    assert len(said.splitlines()) == 1 and repr(made.config.model_type) in said and REFUSED[name] in said


@pytest.mark.zoo
@pytest.mark.parametrize("name", sorted(set(names()) - REFUSED.keys() - {"dbrx"}))  # dbrx is never tied
def test_logits_equal_the_models_own_with_the_opposite_head_tying(name):
    made = model(name, tie_word_embeddings=not getattr(config(name), "tie_word_embeddings", False))
    check(made)
    assert_ours_are_its_own(made)


@pytest.mark.parametrize(
    "name, fields", [("bert", {"is_decoder": False}), ("gemma3_text", {"use_bidirectional_attention": True})]
)
def test_a_model_that_sees_later_tokens_is_refused(name, fields):
    with pytest.raises(UserError, match=NOT_CAUSAL):
        check(model(name, **fields))


def test_the_lists_name_only_existing_model_types():
    assert {*REFUSED, *ALONE.split(), *FEW} <= set(names())
    assert len(names()) > 170
