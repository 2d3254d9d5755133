"""Forms of chat rows and chat templates in the manner of published models, and the table of both in docs/cot-sft.md.

python tests/data/row_forms.py     (prints the table)

A cell is found by comparison with transformers: its tokens for the conversation, and the mask that it makes of the
template's `generation` blocks, which the product never sees.
"""

import json
from copy import deepcopy

from qat_lora.data.chat import documents
from qat_lora.data.packing import encode
from qat_lora.errors import UserError

SPECIAL = """<|eos|> <|begin_of_text|> <|start_header_id|> <|end_header_id|> <|eot_id|> <bos> <start_of_turn>
<end_of_turn> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS]
<|im_sep|> [gMASK] <sop> <|system|> <|user|> <|assistant|> <|observation|>"""

# -- templates: `generation` blocks hold what the model generates ------------------------------------------------------
TEMPLATES = {
    "SmolLM2": """
{%- for m in messages %}
{%- if loop.first and m.role != 'system' %}{{ '<|im_start|>system\\nYou help people.<|im_end|>\\n' }}{% endif %}
{{- '<|im_start|>' + m['role'] + '\\n' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "Llama 3": """
{{- '<|begin_of_text|>' }}
{%- set system = messages[0]['content'] | trim if messages[0]['role'] == 'system' else '' %}
{%- set talk = messages[1:] if messages[0]['role'] == 'system' else messages %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday is 26 Jul 2024.\\n\\n' }}
{%- if tools %}{% for t in tools %}{{ t | tojson + '\\n\\n' }}{% endfor %}{% endif %}
{{- system + '<|eot_id|>' }}
{%- for m in talk %}
{%- if m.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
{{- (m.content if m.content is string else m.content | tojson) + '<|eot_id|>' }}
{%- elif 'tool_calls' in m %}
{%- if m.tool_calls | length != 1 %}{{ raise_exception('one tool call at a time') }}{% endif %}
{%- set call = m.tool_calls[0].function %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- generation %}{{ '{"name": "' + call.name + '", "parameters": ' }}{{ call.arguments | tojson }}
{{- '}<|eot_id|>' }}{% endgeneration %}
{%- elif m.role == 'assistant' %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- generation %}{{ m.content | trim + '<|eot_id|>' }}{% endgeneration %}
{%- else %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    "Qwen3": """
{%- if tools %}
{{- '<|im_start|>system\\n' + (messages[0].content + '\\n\\n' if messages[0].role == 'system' else '') + '# Tools' }}
{%- for t in tools %}{{ '\\n' }}{{ t | tojson }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}{% endif %}
{%- macro calls(m) %}{% for c in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + c.function.name + '", "arguments": ' }}
{{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}{% endfor %}{% endmacro %}
{%- for m in messages %}
{%- set content = m.content if m.content is string else '' %}
{%- if m.role == 'assistant' %}
{%- set thought = m.reasoning_content or '' %}
{{- '<|im_start|>assistant\\n' }}
{%- if not loop.last %}{% generation %}{{ content }}{{ calls(m) }}{{ '<|im_end|>' }}{% endgeneration %}
{%- elif enable_thinking is defined and not enable_thinking and not thought %}{{ '<think>\\n\\n</think>\\n\\n' }}
{%- generation %}{{ content }}{{ calls(m) }}{{ '<|im_end|>' }}{% endgeneration %}
{%- else %}{% generation %}{{ '<think>\\n' + thought + '\\n</think>\\n\\n' + content }}{{ calls(m) }}{{ '<|im_end|>' }}
{%- endgeneration %}{% endif %}{{ '\\n' }}
{%- elif m.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
{%- elif m.role == 'user' or not loop.first %}{{ '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
{%- if add_generation_prompt and enable_thinking is defined and not enable_thinking %}
{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}""",
    "Gemma 3": """
{{- '<bos>' }}
{%- set system = messages[0]['content'] + '\\n\\n' if messages[0]['role'] == 'system' else '' %}
{%- for m in (messages[1:] if system else messages) %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + (system if loop.first else '') }}
{%- macro said(m) %}{% if m.content is string %}{{ m.content | trim }}
{%- else %}{% for p in m.content %}{{ p.text | trim }}{% endfor %}{% endif %}{{ '<end_of_turn>' }}{% endmacro %}
{%- if m.role == 'assistant' %}{% generation %}{{ said(m) }}{% endgeneration %}{% else %}{{ said(m) }}{% endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}""",
    "Mistral": """
{{- '<s>' }}
{%- set system = messages[0].content + '\\n\\n' if messages[0].role == 'system' else '' %}
{%- set asked = messages | selectattr('role', 'equalto', 'user') | list %}
{%- for m in (messages[1:] if system else messages) %}
{%- if m.role == 'user' %}
{%- if tools and m == asked[-1] %}{{ '[AVAILABLE_TOOLS] ' }}{{ tools | tojson }}{{ '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' + (system if m == asked[-1] else '') + m.content + '[/INST]' }}
{%- elif m.tool_calls is defined and m.tool_calls is not none %}
{%- generation %}{{ '[TOOL_CALLS] ' }}{{ m.tool_calls | map(attribute='function') | list | tojson }}{{ '</s>' }}
{%- endgeneration %}
{%- elif m.role == 'assistant' %}{% generation %}{{ ' ' + m.content | trim + '</s>' }}{% endgeneration %}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('unknown role ' + m.role) }}{% endif %}
{%- endfor %}""",
    "Phi-4": """
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '<|im_sep|>' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{ m.content + '<|im_end|>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}""",
    "GLM-4": """
{{- '[gMASK]<sop>' }}
{%- if tools %}{{ '<|system|>\\n# Tools' }}{% for t in tools %}{{ '\\n' }}{{ t | tojson }}{% endfor %}{% endif %}
{%- for m in messages %}
{%- if m.role == 'assistant' and m.tool_calls %}
{%- for c in m.tool_calls %}{{ '<|assistant|>' }}{% generation %}{{ c.function.name + '\\n' }}
{{- c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}{% endgeneration %}
{%- endfor %}
{%- elif m.role == 'assistant' %}{{ '<|assistant|>' }}{% generation %}{{ '\\n' + m.content }}{% endgeneration %}
{%- elif m.role == 'tool' %}{{ '<|observation|>\\n' + m.content }}
{%- else %}{{ '<|' + m.role + '|>\\n' + m.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}""",
    "plain": """
{%- for m in messages %}{{ m.role + ': ' }}
{%- if m.role == 'assistant' %}{% generation %}{{ m.content + '\\n' }}{% endgeneration %}
{%- else %}{{ m.content + '\\n' }}{% endif %}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}""",
}
EOS = {"Llama 3": "<|eot_id|>", "Gemma 3": "<end_of_turn>", "Mistral": "</s>", "GLM-4": "<|eos|>", "plain": "<|eos|>"}

# -- rows --------------------------------------------------------------------------------------------------------------
SYSTEM = {"role": "system", "content": "Be brief and kind."}
ASK, SAY = {"role": "user", "content": "What is two plus two?"}, {"role": "assistant", "content": "It is four, friend."}
MORE, END = {"role": "user", "content": "And the sum of both?"}, {"role": "assistant", "content": "The sum is eight."}
TALK = [ASK, SAY, MORE, END]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}}]


def called(**changes) -> list[dict]:
    call = {"role": "assistant", "content": None, "tool_calls": [
        {"id": "a1", "type": "function", "function": {"name": "add", "arguments": changes.pop("arguments", {"a": 2})}},
    ]}  # fmt: skip
    call |= changes
    return [ASK, call, {"role": "tool", "content": "The tool says 4.", "tool_call_id": "a1"}, SAY]


def without(messages: list[dict], *keys: str) -> list[dict]:
    return [{key: value for key, value in message.items() if key not in keys} for message in messages]


def shared(messages: list[dict]) -> list[dict]:
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    return [{"from": names[message["role"]], "value": message["content"]} for message in messages]


THOUGHT = [ASK, SAY | {"reasoning_content": "Two twos are four."}]
PARTS = [message | {"content": [{"type": "text", "text": message["content"]}]} for message in TALK]
MISSING = [{k: v for k, v in message.items() if v is not None} for message in called()]
# form → (row, messages, columns for the template, untrained turns)
FORMS = {
    "messages": ({"messages": [SYSTEM, *TALK]}, [SYSTEM, *TALK], {}, ()),
    "messages without system": ({"messages": TALK}, TALK, {}, ()),
    '`"weight": 0`': ({"messages": [ASK, SAY | {"weight": 0}, MORE, END | {"weight": 1}]}, TALK, {}, (1,)),
    '`"train": false`': ({"messages": [ASK, SAY | {"train": False}, MORE, END]}, TALK, {}, (1,)),
    "tools, null content": ({"messages": called(), "tools": TOOLS}, called(), {"tools": TOOLS}, ()),
    "tools, no content": ({"messages": MISSING, "tools": json.dumps(TOOLS)}, MISSING, {"tools": TOOLS}, ()),
    "arguments as text": ({"messages": called(arguments='{"a": 2}')}, called(arguments='{"a": 2}'), {}, ()),
    "content in parts": ({"messages": PARTS}, TALK, {}, ()),
    "`reasoning_content`": ({"messages": THOUGHT}, THOUGHT, {}, ()),
    "sharegpt": ({"conversations": shared(TALK)}, TALK, {}, ()),
    "sharegpt with system": ({"conversations": shared([SYSTEM, *TALK])}, [SYSTEM, *TALK], {}, ()),
    "sharegpt, column `system`": (
        {"conversations": shared(TALK), "system": SYSTEM["content"]}, [SYSTEM, *TALK], {}, ()
    ),
    "alpaca with input": (
        {"instruction": "Add.", "input": "2 and 2", "output": "Four it is."},
        [ASK | {"content": "Add.\n\n2 and 2"}, SAY | {"content": "Four it is."}], {}, (),
    ),
    "alpaca with system and history": (
        {"instruction": MORE["content"], "input": "", "output": END["content"], "system": SYSTEM["content"],
         "history": [[ASK["content"], SAY["content"]]]}, [SYSTEM, *TALK], {}, (),
    ),
    "prompt and completion": ({"prompt": TALK[:3], "completion": [END]}, TALK, {}, (1,)),
    "chosen and rejected": ({"chosen": TALK, "rejected": [ASK, END]}, TALK, {}, ()),
    "prompt, chosen, rejected": ({"prompt": [ASK], "chosen": [SAY], "rejected": [END]}, [ASK, SAY], {}, ()),
}  # fmt: skip


# -- comparison --------------------------------------------------------------------------------------------------------
def tokenizer_for(name: str, tiny):
    """The tiny tokenizer with a template, without its `generation` blocks, and with the special tokens of all."""
    tokenizer = deepcopy(tiny)
    tokenizer.add_tokens(SPECIAL.split(), special_tokens=True)
    tokenizer.eos_token = EOS.get(name, "<|im_end|>")
    without = TEMPLATES[name].replace(" generation %}", " if true %}").replace(" endgeneration %}", " endif %}")
    tokenizer.chat_template = without
    return tokenizer


def reference(name: str, tokenizer, messages: list[dict], given: dict) -> tuple[list[int], list[list[int]]]:
    """transformers' tokens of a conversation and, for each assistant turn, the numbers of those that are generated."""
    done = tokenizer.apply_chat_template(
        messages, chat_template=TEMPLATES[name], return_assistant_tokens_mask=True, return_dict=True, **given
    )
    runs: list[list[int]] = []
    for at, learned in enumerate(done["assistant_masks"]):
        if learned:
            if not runs or runs[-1][-1] != at - 1:
                runs.append([])
            runs[-1].append(at)
    return done["input_ids"], runs


def outcome(form: str, name: str, tiny) -> str:
    """What becomes of a row: "yes" (all answers in one text), "each" (a text for each answer), "apart" (the answer is
    tokenised apart from a prompt that ends in a space), or the reason of a refusal. Raises AssertionError if the tokens
    or targets are not those of transformers."""
    row, messages, columns, untrained = FORMS[form]
    tokenizer, thinks = (
        tokenizer_for(name, tiny),
        "reasoning" in form,
    )  # with thinking off, Qwen3 has no place for the thought
    given = columns | {"enable_thinking": thinks}
    try:
        found = list(documents([deepcopy(row)], tokenizer, "on" if thinks else "off"))
    except UserError as error:
        return str(error).removeprefix("row 0: ").split(";")[0]
    answers = [turn for turn, message in enumerate(messages) if message["role"] == "assistant"]
    wanted = [turn for turn in answers if turn not in untrained]
    own = wanted[: len(found) - 1]
    apart = False
    for document, turns in zip(found, [*([turn] for turn in own), wanted[len(own) :]], strict=True):
        told = messages[: turns[0] + 1] if turns[0] in own else messages
        ids, runs = reference(name, tokenizer, told, given)
        assert len(runs) == sum(message["role"] == "assistant" for message in told)
        ended = ids[-1] == tokenizer.eos_token_id or tokenizer.decode(ids).rstrip().endswith(tokenizer.eos_token)
        targets = {at for turn in turns for at in runs[answers.index(turn)]}
        if name == "GLM-4":  # its turns end where the next begins
            targets |= {runs[answers.index(turn)][-1] + 1 for turn in turns} & set(range(len(ids)))
        if not ended:
            ids = [*ids, tokenizer.eos_token_id]
            targets |= {len(ids) - 1} if turns[-1] + 1 == len(told) else set()
        product, sections = encode(document, tokenizer)
        if product.tolist() != ids:  # then it must be what generation begins with, and the answer
            asked = tokenizer.apply_chat_template(
                told[: turns[0]], add_generation_prompt=True, return_dict=False, **given
            )
            start = len(asked)
            assert product[:start].tolist() == asked and len(turns) == 1, (form, name)
            assert tokenizer.decode(product) == tokenizer.decode(ids), (form, name)
            assert sections[start:].all() and not sections[:start].any(), (form, name)
            apart = True
            continue
        assert {at for at, section in enumerate(sections) if section} == targets, (form, name)
    return "apart" if apart else "each" if len(found) > 1 else "yes"


def table(tiny) -> str:
    notes: dict[str, int] = {}
    lines = [f"| row | {' | '.join(TEMPLATES)} |", f"|{'---|' * (len(TEMPLATES) + 1)}"]
    for form in FORMS:
        cells = [outcome(form, name, tiny) for name in TEMPLATES]
        shown = [
            cell if cell in ("yes", "each", "apart") else f"[{notes.setdefault(cell, len(notes) + 1)}]"
            for cell in cells
        ]
        lines.append(f"| {form} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", *(f"{number}. {note}" for note, number in notes.items())])


if __name__ == "__main__":
    import contextlib
    import sys

    from qat_lora.hardware.tiny import tokenizer

    with contextlib.redirect_stdout(sys.stderr):
        made = table(tokenizer())
    print(made)
