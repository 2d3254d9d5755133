"""Packing: every token appears once and in order, the mask selects the completions, held-out rows are separate."""

import itertools
import json
import logging
from copy import deepcopy
from itertools import islice
from pydoc_data.topics import topics

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import CTRLTokenizer, PreTrainedTokenizerFast

from qat_lora.data import packing
from qat_lora.data.chat import Document, documents
from qat_lora.data.packing import Rows, fingerprint, pack, split_heldout, tokenizer_fingerprint
from qat_lora.data.text import read_rows
from qat_lora.errors import UserError

EOS = "<|im_end|>"
SINGLE = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "It is 4, naïve 🙂."}]
MULTI = [*SINGLE, {"role": "user", "content": "And 3+3?"}, {"role": "assistant", "content": "Six"}]


def rows_of(count, length=4):
    tokens = torch.arange(count * length, dtype=torch.int32).reshape(count, length)
    return Rows(tokens, torch.ones(count, length, dtype=torch.uint8))


def pack_whole(found, tokenizer):
    """All tokens of the documents as ids and mask [T]. Rows of 2 drop at most one token, of the extra last document."""
    rows = pack([*found, Document("!", None)], tokenizer, 2)
    return rows.tokens.flatten().tolist(), rows.mask.flatten().tolist()


def learned_runs(ids, mask, tokenizer):
    """The decoded text of each run of tokens with mask 1."""
    runs = itertools.groupby(zip(ids, mask), key=lambda pair: pair[1])
    return [tokenizer.decode([token for token, _ in run]) for value, run in runs if value]


def test_every_token_appears_once_and_in_order(tiny_tokenizer):
    texts = [row["text"] for row in islice(read_rows("embedded"), 20)]
    expected = []
    for text in texts:
        expected += [*tiny_tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], 2]
    rows = pack([Document(text, None) for text in texts], tiny_tokenizer, 64)
    assert rows.tokens.shape == (len(expected) // 64, 64)
    assert rows.tokens.flatten().tolist() == expected[: len(expected) // 64 * 64]
    assert rows.mask.all() and rows.given is None
    assert rows.tokens.dtype == torch.int32 and rows.mask.dtype == torch.uint8


def test_blank_documents_add_nothing(tiny_tokenizer):
    alone, blank = Document("a b", None), Document("", None)
    assert pack_whole([alone], tiny_tokenizer) == pack_whole([blank, alone, blank], tiny_tokenizer)


@pytest.mark.parametrize("thinking", ["on", "off"])
@pytest.mark.parametrize("row, answers", [
    ({"messages": SINGLE}, ["It is 4, naïve 🙂."]), ({"messages": MULTI}, ["It is 4, naïve 🙂.", "Six"]),
    ({"instruction": "Add.", "input": "2 and 2", "output": "4"}, ["4"]),
])  # fmt: skip
def test_the_mask_selects_the_completions_and_their_eos(tiny_tokenizer, row, answers, thinking):
    ids, mask = pack_whole(documents([row], tiny_tokenizer, thinking), tiny_tokenizer)
    assert learned_runs(ids, mask, tiny_tokenizer)[:-1] == [answer + EOS for answer in answers]


def test_chat_gets_no_second_eos(tiny_tokenizer):
    (document,) = documents([{"messages": SINGLE}], tiny_tokenizer, "on")
    ids, _ = pack_whole([document], tiny_tokenizer)
    text = tiny_tokenizer.decode(ids)
    assert text.startswith(document.text) and text[len(document.text) :] in ("!", "!" + EOS)


@pytest.mark.parametrize(
    "document, learned", [(Document("u: hi\na: yes\n", ((9, 13),)), 1), (Document("a: yes\nu: bye\n", ((3, 7),)), 0)]
)
def test_eos_added_to_chat_is_a_target_if_the_last_turn_is_the_assistants(tiny_tokenizer, document, learned):
    ids, mask = pack_whole([document], tiny_tokenizer)
    end = ids.index(tiny_tokenizer.eos_token_id)
    assert tiny_tokenizer.decode(ids[:end]) == document.text and mask[end] == learned


def test_a_token_that_straddles_the_start_of_a_span_is_a_target(tiny_tokenizer):
    text = "say: the"
    assert tiny_tokenizer(text, return_offsets_mapping=True)["offset_mapping"][-1] == (4, 8)  # " the" is one token
    ids, mask = pack_whole([Document(text, ((5, 8),))], tiny_tokenizer)
    assert learned_runs(ids, mask, tiny_tokenizer)[0].startswith(" the" + EOS)


@pytest.mark.parametrize("bos", [None, 1])
def test_max_rows_stops_reading_an_endless_source(tiny_tokenizer, bos):
    endless = (Document(f"text {n}", None) for n in itertools.count())
    assert pack(endless, tiny_tokenizer, 16, max_rows=3, bos=bos).tokens.shape == (3, 16)
    assert int(next(endless).text.split()[1]) < 48


def test_a_text_longer_than_the_models_context_packs_without_a_warning(tiny_tokenizer, caplog, recwarn, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)  # otherwise caplog records nothing
    monkeypatch.setattr(tiny_tokenizer, "deprecation_warnings", {})  # otherwise a tokenizer warns only once
    assert len(pack([Document("All work and no play. " * 500, None)], tiny_tokenizer, 1024)) > 2
    assert not caplog.records and not recwarn.list


def test_the_error_for_too_little_text_names_both_numbers(tiny_tokenizer):
    with pytest.raises(UserError, match=r"has 2 tokens, too few for a row of 128; lower --length or add text"):
        pack([Document("a", None)], tiny_tokenizer, 128)
    with pytest.raises(UserError, match=r"has 0 tokens"):
        pack([], tiny_tokenizer, 128)


@pytest.mark.parametrize("fraction, held", [(0, 0), (0.001, 1), (0.2, 2), (0.5, 5)])
def test_split_holds_out_the_last_rows(fraction, held):
    train, heldout = split_heldout(rows_of(10), fraction)
    assert (len(train), len(heldout)) == (10 - held, held)
    assert torch.equal(torch.cat([train.tokens, heldout.tokens]), rows_of(10).tokens)
    assert not set(train.tokens.flatten().tolist()) & set(heldout.tokens.flatten().tolist())


@pytest.mark.parametrize("count, fraction, words", [(1, 0.1, "1 of 1"), (2, 0.9, "2 of 2")])
def test_invalid_splits_are_refused(count, fraction, words):
    with pytest.raises(UserError, match=words):
        split_heldout(rows_of(count), fraction)


def test_fingerprint_depends_on_content_shape_and_mask():
    rows = rows_of(4)
    distinct = [rows, rows_of(2, 8), rows_of(3), Rows(rows.tokens, rows.mask * 0), split_heldout(rows, 0)[1]]
    assert len({fingerprint(each) for each in distinct}) == len(distinct)
    assert fingerprint(rows) == fingerprint(rows_of(4))
    strided = (rows.tokens[:, ::2], rows.mask[:, ::2])
    assert fingerprint(Rows(*strided)) == fingerprint(Rows(*(part.contiguous() for part in strided)))


def test_fingerprints_are_the_same_in_every_process():
    """A cache records them, so these values must never change."""
    assert fingerprint(rows_of(2)) == "4c3cd7b391dff580ac63787c730f8f75ffb56df5a17f06943ace5ea7e51544b3"
    letters = Tokenizer(models.BPE({"<e>": 0, "b": 1, "a": 2}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=letters, eos_token="<e>")
    assert tokenizer_fingerprint(tokenizer) == "f71d72888f201d9acdc1ce7c3dd8b02f0f39cb149eac9899420d0f44e81c8c14"


def test_tokenizer_fingerprint_depends_on_ids_only(tiny_tokenizer):
    expected, changed, grown = tokenizer_fingerprint(tiny_tokenizer), deepcopy(tiny_tokenizer), deepcopy(tiny_tokenizer)
    changed.chat_template = None
    changed.pad_token = changed.eos_token
    assert tokenizer_fingerprint(changed) == expected
    changed.eos_token = "<|im_start|>"
    grown.add_tokens(["<tool>"])
    assert expected not in (tokenizer_fingerprint(changed), tokenizer_fingerprint(grown))


@pytest.mark.parametrize("change", [
    lambda backend: setattr(backend, "normalizer", normalizers.Lowercase()),
    lambda backend: setattr(backend, "pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)),
    lambda backend: setattr(backend, "post_processor", processors.ByteLevel(trim_offsets=False)),
    lambda backend: setattr(backend.model, "ignore_merges", True),
    lambda backend: setattr(backend, "model", without_last_merge(backend)),
    lambda backend: backend.enable_truncation(4) or backend.enable_padding(),  # of one call
])  # fmt: skip
def test_tokenizer_fingerprint_covers_the_whole_pipeline(tiny_tokenizer, change):
    changed = deepcopy(tiny_tokenizer)
    change(changed.backend_tokenizer)
    same = changed.backend_tokenizer.padding is not None
    assert (tokenizer_fingerprint(changed) == tokenizer_fingerprint(tiny_tokenizer)) is same


def without_last_merge(backend) -> models.BPE:
    held = json.loads(backend.to_str())["model"]
    return models.BPE(held["vocab"], [tuple(pair) for pair in held["merges"][:-1]])


def test_tokenizer_fingerprint_of_a_slow_tokenizer(tmp_path):
    """One whose rules are in the files of its vocabulary."""
    marks = set()
    for merges in ("a b", "b a"):
        (tmp_path / "vocab.json").write_text('{"<s>": 0, "a": 1, "b": 2, "ab": 3, "ba": 4}')
        (tmp_path / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
        files = (str(tmp_path / name) for name in ("vocab.json", "merges.txt"))
        marks.add(tokenizer_fingerprint(CTRLTokenizer(*files, unk_token="<s>")))
    assert len(marks) == 2


# -- long texts --------------------------------------------------------------------------------------------------------
def spaced(tokenizer):
    """The tokenizer with a space put in front of every text, as SentencePiece does."""
    changed = deepcopy(tokenizer)
    changed.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return changed


@pytest.mark.parametrize("change", [deepcopy, spaced])
@pytest.mark.parametrize("text", [
    "\n".join(topics[name] for name in sorted(topics)[:12]), "naïve 🙂 一二三 " * 3000,
    "1234567 " * 40 + "3" * 9000 + " end", "word" * 5000, " " * 9000 + "x" + "\n" * 5000, "a  b\r\n\t" * 4000,
], ids=["topics", "unicode", "digits", "letters", "spaces", "mixed"])  # fmt: skip
def test_a_long_text_has_the_same_tokens_in_windows(tiny_tokenizer, monkeypatch, change, text):
    tokenizer = change(tiny_tokenizer)
    monkeypatch.setattr(packing, "WINDOW", 3000)
    monkeypatch.setattr(packing, "OVERLAP", 600)
    ids, sections = packing.encode(Document(text, None), tokenizer)
    whole = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    assert ids.tolist() == [*whole, tokenizer.eos_token_id] and sections.all() and len(sections) == len(ids)
    first, _ = packing.encode(Document(text, None), tokenizer, 100)
    assert first[:100].tolist() == whole[:100]


def test_ten_rows_of_a_long_text_do_not_tokenise_all_of_it(tiny_tokenizer, monkeypatch):
    asked = []
    window = packing._window
    monkeypatch.setattr(packing, "_window", lambda *call: asked.append(call[2] - call[1]) or window(*call))
    text = "All work and no play makes Jack a dull boy. " * 500_000  # 22 MB
    rows = pack([Document(text, None)], tiny_tokenizer, 256, max_rows=10)
    assert len(rows) == 10 and sum(asked) <= 3 * packing.WINDOW
    assert torch.equal(rows.tokens, pack([Document(text[:50_000], None)], tiny_tokenizer, 256, max_rows=10).tokens)
