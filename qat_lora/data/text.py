"""Sources of text: Python's own help topics, a local file, or a dataset on the Hugging Face hub."""

import codecs
import io
import json
import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from pathlib import Path

from qat_lora.errors import UserError, first_line
from qat_lora.models.source import hub_fault

EMBEDDED = "embedded"
END = "<|endoftext|>"  # separates the texts of a .txt file, as in the published TinyStories
PARQUET_BATCH_ROWS = 1024
READ = 2**16  # bytes read from a .txt file at a time
STOP = re.compile(r"[^\W\d_](?=[.,;:!?。，、；：！？])")  # where text without spaces can be cut
PIECE = 2**14  # approximate length in characters of a piece of a long text


def read_rows(
    source: str, *, config: str | None = None, split: str = "train", streaming: bool = False, fix: str | None = None,
    columns: Collection[str] | None = None,
) -> Iterator[dict]:  # fmt: skip
    """Open `source` and iterate over its rows, each a dict of columns.

    source is "embedded" (pydoc_data.topics, one {"text": ...} per topic in sorted key order), a local .txt, .jsonl or
    .parquet file, or the name of a hub dataset. A .txt file is one {"text": ...} row with its unchanged text; if
    <|endoftext|> separates texts in it, each non-empty text is a row, stripped. Separated texts and rows are read one
    at a time. Every string of a row, including nested ones, is in NFC. `config` and `streaming` apply only to hub
    datasets. If the hub cannot be reached, a dataset in the local cache is used.
    fix: the fix to name in an error about the hub, for callers that also accept other sources. columns: those in use;
    in .parquet files and hub datasets the others are not read, and are None in the rows [all].
    The first row is read at once, so that a bad source fails here and not at the first use of the iterator.
    Raises UserError for a source that is missing, unreadable or empty, for a malformed row (while iterating), and for
    a `split` other than "train" if the source has no splits, because train rows would then pass as held-out rows.
    """
    rows = map(_in_nfc, _open(source, config, split, streaming, fix, columns))
    first = next(rows, None)
    if first is None:
        raise UserError(f'"{source}" has no rows; choose another source')
    return chain([first], rows)


def _open(
    source: str, config: str | None, split: str, streaming: bool, fix: str | None, columns: Collection[str] | None
) -> Iterator[dict]:
    path = Path(source).expanduser()
    is_path = path.suffix.lower() in FILE_READERS or source.startswith(("/", "./", "../", "~")) or path.exists()
    if not is_path and source != EMBEDDED:
        return _hub_rows(source, config, split, streaming, fix, columns)
    if split != "train":
        raise UserError(f'split="{split}" needs a hub dataset: "{source}" has no splits; leave split at "train"')
    if source == EMBEDDED:
        from pydoc_data.topics import topics

        return ({"text": topics[key]} for key in sorted(topics))
    _check_file(path)
    reader = FILE_READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(f'{path}: cannot read "{path.suffix}" files; supported: {_either(FILE_READERS)}')
    return reader(path, columns) if reader is _parquet_rows else reader(path)


def nfc(text: str) -> str:
    """`text` in Unicode's composed form (NFC). Composition never joins a character with an END before it."""
    if text.isascii() or unicodedata.is_normalized("NFC", text):
        return text
    return END.join(unicodedata.normalize("NFC", part) for part in text.split(END))


def _in_nfc(value):
    if isinstance(value, str):
        return nfc(value)
    if isinstance(value, dict):
        return {key: _in_nfc(inner) for key, inner in value.items()}
    return [_in_nfc(inner) for inner in value] if isinstance(value, list) else value


def _check_file(path: Path) -> None:
    if not path.exists():
        raise UserError(f"{path}: no such file; check the path")
    if path.is_dir():
        raise UserError(f"{path} is a folder; give a {_either(FILE_READERS)} file in it")


def txt_parts(path: Path) -> Iterator[str | None]:
    """The text of a .txt file in parts as it is read, with None for every END. Lines end in "\n"; the text is not yet
    in NFC. Raises UserError if the file is missing, cannot be read or is not UTF-8."""
    _check_file(path)
    rest = ""
    for text in _decoded(path):
        *ended, rest = (rest + text).split(END)
        for part in ended:
            yield part
            yield None
        sure = max(0, len(rest) - len(END) + 1)  # the end of this part may be the beginning of an END
        yield rest[:sure]
        rest = rest[sure:]
    yield rest


def _decoded(path: Path) -> Iterator[str]:
    # utf-8-sig: a byte order mark is not text
    decoder = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8-sig")(), translate=True)
    done = 0
    try:
        with path.open("rb") as file:
            _check_encoding(path, file.peek(4)[:4])
            while read := file.read(READ):
                done += len(read)
                yield decoder.decode(read)
            yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:  # error.object ends at the last byte read
        at = done - len(error.object) + error.start
        raise UserError(f"{path}: not UTF-8 text at byte {at}; convert the file to UTF-8") from error
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}); fix that or give another file") from error


def _txt_rows(path: Path) -> Iterator[dict]:
    parts, separated = [], False
    for part in txt_parts(path):
        if part is not None:
            parts.append(part)
            continue
        separated = True
        if text := "".join(parts).strip():
            yield {"text": text}
        parts = []
    text = "".join(parts)
    del parts, part  # a file may be one long text
    if text and not text.isspace():
        yield {"text": text.strip() if separated else text}


def in_pieces(parts: Iterable[str | None]) -> Iterator[tuple[str, bool]]:
    """Texts as (piece, whether it is the text's last): stripped, in NFC, without empty texts.

    parts: text in parts of any size, None between two texts. A text longer than PIECE characters becomes several
    pieces, cut before a space or newline followed by a non-space character, or between a letter and a punctuation
    mark. Neither NFC nor the pre-tokenisation of GPT-2 and byte-level BPE joins characters across such a place, so the
    pieces have the same tokens as the text. A text without such a place stays one piece.
    """
    rest, searched = "", 0  # `rest` cannot be cut before character `searched`
    for part in chain(parts, [None]):
        if part is None:
            if rest := rest.rstrip():
                yield nfc(rest), True
            rest, searched = "", 0
            continue
        for at in range(0, len(part), PIECE):
            rest = rest + part[at : at + PIECE] if searched else (rest + part[at : at + PIECE]).lstrip()
            searched = searched or bool(rest)
            if len(rest) <= PIECE:
                continue
            if cut := _last_cut(rest, searched):
                yield nfc(rest[:cut]), False
                rest, searched = rest[cut:], 1
            else:
                searched = len(rest) - 1


def _last_cut(text: str, start: int) -> int:
    """The last place from `start` on before a space or newline followed by a non-space character; otherwise between
    a letter and a punctuation mark; otherwise 0."""
    end = len(text) - 1
    while (at := max(text.rfind(" ", start, end), text.rfind("\n", start, end))) > 0:
        if not text[at + 1].isspace():
            return at
        end = at
    return max((found.end() for found in STOP.finditer(text, max(0, start - 1))), default=0)


def _jsonl_rows(path: Path) -> Iterator[dict]:
    with path.open("rb") as lines:
        _check_encoding(path, lines.peek(4)[:4])
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # malformed JSON or UTF-8; too deeply nested
                raise UserError(f"{path} line {number}: not valid JSON ({error}); fix or remove the line") from error
            if not isinstance(row, dict):
                kind = type(row).__name__
                raise UserError(
                    f'{path} line {number}: contains a {kind}; each line must be an object such as {{"text": "..."}}'
                )
            yield row


def _check_encoding(path: Path, start: bytes) -> None:
    """Raise UserError if a text file's first four bytes are those of UTF-16 or UTF-32 text. Without a byte order mark,
    such a text is recognised by a first character in ASCII."""
    marks = {codecs.BOM_UTF32_LE: "UTF-32 LE", codecs.BOM_UTF32_BE: "UTF-32 BE", codecs.BOM_UTF16_LE: "UTF-16 LE",
             codecs.BOM_UTF16_BE: "UTF-16 BE"}  # fmt: skip
    zeros = {"0111": "UTF-32 LE", "1110": "UTF-32 BE", "0101": "UTF-16 LE", "1010": "UTF-16 BE"}
    marked = next((name for mark, name in marks.items() if start.startswith(mark)), None)
    if name := marked or zeros.get("".join(str(int(byte == 0)) for byte in start)):
        raise UserError(f"{path} is encoded in {name}, not UTF-8; convert the file to UTF-8")


def _parquet_rows(path: Path, columns: Collection[str] | None = None) -> Iterator[dict]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            unread, used = _unread(file.schema_arrow.names, columns)
            for group in range(file.num_row_groups):
                batches = file.iter_batches(PARQUET_BATCH_ROWS, row_groups=[group], columns=used, use_threads=False)
                left = file.metadata.row_group(group).num_rows
                while left:
                    batch = next(batches)
                    left -= batch.num_rows
                    rows = batch.to_pylist() if used else [{}] * batch.num_rows
                    del batch  # batch and reader may each hold copies of one long text
                    if not left:
                        batches = None
                    pyarrow.default_memory_pool().release_unused()
                    yield from (unread | _without_nulls(row) for row in rows)
    except (
        pyarrow.ArrowException,
        OSError,
        ValueError,
        ArithmeticError,
        TypeError,
        LookupError,
        StopIteration,
    ) as error:
        raise UserError(f"{path}: not a readable parquet file ({first_line(error)}); write it again") from error


def _unread(names: list[str], columns: Collection[str] | None) -> tuple[dict[str, None], list[str]]:
    """A row of None for the columns that are not in use, and the names of the others."""
    used = [name for name in names if columns is None or name in columns]
    return dict.fromkeys(name for name in names if name not in used), used


def _without_nulls(row: dict) -> dict:
    """A row without the keys that its objects, such as turns, only have because others of their column have them."""

    def cleaned(value):
        if isinstance(value, dict):
            return {key: cleaned(inner) for key, inner in value.items() if inner is not None}
        return [cleaned(inner) for inner in value] if isinstance(value, list) else value

    return {name: cleaned(value) for name, value in row.items()}


FILE_READERS = {".txt": _txt_rows, ".jsonl": _jsonl_rows, ".parquet": _parquet_rows}


def _hub_rows(
    source: str, config: str | None, split: str, streaming: bool, fix: str | None, columns: Collection[str] | None
) -> Iterator[dict]:
    import datasets
    from huggingface_hub.errors import HTTPError

    fault = hub_fault("dataset", source)
    if fault and "/" not in source:
        # `datasets` takes names like "json" as a file format and reads files from the working directory.
        raise _hub_error(source, fault, fix)
    before = datasets.config.HF_HUB_OFFLINE
    try:
        # offline, `datasets` goes straight to its cache instead of retrying the hub first
        datasets.config.HF_HUB_OFFLINE = before or fault is not None
        found = datasets.load_dataset(source, config, split=split, streaming=streaming)
        unread, used = _unread(found.column_names or [], columns)
        yield from (unread | _without_nulls(row) for row in (found.select_columns(used) if unread and used else found))
    except (OSError, ValueError, RuntimeError, HTTPError, datasets.exceptions.DatasetsError) as error:
        # A ValueError means that a dataset was found (without the hub, in the cache) but not its split or config.
        reason = fault if fault and not isinstance(error, ValueError) else first_line(error)
        raise _hub_error(source, reason, fix) from error
    finally:
        datasets.config.HF_HUB_OFFLINE = before


def _hub_error(source: str, reason: str, fix: str | None) -> UserError:
    fix = fix or f'use "{EMBEDDED}" or a local {_either(FILE_READERS)} file'
    return UserError(f'cannot read "{source}" from the hub: {reason}; {fix}')


def _either(names) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"
