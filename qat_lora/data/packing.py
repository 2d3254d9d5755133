"""Documents to rows of one length: one static shape for every batch, and a mask of the tokens to learn."""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from qat_lora.data.chat import Document
from qat_lora.errors import UserError
from qat_lora.models.identity import tokenizer_fingerprint as tokenizer_fingerprint
from qat_lora.models.tokens import check_ids
from qat_lora.run.console import progress


@dataclass(frozen=True)
class Rows:
    """Packed text: tokens int32 [N, L] and mask uint8 [N, L].

    mask[n, t] = 1 where tokens[n, t] is to be learned, that is, predicted from the tokens before it; the losses do the
    shift. given: a token that is context wherever it stands and is never predicted (BOS, unless it is also the EOS).
    Raises ValueError for other types or shapes.
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    given: int | None = None

    def __post_init__(self):
        if self.tokens.dtype != torch.int32 or self.mask.dtype != torch.uint8:
            raise ValueError(f"tokens {self.tokens.dtype}, mask {self.mask.dtype}; they must be int32 and uint8")
        if self.tokens.ndim != 2 or self.tokens.shape != self.mask.shape:
            raise ValueError(f"tokens {list(self.tokens.shape)}, mask {list(self.mask.shape)}; both must be [N, L]")

    def __len__(self) -> int:
        return self.tokens.shape[0]


def stream(
    documents: Iterable[Document], tokenizer, limit: int | None = None, bos: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokenise the documents, end each with EOS and put them end to end: tokens int32 [T] and mask uint8 [T].

    Plain text has mask 1 throughout, EOS included; chat has mask 1 inside its spans, and gets no second EOS where its
    rendering ends with one. bos: the token that every document begins with, mask 0; it is added where the text does
    not begin with it already. Where BOS and EOS are the same token, the EOS of the document before stands for it, and
    one is added at the very beginning.
    Reading stops at `limit` tokens, so the documents may be endless.
    Raises UserError where the tokenizer has no EOS.
    """
    if tokenizer.eos_token_id is None:
        raise UserError("the tokenizer has no EOS token to end documents with; set tokenizer.eos_token")
    given = given_token(tokenizer, bos)
    start = [] if bos is None or given is not None else [bos]
    tokens, masks, total = [np.asarray(start, np.int32)], [np.zeros(len(start), np.uint8)], len(start)
    tell = progress()
    for document in documents:
        ids, sections = encode(document, tokenizer)
        mask = (sections > 0).astype(np.uint8)
        if given is not None and len(ids):
            if ids[0] != given:
                ids, mask = np.insert(ids, 0, given), np.insert(mask, 0, 0)
            mask[ids == given] = 0
        tokens.append(ids)
        masks.append(mask)
        total += len(ids)
        tell(f"tokenising: {total:,} tokens" + (f" of {limit:,}" if limit else ""))
        if limit is not None and total >= limit:
            break
    return tuple(torch.from_numpy(np.concatenate(parts)[:limit]) for parts in (tokens, masks))


def given_token(tokenizer, bos: int | None) -> int | None:
    """The token that is never predicted in rows that begin with `bos`: BOS itself, unless it also ends documents."""
    return None if bos == tokenizer.eos_token_id else bos


def window_starts(tokens: torch.Tensor, length: int, stride: int, bos: int | None = None) -> list[int]:
    """Where windows of `length` tokens begin in a stream [T], `stride` apart; the ragged end is left out.

    With `bos`, for which `windowed` overwrites a window's first token, one token further where the second is a BOS
    already: two would stand side by side.
    """
    if bos is None:
        return list(range(0, len(tokens) - length + 1, stride))
    found, start, is_bos = [], 0, (tokens == bos).tolist()
    while True:
        start += start + 1 < len(tokens) and is_bos[start + 1] and not is_bos[start]
        if start + length > len(tokens):
            return found
        found.append(start)
        start += stride


def windowed(values: torch.Tensor, starts: list[int], length: int, first: int | None = None) -> torch.Tensor:
    """The windows [N, length] of a stream [T], with `first` in place of each one's first value."""
    rows = torch.stack([values[start : start + length] for start in starts])
    if first is not None:
        rows[:, 0] = first
    return rows


def pack(
    documents: Iterable[Document], tokenizer, length: int, max_rows: int | None = None, bos: int | None = None
) -> Rows:
    """The documents' `stream`, cut into rows of `length` tokens, at most `max_rows`.

    The ragged end is dropped. A document may span rows and a row may hold several documents. With `bos` every row and
    every document begins with that token, mask 0. At the start of a row it stands in place of a token of the text, one
    that could not be learned there anyway: nothing stands before it. A row of 256 is then BOS and 255 tokens of text.
    Raises UserError where the text does not fill one row or the tokenizer has no EOS.
    """
    if length < 2:
        raise UserError(f"length={length} leaves nothing to predict; use 2 or more")
    if max_rows is not None and max_rows < 1:
        raise UserError(f"max_rows={max_rows} keeps nothing; use 1 or more, or leave it out")
    most = length if bos is None else length + 1  # tokens of the stream that a row can use up
    tokens, mask = stream(documents, tokenizer, None if max_rows is None else max_rows * most, bos)
    starts = window_starts(tokens, length, length, bos)[:max_rows]
    if not starts:
        raise UserError(
            f"the text has {len(tokens)} tokens, too few for a row of {length}; shorten the rows or add text"
        )
    unlearned = None if bos is None else 0
    rows = (windowed(values, starts, length, first) for values, first in ((tokens, bos), (mask, unlearned)))
    return Rows(*rows, given_token(tokenizer, bos))


def pad(documents: Iterable[Document], tokenizer, length: int) -> Rows:
    """A row for each document, filled up with EOS that is not to be learned.

    Raises UserError for a document of more than `length` tokens, and for a tokenizer without EOS.
    """
    rows = []
    for document in documents:
        tokens, mask = stream([document], tokenizer)
        if len(tokens) > length:
            raise UserError(f"a conversation of {len(tokens)} tokens does not fit a row of {length}; use longer rows")
        spare = length - len(tokens)
        filler = tokens.new_full((spare,), tokenizer.eos_token_id)
        rows.append((torch.cat([tokens, filler]), torch.cat([mask, mask.new_zeros(spare)])))
    return Rows(*(torch.stack(column) for column in zip(*rows)))


def encode(document: Document, tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Token ids int32 [T] of one document, EOS included, and the number of the section that each is in, uint8 [T], 0
    at what is not to be learned. T = 0 for an empty text."""
    if not document.text:  # hub datasets keep blank lines as rows: an EOS for each would be learned as text
        return np.zeros(0, np.int32), np.zeros(0, np.uint8)
    whole = _encode_plain if document.spans is None else _encode_chat
    ids, sections = whole(document, tokenizer)
    check_ids(ids, tokenizer)
    return np.asarray(ids, np.int32), np.asarray(sections, np.uint8)


def _encode_plain(document: Document, tokenizer) -> tuple[list[int], list[int]]:
    # verbose=False: a text longer than the model's context is cut into rows here, so its warning would be false.
    ids = tokenizer(document.text, add_special_tokens=False, verbose=False)["input_ids"] + [tokenizer.eos_token_id]
    return ids, [1] * len(ids)


def _encode_chat(document: Document, tokenizer) -> tuple[list[int], list[int]]:
    if not tokenizer.is_fast:
        raise UserError("completion masks need character offsets; use a fast tokenizer (one with a tokenizer.json)")
    encoded = tokenizer(document.text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)
    ids = list(encoded["input_ids"])
    numbers = document.sections or (1,) * len(document.spans)
    sections = _span_numbers(encoded["offset_mapping"], document.spans, numbers)
    ending = document.text.rstrip()  # ChatML ends with a newline after its EOS
    if not ending.endswith(tokenizer.eos_token):
        ids.append(tokenizer.eos_token_id)
        sections.append(numbers[-1] * (document.spans[-1][1] >= len(ending)))  # if the assistant has the last word
    return ids, sections


def _span_numbers(offsets: list[tuple[int, int]], spans: tuple[tuple[int, int], ...], numbers: tuple[int, ...]) -> list:
    """The number of the span that each token has a character in, 0 for none. One that straddles the edge of a span
    counts, else its characters are lost; one that straddles two is of the first."""
    start, end = np.asarray(offsets).reshape(-1, 2).T
    end = np.maximum(end, start + 1)  # byte-level tokenizers may report white space as an empty range
    found = np.zeros(len(start), np.uint8)
    for (first, last), number in reversed(list(zip(spans, numbers))):
        found[(start < last) & (end > first)] = number
    return found.tolist()


def split_heldout(rows: Rows, fraction: float) -> tuple[Rows, Rows]:
    """(train, held-out): the last max(1, round(fraction·N)) rows are held out, none where fraction is 0.

    A contiguous tail, so that no held-out token is trained on; both are views of `rows`.
    Raises UserError for a fraction outside [0, 1) and where nothing would be left to train on.
    """
    if not 0 <= fraction < 1:
        raise UserError(f"held-out fraction {fraction} is outside [0, 1); use 0.05, say")
    held = max(1, round(fraction * len(rows))) if fraction > 0 else 0
    kept = len(rows) - held
    if kept < 1:
        raise UserError(
            f"holding out {held} of {len(rows)} rows leaves nothing to train on; "
            "use a smaller fraction, shorter rows or more text"
        )
    sides = slice(None, kept), slice(kept, None)
    return tuple(Rows(rows.tokens[side], rows.mask[side], rows.given) for side in sides)


def fingerprint(rows: Rows) -> str:
    """sha256 (hex) over shape, tokens and mask: equal for equal rows in every process and on every machine."""
    digest = hashlib.sha256(json.dumps(list(rows.tokens.shape)).encode())
    digest.update(np.ascontiguousarray(rows.tokens.numpy(), dtype="<i4").ravel())
    digest.update(np.ascontiguousarray(rows.mask.numpy()).ravel())
    return digest.hexdigest()


class TextDataset(Dataset):
    """Packed rows as items: tokens [L] int64 and mask [L], 1 at the tokens to be predicted (never the first, and never
    the rows' `given`)."""

    def __init__(self, rows: Rows, completions_only: bool):
        self.tokens, self.mask = rows.tokens, rows.mask.clone() if completions_only else torch.ones_like(rows.mask)
        self.mask[:, 0] = 0
        if rows.given is not None:
            self.mask[rows.tokens == rows.given] = 0
        self.fingerprint = fingerprint(rows)
        if len(rows) and not self.mask.any():
            raise UserError("the rows keep no completion token to learn; use longer rows or other text")

    def kept(self, i: int) -> int:
        """Positions of row i to be predicted."""
        return int(self.mask[i].sum())

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[i].long(), "mask": self.mask[i]}
