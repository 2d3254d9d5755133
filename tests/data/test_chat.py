"""Chat rows: known formats become messages, and spans cover exactly the completions with their end markers."""

import copy

import pytest

from qat_lora.data.chat import (
    THOUGHTS,
    Document,
    after_thought,
    documents,
    opens_thought,
    render,
    render_chat,
    spoken,
    to_messages,
)
from qat_lora.data.text import END
from qat_lora.errors import UserError

SINGLE = [{"role": "user", "content": "What is 2+2?"}, {"role": "assistant", "content": "It is 4."}]
MORE = [{"role": "user", "content": "And 3+3?"}, {"role": "assistant", "content": "Six "}]
MULTI = [{"role": "system", "content": "Be brief."}, *SINGLE, *MORE]
GREETING = {"role": "assistant", "content": "Hello!"}
NO_THOUGHT = "<think>\n\n</think>\n\n"

# Like Qwen3's: the last turn keeps its thought (or an empty one), earlier turns lose theirs.
FORGETFUL = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{{- '<think>\\n\\n</think>\\n\\n' if loop.last and '</think>' not in message.content }}
{{- message.content if loop.last else message.content.split('</think>')[-1] }}
{%- else %}{{- message.content }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{{- '<think>\\n\\n</think>\\n\\n' if enable_thinking is defined and not enable_thinking }}
{%- endif %}
"""


# Like DeepSeek-R1's and QwQ's: the prompt opens a thought, but rendered answers have none.
OPENING = """
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content.split('</think>')[-1].lstrip() + '<|im_end|>\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n<think>' + gap if add_generation_prompt }}
"""


def with_template(tokenizer, template):
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


@pytest.fixture(scope="module")
def opening(tiny_tokenizer):
    return with_template(tiny_tokenizer, OPENING.replace("gap", repr("\n")))


def completions(document):
    return [document.text[start:end] for start, end in document.spans]


def render_one(messages, tokenizer, thinking):
    (document,) = render_chat(messages, tokenizer, thinking)
    return document


def fault(function, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        function(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("row", [
    {"messages": SINGLE, "text": "ignored"},
    {"conversations": [{"from": "human", "value": "What is 2+2?"}, {"from": "gpt", "value": "It is 4."}]},
    {"conversations": [{"from": "user", "value": "What is 2+2?"}, {"from": "assistant", "value": "It is 4."}]},
    {"instruction": "What is 2+2?", "output": "It is 4."},
    {"instruction": "What is 2+2?", "input": "", "output": "It is 4.", "messages": None},
])  # fmt: skip
def test_known_formats_become_the_same_messages(row):
    assert to_messages(row) == SINGLE


def test_alpaca_input_follows_the_instruction():
    assert to_messages({"instruction": "Add.", "input": "2 and 2", "output": "4"})[0]["content"] == "Add.\n\n2 and 2"


@pytest.mark.parametrize("row, words", [
    ({"prompt": "a", "answer": "b"}, "columns prompt, answer match no known format; known: messages, conver"),
    ({}, "(none)"), ({"messages": [{"role": "user"}]}, "turn 0"),
    ({"messages": "[]oops"}, "contains a str, not a list of turns"),
    ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt"}]}, "turn 1"),
    ({"conversations": [{"from": "robot", "value": "a"}]}, '"robot"'), ({"instruction": 3, "output": "a"}, "turn 0"),
])  # fmt: skip
def test_unknown_or_malformed_rows_are_refused(row, words):
    assert words in fault(to_messages, row)


@pytest.mark.parametrize("messages, expected", [
    (SINGLE, ["It is 4."]), (MULTI, ["It is 4.", "Six "]), (MULTI[:-1], ["It is 4."]),
    ([GREETING, *SINGLE], ["It is 4."]),  # no answer, and no prompt
])  # fmt: skip
@pytest.mark.parametrize("thinking", ["on", "off"])
def test_spans_are_the_completions_with_their_end_marker(tiny_tokenizer, messages, expected, thinking):
    document = render_one(messages, tiny_tokenizer, thinking)
    assert completions(document) == [answer + "<|im_end|>" for answer in expected]
    assert document.text.count("<|im_end|>\n") == len(messages)
    assert (NO_THOUGHT in document.text) == (thinking == "off")


def test_thinking_both_gives_two_renderings_or_one_if_they_are_equal(tiny_tokenizer):
    on, off = render_chat(SINGLE, tiny_tokenizer, "both")
    assert [on] == render_chat(SINGLE, tiny_tokenizer, "on") and [off] == render_chat(SINGLE, tiny_tokenizer, "off")
    indifferent = with_template(tiny_tokenizer, tiny_tokenizer.chat_template.replace("enable_thinking", "ignored"))
    assert len(render_chat(SINGLE, indifferent, "both")) == 1


def test_an_answer_that_the_template_rewrites_later_is_a_text_of_its_own(tiny_tokenizer):
    forgetful = with_template(tiny_tokenizer, FORGETFUL)
    for thinking, thought in (("on", NO_THOUGHT), ("off", "")):
        own, whole = render_chat(MULTI, forgetful, thinking)
        assert [own] == render_chat(MULTI[:3], forgetful, thinking)
        assert completions(own) == [thought + "It is 4.<|im_end|>"]
        assert completions(whole) == [thought + "Six <|im_end|>"] and whole.text == render(MULTI, forgetful, True)
    thought = [*MULTI[:-1], {"role": "assistant", "content": "<think>\n3+3\n</think>\n\nSix"}]
    assert completions(render_chat(thought, forgetful, "on")[-1]) == ["<think>\n3+3\n</think>\n\nSix<|im_end|>"]
    assert "continuation of its own generation prompt" in fault(render_chat, thought, forgetful, "off")
    # One text, two prompts: the completion with thinking on includes the one with thinking off.
    assert render_chat(MULTI, forgetful, "both") == render_chat(MULTI, forgetful, "on")


def test_a_template_without_an_end_marker_keeps_the_separator(tiny_tokenizer):
    turns = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    bare = with_template(tiny_tokenizer, turns + "{{ 'assistant: ' if add_generation_prompt }}")
    assert completions(render_one(SINGLE, bare, "on")) == ["It is 4.\n"]


@pytest.mark.parametrize("template, messages, words", [
    (None, SINGLE, "no chat template"),
    ("{{ messages[-1].content }}", SINGLE, "continuation of its own generation prompt"),
    ("{{ raise_exception('system role not supported') }}", SINGLE, "system role not supported"),
    ("{{ messages }}", SINGLE[:1], "no assistant turn"), ("{{ messages }}", [], "no messages"),
])  # fmt: skip
def test_conversations_that_cannot_be_rendered_are_refused(tiny_tokenizer, template, messages, words):
    assert words in fault(render_chat, messages, with_template(tiny_tokenizer, template), "on")


@pytest.mark.parametrize("row, words", [
    ({"text": None}, 'column "text" contains a NoneType'), ({"other": 1}, "columns other match no"),
    ({"messages": SINGLE[:1]}, "no assistant turn"), ({"text": "half \ud800"}, "not valid Unicode at character 5"),
])  # fmt: skip
def test_the_error_names_the_bad_row(tiny_tokenizer, row, words):
    rows = documents([{"text": "plain 😀"}, row], tiny_tokenizer, "on")
    assert next(rows) == Document("plain 😀", None)
    said = fault(next, rows)
    assert said.startswith("row 1: ") and words in said


# -- templates that open a thought -----------------------------------------------------------------------------------
@pytest.mark.parametrize("gap", ["", "\n"])
@pytest.mark.parametrize("thinking", ["on", "off", "both"])
def test_an_opened_thought_is_closed_before_the_answer(tiny_tokenizer, gap, thinking):
    tokenizer = with_template(tiny_tokenizer, OPENING.replace("gap", repr(gap)))
    document = render_one(SINGLE, tokenizer, thinking)
    prompt = render(SINGLE[:1], tokenizer, False, prompt=True)
    assert document.text == prompt + ("" if gap else "\n") + "\n</think>\n\nIt is 4.<|im_end|>\n"
    assert document.text[: document.spans[0][0]] == prompt and completions(document)[0].endswith("It is 4.<|im_end|>")
    assert after_thought(completions(document)[0].removesuffix("<|im_end|>"), True) == "It is 4."


@pytest.mark.parametrize("opened", ["\\n<think>\\n\\n", "<think>\\n\\n</think>\\n\\n", "\\n<think></think>"])
def test_other_ways_to_open_a_thought(tiny_tokenizer, opened):
    tokenizer = with_template(tiny_tokenizer, OPENING.replace("<think>' + gap", f"{opened}'"))
    document = render_one(SINGLE, tokenizer, "off")
    prompt = render(SINGLE[:1], tokenizer, False, prompt=True)
    assert document.text.startswith(prompt) and document.spans[0][0] == len(prompt)
    answer = completions(document)[0].removesuffix("<|im_end|>")
    assert opens_thought(tokenizer, False) == ("</think>" not in opened)
    assert after_thought(answer, opens_thought(tokenizer, False)) == "It is 4."
    assert document.text.count("<think>") == document.text.count("</think>") == 1


@pytest.mark.parametrize("opening, closing", THOUGHTS.items())
@pytest.mark.parametrize("special", [False, True])
def test_the_marks_of_a_thought_are_found_even_as_special_tokens(tiny_tokenizer, opening, closing, special):
    tokenizer = with_template(tiny_tokenizer, OPENING.replace("<think>' + gap", f"{opening}'"))
    tokenizer.add_tokens([opening, closing], special_tokens=special)
    assert opens_thought(tokenizer, False)
    for said, opened, answer in [
        (f"{opening}Two{closing} 4<|im_end|>", False, "4"), (f"Two{closing} 4", True, "4"), (f"{opening}Two", False, "")
    ]:  # fmt: skip
        ids = tokenizer(said, add_special_tokens=False)["input_ids"]
        assert after_thought(tokenizer.decode(spoken(tokenizer, ids)), opened) == answer


@pytest.mark.parametrize("said, opened, answer", [
    ("Two twos.</think> 4", True, "4"), ("Two twos.", True, ""), ("<think>\nTwo", False, ""), ("4", False, "4"),
    ("<think>Two</think>\n\n4", False, "4"), ("", True, ""),
])  # fmt: skip
def test_a_thought_that_was_cut_off_gives_no_answer(said, opened, answer):
    assert after_thought(said, opened) == answer


@pytest.mark.parametrize("thinking", ["on", "off"])
def test_turns_after_the_last_answer_are_left_out_if_the_template_rewrites_it(opening, thinking):
    assert render_one([*SINGLE, MORE[0]], opening, thinking) == render_one(SINGLE, opening, thinking)


def test_a_separator_splits_the_texts_of_a_row(tiny_tokenizer):
    rows = [{"text": f"one{END} two\n{END}{END}"}, {"text": " as it stands "}, {"text": END}]
    assert [document.text for document in documents(rows, tiny_tokenizer, "on")] == ["one", "two", " as it stands "]


@pytest.mark.parametrize("answer", [
    {"role": "assistant", "content": "<think>\nTwo twos.\n</think>\n\nIt is 4."},
    {"role": "assistant", "content": "It is 4.", "reasoning_content": "Two twos."},
])  # fmt: skip
def test_a_thought_that_the_template_drops_is_put_back(opening, answer):
    put_back = "Two twos.\n</think>\n\nIt is 4.<|im_end|>"
    assert completions(render_one([SINGLE[0], answer], opening, "on")) == [put_back]


def test_every_of_several_turns_continues_its_prompt(opening):
    found = [completions(document) for document in render_chat(MULTI, opening, "off")]
    assert found == [["\n</think>\n\nIt is 4.<|im_end|>"], ["\n</think>\n\nSix <|im_end|>"]]
