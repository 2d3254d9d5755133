"""Chat rows as text, with the character ranges of the assistant's completions."""

import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from string import ascii_letters

from jinja2 import TemplateError

from qat_lora.data.rows import Conversation, conversation, ignored_columns, text_of
from qat_lora.data.rows import to_messages as to_messages
from qat_lora.data.text import END
from qat_lora.errors import UserError
from qat_lora.models.tokens import begins_with, check_ids, special_tokens
from qat_lora.run.console import say

REASONING = ("reasoning_content", "thinking", "reasoning")  # a turn's thought, in transformers' order
THOUGHT, THOUGHT_END = "<think>", "</think>"
# How models mark a thought in an answer: the text before it and the text after it. In some tokenizers, including ones
# with <think>, the marks are special tokens.
THOUGHTS = {
    THOUGHT: THOUGHT_END, "[THINK]": "[/THINK]", "<|START_THINKING|>": "<|END_THINKING|>", "<thinking>": "</thinking>",
    "<seed:think>": "</seed:think>", "<|begin_of_thought|>": "<|end_of_thought|>", "◁think▷": "◁/think▷",
}  # fmt: skip
HALF = re.compile("[\ud800-\udfff]")  # half of a surrogate pair, which JSON can contain but no tokenizer accepts
Draw = Callable[..., str]  # `render` with everything but the messages and `prompt` given
# strftime written in Jinja: a table gives the text for each format code.
CLOCK = (
    "{% macro strftime_now(format) %}{% set said, now = SAID, namespace(text='', code='') %}{% for sign in format %}"
    "{% if not now.code and sign != '%' %}{% set now.text = now.text ~ sign %}"
    "{% elif not now.code or (now.code == '%' and sign in '-_0^#') %}{% set now.code = now.code ~ sign %}"
    "{% else %}{% set now.text = now.text ~ said.get(now.code ~ sign, now.code ~ sign) %}{% set now.code = '' %}"
    "{% endif %}{% endfor %}{{ now.text ~ now.code }}{% endmacro %}"
)
ANOTHER = "use another template with --chat-template"
THINKING = {"on": (True,), "off": (False,), "both": (True, False)}


@dataclass(frozen=True)
class Document:
    """A text and the parts of it whose tokens are targets.

    spans: half-open character ranges [start, end) of the completions, in order and without overlap, each with its
    end-of-turn marker; None means the whole text (plain text).
    sections: the section number of each span, from 1 on, if a completion has several parts; None means 1 for all.
    prompt: characters of the text that are a prompt, whose tokens must be those that generation starts from; None if
    the text holds none or several that the tokens of the whole text agree with.
    """

    text: str
    spans: tuple[tuple[int, int], ...] | None
    sections: tuple[int, ...] | None = None
    prompt: int | None = None

    def __post_init__(self):
        if not self.text.isascii() and (found := HALF.search(self.text)):
            raise UserError(f"the text is not valid Unicode at character {found.start()}; fix or remove the row")


def documents(rows: Iterable[dict], tokenizer, thinking: str) -> Iterator[Document]:
    """One Document for each plain-text row (or for each of its texts, if <|endoftext|> separates several) and the
    results of `render_chat` for each chat row, in the order of the rows.

    Prints once what no text contains: columns of the rows, and keys of turns that the template leaves out; and once
    that a conversation becomes several documents.
    Raises UserError with the row's number (0-based) for a row that is neither, or that cannot be rendered.
    """
    seen: set[str] = set()

    def tell_once(names: list[str], line: str) -> None:
        if fresh := [name for name in names if name not in seen]:
            say(line.format(", ".join(fresh)))
            seen.update(fresh)

    for number, row in enumerate(rows):
        try:
            talk = conversation(row)
            found = _plain_documents(row) if talk is None else render_chat(talk, tokenizer, thinking)
            tell_once(ignored_columns(row), "ignored columns: {}")
            if talk is not None:
                keys = _ignored_keys(talk, partial(render, tokenizer=tokenizer, enabled=THINKING[thinking][0]), seen)
                tell_once(keys, "ignored, because the chat template does not print it: {}")
                if len(found) > len(THINKING[thinking]):
                    what = "the chat template renders earlier answers otherwise once a conversation goes on"
                    tell_once([what], "{}: each of them is a text of its own")
        except UserError as error:
            raise UserError(f"row {number}: {error}") from error
        yield from found


def _plain_documents(row: dict) -> list[Document]:
    """The documents of a row without turns."""
    prompt, completion = row.get("prompt"), row.get("completion", row.get("chosen"))
    if prompt is not None and completion is not None:
        if not completion.strip():
            raise UserError("the completion is empty; remove the row")
        text = prompt + completion  # verbatim; the completion includes EOS
        return [Document(text, ((len(prompt), len(text)),), prompt=len(prompt))]
    text = completion if completion is not None else row["text"]
    if not isinstance(text, str):
        raise UserError(f'column "text" contains a {type(text).__name__}, not text; fix or remove the row')
    texts = text.split(END)
    if len(texts) == 1:
        return [Document(text, None)]
    return [Document(text.strip(), None) for text in texts if text.strip()]


def _ignored_keys(talk: Conversation, draw: Draw, seen: set[str]) -> list[str]:
    """What the chat template does not print of turns: without it, the text is the same. Looks at the first turn of each
    role with a key, and adds to `seen` what it prints."""
    ignored = []
    for turn, message in enumerate(talk.messages):
        for key in message:
            name = f'"{key}" of {message["role"]} turns' + ' with "tool_calls"' * (key == "content")
            is_text = key == "content" and not (message.get("tool_calls") and text_of(message["content"]).strip())
            if key in ("role", "tool_calls") or is_text or name in seen or name in ignored:
                continue
            less = {k: v for k, v in message.items() if k != key} | ({"content": ""} if key == "content" else {})
            before = talk.messages[:turn]
            if _is_same(partial(draw, variables=talk.variables), [*before, message], [*before, less]):
                ignored.append(name)
            else:
                seen.add(name)
    return ignored


def render_chat(talk: list[dict] | Conversation, tokenizer, thinking: str) -> list[Document]:
    """Render a conversation, or messages, with the tokenizer's own chat template, once for each setting of
    `enable_thinking`.

    thinking is "on", "off" or "both"; "both" gives two documents, or one if their texts are equal. An answer that the
    template would render otherwise as the last turn than within the conversation (without its thought, without the
    system text in its prompt, without its end) becomes a document of its own, before that of the conversation.
    Raises UserError if the tokenizer has no template, if the template refuses the messages, leaves something of them
    out or writes something before an answer but has no generation prompt, or if an answer does not continue its prompt.
    """
    if isinstance(talk, list):
        talk = Conversation(talk, frozenset(), {})
    found: list[Document] = []
    for enabled in THINKING[thinking]:
        draw = partial(render, tokenizer=tokenizer, enabled=enabled, variables=talk.variables)
        messages = _printable(talk.messages, draw)
        documents = _rendered(messages, talk.untrained, draw, tokenizer)
        _check_printed(messages, talk.variables, draw)
        # If both texts are equal, keep the first: with thinking on, the prompt never ends later, so the completion
        # covers at least as much.
        known = {document.text for document in found}
        found += [document for document in documents if document.text not in known]
    return found


def _printable(messages: list[dict], draw: Draw) -> list[dict]:
    """The messages, with contents in parts joined unless the template itself prints parts as text."""
    listed = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    if not listed:
        return messages
    try:
        text = draw(messages)
    except UserError:
        text = ""
    is_printed = all(part["text"].strip() in text for parts in listed for part in parts)
    if text and is_printed and not any(dump(parts) in text for parts in listed for dump in (str, _json)):
        return messages
    return [m | {"content": text_of(m["content"])} if isinstance(m.get("content"), list) else m for m in messages]


def _check_printed(messages: list[dict], variables: dict, draw: Draw) -> None:
    """Raise UserError if the template leaves out, or garbles, something that an answer depends on."""
    for name in variables.keys() & {"tools", "documents"}:
        if _is_same(draw, messages, messages, variables=variables | {name: None}):
            raise UserError(f'the chat template does not print the column "{name}"; {ANOTHER}, or remove the column')
    text = draw(messages)
    for turn, message in enumerate(messages):
        others = [*messages[:turn], *messages[turn + 1 :]]
        is_seen = message["role"] == "assistant" or text_of(message.get("content")).strip() in text
        if not is_seen and _is_same(draw, messages, others):
            raise UserError(f"the chat template leaves out turn {turn} ({message['role']}); {ANOTHER}, or remove it")
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    if not calls:
        return
    filled = [message | {"content": message.get("content") or ""} for message in messages]
    if _is_same(draw, messages, [{k: v for k, v in message.items() if k != "tool_calls"} for message in filled]):
        raise UserError(f'the chat template does not print "tool_calls"; {ANOTHER}, or remove the row')
    if text.count("None") > draw(filled).count("None"):
        raise UserError('the chat template prints "None" for a turn without content; give it an empty "content"')
    for call in calls:
        function = call.get("function", call)
        given = function.get("arguments") if isinstance(function, dict) else None
        if isinstance(given, str) and _json(given) in text:
            raise UserError("the chat template quotes the text of a tool call's arguments; give them as an object")


def _json(value) -> str:
    return json.dumps(value, ensure_ascii=False)  # as a template's tojson


def _is_same(draw: Draw, messages: list[dict], others: list[dict], **changes) -> bool:
    """Whether both conversations can be rendered and have the same text. changes: arguments of the second rendering."""
    try:
        return draw(messages) == draw(others, **changes)
    except UserError:
        return False


def _rendered(messages: list[dict], untrained: frozenset[int], draw: Draw, tokenizer) -> list[Document]:
    """The documents of a conversation: those of answers that need one of their own, then that of all messages. Raises
    UserError if an answer does not continue its prompt."""
    # An assistant's greeting as the first message has no prompt.
    answers = [turn for turn, message in enumerate(messages) if turn and message["role"] == "assistant"]
    trained = [turn for turn in answers if turn not in untrained]
    markers = tuple(special_tokens(tokenizer))
    text, spans = _completions(messages, trained, draw, markers)
    if not answers:
        raise UserError("no assistant turn follows a prompt; a chat row needs at least one user and one assistant turn")
    if len(spans) > 1:  # each prompt's tokens must be those that generation starts from
        ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        spans = {turn: span for turn, span in spans.items() if begins_with(ids, text[: span[0]], tokenizer)}
    found = []
    for turn in trained:
        if turn not in spans:
            own, ended = _completions(messages[: turn + 1], [turn], draw, markers)
            if not ended:
                raise UserError(
                    f"turn {turn}: the chat template renders no assistant turn as a continuation of its own "
                    f"generation prompt; {ANOTHER}, or the other setting of --thinking (on or off)"
                )
            found.append(Document(own, (ended[turn],), prompt=ended[turn][0]))
    if spans or not trained:
        ranges = tuple(spans.values())
        found.append(Document(text, ranges, prompt=ranges[0][0] if len(ranges) == 1 else None))
    return found


def _completions(
    messages: list[dict], trained: list[int], draw: Draw, markers: tuple[str, ...]
) -> tuple[str, dict[int, tuple[int, int]]]:
    """The text of a conversation and the ranges of its completions by turn, found by rendering the messages before and
    up to each trained turn. A turn that the template renders differently there is left out."""
    text = _with_thought(messages, draw(messages), draw)
    spans = {}
    for turn in trained:
        before = draw(messages[:turn], prompt=True)
        upto = text if turn + 1 == len(messages) else draw(messages[: turn + 1])
        end = _answer_end(text, upto, markers)
        if text.startswith(before) and end > len(before):
            _check_opened(messages[: turn + 1], before, upto, draw)
            spans[turn] = len(before), end
    return text, spans


def _answer_end(text: str, upto: str, markers: tuple[str, ...]) -> int:
    """Where an answer's last target ends in a conversation's text, -1 if the text does not go on from it. upto: the
    text up to the answer.

    A model stops at a special token: the one that ends the turn, without white space after it (ChatML's newline), or
    the one that begins the next turn (GLM-4's). The end of the whole text is followed by EOS.
    """
    ended = upto.rstrip()
    if ended.endswith(markers):
        return len(ended) if text.startswith(ended) else -1
    if not text.startswith(upto):
        return -1
    if len(upto) == len(text):
        return len(text)
    following = [marker for marker in markers if text.startswith(marker, len(upto))]
    return len(upto) + max(map(len, following), default=-1 - len(upto))


def check_template(tokenizer) -> None:
    """Raise UserError if a tokenizer has no chat template, or several without a default."""
    if isinstance(tokenizer.chat_template, dict) and "default" not in tokenizer.chat_template:
        names = ", ".join(sorted(tokenizer.chat_template))
        raise UserError(
            f"the tokenizer has chat templates named {names} and no default; choose one, e.g. "
            f"--chat-template {min(tokenizer.chat_template)}"
        )
    if not tokenizer.chat_template:
        raise UserError(
            "the tokenizer has no chat template: give one with --chat-template (chatml, gemma, llama3 or a Jinja "
            "file), or use an instruct model"
        )


def chat_ids(messages: list[dict], tokenizer, enabled: bool | None) -> list[int]:
    """The tokens of a conversation, ready for the assistant's answer; see `render`."""
    ids = tokenizer(render(messages, tokenizer, enabled, prompt=True), add_special_tokens=False)["input_ids"]
    check_ids(ids, tokenizer)
    return ids


def render(
    messages: list[dict], tokenizer, enabled: bool | None, prompt: bool = False, variables: dict | None = None
) -> str:
    """The text of a conversation, followed by the generation prompt if `prompt`; enabled: whether thinking is on, None
    leaves the template's default. A template that prints the date prints the tokenizer's `template_date`, by default
    today's. variables: what else the template gets, e.g. `tools`.

    Raises UserError if there are no messages or no template, or if the template refuses the messages.
    """
    if not messages:
        raise UserError("the conversation has no messages; remove the row")
    check_template(tokenizer)
    date = getattr(tokenizer, "template_date", None)
    template = tokenizer.get_chat_template()
    given = ({} if enabled is None else {"enable_thinking": enabled}) | (variables or {})
    try:
        return tokenizer.apply_chat_template(
            messages,
            chat_template=dated(template, date) if date else template,
            tokenize=False,
            add_generation_prompt=prompt,
            **given,
        )
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise UserError(
            f"the chat template refuses the messages: {error}; correct it, or give another with --chat-template"
        ) from error


def dated(template: str, date: datetime) -> str:
    """A chat template whose strftime_now formats `date` instead of the current date.

    A macro of the same name shadows the function, because transformers offers no other way to set the date.
    """
    if "strftime_now" not in template:
        return template
    codes = [f"%{flag}{letter}" for flag in ("", *"-_0^#") for letter in ascii_letters]
    said = {code: date.strftime(code) for code in codes} | {"%%": "%"}
    return f"{CLOCK.replace('SAID', repr(said))}\n{template}"


def _with_thought(messages: list[dict], text: str, draw: Draw) -> str:
    """The text of a conversation, changed if necessary so that its last answer continues the generation prompt.

    Some templates (DeepSeek-R1's, QwQ's) end the prompt with `<think>` but render the answer without its thought. The
    thought is put back: the message's own (REASONING, or its content up to `</think>`) or an empty one.
    """
    if messages[-1]["role"] != "assistant" or len(messages) < 2:
        return text
    prompt = draw(messages[:-1], prompt=True)
    opened = re.search(r"\s*<think>\s*(</think>\s*)?$", prompt)
    if not opened or text.startswith(prompt) or not text.startswith(prompt[: opened.start()]):
        return text
    answer = text[opened.start() :].lstrip()
    if opened[1]:  # the prompt closes its empty thought itself
        return text if THOUGHT_END in answer else prompt + answer
    thought, _, _ = text_of(messages[-1].get("content")).rpartition(THOUGHT_END)
    thought = (
        next((messages[-1][key] for key in REASONING if messages[-1].get(key)), thought).replace("<think>", "").strip()
    )
    gap = "" if prompt[-1].isspace() else "\n"
    return f"{prompt}{gap}{thought}\n{THOUGHT_END}\n\n{answer.rpartition(THOUGHT_END)[2].lstrip()}"


def opens_thought(tokenizer, enabled: bool) -> bool:
    """Whether the chat template's generation prompt opens a thought at its end, which the answer continues."""
    prompt = render([{"role": "user", "content": "?"}], tokenizer, enabled, prompt=True)
    return prompt.rstrip().endswith(tuple(THOUGHTS))


def spoken(tokenizer, ids: list[int]) -> list[int]:
    """An answer's tokens without the special ones, except those around a thought, so that the thought can be told from
    the answer (`after_thought`)."""
    silent = silent_tokens(tokenizer)
    return [id for id in ids if id not in silent]


def silent_tokens(tokenizer) -> set[int]:
    """The ids of the special tokens, except those around a thought."""
    marks = {*THOUGHTS, *THOUGHTS.values()}
    tokens = tokenizer.added_tokens_decoder.items()
    return {id for id, token in tokens if token.special and token.content not in marks}


def after_thought(text: str, opened: bool) -> str:
    """The text of an answer after its thought: all of it if there is no thought, empty if the thought was cut off.
    opened: whether the prompt opened a thought (`opens_thought`)."""
    end = max(text.rfind(mark) + len(mark) if mark in text else 0 for mark in THOUGHTS.values())
    unfinished = not end and (opened or text.lstrip().startswith(tuple(THOUGHTS)))
    return "" if unfinished else text[end:].strip()


def _check_opened(messages: list[dict], before: str, upto: str, draw: Draw) -> None:
    """Raise UserError if the template has no generation prompt but writes something before an answer: the model would
    learn to generate it as part of the answer."""
    said = text_of(messages[-1].get("content")).strip()
    if before == draw(messages[:-1]) and not upto[len(before) :].lstrip().startswith(said):
        raise UserError(
            "the chat template does not open an assistant's turn (add_generation_prompt changes nothing), so the start "
            "of the answer is unknown; use a template that does"
        )
