"""Metadata of GGUF files: row order, tokenizer, and the models that the format cannot describe."""

import json
import shutil

import numpy as np
import pytest
import transformers as tf
from gguf import GGUFReader
from gguf_rows import from_gguf_rows
from packaged import finish
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from qat_lora.errors import UserError
from qat_lora.export import gguf_file as gguf
from qat_lora.export.gguf_file import check_architecture, metadata, model_writer, to_gguf_rows
from qat_lora.models.gguf_settings import frequency_factors, unwritten

FILE = "model.gguf"
SPLIT = next(regex for (regex, _), name in gguf.SPLITS.items() if name == "llama-bpe")
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip


@pytest.fixture
def write(tiny_model_dir, tmp_path):
    """write(tokenizer): the metadata and notes for the tiny model with another tokenizer."""

    def make(tokenizer):
        folder = shutil.copytree(tiny_model_dir, tmp_path / "other")
        for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            (folder / file).unlink(missing_ok=True)
        tokenizer.save_pretrained(folder)
        writer, notes = model_writer(str(folder), 0)
        return metadata(writer), notes

    return make


def bpe(*steps, normalizer=None, **options) -> PreTrainedTokenizerFast:
    """A byte-level BPE of single bytes that splits text by the given steps."""
    vocab = {text: number for number, text in enumerate(["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    made = Tokenizer(models.BPE(vocab, [], **options))
    if normalizer:
        made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.Sequence(list(steps)) if len(steps) > 1 else steps[0]
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>")


def byte_level(**options):
    return pre_tokenizers.ByteLevel(**{"add_prefix_space": False, "use_regex": True} | options)


def split(pattern, how="isolated", **options):
    return pre_tokenizers.Split(Regex(pattern), how, **options)


def test_row_order_survives_the_round_trip():
    rows = np.arange(24).reshape(12, 2)
    assert to_gguf_rows(rows, 2)[:, 0].tolist() == [0, 6, 2, 8, 4, 10, 12, 18, 14, 20, 16, 22]
    assert (from_gguf_rows(to_gguf_rows(rows, 2), 2) == rows).all()
    assert to_gguf_rows(rows, 0) is rows


# -- tokenizer -------------------------------------------------------------------------------------------------------
def test_tokenizer_of_a_folder_is_written_completely(tiny_model_dir, tmp_path, tiny_tokenizer, monkeypatch):
    larger = tf.LlamaConfig.from_pretrained(tiny_model_dir, vocab_size=520)
    monkeypatch.setattr(gguf, "load_config", lambda name: larger)
    writer, notes = model_writer(str(tiny_model_dir), 0)
    assert any('520 tokens, pre-tokenizer "gpt-2"' in note for note in notes)
    size = gguf.file_bytes(writer, [])
    finish(writer, tmp_path / FILE)
    assert (tmp_path / FILE).stat().st_size == size
    values = {key: field.contents() for key, field in GGUFReader(tmp_path / FILE).fields.items()}
    tokens = values["tokenizer.ggml.tokens"]
    assert {text: number for number, text in enumerate(tokens[:512])} == tiny_tokenizer.get_vocab()
    assert tokens[512:] == [f"[PAD{number}]" for number in range(512, 520)]
    assert values["tokenizer.ggml.token_type"] == [3] * 3 + [1] * 509 + [5] * 8
    state = json.loads(tiny_tokenizer.backend_tokenizer.to_str())
    assert values["tokenizer.ggml.merges"] == [" ".join(pair) for pair in state["model"]["merges"]]
    assert values["tokenizer.chat_template"] == tiny_tokenizer.chat_template
    assert (values["tokenizer.ggml.eos_token_id"], values["tokenizer.ggml.add_bos_token"]) == (2, False)
    shape = {"block_count": 2, "rope.dimension_count": 16, "attention.head_count_kv": 2, "embedding_length": 64}
    assert {key: values[f"llama.{key}"] for key in shape} == shape
    assert values["llama.vocab_size"] == 520 and values["llama.rope.freq_base"] == 1e4
    assert values["llama.attention.layer_norm_rms_epsilon"] == np.float32(1e-6)
    read = AutoTokenizer.from_pretrained(tmp_path, gguf_file=FILE)
    for text in ("Assignment statements are used to (re)bind names.", "x = 12345\n\n\tdef f():", "naïve café 東京"):
        assert read(text)["input_ids"] == tiny_tokenizer(text)["input_ids"]


WHOLE = {"ignore_merges": True}  # words of the vocabulary are taken whole, as in Llama 3


@pytest.mark.parametrize(
    "steps, name, options",
    [
        ([byte_level()], "gpt-2", {}),
        ([pre_tokenizers.Digits(individual_digits=True), byte_level()], "smollm", {}),
        ([split(SPLIT), byte_level(use_regex=False)], "llama-bpe", WHOLE),
        ([split(SPLIT), byte_level(use_regex=False)], "smaug-bpe", {}),
        ([split(SPLIT.replace("{1,3}", "")), byte_level(use_regex=False)], "qwen2", {"normalizer": normalizers.NFC()}),
        ([split(SPLIT.replace("{1,3}", "")), byte_level(use_regex=False)], "default", WHOLE),
        ([split(SPLIT), byte_level(use_regex=False)], "default", WHOLE | {"normalizer": normalizers.NFKC()}),
        ([split(SPLIT, "removed"), byte_level(use_regex=False)], "default", WHOLE),
        ([split(SPLIT, invert=True), byte_level(use_regex=False)], "default", WHOLE),
        ([split(SPLIT), byte_level(use_regex=False)], "default", WHOLE | {"continuing_subword_prefix": "#"}),
        ([byte_level()], "default", WHOLE),
        ([byte_level(add_prefix_space=True)], "default", {}),
        ([pre_tokenizers.Digits(individual_digits=False), byte_level()], "default", {}),
        ([split(r"\\w+"), byte_level(use_regex=False)], "default", {}),
        ([split(SPLIT), byte_level()], "default", {}),
    ],
)
def test_pre_tokenizer_is_identified_by_its_whole_pipeline(write, steps, name, options):
    """llama.cpp reads no empty list of merges, so a tokenizer without merges gets one that never occurs."""
    values, notes = write(bpe(*steps, **options))
    assert values["tokenizer.ggml.pre"] == name and values["tokenizer.ggml.merges"] == ["no merges"]
    assert any("compare" in note for note in notes) == (name == "default")
    assert any("NFC" in note for note in notes) == (name == "qwen2")
    assert any("no chat template" in note for note in notes) and "tokenizer.chat_template" not in values


def test_pre_tokenizer_of_qwen(write):
    """The regular expression of transformers' own class, which has no BOS token."""
    vocab = {"a": 0, "b": 1, "ab": 2, "<|endoftext|>": 3}
    values, _ = write(Qwen2Tokenizer(vocab=vocab, merges=[("a", "b")]))
    assert values["tokenizer.ggml.pre"] == "qwen2" and values["tokenizer.ggml.merges"] == ["a b"]
    assert "tokenizer.ggml.bos_token_id" not in values and not values["tokenizer.ggml.add_bos_token"]


def test_tokenizer_of_a_gguf_file_is_copied_unchanged(gguf_file):
    writer, notes = model_writer(str(gguf_file), 2)
    theirs = {key: field.contents() for key, field in GGUFReader(gguf_file).fields.items() if "tokenizer" in key}
    assert {key: value for key, value in metadata(writer).items() if "tokenizer" in key} == theirs
    assert len(theirs) >= 8 and notes == ["tokenizer: copied from sharp.gguf"]


def test_tokenizer_that_is_not_a_byte_level_bpe_is_refused(write):
    words = Tokenizer(models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    with pytest.raises(UserError, match="neither a byte-level BPE"):
        write(PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>"))


# -- models ----------------------------------------------------------------------------------------------------------
def test_a_model_that_llama_cpp_would_run_differently_is_refused(monkeypatch):
    monkeypatch.setattr(gguf, "load_config", lambda name: tf.LlamaConfig(hidden_act="gelu"))
    with pytest.raises(UserError, match=r"model 'm' has hidden_act 'gelu'.*; use --format hf"):
        check_architecture("m")


ROPE = {"rope_type": "default", "rope_theta": 1e4}


def with_rope(**changes):
    """A Llama's config with these settings of its rotary embedding, as they are."""
    config = tf.LlamaConfig()
    config.rope_parameters = ROPE | changes
    return config


@pytest.mark.parametrize(
    "config, words",
    [
        (tf.LlamaConfig(mlp_bias=True), "mlp_bias True"), (tf.LlamaConfig(logits_scaling=8.0), "logits_scaling 8.0"),
        (tf.LlamaConfig(never_heard_of=1), "never_heard_of 1"),
        (with_rope(rope_type="dynamic", factor=2.0), "rope_type 'dynamic'"),
        (with_rope(rope_type="linear"), "factor None"),
        (with_rope(partial_rotary_factor=0.5), "partial_rotary_factor 0.5"),
        (with_rope(rope_type="yarn", factor=4.0, attention_factor=1.5, original_max_position_embeddings=64),
         "attention_factor 1.5"),
        (tf.MistralConfig(), "sliding_window 4096"),  # below its 131072 positions
        (tf.Qwen2Config(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"]), "layer_types"),
        (tf.Qwen3Config(attention_bias=True), "attention_bias True"), (tf.Gemma2Config(), "is a gemma2"),
        (tf.Gemma3TextConfig(attn_logit_softcapping=50.0), "attn_logit_softcapping 50.0"),
        (tf.Gemma3TextConfig(use_bidirectional_attention=True), "use_bidirectional_attention True"),
        (tf.Gemma3TextConfig(hidden_activation="gelu"), "hidden_activation 'gelu'"),
        (tf.Gemma3TextConfig(rope_parameters={"full_attention": ROPE, "sliding_attention": {
            "rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}), "rope_type 'linear'"),
        (tf.Qwen2Config(rope_parameters=LLAMA3), "rope_type 'llama3'"),
        *((getattr(tf, f"{kind}Config")(), None) for kind in ("Llama", "Granite", "Qwen2", "Qwen3", "Gemma3Text")),
        (tf.MistralConfig(sliding_window=None), None),
        (tf.GraniteConfig(logits_scaling=8.0, embedding_multiplier=12.0), None),
        (tf.Qwen2Config(use_sliding_window=False, sliding_window=4096), None),
        (tf.Gemma3TextConfig(query_pre_attn_scalar=168, final_logit_softcapping=30.0, sliding_window=512), None),
    ],
)  # fmt: skip
def test_settings_of_each_model_type(config, words):
    said = unwritten(config)
    assert said is None if words is None else words in said


def test_frequency_factors_of_llama_3():
    """The three bands of the published rule: kept, divided by the factor, and in between."""
    factors = frequency_factors(tf.LlamaConfig(hidden_size=256, num_attention_heads=2, rope_parameters=LLAMA3))
    assert len(factors) == 64 and factors == sorted(factors)
    assert factors[0] == pytest.approx(1, rel=1e-6) and factors[-1] == pytest.approx(8, rel=1e-6)
    assert 1.1 < factors[31] < 7.9
    assert frequency_factors(tf.LlamaConfig()) is None


# -- a SentencePiece tokenizer ---------------------------------------------------------------------------------------
def sentencepiece(merges) -> PreTrainedTokenizerFast:
    characters = ["<eos>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c"]
    texts = [*characters, *dict.fromkeys(a + b for a, b in merges)]
    made = Tokenizer(models.BPE({text: n for n, text in enumerate(texts)}, merges, byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Replace(" ", "▁")
    made.add_special_tokens(["<eos>"])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


def test_sentencepiece_tokenizer_is_written_with_scores(write):
    values, notes = write(sentencepiece([("a", "b"), ("▁", "a"), ("ab", "c"), ("a", "bc"), ("b", "c")]))
    assert (values["tokenizer.ggml.model"], values["tokenizer.ggml.add_space_prefix"]) == ("llama", False)
    score = dict(zip(values["tokenizer.ggml.tokens"], values["tokenizer.ggml.scores"]))
    assert score["ab"] > score["▁a"] > score["abc"] > score["bc"] > score["c"]
    kinds = dict(zip(values["tokenizer.ggml.tokens"], values["tokenizer.ggml.token_type"]))
    assert (kinds["<eos>"], kinds["<0x0A>"], kinds["ab"]) == (3, 6, 1) and "SentencePiece" in notes[0]


@pytest.mark.parametrize(
    "merges",
    [
        [("a", "b"), ("b", "c"), ("ab", "c")],  # "abc" is also a + bc, which is not a merge
        [("a", "b"), ("ab", "c"), ("b", "c"), ("a", "bc")],  # "abc" has two places in the order
    ],
)
def test_tokenizer_that_does_not_merge_by_score_is_refused(write, merges):
    with pytest.raises(UserError, match="does not merge by the score"):
        write(sentencepiece(merges))
