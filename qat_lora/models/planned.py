"""Configs of models, and a stand-in for a tokenizer, to plan a run, where only shapes matter."""

from pathlib import Path

from qat_lora.models.source import hub_fault, is_hub

PUBLISHED = Path(__file__).with_name("published")  # the sizes of the models that presets name


def planned_name(name: str) -> str:
    """Where the config of a model is: `name` itself, or our own copy of its sizes if the hub cannot be reached."""
    copy = PUBLISHED / name.replace("/", "--")
    unreachable = (
        name not in ("", ".") and (copy / "config.json").is_file() and is_hub(name) and hub_fault("model", name)
    )
    return str(copy) if unreachable else name


def is_planned(name: str) -> bool:
    """Whether a model is one of our copies, which have no weights."""
    return Path(name).parent == PUBLISHED


class PlannedTokenizer:
    """Stands in for a tokenizer: encodes every text as the token 0, and decodes every token to nothing."""

    eos_token_id, chat_template = 0, "none"

    def __call__(self, text: str, **options) -> dict[str, list[int]]:
        return {"input_ids": [0]}

    def decode(self, tokens: list[int], **options) -> str:
        return ""

    def get_chat_template(self) -> str:
        return self.chat_template

    def apply_chat_template(self, messages: list[dict], **options) -> str:
        return ""
