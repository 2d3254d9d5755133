"""Which tokenizers begin a text with BOS, and for which ids a model's embedding has no row."""

import shutil
from copy import deepcopy
from types import SimpleNamespace

import pytest
from tokenizers import processors
from transformers import AutoTokenizer, Gemma3Config, Gemma3TextConfig, LlamaConfig

from qat_lora.errors import UserError
from qat_lora.models.generate import encode_prompt
from qat_lora.models.loading import load_tokenizer
from qat_lora.models.tokens import bos_token, check_ids, check_vocabulary, prompt_ids

MODEL = SimpleNamespace(config=LlamaConfig())
BOS, EOS = 1, 2  # <|im_start|> and <|im_end|> of the tiny tokenizer


def convention(tokenizer, single: str, bos: str | None = "<|im_start|>"):
    """A copy of the tokenizer that puts the tokens in `single`, e.g. "B $A E", around a text ($A)."""
    copy = deepcopy(tokenizer)
    copy.bos_token = bos
    names = {"B": "<|im_start|>", "E": "<|im_end|>", "P": "<|pad|>", "$A": "$A"}
    copy.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=" ".join(names[part] for part in single.split()),
        special_tokens=[("<|im_start|>", BOS), ("<|im_end|>", EOS), ("<|pad|>", 0)],
    )
    return copy


@pytest.mark.parametrize("single, bos, wanted", [
    ("B $A", "<|im_start|>", BOS), ("B $A E", "<|im_start|>", BOS), ("$A E", "<|im_start|>", None),
    ("$A", "<|im_start|>", None), ("P $A E", "<|im_start|>", None), ("B $A E", None, None), ("E $A", "<|im_end|>", EOS),
])  # fmt: skip
def test_auto_follows_the_tokenizer(tiny_tokenizer, single, bos, wanted):
    tokenizer = convention(tiny_tokenizer, single, bos)
    assert bos_token(tokenizer) == wanted
    assert bos_token(tokenizer, "off") is None
    if bos:
        assert bos_token(tokenizer, "on") == tokenizer.bos_token_id


def test_bos_is_refused_for_a_tokenizer_without_it(tiny_tokenizer):
    with pytest.raises(UserError, match="--bos on: the tokenizer has no BOS token"):
        bos_token(tiny_tokenizer, "on")


def test_a_prompt_begins_with_bos_and_does_not_end_with_eos(tiny_tokenizer):
    plain = tiny_tokenizer("some text", add_special_tokens=False)["input_ids"]
    both, end = convention(tiny_tokenizer, "B $A E"), convention(tiny_tokenizer, "$A E")
    assert prompt_ids(both, "some text") == prompt_ids(both, "<|im_start|>some text") == [BOS, *plain]
    assert prompt_ids(end, "some text") == prompt_ids(tiny_tokenizer, "some text") == plain
    encoded = encode_prompt(MODEL, both, "some text", 1, None)
    assert encoded["input_ids"].tolist() == [[BOS, *plain]] and encoded["attention_mask"].all()


@pytest.mark.parametrize("special", [True, False])
def test_ids_beyond_the_embedding_are_refused_at_load(tiny_model_dir, tiny_tokenizer, tmp_path, special):
    grown = deepcopy(tiny_tokenizer)
    grown.add_tokens(["<tool>", "<call>"], special_tokens=special)
    folder = shutil.copytree(tiny_model_dir, tmp_path / "grown")
    grown.save_pretrained(folder)
    with pytest.raises(UserError, match=r"ids up to 513 \('<call>'\), beyond the 512 rows of its embedding; ") as error:
        load_tokenizer(str(folder))
    assert "\n" not in str(error.value)


def test_vocabulary_check_with_padded_embeddings_and_nested_configs(tiny_tokenizer):
    check_vocabulary(tiny_tokenizer, LlamaConfig(vocab_size=600), "m", set())
    for wrap in (lambda text: text, lambda text: Gemma3Config(text_config=text.to_dict())):
        check_vocabulary(tiny_tokenizer, wrap(Gemma3TextConfig(vocab_size=512)), "m", set())
        with pytest.raises(UserError, match=r"ids up to 511 .* beyond the 511 rows"):
            check_vocabulary(tiny_tokenizer, wrap(Gemma3TextConfig(vocab_size=511)), "m", {"the"})


def test_an_image_placeholder_may_be_beyond_the_embedding_but_not_in_a_text(tiny_tokenizer, tmp_path):
    tiny_tokenizer.save_pretrained(tmp_path)
    grown = AutoTokenizer.from_pretrained(tmp_path, extra_special_tokens={"image_token": "<image>"})
    assert grown.convert_tokens_to_ids("<image>") == 512
    check_vocabulary(grown, LlamaConfig(vocab_size=512), "m", {"<image>"})
    check_ids([511], grown)
    with pytest.raises(UserError, match="the text contains '<image>', for which the model has no embedding"):
        encode_prompt(MODEL, grown, "look: <image>", 1, None)
