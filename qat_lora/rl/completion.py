"""Completions with HF generate, on CPU and CUDA."""

import threading
from collections.abc import Iterator

import torch
from torch import nn
from transformers import GenerationConfig, TextIteratorStreamer

from qat_lora.backend import TorchBackend, has_static_shapes
from qat_lora.data.chat import chat_ids
from qat_lora.errors import UserError
from qat_lora.models.architecture import unwrap
from qat_lora.models.generate import check_sampling, end_tokens
from qat_lora.models.tokens import check_ids, prompt_ids


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
    Raises UserError for a template that is missing or refuses the messages, and for a prompt that
    does not fit the model's context.
    """
    check_sampling(temperature, top_p=top_p)
    ids = _encode(tokenizer, prompt, thinking)
    used, context = len(ids), _context(model)
    if context and used + max_new_tokens > context:
        raise UserError(
            f"a prompt of {used} tokens and {max_new_tokens} new tokens do not fit the model's context of {context}; "
            "use fewer new tokens or a shorter prompt"
        )
    # Pad may equal EOS, but the mask, all ones for a single prompt, shows that no token is padding.
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    plan = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=temperature > 0, temperature=temperature or 1.0, top_p=top_p, top_k=0,
        repetition_penalty=1.0, eos_token_id=end_tokens(model, tokenizer), pad_token_id=pad,
    )  # fmt: skip
    output = model.generate(
        input_ids=torch.tensor([ids], device=unwrap(model).device),
        attention_mask=torch.ones(1, used, dtype=torch.long, device=unwrap(model).device),
        generation_config=plan,
        streamer=streamer,
    )
    return tokenizer.decode(output[0, used:], skip_special_tokens=True)


class _Pieces(TextIteratorStreamer):
    """Streams text as it is generated, until the reader stops iterating."""

    left = False
    last = None

    def put(self, value):
        if self.left:
            raise _Left
        self.last = int(value.flatten()[-1])
        super().put(value)
        self.text_queue.put("")  # the reader's turn to leave, also while no text can be shown yet


class _Left(Exception):
    """The reader has stopped iterating, so generation must stop."""


class Stream:
    """The output of `complete`, piece by piece as it is generated; generation stops when the reader stops iterating.

    rule: the remaining arguments of `complete`. turns: also yield "" for every token, so that a reader who waits for
    text can leave between two tokens. ended: whether the completion stopped at an end token rather than the length
    limit; valid once the whole completion has been read. Iterating raises the errors of `complete`.
    """

    def __init__(
        self, model: nn.Module, tokenizer, prompt: str | list[dict], backend: TorchBackend, turns=False, **rule
    ):
        self.turns = turns
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
            yield from pieces if self.turns else filter(None, pieces)
            if failed:
                raise failed[0]
            self.ended = pieces.last in end_tokens(self.model, self.tokenizer)
        finally:
            pieces.left = True
            thread.join()


def check_device(device: str) -> None:
    """Raise UserError if generation is not supported on a device."""
    if has_static_shapes(device):
        raise UserError("on XLA every new token would compile another graph; use --device cpu or cuda")


def check_room(
    model: nn.Module, tokenizer, shortest: str | list[dict], max_new_tokens: int, thinking: bool | None = None
) -> None:
    """Raise UserError if even the `shortest` possible prompt does not fit the model's context."""
    used, context = len(_encode(tokenizer, shortest, thinking)), _context(model)
    if context and used + max_new_tokens > context:
        raise UserError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a prompt, which takes at least {used} of the "
            f"model's context of {context} tokens; use at most {context - used}"
        )


def _context(model: nn.Module) -> int | None:
    """The model's context length in tokens; None if unknown."""
    return getattr(unwrap(model).config, "max_position_embeddings", None)


def _encode(tokenizer, prompt: str | list[dict], thinking: bool | None) -> list[int]:
    """The tokens of messages rendered by the chat template, or of plain text."""
    if not prompt:
        raise UserError("the prompt is empty; give some text to continue")
    try:
        for text in [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]:
            text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the prompt is not valid Unicode at character {error.start}; type it again") from error
    if not isinstance(prompt, str):
        return chat_ids(prompt, tokenizer, thinking)
    ids = prompt_ids(tokenizer, prompt)
    check_ids(ids, tokenizer)
    return ids
