"""Completions with HF generate, on CPU and CUDA."""

import threading
from collections.abc import Iterator

import torch
from jinja2 import TemplateError
from torch import nn
from transformers import GenerationConfig, TextIteratorStreamer

from qat_lora.backend import TorchBackend, has_static_shapes
from qat_lora.errors import UserError
from qat_lora.models.architecture import unwrap
from qat_lora.models.tokens import check_ids, prompt_ids

LEAST = 1e-6  # smallest temperature above 0; dividing fp32 logits by less would overflow


def complete(
    model: nn.Module,
    tokenizer,
    prompt: str | list[dict],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    thinking: bool | None = None,
    streamer=None,
) -> str:
    """The model's completion of `prompt`, without special tokens; it stops at an end token (`end_tokens`) or after
    `max_new_tokens`.

    prompt: messages ({"role": …, "content": …}) for the chat template, or plain text to continue.
    model: a placed HF model, frozen student or PEFT model in evaluation mode. temperature 0 is greedy; above 0, samples
    are drawn from torch's global generator, so seed the backend first. Sampling defaults that the model ships with
    (top_k, repetition penalty) are switched off, so that models are compared under the same settings.
    thinking: the value of the template's `enable_thinking` switch, if it has one; None leaves the default.
    streamer: a transformers streamer that receives the prompt and each token as it is generated.
    Raises UserError for a template that is missing or refuses the messages, and for a prompt that does not fit the
    model's context.
    """
    inputs, base = encode_prompt(model, tokenizer, prompt, max_new_tokens, thinking), unwrap(model)
    # Pad may equal EOS, but the mask, all ones for a single prompt, shows that no token is padding.
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    plan = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=temperature > 0, temperature=temperature or 1.0, top_p=top_p, top_k=0,
        repetition_penalty=1.0, eos_token_id=end_tokens(model, tokenizer), pad_token_id=pad,
    )  # fmt: skip
    output = model.generate(
        input_ids=inputs["input_ids"].to(base.device),
        attention_mask=inputs["attention_mask"].to(base.device),
        generation_config=plan,
        streamer=streamer,
    )
    return tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


class _Pieces(TextIteratorStreamer):
    """Streams text as it is generated, until the reader stops iterating."""

    left = False
    last = None

    def put(self, value):
        if self.left:
            raise _Left
        self.last = int(value.flatten()[-1])
        super().put(value)


class _Left(Exception):
    """The reader has stopped iterating, so generation must stop."""


class Stream:
    """The output of `complete`, piece by piece as it is generated; generation stops when the reader stops iterating.

    rule: the remaining arguments of `complete`. ended: whether the completion stopped at an end token rather than the
    length limit; valid once the whole completion has been read. Iterating raises the errors of `complete`.
    """

    def __init__(self, model: nn.Module, tokenizer, prompt: str | list[dict], backend: TorchBackend, **rule):
        self.model, self.tokenizer, self.prompt, self.backend, self.rule = model, tokenizer, prompt, backend, rule
        self.ended = False

    def __iter__(self) -> Iterator[str]:
        pieces, failed = _Pieces(self.tokenizer, skip_prompt=True, skip_special_tokens=True), []

        def work() -> None:
            try:
                with self.backend.autocast():
                    complete(self.model, self.tokenizer, self.prompt, streamer=pieces, **self.rule)
            except _Left:
                pass
            except Exception as error:
                failed.append(error)
                pieces.end()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield from filter(None, pieces)
            if failed:
                raise failed[0]
            self.ended = pieces.last in end_tokens(self.model, self.tokenizer)
        finally:
            pieces.left = True
            thread.join()


def end_tokens(model: nn.Module, tokenizer) -> list[int]:
    """Every token that ends a completion: the tokenizer's EOS, the EOS tokens of the model's generation config, and the
    token that ends an assistant turn in the chat template (for a base model often not EOS)."""
    own = unwrap(model).generation_config.eos_token_id or []
    return sorted({tokenizer.eos_token_id, *(own if isinstance(own, list) else [own]), *_turn_end(tokenizer)})


def _turn_end(tokenizer) -> list[int]:
    said = "§"
    talk = [{"role": "user", "content": "?"}, {"role": "assistant", "content": said}]
    try:
        text = tokenizer.apply_chat_template(talk, tokenize=False) if tokenizer.chat_template else ""
    except (TemplateError, ValueError):  # the template refuses these messages, or there are several and no default
        text = ""
    if said not in text:
        return []
    after = tokenizer(text.rpartition(said)[2].lstrip(), add_special_tokens=False)["input_ids"]
    return [number for number in after[:1] if number in tokenizer.added_tokens_decoder]


def check_device(device: str) -> None:
    """Raise UserError if generation is not supported on a device."""
    if has_static_shapes(device):
        raise UserError("on XLA every new token would compile another graph; use --device cpu or cuda")


def check_temperature(temperature: float) -> None:
    """Raise UserError for a temperature that cannot be used."""
    if temperature and temperature < LEAST:
        raise UserError(f"--temperature {temperature} must be 0 (greedy) or at least {LEAST:g}; use e.g. 0.7")


def encode_prompt(
    model: nn.Module, tokenizer, prompt: str | list[dict], max_new_tokens: int, thinking: bool | None
) -> dict[str, torch.Tensor]:
    """input_ids and attention_mask [1, T] of messages rendered by the chat template, or of plain text. Raises UserError
    as `complete` does."""
    if not prompt:
        raise UserError("the prompt is empty; give some text to continue")
    try:
        for text in [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]:
            text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the prompt is not valid Unicode at character {error.start}; type it again") from error
    if isinstance(prompt, str):
        ids = prompt_ids(tokenizer, prompt)
    elif tokenizer.chat_template is None:
        raise UserError(
            "the tokenizer has no chat template; use --raw for a plain continuation, --chat-template, or an instruct "
            "model"
        )
    else:
        switches = {} if thinking is None else {"enable_thinking": thinking}
        try:
            text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True, **switches)
        except (TemplateError, ValueError) as error:
            raise UserError(
                f"the chat template refuses the messages: {error}; correct it, or give another with --chat-template"
            ) from error
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    check_ids(ids, tokenizer)
    context = getattr(unwrap(model).config, "max_position_embeddings", None)
    if context and len(ids) + max_new_tokens > context:
        raise UserError(
            f"a prompt of {len(ids)} tokens and {max_new_tokens} new tokens do not fit the model's context of "
            f"{context}; lower --max-new-tokens or use a shorter prompt"
        )
    tokens = torch.tensor([ids], dtype=torch.long)
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
