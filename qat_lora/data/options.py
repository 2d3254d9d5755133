"""The text options that several scripts share, and functions that read the text.

Methods import what they need, so that --help does not wait for torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from qat_lora.errors import UserError
from qat_lora.models.tokens import BOS_SETTINGS, bos_token
from qat_lora.run import options as opt

if TYPE_CHECKING:
    from qat_lora.data.chat import Document
    from qat_lora.data.packing import Rows


@dataclass(frozen=True, kw_only=True)
class ChatOptions:
    """How conversations become text."""

    # Not part of the run's identity, whose facts already include fingerprints of the rows and of the template.
    chat_template: str | None = opt.data(
        None,
        "chat template to use instead of the tokenizer's own: chatml, gemma, llama3, the name of another template of "
        "the tokenizer, or a Jinja file",
        identity=False,
    )
    thinking: Literal["on", "off"] = opt.data("off", "render conversations with thinking on or off", identity=False)

    def tokenizer(self, name: str, date: datetime | None = None):
        """The tokenizer of a model with the chosen template; a template that prints the date prints `date`, by default
        today's. Raises UserError as `load_tokenizer` and `set_template` do."""
        from qat_lora.data.templates import set_template
        from qat_lora.models.loading import load_tokenizer

        tokenizer = load_tokenizer(name)
        if self.chat_template is not None:
            set_template(tokenizer, self.chat_template)
        tokenizer.template_date = date
        return tokenizer

    @property
    def thinks(self) -> bool:
        """Whether conversations are rendered with thinking on."""
        return self.thinking == "on"


@dataclass(frozen=True, kw_only=True)
class TokenOptions(ChatOptions):
    """How texts become tokens."""

    bos: Literal[*BOS_SETTINGS] = opt.data(
        "auto", "begin texts and rows with BOS; auto does what the tokenizer does", identity=False
    )

    def bos_token(self, tokenizer) -> int | None:
        """The token that texts begin with, or None."""
        return bos_token(tokenizer, self.bos)


@dataclass(frozen=True, kw_only=True)
class TextSource(TokenOptions):
    """The source of documents."""

    thinking: Literal["on", "off", "both"] = opt.data(
        "off", "render conversations with thinking on or off; both renders each row twice", identity=False
    )
    dataset: str = opt.data(
        "embedded",
        "text: embedded (Python's help topics), a local .txt, .jsonl or .parquet file, or a hub dataset",
        identity="data",
    )
    dataset_config: str | None = opt.data(None, "configuration name of a hub dataset")
    dataset_split: str = opt.data("train", "split of a hub dataset")
    streaming: bool = opt.data(False, "stream a hub dataset instead of downloading it", identity=False)

    def documents(self, tokenizer) -> Iterator[Document]:
        """The documents, chat rows rendered. Raises UserError for an unusable source, row or option."""
        from qat_lora.data.chat import documents
        from qat_lora.data.rows import COLUMNS
        from qat_lora.data.text import read_rows

        source = read_rows(
            self.dataset, config=self.dataset_config, split=self.dataset_split, streaming=self.streaming,
            columns=COLUMNS,
        )  # fmt: skip
        return documents(source, tokenizer, self.thinking)


@dataclass(frozen=True, kw_only=True)
class TextOptions(TextSource):
    """The source of rows of tokens."""

    length: int = opt.data(256, "tokens per row", at_least=2)
    max_rows: int | None = opt.data(None, "use at most this many packed rows [all]", at_least=1)

    def rows(self, tokenizer) -> Rows:
        """The documents packed into rows. Raises UserError as `documents` and `pack` do."""
        from qat_lora.data.packing import pack

        if self.streaming and not self.max_rows:
            raise UserError("--streaming may never end; give --max-rows with it")
        return pack(self.documents(tokenizer), tokenizer, self.length, self.max_rows, self.bos_token(tokenizer))
