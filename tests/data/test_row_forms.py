"""Chat rows × templates: tokens and targets are those of transformers, or there is one clear refusal."""

import re
from types import SimpleNamespace

import pytest
import row_forms

from qat_lora.data.chat import documents
from qat_lora.errors import ROOT, UserError
from qat_lora.models.generate import end_tokens
from qat_lora.rl.sampler import chat_ids


def test_the_table_in_the_docs_is_up_to_date(tiny_tokenizer):
    """Making it compares every cell with transformers."""
    page = (ROOT / "docs" / "cot-sft.md").read_text(encoding="utf-8")
    written = re.search(r"<!-- row_forms -->\n(.*)\n<!-- /row_forms -->", page, re.DOTALL)[1]
    assert written == row_forms.table(tiny_tokenizer)


@pytest.mark.parametrize("name", row_forms.TEMPLATES)
def test_every_answer_follows_the_tokens_of_its_generation_prompt(tiny_tokenizer, name):
    tokenizer, found = row_forms.tokenizer_for(name, tiny_tokenizer), []
    talk = [row_forms.SYSTEM, *row_forms.TALK]
    for document in documents([{"messages": talk}], tokenizer, "off"):
        ids, sections = row_forms.encode(document, tokenizer)
        starts = [at for at in range(1, len(ids)) if sections[at] and not sections[at - 1]]
        found += [ids[:start].tolist() for start in starts]
        for start in starts:  # the model learns where to stop
            end = next((at for at in range(start, len(ids)) if not sections[at]), len(ids))
            assert ids[end - 1] in tokenizer.all_special_ids or ids[end - 1] in tokenizer.added_tokens_decoder
    asked = [chat_ids(talk[:turn], tokenizer, False) for turn in (2, 4)]
    assert all(prompt in found for prompt in asked) and len(found) == 2


DROPS = (
    "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
)
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.mark.parametrize("template, row, words", [
    (CHATML, {"messages": row_forms.TALK, "tools": row_forms.TOOLS}, 'does not print the column "tools"'),
    (CHATML, {"messages": row_forms.called()}, 'does not print "tool_calls"'),
    (DROPS + "{{ 'assistant:' if add_generation_prompt }}", {"messages": [row_forms.SYSTEM, *row_forms.TALK]},
     "leaves out turn 0 (system)"),
    (CHATML, {"messages": [row_forms.ASK, row_forms.SAY | {"weight": 0.5}]}, '"weight": 0.5; only 0, 1'),
    (CHATML, {"messages": [row_forms.ASK | {"train": True}, row_forms.SAY]}, "only assistant turns can be trained"),
    (CHATML, {"messages": [row_forms.ASK, {"role": "assistant", "content": None}]}, "turn 1 is malformed"),
    (CHATML, {"messages": [row_forms.ASK | {"content": [{"type": "image_url"}]}, row_forms.SAY]}, "type image_url"),
    (CHATML, {"messages": row_forms.TALK, "tools": "[{"}, 'column "tools" is not valid JSON'),
    (CHATML, {"messages": [row_forms.SYSTEM, *row_forms.TALK], "system": "Hi."}, "second system text"),
    (CHATML, {"prompt": "Hi", "completion": "Ho", "system": "Be brief."}, 'column "system" changes nothing'),
    (CHATML, {"instruction": "a", "output": "b", "history": ["c"]}, 'column "history" is not a list of [question'),
])  # fmt: skip
def test_what_cannot_be_rendered_is_refused(tiny_tokenizer, template, row, words):
    tokenizer = row_forms.tokenizer_for("plain", tiny_tokenizer)
    tokenizer.chat_template = template
    with pytest.raises(UserError) as caught:
        list(documents([row], tokenizer, "off"))
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_ignored_is_named_once(tiny_tokenizer, capsys):
    tokenizer = row_forms.tokenizer_for("SmolLM2", tiny_tokenizer)
    rows = [{"messages": row_forms.THOUGHT, "id": 1, "source": "x"}, {"messages": row_forms.TALK, "id": 2, "score": 3}]
    list(documents(rows * 3, tokenizer, "off"))
    assert capsys.readouterr().out.splitlines() == [
        "ignored columns: id, source",
        'ignored, because the chat template does not print it: "reasoning_content" of assistant turns',
        "ignored columns: score",
    ]


def test_a_prompt_that_ends_in_a_space_keeps_its_tokens(tiny_tokenizer):
    (document,) = documents([{"prompt": "Say: ", "completion": "the"}], tiny_tokenizer, "off")
    ids, sections = row_forms.encode(document, tiny_tokenizer)
    asked = tiny_tokenizer("Say: ")["input_ids"]
    assert ids[: len(asked)].tolist() == asked and sections.tolist() == [0] * len(asked) + [1] * (len(ids) - len(asked))
    assert tiny_tokenizer.decode(ids[len(asked) : -1]) == "the"


def test_a_row_without_trained_turns_is_context_only(tiny_tokenizer):
    talk = [row_forms.ASK, row_forms.SAY | {"weight": 0}]
    (document,) = documents([{"messages": talk}], row_forms.tokenizer_for("GLM-4", tiny_tokenizer), "off")
    assert document.spans == () and not row_forms.encode(document, tiny_tokenizer)[1].any()


STOPS = {
    "GLM-4": ["<|user|>", "<|eos|>"], "plain": ["<|eos|>"], "Llama 3": ["<|eot_id|>"], "Gemma 3": ["<end_of_turn>"],
    "Mistral": ["</s>"],
}  # others: <|im_end|>  # fmt: skip


@pytest.mark.parametrize("name", row_forms.TEMPLATES)
def test_generation_stops_where_a_trained_answer_ends(name, tiny_tokenizer):
    tokenizer = row_forms.tokenizer_for(name, tiny_tokenizer)
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None))
    wanted = STOPS.get(name, ["<|im_end|>"])
    assert end_tokens(model, tokenizer) == sorted(tokenizer.convert_tokens_to_ids(wanted))
