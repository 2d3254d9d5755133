"""When a completion ends, and which sampling settings are valid."""

from jinja2 import TemplateError
from torch import nn

from qat_lora.errors import UserError
from qat_lora.models.architecture import unwrap

LEAST = 1e-6  # smallest temperature above 0; dividing fp32 logits by less would overflow


def end_tokens(model: nn.Module, tokenizer) -> list[int]:
    """Every token that ends a completion: the tokenizer's EOS, the EOS tokens of the model's generation config, and the
    special token that follows an answer in the chat template: the end of the turn (for a base model often not EOS) or,
    as in GLM-4's, the beginning of the next."""
    own = unwrap(model).generation_config.eos_token_id or []
    return sorted({tokenizer.eos_token_id, *(own if isinstance(own, list) else [own]), *_turn_end(tokenizer)})


def _turn_end(tokenizer) -> list[int]:
    said, ask = "§", {"role": "user", "content": "?"}
    talk = [ask, {"role": "assistant", "content": said}, ask]
    try:
        text = tokenizer.apply_chat_template(talk, tokenize=False) if tokenizer.chat_template else ""
    except (TemplateError, ValueError):  # the template refuses these messages, or there are several and no default
        text = ""
    if said not in text:
        return []
    after = tokenizer(text.rpartition(said)[2].lstrip(), add_special_tokens=False)["input_ids"]
    return [number for number in after[:1] if number in tokenizer.added_tokens_decoder]


def check_sampling(temperature: float, top_k: int = 0, top_p: float = 1.0) -> None:
    """Raise UserError for invalid sampling settings."""
    if temperature and not LEAST <= temperature < float("inf"):
        raise UserError(f"temperature {temperature} must be 0 (greedy) or at least {LEAST:g}; use e.g. 0.7")
    if top_k < 0:
        raise UserError(f"top-k {top_k} must not be negative; use 0 for no restriction")
    if not LEAST <= top_p <= 1:
        raise UserError(f"top-p {top_p} is outside [{LEAST:g}, 1]; use 1 for no restriction")
