"""Rows with BOS: every row and document begins with one BOS, which is never a target."""

import itertools
from copy import deepcopy

import pytest
import torch
from tokenizers import processors

from qat_lora.data.chat import Document, documents
from qat_lora.data.options import TextOptions
from qat_lora.data.packing import TextDataset, pack, split_heldout, stream, window_starts
from qat_lora.train.evaluation import counted, windows

BOS, EOS = 1, 2
TEXTS = ["the first of them", "a", "the second is longer than the first one", "x y", "and the last"] * 8
SINGLE = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "It is 4."}]


@pytest.fixture(scope="module")
def gemma_like(tiny_tokenizer):
    """A tokenizer that puts BOS in front of a text: <|pad|>, a token that no text or template contains."""
    tokenizer = deepcopy(tiny_tokenizer)
    tokenizer.bos_token = "<|pad|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", 0)]
    )
    return tokenizer


def plain(texts=TEXTS):
    return [Document(text, None) for text in texts]


@pytest.mark.parametrize("length", [2, 3, 5, 8, 13])
def test_every_row_and_document_begins_with_one_bos(tiny_tokenizer, length):
    rows = pack(plain(), tiny_tokenizer, length, bos=BOS)
    assert (rows.tokens[:, 0] == BOS).all()
    is_bos = rows.tokens == BOS
    assert not (is_bos[:, 1:] & is_bos[:, :-1]).any()
    ends = rows.tokens[:, :-1] == EOS
    assert (ends.any() or length == 2) and (rows.tokens[:, 1:][ends] == BOS).all()
    assert torch.equal(rows.mask == 0, is_bos) and rows.given == BOS


@pytest.mark.parametrize("length", [5, 8, 13])
def test_rows_equal_the_stream_except_for_their_first_token(tiny_tokenizer, length):
    tokens, _ = stream(plain(), tiny_tokenizer, bos=BOS)
    expected = [i for text in TEXTS for i in (BOS, *tiny_tokenizer(text, add_special_tokens=False)["input_ids"], EOS)]
    assert tokens.tolist() == expected
    starts = window_starts(tokens, length, length, BOS)
    rows = pack(plain(), tiny_tokenizer, length, bos=BOS).tokens
    for start, row in zip(starts, rows, strict=True):
        assert row[1:].tolist() == expected[start + 1 : start + length]
    for before, after in itertools.pairwise(starts):  # at most the end of a document is left out in between
        assert after - before == length or (after - before == length + 1 and expected[after] == BOS)


def test_the_bos_option_follows_the_tokenizer_by_default(gemma_like, tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(" ".join(TEXTS))
    begins = {
        bos: bool((TextOptions(dataset=str(path), length=16, bos=bos).rows(gemma_like).tokens[:, 0] == 0).all())
        for bos in ("auto", "on", "off")
    }
    assert begins == {"auto": True, "on": True, "off": False}


@pytest.mark.parametrize("own", [True, False])
def test_a_template_that_writes_bos_gets_no_second_one(gemma_like, own):
    tokenizer = deepcopy(gemma_like)
    tokenizer.chat_template = ("{{ bos_token }}" if own else "") + gemma_like.chat_template.lstrip()
    found = list(documents([{"messages": SINGLE}] * 3, tokenizer, "on"))
    tokens, mask = stream(found, tokenizer, bos=0)
    assert tokens.tolist().count(0) == 3 and tokens[0] == 0
    assert tokenizer.decode(tokens[mask.bool()]) == "It is 4.<|im_end|>" * 3


def test_a_token_that_is_both_bos_and_eos_appears_once_between_documents(tiny_tokenizer):
    tokens, mask = stream(plain(["one", "two"]), tiny_tokenizer, bos=EOS)
    one, two = (tiny_tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("one", "two"))
    assert tokens.tolist() == [EOS, *one, EOS, *two, EOS]
    assert mask.tolist() == [0] + [1] * (len(tokens) - 1)  # the end of a document is a target
    rows = pack(plain(), tiny_tokenizer, 8, bos=EOS)
    assert (rows.tokens[:, 0] == EOS).all() and rows.mask[:, 1:].all() and rows.given is None


@pytest.mark.parametrize("completions_only", [True, False])
def test_bos_is_never_predicted_in_training(gemma_like, completions_only):
    found = [*documents([{"messages": SINGLE}] * 6, gemma_like, "on"), *plain()]
    for rows in split_heldout(pack(found, gemma_like, 16, bos=0), 0.3):
        data = TextDataset(rows, completions_only)
        masks = torch.stack([data[i]["mask"] for i in range(len(data))])
        assert masks.any() and not masks[rows.tokens == 0].any()
        if not completions_only:
            assert masks[rows.tokens != 0].all()


# -- evaluation windows -----------------------------------------------------------------------------------------------
def test_a_blocked_window_is_bos_and_the_tokens_after_it(tiny_tokenizer):
    tokens = torch.tensor([BOS, *range(10, 40)], dtype=torch.int32)
    rows, scored = windows(tokens, 8, 8, bos=BOS)
    assert rows.tolist() == [[BOS, *tokens[s + 1 : s + 8].tolist()] for s in (0, 8, 16)]
    assert scored.tolist() == [7, 7, 7]


@pytest.mark.parametrize("stride", [1, 2, 3, 5, 7])
def test_sliding_windows_score_every_token_of_the_text_once(tiny_tokenizer, stride):
    tokens, _ = stream(plain(), tiny_tokenizer, bos=BOS)
    text = [i for i in tokens.tolist() if i != BOS]
    rows, scored = windows(tokens, 8, stride, bos=BOS)
    assert (rows[:, 0] == BOS).all() and not ((rows[:, 1:] == BOS) & (rows[:, :-1] == BOS)).any()
    said = rows[:, 1:][counted(rows, scored, BOS)].tolist()
    assert said == text[: len(said)] and len(text) - len(said) < stride + 2
