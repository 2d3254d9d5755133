"""Examples for supervised fine-tuning: which tokens are targets, which rows share a group, how rows are packed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qat_lora.data.chat import Document, documents
from qat_lora.data.supervised import (
    Example,
    PackedExamples,
    best_fit,
    checked,
    deduplicated,
    encoded,
    split_by_length,
    split_groups,
    without_figures,
)
from qat_lora.errors import UserError


def example(id: str, *sections: int) -> Example:
    """Tokens 10, 11, … with these sections."""
    return Example(id, np.arange(10, 10 + len(sections), dtype=np.int32), np.array(sections, np.uint8))


def learned(row: dict, tokenizer) -> str:
    """The decoded target tokens of a row."""
    (document,) = documents([row], tokenizer, "off")
    found = encoded("0", document, tokenizer)
    return tokenizer.decode(found.tokens[found.sections > 0])


def turns(*contents: str) -> list[dict]:
    return [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(contents)]


# -- golden masks ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("row, targets", [
    ({"messages": turns("Who?", "He.", "Why?", "So.")}, "He.<|im_end|>So.<|im_end|>"),
    ({"prompt": turns("Who?", "He.", "Why?"), "completion": turns("", "So.")[1:]}, "So.<|im_end|>"),
    ({"prompt": "### Instruction:\nWho?\n\n### Response:\n", "completion": "He."}, "He.<|im_end|>"),
    ({"prompt": "", "completion": "He went home."}, "e went home.<|im_end|>"),  # the first token has no context
])  # fmt: skip
def test_the_targets_are_the_answers_after_the_prompt_and_their_ends(tiny_tokenizer, row, targets):
    assert learned(row, tiny_tokenizer) == targets


def test_an_empty_completion_is_refused(tiny_tokenizer):
    with pytest.raises(UserError, match="row 0: the completion is empty"):
        learned({"prompt": "Who?", "completion": " "}, tiny_tokenizer)
    with pytest.raises(UserError, match="both hold text, or both a list of turns"):
        learned({"prompt": "Who?", "completion": turns("He.")}, tiny_tokenizer)


def test_sections_of_a_document_are_numbered_and_eos_belongs_to_the_last(tiny_tokenizer):
    text = "question: one two three"
    found = encoded("0", Document(text, ((10, 14), (14, 18), (18, 23)), (1, 2, 5)), tiny_tokenizer)
    parts = [tiny_tokenizer.decode(found.tokens[found.sections == n]) for n in (0, 1, 2, 5)]
    assert "".join(parts) == text + "<|im_end|>" and parts[3].endswith("ree<|im_end|>")
    assert parts[0] == "question:" and parts[1].startswith(" one"), "a token in two sections belongs to the first"


def test_the_first_token_of_an_example_is_never_a_target(tiny_tokenizer):
    found = encoded("0", Document("all of it", None), tiny_tokenizer)
    assert found.sections[0] == 0 and found.sections[1:].all()


@pytest.mark.parametrize("turn, words", [
    ("{{ m.content if m.role == 'user' }}", "renders no assistant turn"),
    ("{{ m.role }}: {{ m.content }}<|im_end|>", "does not open an assistant's turn"),
])  # fmt: skip
def test_templates_that_generate_no_assistant_turn_are_refused(turn, words, tiny_tokenizer, monkeypatch):
    monkeypatch.setattr(tiny_tokenizer, "chat_template", f"{{% for m in messages %}}{turn}{{% endfor %}}")
    with pytest.raises(UserError, match=words):
        learned({"messages": turns("Who?", "He.")}, tiny_tokenizer)


def test_a_template_that_does_not_open_a_turn_is_accepted(tiny_tokenizer, monkeypatch):
    """The templates of Mistral and Llama 2 go straight from the end of the question to the answer."""
    turn = "{{ '[' + m.content + ']' if m.role == 'user' else ' ' + m.content + '<|im_end|>' }}"
    monkeypatch.setattr(tiny_tokenizer, "chat_template", f"{{% for m in messages %}}{turn}{{% endfor %}}")
    assert learned({"messages": turns("Who?", "He.")}, tiny_tokenizer).strip() == "He.<|im_end|>"


# -- examples that are left out or held out --------------------------------------------------------------------------
def test_the_error_about_examples_without_targets_lists_their_ids():
    with pytest.raises(UserError, match=r"rows b, c: no target token is left \(all labels masked\)"):
        checked([example("a", 0, 1), example("b", 0, 0), example("c", 0)])


def test_long_examples_are_left_out_rather_than_cut():
    short, long = split_by_length([example("a", 0, 1), example("b", 0, 1, 1)], 2)
    assert [e.id for e in short] == ["a"] and [e.id for e in long] == ["b"] and len(long[0].tokens) == 3
    with pytest.raises(UserError, match=r"rows b, up to 3 tokens.*raise --length, e.g. to 3"):
        split_by_length([example("b", 0, 1, 1)], 2)


@pytest.mark.parametrize("one, other", [
    ("Due on 3 May 2021?", "due on 12 March 1999"), ("It costs £1,200.50", "it costs £3!"),
    ("1 year and 1 month", "2 years  and 3 months"),
])  # fmt: skip
def test_texts_that_differ_only_in_figures_are_one_group(one, other):
    assert without_figures(one) == without_figures(other)
    assert without_figures(one) != without_figures(one + " or not")


def test_the_first_of_several_duplicates_is_kept():
    rows = [{"n": n, "q": q} for n, q in enumerate("abca")]
    kept, dropped = deduplicated(rows, lambda row: row["q"])
    assert [row["n"] for row in kept] == [0, 1, 2] and [row["n"] for row in dropped] == [3]


@given(st.lists(st.integers(0, 12), min_size=1, max_size=60), st.floats(0.05, 0.9), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_no_group_is_on_both_sides(groups, fraction, seed):
    rows = [{"n": n, "g": str(g)} for n, g in enumerate(groups)]
    if len(set(groups)) == 1:
        with pytest.raises(UserError, match="one group of near-duplicates"):
            split_groups(rows, lambda row: row["g"], fraction, seed)
        return
    train, heldout = split_groups(rows, lambda row: row["g"], fraction, seed)
    assert not {row["g"] for row in train} & {row["g"] for row in heldout}
    assert sorted(row["n"] for row in train + heldout) == list(range(len(rows))) and train and heldout
    assert (train, heldout) == split_groups(rows, lambda row: row["g"], fraction, seed)


def test_a_group_that_is_too_large_is_skipped():
    rows = [{"g": "large"}] * 36 + [{"g": "small"}] * 4
    for seed in range(6):
        assert [len(side) for side in split_groups(rows, lambda row: row["g"], 0.1, seed)] == [36, 4]
        assert [len(side) for side in split_groups(rows, lambda row: row["g"], 0.05, seed)] == [36, 4], "the smallest"


def test_an_invalid_fraction_is_refused():
    with pytest.raises(UserError, match="--heldout-fraction 1"):
        split_groups([{}], str, 1, 0)


# -- packing ---------------------------------------------------------------------------------------------------------
@given(st.lists(st.integers(1, 50), min_size=1, max_size=80), st.integers(50, 120))
@settings(max_examples=100, deadline=None)
def test_every_example_is_packed_once_into_few_rows(lengths, room):
    rows = best_fit(lengths, room)
    assert sorted(n for row in rows for n in row) == list(range(len(lengths)))
    filled = [sum(lengths[n] for n in row) for row in rows]
    assert max(filled) <= room
    assert all(lengths[rows[-1][0]] + other > room for other in filled[:-1]), "a new row only if no other has room"
    assert len(rows) <= 2 * sum(lengths) / room + 1


def test_the_fullest_row_with_room_is_chosen():
    assert best_fit([6, 5, 4, 3], 10) == [[0, 2], [1, 3]]
    assert best_fit([7, 8, 2], 10) == [[1, 2], [0]]


def test_the_tensors_of_a_packed_row():
    packed = PackedExamples([example("a", 0, 1, 2), example("b", 0, 1)], 7, (1.0, 3.0), end=9)
    assert len(packed) == 1 and packed.width == 3 and packed.filled == 5 / 7
    item = packed[0]
    assert item["tokens"].tolist() == [10, 11, 12, 10, 11, 9, 9]
    assert item["segments"].tolist() == [1, 1, 1, 2, 2, 0, 0]
    assert item["positions"].tolist() == [0, 1, 2, 0, 1, 0, 0]
    assert item["places"].tolist() == [1, 2, 4] and item["sections"].tolist() == [1, 2, 1]
    assert item["weights"].tolist() == [1.0, 3.0, 1.0] and packed.kept(0) == 5.0


def test_the_fingerprint_depends_on_tokens_sections_packing_and_weights():
    rows = [example("a", 0, 1, 1), example("b", 0, 1)]
    joined = Example("ab", *(np.concatenate([getattr(row, part) for row in rows]) for part in ("tokens", "sections")))
    unlearned = [rows[0], example("b", 0, 0)]
    made = {"examples": rows, "length": 7, "weights": (1.0,), "end": 9}
    changes = [{"examples": [joined]}, {"examples": unlearned}, {"length": 8}, {"weights": (2.0,)}, {"end": 8}, {}]
    *distinct, again = [PackedExamples(**made | change).fingerprint for change in [{}, *changes]]
    assert len(set(distinct)) == len(distinct) and again == distinct[0]


def test_weights_that_leave_nothing_to_learn_are_refused():
    with pytest.raises(UserError, match="section weights leave nothing"):
        PackedExamples([example("a", 0, 1)], 4, (0.0, 1.0), 9)
