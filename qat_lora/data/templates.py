"""Chat templates for models that come without one, and for those that are to speak in another."""

import hashlib
from pathlib import Path

from qat_lora.data.chat import render
from qat_lora.errors import UserError
from qat_lora.models.tokens import bos_token

# name → (token that ends a turn, Jinja template in which `end` stands for it)
BUILT_IN = {
    "chatml": (
        "<|im_end|>",
        """
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + end + '\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}""",
    ),
    "gemma": (  # knows no system role: its text stands before the first question
        "<end_of_turn>",
        """
{%- set system = messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '' %}
{%- for message in (messages[1:] if system else messages) %}
{{- '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\\n' }}
{{- (system if loop.first else '') + (message['content'] | trim) + end + '\\n' }}
{%- endfor %}
{{- '<start_of_turn>model\\n' if add_generation_prompt }}""",
    ),
    "llama3": (
        "<|eot_id|>",
        """
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + (message['content'] | trim) + end }}
{%- endfor %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' if add_generation_prompt }}""",
    ),
}


def set_template(tokenizer, choice: str) -> None:
    """Give a tokenizer the chat template `choice`, one of its own named templates, a name of BUILT_IN or a Jinja file.

    A built-in one begins with BOS where the tokenizer's convention asks for it, and ends a turn with the tokenizer's
    EOS where its own end marker is no special token there: a model learns to stop at one token, not at a spelled-out
    marker. Raises UserError for a file that is missing, that is no template or does not show an answer, and for one
    that ends a turn with a text that is no special token.
    """
    named = tokenizer.chat_template if isinstance(tokenizer.chat_template, dict) else {}
    if choice in named:
        tokenizer.chat_template = named[choice]
    elif choice in BUILT_IN:
        marker, body = BUILT_IN[choice]
        end = f"'{marker}'" if marker in special_tokens(tokenizer) else "eos_token"
        start = "" if bos_token(tokenizer) is None else "{{- bos_token }}"
        tokenizer.chat_template = f"{{%- set end = {end} %}}{start}{body}"
    else:
        tokenizer.chat_template = _read(choice)
    after = _after_answer(tokenizer, choice)
    if after and not after.startswith(tuple(special_tokens(tokenizer))):
        raise UserError(
            f"--chat-template {choice} ends a turn with {after[:40]!r}, which is no special token of the tokenizer, so "
            f"answers would not stop there; end it with {{{{ eos_token }}}}, or add the token to the tokenizer"
        )


def begin_with_bos(tokenizer) -> None:
    """Have the tokenizer's chat template write BOS first, where it does not do so by itself."""
    bos_token(tokenizer, "on")  # refuses a tokenizer without one
    if not render([{"role": "user", "content": "?"}], tokenizer, False).startswith(tokenizer.bos_token):
        tokenizer.chat_template = "{{- bos_token }}" + tokenizer.get_chat_template()


def template_facts(tokenizer, choice: str | None) -> dict[str, str]:
    """For a run's manifest: the template that was asked for, a file by its checksum (nothing if it is the
    tokenizer's own), and the date, if the template prints one."""
    facts = {}
    if choice is not None:
        is_file = choice not in BUILT_IN and Path(choice).expanduser().is_file()
        facts["chat_template"] = hashlib.sha256(_read(choice).encode()).hexdigest() if is_file else choice
    if "strftime_now" in str(tokenizer.chat_template or "") and tokenizer.template_date:
        facts["date"] = tokenizer.template_date.isoformat()
    return facts


def special_tokens(tokenizer) -> set[str]:
    return {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}


def _read(choice: str) -> str:
    path = Path(choice).expanduser()
    if not path.is_file():
        raise UserError(
            f"--chat-template {choice}: no such file; give one with a Jinja template, or {', '.join(BUILT_IN)}"
        )
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"--chat-template {choice}: not UTF-8 text at byte {error.start}; convert the file") from error
    except OSError as error:
        raise UserError(f"--chat-template {choice}: cannot be read ({error.strerror}); check the file") from error


def _after_answer(tokenizer, choice: str) -> str:
    """What the template writes after an answer, without white space around it."""
    said = "§"
    try:
        text = render([{"role": "user", "content": "?"}, {"role": "assistant", "content": said}], tokenizer, False)
    except (UserError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise UserError(f"--chat-template {choice} cannot be rendered ({error}); correct the template") from error
    if said not in text:
        raise UserError(f"--chat-template {choice} leaves out the assistant's message; give a Jinja chat template")
    return text.rpartition(said)[2].strip()
