"""Write a model as a Hugging Face folder, read it back with plain transformers and compare the two."""

import io
from contextlib import redirect_stderr
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.func import functional_call
from transformers import AutoModelForCausalLM, AutoTokenizer

from qat_lora.backend.devices import on_host
from qat_lora.backend.machine import giving_memory_back
from qat_lora.errors import UserError, first_line
from qat_lora.models.generate import end_tokens
from qat_lora.models.identity import pipeline
from qat_lora.models.loading import plain_state
from qat_lora.run.files import cannot_write, read_json, write_json, writing

PROBE_TOKENS = 24
NEAR = 1e-4  # largest allowed RMS difference of logits, relative to their standard deviation


def write_model(
    model: nn.Module,
    tokenizer,
    folder: Path,
    shown: Path,
    state: dict[str, Tensor] | None = None,
    logits: Tensor | None = None,
) -> nn.Module:
    """Write model, tokenizer and generation config in HF's format; returns the model as transformers reads it back.

    model: an HF model on any device, with its quantised weights frozen. state: values (on the CPU) to write instead of
    `plain_state`; requires `logits`, the logits of the model with these values for its `probe`. shown: the folder's
    name in errors, because it may have a temporary name until it is complete.

    The written generation config stops at every token of `end_tokens`. Raises UserError if the folder cannot be
    written, or if plain transformers loads other tensors from it or computes other logits.
    """
    if state is None:
        state = {name: value.detach().cpu() for name, value in plain_state(model).items()}
        logits = logits_on_cpu(model, probe(model))
    model.generation_config.eos_token_id = end_tokens(model, tokenizer)
    with writing(shown):
        try:
            model.save_pretrained(folder, state_dict=dict(state))
            tokenizer.save_pretrained(folder)
        except ValueError as error:  # settings that transformers refuses to write
            raise cannot_write(shown, error) from error
        backend = getattr(tokenizer, "backend_tokenizer", None)
        # transformers warns of Mistral's wrong split expression only in models written before version 5
        if getattr(backend, "fix_mistral_regex", None) is False:
            version = {"transformers_version": model.config.transformers_version}
            write_json(folder / "config.json", read_json(folder / "config.json") | version)
        _leave_out(folder / "tokenizer.json", getattr(tokenizer, "without_row", {}))
    back = _read(folder, shown)
    read = plain_state(back)
    for name in sorted(read.keys() | state.keys()):
        if name not in read or name not in state or not torch.equal(read[name], state[name]):
            raise differs(shown, name)
    check_logits(back, probe(model), logits, shown)
    again, ends = AutoTokenizer.from_pretrained(folder), back.generation_config.eos_token_id
    rows = len(back.get_input_embeddings().weight)
    if again.chat_template != tokenizer.chat_template:
        raise differs(shown, "the chat template")
    if _with_rows(again, rows) != _with_rows(tokenizer, rows):
        raise UserError(
            f"{shown} is not kept: for model type {back.config.model_type!r}, transformers replaces this tokenizer "
            "with its own, which splits texts differently; use a model with the standard tokenizer of its type"
        )
    if ends != model.generation_config.eos_token_id:
        raise differs(shown, "the generation config")
    return back


def _with_rows(tokenizer, rows: int) -> dict:
    """A tokenizer's pipeline without the added tokens beyond the model's embedding: transformers may add others."""
    whole = pipeline(tokenizer)
    if "vocab" in whole:  # of a slow tokenizer
        return whole | {"vocab": {token: id for token, id in whole["vocab"].items() if id < rows}}
    return whole | {"added_tokens": [token for token in whole["added_tokens"] if token["id"] < rows]}


def _leave_out(path: Path, tokens: dict[int, str]) -> None:
    """Remove from a tokenizer's file the tokens that transformers has added beyond the model's embedding."""
    if tokens and path.is_file():
        held = read_json(path)
        held["added_tokens"] = [token for token in held["added_tokens"] if token["id"] not in tokens]
        write_json(path, held)


def probe(model: nn.Module) -> Tensor:
    """The tokens [1, T] on which two forms of a model are compared, drawn from its whole vocabulary."""
    rows = len(model.get_input_embeddings().weight)
    return torch.randint(rows, (1, PROBE_TOKENS), generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def logits_on_cpu(model: nn.Module, tokens: Tensor) -> Tensor:
    """The model's logits for tokens [B, L], computed on the CPU in evaluation mode, whatever its device."""
    training = model.training
    model.eval()
    try:
        if on_host(next(model.parameters())):
            return model(input_ids=tokens, use_cache=False).logits
        values = {n: v.detach().cpu() for n, v in (*model.named_parameters(), *model.named_buffers())}
        return functional_call(model, values, (tokens,), {"use_cache": False}).logits
    finally:
        model.train(training)


@giving_memory_back()
def _read(folder: Path, shown: Path) -> nn.Module:
    try:
        with redirect_stderr(io.StringIO()):
            return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise UserError(
            f"{shown} cannot be read back ({first_line(error)[:160]}), so it is not kept; check disk and memory"
        ) from error


def check_logits(back: nn.Module, tokens: Tensor, logits: Tensor, shown: Path) -> None:
    """Raise UserError if a model's logits for tokens [B, L] differ from `logits` by more than rounding (NEAR)."""
    gap = (logits_on_cpu(back, tokens) - logits).double()
    spread = logits.double().std()
    if not gap.square().mean().sqrt() <= NEAR * spread:  # written so that NaN fails too
        raise UserError(
            f"{shown}: logits from plain transformers differ from the trained model's by up to "
            f"{float(gap.abs().max()):.2g} (standard deviation {float(spread):.2g}), so it is not kept; use the pinned "
            "transformers"
        )


def differs(path: Path, what: str) -> UserError:
    return UserError(
        f"{path}: {what} changed between writing and reading back, so it is not kept; check disk and memory"
    )
