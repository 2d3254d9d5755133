"""Chat templates for models without one, or to replace a model's own."""

import hashlib
from pathlib import Path

from qat_lora.data.chat import render
from qat_lora.errors import UserError
from qat_lora.models.tokens import bos_token, special_tokens

# name → (token that ends a turn, Jinja template that refers to it as `end`)
BUILT_IN = {
    "chatml": (
        "<|im_end|>",
        """
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + end + '\\n' }}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}""",
    ),
    "gemma": (  # has no system role: the system text goes before the first question
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
    """Set a tokenizer's chat template to `choice`: one of its own named templates, a name of BUILT_IN or a Jinja file.

    A built-in template begins with BOS if the tokenizer puts BOS in front of texts. It ends a turn with the tokenizer's
    EOS if its own end marker is not a special token of the tokenizer, because a model learns to stop at a single token
    but not at a spelled-out marker. Raises UserError for a missing file, for a template that cannot be rendered or
    leaves out the answer, and for one that ends a turn with text that is not a special token.
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
            f"--chat-template {choice} ends a turn with {after[:40]!r}, which is not a special token of the tokenizer, "
            f"so answers would not stop there; end it with {{{{ eos_token }}}}, or add the token to the tokenizer"
        )


def begin_with_bos(tokenizer) -> None:
    """Make the tokenizer's chat template begin with BOS if it does not already."""
    bos_token(tokenizer, "on")  # refuses a tokenizer without BOS
    if not render([{"role": "user", "content": "?"}], tokenizer, False).startswith(tokenizer.bos_token):
        tokenizer.chat_template = "{{- bos_token }}" + tokenizer.get_chat_template()


def template_facts(tokenizer, choice: str | None) -> dict[str, str]:
    """For a run's manifest: the chosen template (a file's sha256) unless it is the tokenizer's own, and the date if the
    template prints one."""
    facts = {}
    if choice is not None:
        is_file = choice not in BUILT_IN and Path(choice).expanduser().is_file()
        facts["chat_template"] = hashlib.sha256(_read(choice).encode()).hexdigest() if is_file else choice
    if "strftime_now" in str(tokenizer.chat_template or "") and tokenizer.template_date:
        facts["date"] = tokenizer.template_date.isoformat()
    return facts


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


def _after_answer(tokenizer, choice: str) -> str:
    """The text that the template writes after an answer, stripped."""
    said = "§"
    try:
        text = render([{"role": "user", "content": "?"}, {"role": "assistant", "content": said}], tokenizer, False)
    except (UserError, TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise UserError(f"--chat-template {choice} cannot be rendered ({error}); correct the template") from error
    if said not in text:
        raise UserError(f"--chat-template {choice} leaves out the assistant's message; give a Jinja chat template")
    return text.rpartition(said)[2].strip()
