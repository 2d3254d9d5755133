"""Stories as a stream of tokens with a held-out tail, and its tokenizer."""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import Dataset

from qat_lora.data.chat import Document
from qat_lora.data.text import END, in_pieces, read_rows, txt_parts
from qat_lora.errors import UserError
from qat_lora.experiments.stories.token_files import Tokens, cached, read_meta, token_type, write_meta
from qat_lora.models.loading import load_tokenizer
from qat_lora.run.console import say, watched

LARGEST_VOCAB = 1_000_000
LARGEST_TEXT = 2**31  # stories of a text to measure
TOKENIZERS = ("auto", "gpt2", "bpe", "chars")
GPT2_VOCAB = 50_257
FORMAT = 1  # version of the files; raising it rebuilds all caches
BATCH = 2**18  # characters tokenised at a time
DISTINCT = 3 * 2**19  # bytes of distinct words to train a BPE on; each takes about 80 bytes of memory
SIDES = ("train", "heldout")
LONGEST = 200  # characters per word in BPE training, whose time is quadratic in the length of a word
LONG = re.compile(rf"\S{{{LONGEST + 1},}}")


@dataclass(frozen=True)
class Stories:
    """train, heldout: tokens [T], each story followed by END. heldout_bytes: size of the held-out text in UTF-8, for
    bits per byte. kind: the kind of the tokenizer: gpt2, bpe or chars. fingerprint: sha256 (hex) of both parts'
    tokens."""

    kind: str
    tokenizer: Tokenizer
    train: Tokens | Tensor
    heldout: Tokens | Tensor
    heldout_bytes: int
    fingerprint: str

    @property
    def vocab(self) -> int:
        return self.tokenizer.get_vocab_size()

    @property
    def end(self) -> int:
        return self.tokenizer.token_to_id(END)

    def openings(self, count: int, length: int) -> list[list[int]]:
        """The first `length` tokens of `count` held-out stories; if there are fewer stories, the rest come from
        within the last one."""
        ends = list(islice(self._ends(), count))
        starts = [0, *(end + 1 for end in ends[:-1])]
        room, missing = max(0, ends[-1] - starts[-1] - length), count - len(starts)
        starts += [starts[-1] + room * part // missing for part in range(1, missing + 1)]
        stops = [min(start + length, next(end for end in ends if end >= start)) for start in starts]
        return [self.heldout[start:stop].tolist() for start, stop in zip(starts, stops)]

    def _ends(self) -> Iterator[int]:
        """Token positions at which the held-out stories end."""
        for start in range(0, len(self.heldout), BATCH):
            yield from (start + (self.heldout[start : start + BATCH] == self.end).nonzero().flatten()).tolist()


def load_stories(
    source: str, max_stories: int, heldout: float, tokenizer: str, vocab: int, cache: Path | None = None,
    given: Tokenizer | None = None,
) -> Stories:  # fmt: skip
    """Read the first stories of `source` (embedded, a local file or a hub dataset), hold out the last share of them (or
    the last lines of a single story), and tokenise both parts, with memory that does not grow with the text.

    <|endoftext|> in a text separates stories. tokenizer: gpt2; bpe, trained on the training text with `vocab` tokens;
    chars, one token per character of the whole text; auto is gpt2 if available, else bpe. cache: folder that keeps the
    tokens for later calls and for all processes of a host; without it they are in temporary files. given: the tokenizer
    to use instead. Raises UserError for a bad option, for a source that cannot be read, is empty, leaves one part empty
    or holds a character that `given` has no token for, and if files cannot be written.
    """
    if tokenizer not in TOKENIZERS:
        raise UserError(f"--tokenizer {tokenizer!r} is not one of {', '.join(TOKENIZERS)}")
    if max_stories < 1:
        raise UserError(f"--max-stories {max_stories} must be at least 1")
    if not 0 < heldout < 1:
        raise UserError(f"--heldout-fraction {heldout} is outside (0, 1); use e.g. 0.05")
    kind, made = ("given", given) if given else _given_tokenizer(tokenizer, vocab)
    text = _survey(source, max_stories, heldout, kind == "chars")
    key = [FORMAT, text.digest, text.train, text.at, kind, vocab if kind == "bpe" else made and made.to_str()]
    name = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]
    return cached(cache and cache / name, lambda folder: _write(folder, text, kind, made, vocab), _read)


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text. Raises UserError if it holds a character that the tokenizer has no token for."""
    try:
        ids = tokenizer.encode(text).ids
    except UnicodeEncodeError as error:
        raise UserError(f"the text is not valid Unicode at character {error.start}; correct it") from error
    except Exception as error:  # the only kind that tokenizers raises: a character of --tokenizer chars is missing
        lost = next((sign for sign in text if tokenizer.token_to_id(sign) is None), text)
        raise UserError(
            f"the run's tokenizer has no token for {lost!r}; leave it out, or train with --tokenizer bpe, which has a "
            "token for every byte"
        ) from error
    return ids


def text_to_measure(source: str, tokenizer: Tokenizer) -> Stories:
    """A whole text as the held-out part, for `evaluation.heldout`, tokenised by a run's tokenizer. Raises UserError if
    it cannot be read, is empty, or holds a character that the tokenizer has no token for."""
    tokens, size, end = [], 0, tokenizer.token_to_id(END)
    for piece, ends in _pieces(source, LARGEST_TEXT):
        tokens.append(torch.tensor(tokens_of(tokenizer, piece) + [end] * ends))
        size += len(piece.encode())
    if not size:
        raise UserError(f'"{source}" holds no text; give another file')
    stream = torch.cat(tokens)
    return Stories("", tokenizer, stream, stream, size, "")


def planned_stories(tokenizer: str, vocab: int, tokens: int) -> Stories:
    """Two parts of `tokens` tokens each, all the same, to plan a run. vocab: size of a bpe tokenizer."""
    # auto: gpt2, if the hub can be reached; chars: depends on the text, 256 is assumed
    sizes = {"auto": GPT2_VOCAB, "gpt2": GPT2_VOCAB, "bpe": vocab, "chars": 256}
    if tokenizer not in sizes:
        raise UserError(f"--tokenizer {tokenizer!r} is not one of {', '.join(TOKENIZERS)}")
    words = Tokenizer(models.WordLevel({END: 0} | {str(i): i for i in range(1, sizes[tokenizer])}))
    stream = torch.ones(tokens, dtype=torch.long)
    stream[-1] = words.token_to_id(END)
    return Stories(tokenizer, words, stream, stream, tokens, "")


# -- the text --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Text:
    """The first `most` stories of a source, which is read again for every pass. count: number of stories. digest:
    sha256 (hex) of the stories. train: how many of them to train on. at: character at which a single story is cut in
    two. alphabet: their characters, if the survey collected them."""

    source: str
    most: int
    count: int
    size: int  # bytes
    digest: str
    train: int
    at: int | None
    alphabet: frozenset[str]

    def pieces(self) -> Iterator[tuple[int, str, bool]]:
        """(side, piece, whether a story ends with it); side 0 is the training part, 1 the held-out part."""
        digest, number = hashlib.sha256(), 0
        pieces = _hashed(_pieces(self.source, self.most), digest)
        if self.at is not None:
            pieces = in_pieces(_halves(pieces, self.at))
        for piece, ends in pieces:
            yield int(number >= self.train), piece, ends
            number += ends
        if digest.hexdigest() != self.digest:
            raise UserError(f"{self.source} changed while it was read; start again when nothing writes to it")


def _survey(source: str, most: int, heldout: float, alphabet: bool) -> _Text:
    """Read the source once to find its size and where the held-out part begins."""
    digest, count, size, length, chars = hashlib.sha256(), 0, 0, 0, set()
    for piece, ends in _hashed(_pieces(source, most), digest):
        count, size, length = count + ends, size + len(piece.encode()), length + len(piece)
        if alphabet:
            chars.update(piece)
    if not count:
        raise UserError(f'"{source}" holds no rows with text; choose another source')
    train, at = count - max(1, round(heldout * count)), None
    if count == 1:
        train, at = 1, _newline(_pieces(source, most), int(length * (1 - heldout)))
    if train < 1 or (at is not None and at < 1):
        raise UserError(
            f"{source} is too short to hold out {heldout} of it (whole lines of a single text); add text, or change "
            "--heldout-fraction"
        )
    return _Text(source, most, count, size, digest.hexdigest(), train, at, frozenset(chars))


def _pieces(source: str, most: int) -> Iterator[tuple[str, bool]]:
    """The first `most` stories, as `in_pieces` cuts them."""
    path = Path(source).expanduser()
    parts = txt_parts(path) if path.suffix.lower() == ".txt" else _row_parts(source)
    count = 0
    for piece, ends in in_pieces(parts):
        yield piece, ends
        count += ends
        if count == most:
            return


def _row_parts(source: str) -> Iterator[str | None]:
    for number, row in enumerate(read_rows(source, columns=("text",))):
        where, text = f"{source} row {number}", row.get("text", row)
        if not isinstance(text, str | None):
            raise UserError(f'{where}: no text in column "text" (columns: {", ".join(row)}); rename or fix it')
        try:
            stories = Document(text or "", None).text.split(END)
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
        for story in stories:
            yield story
            yield None


def _hashed(pieces: Iterator[tuple[str, bool]], digest) -> Iterator[tuple[str, bool]]:
    """The same pieces; updates `digest` with every story and its end, however stories are cut into pieces."""
    for piece, ends in pieces:
        digest.update(piece.encode() + b"\xff" * ends)  # a byte that never occurs in UTF-8
        yield piece, ends


def _newline(pieces: Iterator[tuple[str, bool]], start: int) -> int:
    """Index of the first newline from character `start` on, or -1."""
    seen = 0
    for piece, _ in pieces:
        if (found := piece.find("\n", max(0, start - seen))) >= 0:
            return seen + found
        seen += len(piece)
    return -1


def _halves(pieces: Iterator[tuple[str, bool]], at: int) -> Iterator[str | None]:
    """A text's pieces, with None inserted at character `at`."""
    seen = 0
    for piece, _ in pieces:
        here = at - seen
        yield from (piece[:here], None, piece[here:]) if 0 <= here < len(piece) else (piece,)
        seen += len(piece)


# -- the tokenizer ---------------------------------------------------------------------------------------------------
def _given_tokenizer(kind: str, vocab: int) -> tuple[str, Tokenizer | None]:
    """The resolved kind, and the tokenizer unless it is to be made from the text."""
    if kind in ("auto", "gpt2"):
        try:
            return "gpt2", load_tokenizer("gpt2").backend_tokenizer
        except UserError as error:
            if kind == "gpt2":
                raise UserError(f"--tokenizer gpt2: {error}; --tokenizer bpe needs no hub") from error
    least = len(pre_tokenizers.ByteLevel.alphabet())
    if kind != "chars" and not least < vocab <= LARGEST_VOCAB:
        raise UserError(
            f"--vocab-size {vocab} is not from {least + 1} (all bytes and END) to {LARGEST_VOCAB}; use e.g. 2048"
        )
    return "chars" if kind == "chars" else "bpe", None


def _chars(alphabet: frozenset[str]) -> Tokenizer:
    made = Tokenizer(models.WordLevel({char: i for i, char in enumerate([END, *sorted(alphabet)])}))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated"), decoders.Fuse()
    return made


def _bpe(text: _Text, vocab: int) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.train_from_iterator(_training_text(text), trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    ))  # fmt: skip
    return made


def _training_text(text: _Text) -> Iterator[str]:
    """The training part, up to where its distinct words reach DISTINCT bytes, because memory grows with them. Few texts
    in a language that uses spaces reach this limit."""
    words, size = set(), 0
    for side, piece, _ in text.pieces():
        if side or size > DISTINCT:
            return
        piece = LONG.sub(
            lambda run: " ".join(run[0][at : at + LONGEST] for at in range(0, len(run[0]), LONGEST)), piece
        )
        yield piece
        fresh = set(piece.split()) - words
        size += sum(len(word.encode()) for word in fresh)
        words |= fresh


# -- the files -------------------------------------------------------------------------------------------------------
def _write(folder: Path, text: _Text, kind: str, tokenizer: Tokenizer | None, vocab: int) -> None:
    """Write tokenizer.json, train.bin, heldout.bin, and meta.json, which describes them."""
    say(f"tokenising {text.size / 1e6:,.1f} MB: " + (f"{text.count:,} stories" if text.count > 1 else "one text"))
    tokenizer = tokenizer or (_chars(text.alphabet) if kind == "chars" else _bpe(text, vocab))
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    stored, end = token_type(tokenizer.get_vocab_size()), tokenizer.token_to_id(END)
    encode = _encoder(tokenizer, kind)
    sizes = [0, 0]
    with open(folder / "train.bin", "wb") as train, open(folder / "heldout.bin", "wb") as heldout:
        for batch in watched(_batches(text.pieces()), "tokenising", text.size, size=_bytes):
            for (side, piece, ends), tokens in zip(batch, encode([piece for _, piece, _ in batch])):
                tokens = np.append(tokens, end) if ends else np.asarray(tokens)
                (train, heldout)[side].write(tokens.astype(stored).tobytes())
                sizes[side] += len(piece.encode())
    values = {"kind": kind, "type": stored.str, "heldout_bytes": sizes[1]}
    parts = [Tokens(folder / f"{side}.bin", stored) for side in SIDES]
    write_meta(folder, values | {"fingerprint": _fingerprint(*parts, tokenizer.get_vocab_size())})


def _bytes(batch: list[tuple[int, str, bool]]) -> int:
    return sum(len(piece.encode()) for _, piece, _ in batch)


def _batches(pieces: Iterator[tuple[int, str, bool]]) -> Iterator[list[tuple[int, str, bool]]]:
    """The pieces in batches of about BATCH characters."""
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[1])
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    yield batch


def _encoder(tokenizer: Tokenizer, kind: str) -> Callable[[list[str]], list]:
    """The tokenizer's own encode or, for chars, the same result by looking code points up in a table."""
    if kind == "given":  # a UserError names a character without a token
        return lambda pieces: [tokens_of(tokenizer, piece) for piece in pieces]
    if kind != "chars":
        return lambda pieces: [done.ids for done in tokenizer.encode_batch_fast(pieces)]
    table = np.zeros(0x110000, np.int32)
    for char, number in tokenizer.get_vocab().items():
        if char != END:
            table[ord(char)] = number
    return lambda pieces: [table[np.frombuffer(piece.encode("utf-32-le"), "<u4")] for piece in pieces]


def _fingerprint(train: Tokens, heldout: Tokens, vocab: int) -> str:
    digest = hashlib.sha256(f"{len(train)} {vocab}".encode())
    for part in (train, heldout):
        for start in range(0, len(part), BATCH):
            digest.update(part[start : start + BATCH].numpy().astype("<i4").tobytes())
    return digest.hexdigest()


def _read(folder: Path) -> Stories:
    values = read_meta(folder)
    kind, stored = values["kind"], np.dtype(values["type"])
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    train, heldout = (Tokens(folder / f"{side}.bin", stored) for side in SIDES)
    return Stories(kind, tokenizer, train, heldout, values["heldout_bytes"], values["fingerprint"])


# -- training and measuring ------------------------------------------------------------------------------------------
class Blocks(Dataset):
    """A stream (Tokens, or a tensor [T]) in blocks of tokens [length + 1]. All but the first token of a block are
    predicted, each token of the stream once; an incomplete last block is left out."""

    def __init__(self, stream: Tokens | Tensor, length: int):
        self.count = (len(stream) - 1) // max(1, length)
        if length < 1 or not self.count:
            raise UserError(
                f"--block-size {length} must be at least 1 and less than the text's {len(stream)} tokens; "
                "lower it or add text"
            )
        self.stream, self.length = stream, length

    def kept(self, i: int) -> int:
        return self.length

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        tokens = self.stream[i * self.length : (i + 1) * self.length + 1]
        return {"tokens": tokens, "mask": torch.ones(self.length, dtype=torch.uint8)}


def spans(stream: Tokens | Tensor, first: int, length: int, stride: int, rows: int) -> Iterator[dict[str, Tensor]]:
    """Batches of `rows` windows over a whole stream in which every token is predicted once: tokens [rows, length + 1]
    and mask [rows, length], 1 at target tokens. Token `first` precedes the stream. After the first window, only the
    last `stride` tokens of each window are targets; those before are context. Padding in the last batch is masked."""
    place, begin = torch.arange(length), torch.tensor([first])

    def window(start: int) -> tuple[Tensor, Tensor]:
        tokens = stream[max(0, start - 1) : start + length]
        tokens = torch.cat([begin[: start == 0], tokens])
        fresh = place >= (length - stride if start else 0)
        mask = (fresh & (start + place < len(stream))).to(torch.uint8)
        return torch.cat([tokens, begin.expand(length + 1 - len(tokens))]), mask

    starts = range(0, max(1, len(stream) - length + stride), stride)
    for at in range(0, len(starts), rows):
        tokens, mask = map(list, zip(*map(window, starts[at : at + rows])))
        spare = rows - len(tokens)
        yield {"tokens": torch.stack(tokens + tokens[:1] * spare), "mask": torch.stack(mask + [mask[0] * 0] * spare)}
