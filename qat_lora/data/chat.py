"""Chat rows as text, with the character ranges of the assistant's completions."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from string import ascii_letters

from jinja2 import TemplateError

from qat_lora.data.text import END
from qat_lora.errors import UserError
from qat_lora.models.tokens import check_ids, special_tokens

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}
KNOWN_FORMATS = (
    "messages, conversations (sharegpt), instruction + output (alpaca), prompt + completion (text or turns), "
    "text (plain)"
)
THOUGHT, THOUGHT_END = "<think>", "</think>"
# How models mark a thought in an answer: the text before it and the text after it. In some tokenizers, including ones
# with <think>, the marks are special tokens.
THOUGHTS = {
    THOUGHT: THOUGHT_END, "[THINK]": "[/THINK]", "<|START_THINKING|>": "<|END_THINKING|>", "<thinking>": "</thinking>",
    "<seed:think>": "</seed:think>", "<|begin_of_thought|>": "<|end_of_thought|>", "◁think▷": "◁/think▷",
}  # fmt: skip
# strftime written in Jinja: a table gives the text for each format code.
CLOCK = (
    "{% macro strftime_now(format) %}{% set said, now = SAID, namespace(text='', code='') %}{% for sign in format %}"
    "{% if not now.code and sign != '%' %}{% set now.text = now.text ~ sign %}"
    "{% elif not now.code or (now.code == '%' and sign in '-_0^#') %}{% set now.code = now.code ~ sign %}"
    "{% else %}{% set now.text = now.text ~ said.get(now.code ~ sign, now.code ~ sign) %}{% set now.code = '' %}"
    "{% endif %}{% endfor %}{{ now.text ~ now.code }}{% endmacro %}"
)
THINKING = {"on": (True,), "off": (False,), "both": (True, False)}


@dataclass(frozen=True)
class Document:
    """A text and the parts of it whose tokens are targets.

    spans: half-open character ranges [start, end) of the completions, in order and without overlap, each with its
    end-of-turn marker; None means the whole text (plain text).
    sections: the section number of each span, from 1 on, if a completion has several parts; None means 1 for all.
    """

    text: str
    spans: tuple[tuple[int, int], ...] | None
    sections: tuple[int, ...] | None = None

    def __post_init__(self):
        try:
            self.text.encode()
        except UnicodeEncodeError as error:  # JSON can contain half a surrogate pair, which no tokenizer accepts
            raise UserError(
                f"the text is not valid Unicode at character {error.start}; fix or remove the row"
            ) from error


def documents(rows: Iterable[dict], tokenizer, thinking: str) -> Iterator[Document]:
    """One Document for each plain-text row (or for each of its texts, if <|endoftext|> separates several) and the
    results of `render_chat` for each chat row, in the order of the rows.

    Raises UserError with the row's number (0-based) for a row that is neither, or that cannot be rendered.
    """
    for number, row in enumerate(rows):
        try:
            found = _row_documents(row, tokenizer, thinking)
        except UserError as error:
            raise UserError(f"row {number}: {error}") from error
        yield from found


def _row_documents(row: dict, tokenizer, thinking: str) -> list[Document]:
    messages = to_messages(row)
    if messages is not None:
        return render_chat(messages, tokenizer, thinking, given=_given(row))
    if row.get("prompt") is not None and row.get("completion") is not None:
        if not row["completion"].strip():
            raise UserError("the completion is empty; remove the row")
        text = row["prompt"] + row["completion"]  # verbatim; the completion includes EOS
        return [Document(text, ((len(row["prompt"]), len(text)),))]
    if not isinstance(row["text"], str):
        raise UserError(f'column "text" contains a {type(row["text"]).__name__}, not text; fix or remove the row')
    texts = row["text"].split(END)
    if len(texts) == 1:
        return [Document(row["text"], None)]
    return [Document(text.strip(), None) for text in texts if text.strip()]


def to_messages(row: dict) -> list[dict] | None:
    """The row as [{"role", "content"}, ...], or None for text without turns (column `text`, or text columns `prompt`
    and `completion`).

    Reads `messages`; sharegpt `conversations` ({"from", "value"}); alpaca `instruction`, `input` (optional), `output`;
    `prompt` and `completion` as lists of turns.
    A None column counts as absent. Other keys of a message are kept (e.g. `reasoning_content`, which some templates
    use). Raises UserError for any other row and for a malformed turn.
    """
    for name, read in (("messages", _checked_message), ("conversations", _from_sharegpt)):
        if row.get(name) is not None:
            if not isinstance(row[name], list):
                raise UserError(f'column "{name}" contains a {type(row[name]).__name__}, not a list of turns')
            return [read(entry, turn) for turn, entry in enumerate(row[name])]
    if row.get("instruction") is not None and row.get("output") is not None:
        prompt = f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]
        turns = ({"role": "user", "content": prompt}, {"role": "assistant", "content": row["output"]})
        return [_checked_message(message, turn) for turn, message in enumerate(turns)]
    if row.get("prompt") is not None and row.get("completion") is not None:
        sides = [row["prompt"], row["completion"]]
        if all(isinstance(side, str) for side in sides):
            return None
        if not all(isinstance(side, list) for side in sides):
            raise UserError('columns "prompt" and "completion" must both hold text, or both a list of turns')
        return [_checked_message(entry, turn) for turn, entry in enumerate(sides[0] + sides[1])]
    if "text" in row:
        return None
    raise UserError(f"columns {', '.join(map(str, row)) or '(none)'} match no known format; known: {KNOWN_FORMATS}")


def _given(row: dict) -> int:
    """The number of turns in a row's prompt, which carries no loss."""
    is_pair = row.get("messages") is None and row.get("conversations") is None and isinstance(row.get("prompt"), list)
    return len(row["prompt"]) if is_pair else 0


def _checked_message(message: dict, turn: int) -> dict:
    _require_text(message, ("role", "content"), turn)
    return dict(message)


def _from_sharegpt(entry: dict, turn: int) -> dict:
    _require_text(entry, ("from", "value"), turn)
    if entry["from"] not in SHAREGPT_ROLES:
        raise UserError(f'turn {turn} is from "{entry["from"]}"; known: {", ".join(SHAREGPT_ROLES)}')
    return {"role": SHAREGPT_ROLES[entry["from"]], "content": entry["value"]}


def _require_text(entry: dict, keys: tuple[str, str], turn: int) -> None:
    if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in keys):
        raise UserError(f'turn {turn} is malformed; each turn is an object with text in "{keys[0]}" and "{keys[1]}"')


def render_chat(messages: list[dict], tokenizer, thinking: str, given: int = 0) -> list[Document]:
    """Render a conversation with the tokenizer's own chat template, once for each setting of `enable_thinking`.

    thinking is "on", "off" or "both"; "both" gives two documents, or one if their texts are equal. given: the number of
    leading messages that belong to the prompt.
    Raises UserError if the tokenizer has no template, if the template refuses the messages or writes something before
    an answer but has no generation prompt, or if no completion is found.
    """
    spans = {}
    for enabled in THINKING[thinking]:
        text, ranges = _completions(messages, tokenizer, enabled, given)
        # If both texts are equal, keep the first: with thinking on, the prompt never ends later, so the completion
        # covers at least as much.
        spans.setdefault(text, ranges)
    return [Document(text, ranges) for text, ranges in spans.items()]


def _completions(messages: list[dict], tokenizer, enabled: bool, given: int) -> tuple[str, tuple[tuple[int, int], ...]]:
    """The text of a conversation and the ranges of its completions. Drops the turns after the last answer if, with
    them, the template renders no answer as a continuation of its prompt. Raises UserError if there is no completion."""
    answered = max((n for n, message in enumerate(messages, 1) if message["role"] == "assistant"), default=0)
    for told in (messages, messages[:answered]):
        text = _with_thought(told, render(told, tokenizer, enabled), tokenizer, enabled)
        if spans := _completion_spans(told, text, tokenizer, enabled, given):
            return text, spans
    raise UserError(
        "the chat template renders no assistant turn as a continuation of its own generation prompt; "
        "use another template with --chat-template, or the other setting of --thinking (on or off)"
    )


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


def render(messages: list[dict], tokenizer, enabled: bool | None, prompt: bool = False) -> str:
    """The text of a conversation, followed by the generation prompt if `prompt`; enabled: whether thinking is on, None
    leaves the template's default. A
    template that prints the date prints the tokenizer's `template_date`, by default today's.

    Raises UserError if there are no messages or no template, or if the template refuses the messages.
    """
    if not messages:
        raise UserError("the conversation has no messages; remove the row")
    check_template(tokenizer)
    date = getattr(tokenizer, "template_date", None)
    template = tokenizer.get_chat_template()
    try:
        return tokenizer.apply_chat_template(
            messages,
            chat_template=dated(template, date) if date else template,
            tokenize=False,
            add_generation_prompt=prompt,
            **({} if enabled is None else {"enable_thinking": enabled}),
        )
    except TemplateError as error:
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


def _completion_spans(
    messages: list[dict], text: str, tokenizer, enabled: bool, given: int
) -> tuple[tuple[int, int], ...]:
    """Ranges of the completions in `text`, found by rendering the messages before and up to each assistant turn.

    A template that rewrites earlier turns (Qwen3 drops their thinking) renders such a turn differently here than in
    `text`. The turn's prompt is then unknown, so the turn does not count as a completion.
    """
    # An assistant's greeting as the first message has no prompt.
    turns = [n for n, message in enumerate(messages) if n >= max(1, given) and message["role"] == "assistant"]
    if not turns:
        raise UserError("no assistant turn follows a prompt; a chat row needs at least one user and one assistant turn")
    markers = tuple(special_tokens(tokenizer))
    spans = []
    for turn in turns:
        before = render(messages[:turn], tokenizer, enabled, prompt=True)
        last = turn + 1 == len(messages)
        upto = _until_end_marker(text if last else render(messages[: turn + 1], tokenizer, enabled), markers)
        if len(upto) > len(before) and text.startswith(before) and text.startswith(upto):
            _check_opened(messages[: turn + 1], before, upto, tokenizer, enabled)
            spans.append((len(before), len(upto)))
    return tuple(spans)


def _with_thought(messages: list[dict], text: str, tokenizer, enabled: bool) -> str:
    """The text of a conversation, changed if necessary so that its last answer continues the generation prompt.

    Some templates (DeepSeek-R1's, QwQ's) end the prompt with `<think>` but render the answer without its thought. The
    thought is put back: the message's own (reasoning_content, or its content up to `</think>`) or an empty one.
    """
    if messages[-1]["role"] != "assistant" or len(messages) < 2:
        return text
    prompt = render(messages[:-1], tokenizer, enabled, prompt=True)
    opened = re.search(r"\s*<think>\s*(</think>\s*)?$", prompt)
    if not opened or text.startswith(prompt) or not text.startswith(prompt[: opened.start()]):
        return text
    answer = text[opened.start() :].lstrip()
    if opened[1]:  # the prompt closes its empty thought itself
        return text if THOUGHT_END in answer else prompt + answer
    thought, _, _ = messages[-1]["content"].rpartition(THOUGHT_END)
    thought = (messages[-1].get("reasoning_content") or thought).replace("<think>", "").strip()
    gap = "" if prompt[-1].isspace() else "\n"
    return f"{prompt}{gap}{thought}\n{THOUGHT_END}\n\n{answer.rpartition(THOUGHT_END)[2].lstrip()}"


def opens_thought(tokenizer, enabled: bool) -> bool:
    """Whether the chat template's generation prompt opens a thought at its end, which the answer continues."""
    prompt = render([{"role": "user", "content": "?"}], tokenizer, enabled, prompt=True)
    return prompt.rstrip().endswith(tuple(THOUGHTS))


def spoken(tokenizer, ids: list[int]) -> list[int]:
    """An answer's tokens without the special ones, except those around a thought, so that the thought can be told from
    the answer (`after_thought`)."""
    marks = {*THOUGHTS, *THOUGHTS.values()}
    tokens = tokenizer.added_tokens_decoder.items()
    silent = {id for id, token in tokens if token.special and token.content not in marks}
    return [id for id in ids if id not in silent]


def after_thought(text: str, opened: bool) -> str:
    """The text of an answer after its thought: all of it if there is no thought, empty if the thought was cut off.
    opened: whether the prompt opened a thought (`opens_thought`)."""
    end = max(text.rfind(mark) + len(mark) if mark in text else 0 for mark in THOUGHTS.values())
    unfinished = not end and (opened or text.lstrip().startswith(tuple(THOUGHTS)))
    return "" if unfinished else text[end:].strip()


def _check_opened(messages: list[dict], before: str, upto: str, tokenizer, enabled: bool) -> None:
    """Raise UserError if the template has no generation prompt but writes something before an answer: the model would
    learn to generate it as part of the answer."""
    said = messages[-1]["content"].strip()
    if before == render(messages[:-1], tokenizer, enabled) and not upto[len(before) :].lstrip().startswith(said):
        raise UserError(
            "the chat template does not open an assistant's turn (add_generation_prompt changes nothing), so the start "
            "of the answer is unknown; use a template that does"
        )


def _until_end_marker(text: str, markers: tuple[str, ...]) -> str:
    """Cut white space after an end-of-turn marker (ChatML's newline), because a model stops at the marker."""
    stripped = text.rstrip()
    return stripped if stripped.endswith(markers) else text
