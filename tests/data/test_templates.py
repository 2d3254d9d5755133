"""Built-in chat templates render their models' format and end a turn with a stop token; bad templates are refused."""

from copy import deepcopy
from datetime import datetime

import pytest
from tokenizers import processors

from qat_lora.data.chat import render, render_chat
from qat_lora.data.options import ChatOptions
from qat_lora.data.templates import begin_with_bos, set_template, template_facts
from qat_lora.errors import UserError
from qat_lora.models.generate import _turn_end

TURNS = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Bye"), ("assistant", "See you")]
TALK = [{"role": role, "content": content} for role, content in TURNS]
CHATML = "".join(f"<|im_start|>{turn['role']}\n{turn['content']}<|im_end|>\n" for turn in TALK)
GEMMA = (
    "<start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nHello<end_of_turn>\n"
    "<start_of_turn>user\nBye<end_of_turn>\n<start_of_turn>model\nSee you<end_of_turn>\n"
)
LLAMA = "".join(f"<|start_header_id|>{turn['role']}<|end_header_id|>\n\n{turn['content']}<|eot_id|>" for turn in TALK)
DATELESS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
SHAPES = [("chatml", "<|im_end|>", CHATML), ("gemma", "<end_of_turn>", GEMMA), ("llama3", "<|eot_id|>", LLAMA)]


@pytest.fixture
def bare(tiny_tokenizer):
    """bare(*specials, bos): a tokenizer without a chat template, with EOS <|pad|> and extra special tokens; with `bos`
    it puts <|im_start|> in front of a text."""

    def make(*specials, bos=False):
        tokenizer = deepcopy(tiny_tokenizer)
        tokenizer.chat_template, tokenizer.eos_token = None, "<|pad|>"
        tokenizer.add_tokens(list(specials), special_tokens=True)
        if bos:
            tokenizer.bos_token = "<|im_start|>"
            tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
                single="<|im_start|> $A", special_tokens=[("<|im_start|>", 1)]
            )
        return tokenizer

    return make


@pytest.fixture
def tokenizer(bare):
    return bare("<|eot_id|>")


@pytest.mark.parametrize("name, end, text", SHAPES)
def test_built_in_templates_render_the_format_of_their_models(bare, name, end, text):
    tokenizer = bare(end)
    set_template(tokenizer, name)
    (found,) = render_chat(TALK, tokenizer, "off")
    assert found.text == text
    assert [found.text[start:stop] for start, stop in found.spans] == ["Hello" + end, "See you" + end]
    assert _turn_end(tokenizer) == [tokenizer.convert_tokens_to_ids(end)]
    set_template(other := bare(end, bos=True), name)
    assert render_chat(TALK, other, "off")[0].text == "<|im_start|>" + text


@pytest.mark.parametrize("name, end, text", SHAPES[1:])
def test_a_turn_ends_with_eos_if_the_tokenizer_lacks_the_end_marker(bare, name, end, text):
    tokenizer = bare()
    set_template(tokenizer, name)
    (found,) = render_chat(TALK, tokenizer, "off")
    assert found.text == text.replace(end, "<|pad|>")
    assert [found.text[start:stop] for start, stop in found.spans] == ["Hello<|pad|>", "See you<|pad|>"]
    assert _turn_end(tokenizer) == [tokenizer.eos_token_id]


def test_a_file_replaces_the_tokenizers_own_template(tiny_model_dir, tmp_path):
    (tmp_path / "talk.jinja").write_text(DATELESS)
    tokenizer = ChatOptions(chat_template=str(tmp_path / "talk.jinja")).tokenizer(str(tiny_model_dir))
    assert render_chat(TALK[1:3], tokenizer, "off")[0].text == "user: Hi<|im_end|>assistant: Hello<|im_end|>"
    own = ChatOptions().tokenizer(str(tiny_model_dir))
    assert render_chat(TALK[1:3], own, "off")[0].text.startswith("<|im_start|>user")


@pytest.mark.parametrize("content, words", [
    (None, "no such file; give one with a Jinja template, or chatml, gemma, llama3"),
    (b"\xff\xfe", "not UTF-8 text at byte 0"), (b"{% for m in messages %}", "cannot be rendered"),
    (b"{{ messages[0].content + 1 }}", "cannot be rendered"), (b"{{ raise_exception('no') }}", "cannot be rendered"),
    (b"hello", "leaves out the assistant's message"),
    (b"{% for m in messages %}{{ m.content }}</turn>\n{% endfor %}", "ends a turn with '</turn>', which is not "),
])  # fmt: skip
def test_files_that_are_not_templates_are_refused(tiny_tokenizer, tmp_path, content, words):
    path = tmp_path / "t.jinja"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as error:
        set_template(deepcopy(tiny_tokenizer), str(path))
    assert words in str(error.value) and "\n" not in str(error.value)


def test_bos_is_put_in_front_of_a_template_that_lacks_it(tokenizer):
    set_template(tokenizer, "llama3")
    with pytest.raises(UserError, match="no BOS token"):
        begin_with_bos(tokenizer)
    tokenizer.bos_token = "<|im_start|>"
    for _ in range(2):
        begin_with_bos(tokenizer)
        assert render_chat(TALK, tokenizer, "off")[0].text == "<|im_start|>" + LLAMA


def test_a_run_identifies_its_template_by_content(tmp_path, tokenizer):
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path, text in zip(paths, ("one", "one", "two")):
        path.write_text(text)
    first, same, other = (template_facts(tokenizer, str(path)) for path in paths)
    assert first == same != other and template_facts(tokenizer, None) == {}
    assert template_facts(tokenizer, "gemma") == {"chat_template": "gemma"}


# -- templates with a date, named templates ----------------------------------------------------------------------------
def test_a_template_prints_the_given_date(tokenizer):
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y %H:%M') }}" + DATELESS
    (today,) = render_chat(TALK[1:3], tokenizer, "off")
    assert today.text.startswith(datetime.now().strftime("%d %b %Y"))
    tokenizer.template_date = datetime(2024, 7, 26, 8, 30)
    (then,) = render_chat(TALK[1:3], tokenizer, "off")
    assert then.text.startswith("26 Jul 2024 08:30")
    assert template_facts(tokenizer, None) == {"date": "2024-07-26T08:30:00"}
    tokenizer.chat_template = DATELESS
    assert template_facts(tokenizer, None) == {}


@pytest.mark.parametrize("call, code", [
    ("'%-d %B, %H:%M:%S %p, day %j, week %U'", "%-d %B, %H:%M:%S %p, day %j, week %U"), ("format='%A'", "%A"),
    ("'%' ~ 'd/' ~ '%m, 100%% %%Y %%'", "%d/%m, 100%% %%Y %%"), ("''", ""),
    ("'%Y' if true else '%y') ~ strftime_now('%s'", "%Y%s"),
])  # fmt: skip
def test_a_fixed_date_is_formatted_as_by_strftime(tokenizer, call, code):
    tokenizer.chat_template = f"\n{{% set now = strftime_now({call}) %}}{{{{ now }}}}"
    tokenizer.template_date = date = datetime(2024, 7, 6, 18, 5, 9)
    assert render(TALK[1:2], tokenizer, False) == "\n" + date.strftime(code)


def test_one_of_several_named_templates_must_be_chosen_if_there_is_no_default(tokenizer):
    tokenizer.chat_template = {"plain": DATELESS, "tools": "{{ 'tools' }}" + DATELESS}
    with pytest.raises(UserError, match=r"templates named plain, tools and no default; .*--chat-template plain"):
        render_chat(TALK[1:3], tokenizer, "off")
    set_template(tokenizer, "tools")
    assert render_chat(TALK[1:3], tokenizer, "off")[0].text.startswith("tools")
    tokenizer.chat_template = {"default": DATELESS, "tools": "{{ 'tools' }}" + DATELESS}
    assert render_chat(TALK[1:3], tokenizer, "off")[0].text.startswith("user: Hi")
