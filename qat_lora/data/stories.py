"""Stories as one stream of tokens, its tail held out, and the tokenizer that made it."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset

from qat_lora.data.chat import Document
from qat_lora.data.text import read_rows
from qat_lora.errors import UserError
from qat_lora.models.loading import load_tokenizer

END = "<|endoftext|>"
LARGEST_VOCAB = 1_000_000
TOKENIZERS = ("auto", "gpt2", "bpe", "chars")


@dataclass(frozen=True)
class Stories:
    """train, heldout: tokens [T], each text followed by END. heldout_bytes: of the held-out text in UTF-8, for bits a
    byte. kind: of the tokenizer, gpt2, bpe or chars."""

    kind: str
    tokenizer: Tokenizer
    train: Tensor
    heldout: Tensor
    heldout_bytes: int

    @property
    def vocab(self) -> int:
        return self.tokenizer.get_vocab_size()

    @property
    def end(self) -> int:
        return self.tokenizer.token_to_id(END)

    def openings(self, count: int, length: int) -> list[list[int]]:
        """The first tokens of `count` held-out texts; of fewer texts, tokens of the last from other places."""
        ends = (self.heldout == self.end).nonzero().flatten().tolist()
        starts = [0, *(end + 1 for end in ends[:-1])][:count]
        room, missing = max(0, ends[-1] - starts[-1] - length), count - len(starts)
        starts += [starts[-1] + room * part // missing for part in range(1, missing + 1)]
        stops = [min(start + length, next(end for end in ends if end >= start)) for start in starts]
        return [self.heldout[start:stop].tolist() for start, stop in zip(starts, stops)]

    @property
    def fingerprint(self) -> str:
        """sha256 (hex) of both parts' tokens."""
        digest = hashlib.sha256(f"{len(self.train)} {self.vocab}".encode())
        for part in (self.train, self.heldout):
            digest.update(part.numpy().astype("<i4").tobytes())
        return digest.hexdigest()


def load_stories(source: str, max_stories: int, heldout: float, tokenizer: str, vocab: int) -> Stories:
    """Read `source` (embedded, a local file or a hub dataset), hold out the tail, and tokenise both.

    tokenizer: gpt2; bpe, trained on the training text with `vocab` tokens; chars, those of the whole text; auto is gpt2
    where it is at hand and bpe elsewhere. Raises UserError for what cannot be read, is empty or leaves nothing on one
    side.
    """
    if tokenizer not in TOKENIZERS:
        raise UserError(f"--tokenizer {tokenizer!r} is not one of {', '.join(TOKENIZERS)}")
    if max_stories < 1:
        raise UserError(f"--max-stories {max_stories} must be at least 1")
    if not 0 < heldout < 1:
        raise UserError(f"--heldout-fraction {heldout} is outside (0, 1); 0.05, say")
    rows = enumerate(islice(read_rows(source), max_stories))
    texts = [text for number, row in rows if (text := _text(f"{source} row {number}", row))]
    train, rest = _split(texts, heldout)
    if not train or not rest:
        raise UserError(
            f"{source} is too short to hold out {heldout} of it (of a single text, whole lines); add text, or choose "
            "another share"
        )
    kind, made = _tokenizer(tokenizer, train, rest, vocab)
    end = made.token_to_id(END)
    streams = [
        torch.tensor([token for done in made.encode_batch(part) for token in (*done.ids, end)])
        for part in (train, rest)
    ]
    return Stories(kind, made, *streams, sum(len(text.encode()) for text in rest))


def _text(where: str, row: dict) -> str:
    text = row.get("text", row)
    if not isinstance(text, str | None):
        raise UserError(f'{where}: no text in column "text" (columns: {", ".join(row)}); rename or mend it')
    try:
        return Document(text or "", None).text.strip()
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _split(texts: list[str], heldout: float) -> tuple[list[str], list[str]]:
    """The last stories, or of a single text the last paragraphs."""
    if len(texts) == 1:
        at = texts[0].find("\n", int(len(texts[0]) * (1 - heldout)))
        return ([texts[0][:at].strip()], [rest] if (rest := texts[0][at:].strip()) else []) if at > 0 else (texts, [])
    count = max(1, round(heldout * len(texts)))
    return texts[:-count], texts[-count:]


def _tokenizer(kind: str, train: list[str], rest: list[str], vocab: int) -> tuple[str, Tokenizer]:
    if kind in ("auto", "gpt2"):
        try:
            return "gpt2", load_tokenizer("gpt2").backend_tokenizer
        except UserError as error:
            if kind == "gpt2":
                raise UserError(f"--tokenizer gpt2: {error}; --tokenizer bpe needs no hub") from error
    if kind == "chars":
        made = Tokenizer(models.WordLevel({c: i for i, c in enumerate([END, *sorted(set("".join([*train, *rest])))])}))
        made.pre_tokenizer, made.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
        return "chars", made
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if not len(alphabet) < vocab <= LARGEST_VOCAB:
        raise UserError(
            f"--vocab-size {vocab} is not from {len(alphabet) + 1}, all bytes and END, to {LARGEST_VOCAB}; 2048, say"
        )
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator(train, trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    ))  # fmt: skip
    return "bpe", made


class Blocks(Dataset):
    """A stream in blocks: tokens [length + 1], of which all but the first are predicted, each token of the stream once;
    the ragged end is left out."""

    def __init__(self, stream: Tensor, length: int):
        self.count = (len(stream) - 1) // max(1, length)
        if length < 1 or not self.count:
            raise UserError(
                f"--block-size {length} and a text of {len(stream)} tokens: a block must hold 1 and fit it; "
                "shorten it or add text"
            )
        self.stream, self.length = stream, length

    def kept(self, i: int) -> int:
        return self.length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        tokens = self.stream[i * self.length : (i + 1) * self.length + 1]
        return {"tokens": tokens, "mask": torch.ones(self.length, dtype=torch.uint8)}


def spans(stream: Tensor, first: int, length: int, stride: int, rows: int) -> Iterator[dict[str, Tensor]]:
    """Batches of `rows` windows over a whole stream, every token of it predicted once: tokens [rows, length + 1], mask
    [rows, length], 1 at what counts. `first` stands before the stream; after the first window the last `stride` tokens
    of each count, with those before as context, and the last batch is filled up with what does not count."""
    padded = torch.cat([torch.tensor([first]), stream, stream.new_full((length,), first)])
    starts = range(0, max(1, len(stream) - length + stride), stride)
    place = torch.arange(length)
    windows, masks = [], []
    for start in starts:
        windows.append(padded[start : start + length + 1])
        fresh = place >= (length - stride if start else 0)
        masks.append((fresh & (start + place < len(stream))).to(torch.uint8))
    for at in range(0, len(windows), rows):
        tokens, mask = windows[at : at + rows], masks[at : at + rows]
        spare = rows - len(tokens)
        yield {
            "tokens": torch.stack(tokens + tokens[:1] * spare), "mask": torch.stack(mask + [mask[0] * 0] * spare)
        }  # fmt: skip
