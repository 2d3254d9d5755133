"""Pack documents into rows of one length, with a mask of the target tokens, so that all batches have one shape."""

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
from qat_lora.models.tokens import check_ids, encoded
from qat_lora.run.console import progress

WINDOW = 2**17  # characters of a text that are tokenised at a time; no help topic is longer
OVERLAP = 2**11  # characters that two windows share
AGREE = 8  # tokens that must be the same on both sides of the place where two windows are joined


@dataclass(frozen=True)
class Rows:
    """Packed text: tokens int32 [N, L] and mask uint8 [N, L].

    mask[n, t] = 1 if tokens[n, t] is a target, i.e. predicted from the tokens before it; the losses shift by one.
    given: a token that is only context and never a target (BOS, unless it is also the EOS).
    """

    tokens: torch.Tensor
    mask: torch.Tensor
    given: int | None = None

    def __len__(self) -> int:
        return self.tokens.shape[0]


def stream(
    documents: Iterable[Document], tokenizer, limit: int | None = None, bos: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokenise the documents, end each with EOS and concatenate them: tokens int32 [T] and mask uint8 [T].

    Plain text has mask 1 throughout, including EOS; chat has mask 1 inside its spans, and gets no second EOS if its
    rendering ends with one. bos: the token that begins every document, mask 0; it is added unless the text already
    begins with it. If BOS and EOS are the same token, the EOS of the previous document serves as BOS, and one is added
    at the start of the stream.
    Reading stops at `limit` tokens, so the documents may be endless.
    """
    given = given_token(tokenizer, bos)
    start = [] if bos is None or given is not None else [bos]
    tokens, masks, total = [np.asarray(start, np.int32)], [np.zeros(len(start), np.uint8)], len(start)
    tell = progress()
    for document in documents:
        ids, sections = encode(document, tokenizer, None if limit is None else limit - total)
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
    """The token that is never a target in rows that begin with `bos`: BOS itself, unless it also ends documents."""
    return None if bos == tokenizer.eos_token_id else bos


def window_starts(tokens: torch.Tensor, length: int, stride: int, bos: int | None) -> list[int]:
    """The starts of windows of `length` tokens in a stream [T], `stride` apart; an incomplete last window is dropped.

    With `bos`, `windowed` overwrites a window's first token with BOS. A window whose second token is already BOS starts
    one token later, so that it does not begin with two.
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


def windowed(values: torch.Tensor, starts: list[int], length: int, first: int | None) -> torch.Tensor:
    """The windows [N, length] of a stream [T]; `first` replaces the first value of each."""
    rows = torch.stack([values[start : start + length] for start in starts])
    if first is not None:
        rows[:, 0] = first
    return rows


def pack(
    documents: Iterable[Document], tokenizer, length: int, max_rows: int | None = None, bos: int | None = None
) -> Rows:
    """The documents' `stream`, cut into at most `max_rows` rows of `length` tokens.

    An incomplete last row is dropped. A document may span rows, and a row may contain several documents. With `bos`
    every row and every document begins with that token, mask 0. At the start of a row it replaces a token of the text,
    which has no context there and so could not be a target: a row of 256 is BOS and 255 tokens of text.
    Raises UserError if the text does not fill one row.
    """
    most = length if bos is None else length + 1  # the maximum number of stream tokens that a row uses
    tokens, mask = stream(documents, tokenizer, None if max_rows is None else max_rows * most, bos)
    starts = window_starts(tokens, length, length, bos)[:max_rows]
    if not starts:
        raise UserError(f"the text has {len(tokens)} tokens, too few for a row of {length}; lower --length or add text")
    unlearned = None if bos is None else 0
    rows = windowed(tokens, starts, length, bos), windowed(mask, starts, length, unlearned)
    return Rows(*rows, given_token(tokenizer, bos))


def pad(documents: Iterable[Document], tokenizer, length: int) -> Rows:
    """A row for each document, padded with EOS tokens that are not targets.

    Raises UserError for a document of more than `length` tokens.
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


def encode(document: Document, tokenizer, wanted: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Token ids int32 [T] of one document, including EOS, and the section number of each, uint8 [T], 0 for tokens that
    are not targets. T = 0 for an empty text. A plain text with more than `wanted` tokens may end after those."""
    if not document.text:  # hub datasets keep blank lines as rows, and each would be one more EOS
        return np.zeros(0, np.int32), np.zeros(0, np.uint8)
    if document.spans is None:
        ids = np.append(_plain_ids(document.text, tokenizer, wanted), np.int32(tokenizer.eos_token_id))
        sections = np.ones(len(ids), np.uint8)
    else:
        ids, sections = _encode_chat(document, tokenizer)
    check_ids(ids, tokenizer)
    return np.asarray(ids, np.int32), np.asarray(sections, np.uint8)


def _plain_ids(text: str, tokenizer, wanted: int | None) -> np.ndarray:
    """Token ids int32 [T] of a text, or at least the first `wanted` of them.

    A tokenizer holds some 300 bytes for each token that it makes, so a long text is tokenised in windows. Two windows
    overlap, and are joined where they agree; if they do not (a run of digits longer than the overlap), the first is
    made longer. A slow tokenizer, which gives no character offsets, gets the whole text.
    """
    size = WINDOW if tokenizer.is_fast else len(text)
    start, end, first = 0, size, 0  # the window, and its first token that is not in `found` yet
    found, total = [], 0
    ids, places = _window(text, start, end, tokenizer)
    while end < len(text):
        following = _window(text, end - OVERLAP, end - OVERLAP + size, tokenizer)
        if (joint := _joint(ids, places, *following, end)) is None:
            end += end - start
            ids, places = _window(text, start, end, tokenizer)
            continue
        found.append(ids[first : joint[0]])
        total += len(found[-1])
        if wanted is not None and total >= wanted:
            return np.concatenate(found)
        start, end = end - OVERLAP, end - OVERLAP + size
        (ids, places), first = following, joint[1]
    return np.concatenate([*found, ids[first:]])


def _window(text: str, start: int, end: int, tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Token ids int32 [T] of a part of a text, and at which character of the text each begins, int64 [T]; zeros for a
    slow tokenizer."""
    # verbose=False: long texts are cut into rows here, so the warning about the model's context would be wrong.
    done = tokenizer(text[start:end], add_special_tokens=False, verbose=False, return_offsets_mapping=tokenizer.is_fast)
    ids = np.asarray(done["input_ids"], np.int32)
    places = done.get("offset_mapping", [(0, 0)] * len(ids))
    return ids, start + np.asarray(places, np.int64).reshape(-1, 2)[:, 0]


def _joint(
    ids: np.ndarray, places: np.ndarray, next_ids: np.ndarray, next_places: np.ndarray, end: int
) -> tuple[int, int] | None:
    """The numbers of a token in a window that ends at character `end` and in the next window, so that AGREE tokens
    before and after it are the same at the same characters; None if there is none. The ends of the overlap, where text
    is missing on one side, do not count."""
    inner = slice(*np.searchsorted(places, (end - OVERLAP * 3 // 4, end - OVERLAP // 4)))
    for place in np.unique(places[inner]):
        here, there = np.searchsorted(places, place), np.searchsorted(next_places, place)
        if here < AGREE or there < AGREE:
            continue
        near, beyond = slice(here - AGREE, here + AGREE), slice(there - AGREE, there + AGREE)
        same = np.array_equal(ids[near], next_ids[beyond]) and np.array_equal(places[near], next_places[beyond])
        if same and len(ids[near]) == 2 * AGREE:
            return int(here), int(there)
    return None


def _encode_chat(document: Document, tokenizer) -> tuple[list[int], list[int]]:
    if not tokenizer.is_fast:
        raise UserError("completion masks need character offsets; use a fast tokenizer (one with a tokenizer.json)")
    ids, places = encoded(document.text, document.prompt, tokenizer)
    numbers = document.sections or (1,) * len(document.spans)
    sections = _span_numbers(places, document.spans, numbers)
    ending = document.text.rstrip()  # ChatML ends with a newline after its EOS
    if not ending.endswith(tokenizer.eos_token):
        ids.append(tokenizer.eos_token_id)
        is_answer = document.spans and document.spans[-1][1] >= len(ending)  # the last turn is the assistant's
        sections.append(numbers[-1] if is_answer else 0)
    return ids, sections


def _span_numbers(offsets: list[tuple[int, int]], spans: tuple[tuple[int, int], ...], numbers: tuple[int, ...]) -> list:
    """For each token, the number of the span that it overlaps, 0 for none. A token that only partly overlaps a span
    counts too, so that no character of the span is lost; one that overlaps two spans gets the number of the first."""
    start, end = np.asarray(offsets).reshape(-1, 2).T
    end = np.maximum(end, start + 1)  # byte-level tokenizers may report white space as an empty range
    found = np.zeros(len(start), np.uint8)
    for (first, last), number in reversed(list(zip(spans, numbers))):
        found[(start < last) & (end > first)] = number
    return found.tolist()


def split_heldout(rows: Rows, fraction: float) -> tuple[Rows, Rows]:
    """(train, held-out): the last max(1, round(fraction·N)) rows are held out, or none if fraction (in [0, 1)) is 0.

    The held-out rows are contiguous, so that no held-out token is trained on; both parts are views of `rows`.
    Raises UserError if no row would be left for training.
    """
    held = max(1, round(fraction * len(rows))) if fraction > 0 else 0
    trained = len(rows) - held
    if trained < 1:
        raise UserError(
            f"holding out {held} of {len(rows)} rows leaves nothing to train on; "
            "use a smaller fraction, shorter rows or more text"
        )
    sides = slice(None, trained), slice(trained, None)
    return tuple(Rows(rows.tokens[side], rows.mask[side], rows.given) for side in sides)


def fingerprint(rows: Rows) -> str:
    """sha256 (hex) of shape, tokens and mask: the same for equal rows in every process and on every machine."""
    digest = hashlib.sha256(json.dumps(list(rows.tokens.shape)).encode())
    digest.update(np.ascontiguousarray(rows.tokens.numpy(), dtype="<i4").ravel())
    digest.update(np.ascontiguousarray(rows.mask.numpy()).ravel())
    return digest.hexdigest()


class TextDataset(Dataset):
    """Packed rows as items: tokens [L] int64 and mask [L], 1 at the target tokens (never the first token, and never the
    rows' `given`)."""

    def __init__(self, rows: Rows, completions_only: bool):
        self.tokens, self.mask = rows.tokens, rows.mask.clone() if completions_only else torch.ones_like(rows.mask)
        self.mask[:, 0] = 0
        if rows.given is not None:
            self.mask[rows.tokens == rows.given] = 0
        self.fingerprint = fingerprint(rows)
        if len(rows) and not self.mask.any():
            raise UserError("the rows contain no completion token to learn; use longer rows or other text")

    def kept(self, i: int) -> int:
        """The number of target tokens in row i."""
        return int(self.mask[i].sum())

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[i].long(), "mask": self.mask[i]}
