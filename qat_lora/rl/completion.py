"""Completions with HF generate, on CPU and CUDA."""

import copy
import queue
import re
import threading
from collections.abc import Callable, Iterator

import torch
from torch import nn
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from qat_lora.backend import TorchBackend, has_static_shapes
from qat_lora.data.chat import chat_ids, silent_tokens, spoken
from qat_lora.errors import UserError
from qat_lora.models.architecture import context_length, unwrap
from qat_lora.models.generate import check_sampling, end_tokens
from qat_lora.models.tokens import check_ids, prompt_ids

BYTE = re.compile("<0x[0-9A-F]{2}>")  # a token for a byte of a character that has no token
CLEANED = 12  # removing a space before punctuation looks at fewer characters than this


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
    """The model's completion of `prompt`, without special tokens except those around a thought (`spoken`); it stops at
    an end token (`end_tokens`) or after `max_new_tokens`.

    prompt: messages ({"role": …, "content": …}) for the chat template, or plain text to continue.
    model: a placed HF model, frozen student or PEFT model in evaluation mode. temperature 0 is greedy; above 0, samples
    are drawn from torch's global generator, so seed the backend first. Of the generation settings that the model ships
    with, only the end tokens apply, so that models are compared under the same settings.
    thinking: the value of the template's `enable_thinking` switch, if it has one; None leaves the default.
    streamer: a `Pieces`, which shows the text as it is generated.
    Raises UserError for a template that is missing or refuses the messages, and for a prompt that
    does not fit the model's context.
    """
    check_sampling(temperature, top_p=top_p)
    ids = _encode(tokenizer, prompt, thinking)
    used, context = len(ids), context_length(unwrap(model).config)
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
    # generate() fills what a plan leaves open from the model's own settings, so it is called on a copy without any. The
    # copy shares the weights; the model may be generating for someone else at the same time.
    speaker = copy.copy(unwrap(model))
    speaker.generation_config = GenerationConfig()
    output = speaker.generate(
        input_ids=torch.tensor([ids], device=speaker.device),
        attention_mask=torch.ones(1, used, dtype=torch.long, device=speaker.device),
        generation_config=plan,
        streamer=streamer,
    )
    return tokenizer.decode(spoken(tokenizer, output[0, used:].tolist()))


class Pieces(BaseStreamer):
    """Receives tokens from generate() and calls `show` for each with the text that has become final, often none. All
    pieces together are the completion."""

    def __init__(self, tokenizer, show: Callable[[str], None]):
        self.tokenizer, self.show, self.silent = tokenizer, show, silent_tokens(tokenizer)
        self.last: int | None = None  # the last token
        self.spoken: list[int] | None = None  # tokens that have text; None until the prompt has been received
        self.shown = 0  # characters

    def put(self, value: torch.Tensor) -> None:
        if self.spoken is None:
            self.spoken = []
            return
        for self.last in value.flatten().tolist():
            self.spoken += [self.last] * (self.last not in self.silent)
        self._pass_on(_final(self.tokenizer, self.spoken))

    def end(self) -> None:
        self._pass_on(self.tokenizer.decode(self.spoken))

    def _pass_on(self, text: str) -> None:
        piece = text[self.shown :]
        self.shown += len(piece)
        self.show(piece)


def _final(tokenizer, ids: list[int]) -> str:
    """The part of the text of `ids` that no further token can change."""
    # A run of byte tokens is decoded as a whole: one bad byte at its end turns all of it into replacement characters.
    # An id without a token, in an embedding that is larger than the vocabulary, does not interrupt it.
    while ids and BYTE.fullmatch(tokenizer.convert_ids_to_tokens(ids[-1]) or "<0x00>"):
        ids = ids[:-1]
    text = tokenizer.decode(ids).rstrip("\N{REPLACEMENT CHARACTER}")  # perhaps the start of a character
    cleans = tokenizer.clean_up_tokenization_spaces and type(tokenizer.backend_tokenizer.model).__name__ != "BPE"
    return text[:-CLEANED] if cleans else text


class _Left(Exception):
    """The reader has stopped iterating, so generation must stop."""


class Stream:
    """The output of `complete`, piece by piece as it is generated; generation stops when the reader stops iterating.

    rule: the remaining arguments of `complete`. turns: also yield "" for a token that shows no text yet, so that a
    reader can leave between any two tokens. text, ended: the completion, and whether it stopped at an end token rather
    than the length limit; valid once all pieces have been read. Iterating raises the errors of `complete`.
    """

    left = False  # whether the reader has stopped iterating

    def __init__(
        self, model: nn.Module, tokenizer, prompt: str | list[dict], backend: TorchBackend, turns: bool = False, **rule
    ):
        self.turns = turns
        self.model, self.tokenizer, self.prompt, self.backend, self.rule = model, tokenizer, prompt, backend, rule
        self.text, self.ended = "", False

    def __iter__(self) -> Iterator[str]:
        waiting, failed = queue.Queue(), []

        def show(piece: str) -> None:
            if self.left:
                raise _Left
            waiting.put(piece)

        def work() -> None:
            pieces = Pieces(self.tokenizer, show)
            try:
                with self.backend.autocast():
                    self.text = complete(self.model, self.tokenizer, self.prompt, streamer=pieces, **self.rule)
                self.ended = pieces.last in end_tokens(self.model, self.tokenizer)
            except _Left:
                pass
            except Exception as error:
                failed.append(error)
            waiting.put(None)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            pieces = iter(waiting.get, None)
            yield from pieces if self.turns else filter(None, pieces)
            if failed:
                raise failed[0]
        finally:
            self.left = True
            thread.join()


def check_device(device: str) -> None:
    """Raise UserError if generation is not supported on a device."""
    if has_static_shapes(device):
        raise UserError("on XLA every new token would compile another graph; use --device cpu or cuda")


def check_room(
    model: nn.Module, tokenizer, shortest: str | list[dict], max_new_tokens: int, thinking: bool | None = None
) -> None:
    """Raise UserError if even the `shortest` possible prompt does not fit the model's context."""
    used, context = len(_encode(tokenizer, shortest, thinking)), context_length(unwrap(model).config)
    if context and used + max_new_tokens > context:
        raise UserError(
            f"--max-new-tokens {max_new_tokens} leaves no room for a prompt, which takes at least {used} of the "
            f"model's context of {context} tokens; use at most {context - used}"
        )


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
