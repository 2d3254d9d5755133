"""Rows of a dataset as conversations. Every column is rendered, refused, or ignored by name."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from qat_lora.errors import UserError

SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "system": "system", "user": "user", "assistant": "assistant"}
KNOWN_FORMATS = (
    "messages, conversations (sharegpt), instruction + output (alpaca), prompt + completion (text or turns), "
    "chosen (text or turns), text (plain)"
)
# The columns of each form, the first form that a row has counts; and those that any conversation may have beside them.
FORMS = {
    "messages": ("messages",),
    "conversations": ("conversations",),
    "instruction": ("instruction", "output", "input", "history"),
    "prompt": ("prompt", "completion"),
    "chosen": ("chosen", "prompt"),
    "text": ("text",),
}
NEEDS = {"instruction": "output", "prompt": "completion"}
SYSTEM = ("system", "system_prompt", "system_message")
CONTEXT = ("tools", "documents")  # lists that the template prints
KWARGS = "chat_template_kwargs"
ADDED = (*SYSTEM, *CONTEXT, KWARGS)
COLUMNS = frozenset(name for names in FORMS.values() for name in names) | frozenset(ADDED)
CHOICES = ("weight", "train", "training", "trainable", "loss")  # keys of a turn: 0 or false leaves it untrained


@dataclass(frozen=True)
class Conversation:
    """messages: what the chat template gets. untrained: the numbers (0-based) of turns that are no targets: those of
    the prompt, and those that say so themselves. variables: what else the template gets (`tools`, ...)."""

    messages: list[dict]
    untrained: frozenset[int]
    variables: dict


def conversation(row: dict) -> Conversation | None:
    """The row's conversation, or None for text without turns (see `to_messages`, which also lists the errors)."""
    messages = to_messages(row)
    if messages is None:
        return None
    given = _given(row)
    if given and all(message["role"] != "assistant" for message in messages[given:]):
        raise UserError("no assistant turn follows a prompt; a completion needs at least one assistant turn")
    untrained = set(range(given))
    for turn, message in enumerate(messages):
        for key in CHOICES:
            choice = message.pop(key, None)
            if choice not in (None, 0, 1):
                raise UserError(f'turn {turn} has "{key}": {json.dumps(choice)}; only 0, 1, false and true are known')
            if choice == 0:
                untrained.add(turn)
            elif choice and key != "weight" and message["role"] != "assistant":
                raise UserError(f'turn {turn} ({message["role"]}) has "{key}"; only assistant turns can be trained')
    variables = {name: found for name in CONTEXT if (found := _listed(row, name))}
    return Conversation(messages, frozenset(untrained), variables | _parsed(row, KWARGS, dict, "an object"))


def to_messages(row: dict) -> list[dict] | None:
    """The row as [{"role", "content"}, ...], or None for text without turns (column `text`, text columns `prompt` and
    `completion`, or `chosen` as text).

    Reads `messages`; sharegpt `conversations` ({"from", "value"}); alpaca `instruction`, `input`, `output` and
    `history` (earlier [question, answer] pairs); `prompt` and `completion` as lists of turns; `chosen`, which may
    follow a `prompt`. A system column begins the conversation. A content is text, or a list of text parts; beside
    tool_calls it may be missing.
    A None column or key counts as absent. Other keys of a message are kept (e.g. `reasoning_content`, which some
    templates use). Raises UserError for any other row and for a malformed turn.
    """
    form = _form(row)
    turns = _turns(row, form)
    system = [name for name in SYSTEM if row.get(name)]
    if turns is None:
        unused = [name for name in ADDED if row.get(name)]
        if unused and form != "text":
            raise UserError(
                f'column "{unused[0]}" changes nothing beside a text prompt; give the prompt as turns, or remove it'
            )
        return None
    if system:
        if len(system) > 1 or (turns[:1] and turns[0]["role"] == "system"):
            raise UserError(f'column "{system[0]}" is a second system text of the row; remove one')
        turns = [_checked_message({"role": "system", "content": row[system[0]]}, 0), *turns]
    return turns


def ignored_columns(row: dict) -> list[str]:
    """The columns of a row that nothing is made of."""
    form = _form(row)
    used = {*FORMS[form], *(ADDED if form != "text" else ())}
    if form == "chosen" and not _is_prompt(row):
        used.remove("prompt")
    return [str(name) for name in row if name not in used]


def _form(row: dict) -> str:
    for form, (name, *_) in FORMS.items():
        if row.get(name) is not None and row.get(NEEDS.get(form, name)) is not None:
            return form
    if "text" in row:
        return "text"
    raise UserError(f"columns {', '.join(map(str, row)) or '(none)'} match no known format; known: {KNOWN_FORMATS}")


def _turns(row: dict, form: str) -> list[dict] | None:
    if form == "messages":
        return _read(row, "messages", _checked_message)
    if form == "conversations":
        return _read(row, "conversations", _from_sharegpt)
    if form == "instruction":
        prompt = f"{row['instruction']}\n\n{row['input']}" if row.get("input") else row["instruction"]
        said = [text for pair in _history(row) for text in pair] + [prompt, row["output"]]
        roles = ("user", "assistant") * (len(said) // 2)
        return [_checked_message({"role": r, "content": c}, n) for n, (r, c) in enumerate(zip(roles, said))]
    if form == "prompt":
        sides = [row["prompt"], row["completion"]]
        if all(isinstance(side, str) for side in sides):
            return None
        if not all(isinstance(side, list) for side in sides):
            raise UserError('columns "prompt" and "completion" must both hold text, or both a list of turns')
        return [_checked_message(entry, turn) for turn, entry in enumerate(sides[0] + sides[1])]
    if form == "chosen" and not isinstance(row["chosen"], str):
        chosen = _read(row, "chosen", _either_turn)
        if not _is_prompt(row):
            return chosen
        prompt = row["prompt"]
        if isinstance(prompt, str):
            return [_checked_message({"role": "user", "content": prompt}, 0), *chosen]
        return [*_read(row, "prompt", _either_turn), *chosen]
    return None


def _is_prompt(row: dict) -> bool:
    """Whether `prompt` precedes `chosen`, rather than repeating what `chosen` begins with."""
    prompt, chosen = row.get("prompt"), row["chosen"]
    if not prompt or isinstance(chosen, str) or not chosen:
        return bool(prompt)
    if isinstance(prompt, list):
        return chosen[: len(prompt)] != prompt
    return _either_turn(chosen[0], 0)["role"] == "assistant"


def _given(row: dict) -> int:
    """The number of turns in a row's prompt, which carries no loss."""
    form = _form(row)
    is_pair = form == "prompt" or (form == "chosen" and _is_prompt(row))
    if not is_pair:
        return 0
    turns = len(row["prompt"]) if isinstance(row["prompt"], list) else 1
    return turns + any(row.get(name) for name in SYSTEM)


def _read(row: dict, name: str, read: Callable[[dict, int], dict]) -> list[dict]:
    if not isinstance(row[name], list):
        raise UserError(f'column "{name}" contains a {type(row[name]).__name__}, not a list of turns')
    return [read(entry, turn) for turn, entry in enumerate(row[name])]


def _history(row: dict) -> list[list[str]]:
    history = row.get("history") or []
    if not isinstance(history, list) or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in history):
        raise UserError('column "history" is not a list of [question, answer] pairs; fix or remove it')
    return history


def _checked_message(message: dict, turn: int) -> dict:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _malformed(turn, "role", "content")
    calls, content = message.get("tool_calls"), message.get("content")
    if calls is not None and not (isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
        raise UserError(f'turn {turn}: "tool_calls" is not a list of objects; fix or remove it')
    if isinstance(content, list):
        _check_parts(content, turn)
    elif not isinstance(content, str) and (content is not None or not calls):
        raise _malformed(turn, "role", "content")
    kept = {key: value for key, value in message.items() if value is not None or (key == "content" and calls)}
    return {key: value for key, value in kept.items() if key != "tool_calls" or value}


def _check_parts(parts: list, turn: int) -> None:
    for part in parts:
        if not isinstance(part, dict) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
            kind = part.get("type", "an object") if isinstance(part, dict) else type(part).__name__
            raise UserError(
                f'turn {turn} is malformed: its content has a part of type {kind}; parts need "type": "text" and "text"'
            )


def _from_sharegpt(entry: dict, turn: int) -> dict:
    if isinstance(entry, dict) and "role" in entry and "from" not in entry:
        return _checked_message(entry, turn)
    if not isinstance(entry, dict) or not all(isinstance(entry.get(key), str) for key in ("from", "value")):
        raise _malformed(turn, "from", "value")
    if entry["from"] not in SHAREGPT_ROLES:
        raise UserError(f'turn {turn} is from "{entry["from"]}"; known: {", ".join(SHAREGPT_ROLES)}')
    others = {key: value for key, value in entry.items() if key not in ("from", "value")}
    return _checked_message({"role": SHAREGPT_ROLES[entry["from"]], "content": entry["value"]} | others, turn)


def _either_turn(entry: dict, turn: int) -> dict:
    is_sharegpt = isinstance(entry, dict) and "from" in entry
    return (_from_sharegpt if is_sharegpt else _checked_message)(entry, turn)


def _malformed(turn: int, *keys: str) -> UserError:
    return UserError(
        f'turn {turn} is malformed; each turn is an object with text in "{keys[0]}" and "{keys[1]}"'
        + (', or without "content" beside "tool_calls"' if keys[0] == "role" else "")
    )


def _listed(row: dict, name: str) -> list:
    found = _parsed(row, name, list, "a list")
    if not all(isinstance(item, dict) for item in found):
        raise UserError(f'column "{name}" is not a list of objects; fix or remove it')
    return found


def _parsed(row: dict, name: str, kind: type, said: str) -> Iterable:
    """A column that holds a list or an object, or its JSON; empty if there is none."""
    value = row.get(name)
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise UserError(f'column "{name}" is not valid JSON ({error}); fix or remove it') from error
    if not value:
        return kind()
    if not isinstance(value, kind):
        raise UserError(f'column "{name}" is not {said}; fix or remove it')
    return value


def text_of(content: str | list | None) -> str:
    """A message's content as text: its parts joined, empty if there is none."""
    return "".join(part["text"] for part in content) if isinstance(content, list) else content or ""
