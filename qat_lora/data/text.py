"""Where text comes from: Python's own help topics, a local file, or a dataset on the Hugging Face hub."""

import json
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import chain
from pathlib import Path

from qat_lora.errors import UserError, first_line
from qat_lora.hub import hub_fault

EMBEDDED = "embedded"
PARQUET_BATCH_ROWS = 1024


def read_rows(
    source: str,
    *,
    config: str | None = None,
    split: str = "train",
    streaming: bool = False,
    mend: str | None = None,
) -> Iterator[dict]:
    """Open `source` and iterate over its rows, each a dict of columns.

    source is "embedded" (pydoc_data.topics, one {"text": ...} a topic in sorted key order), a local .txt (the whole
    file is one {"text": ...}), .jsonl or .parquet file (both read row by row), or the name of a hub dataset. `config`
    and `streaming` concern hub datasets only. Without a hub, a dataset that is in the local cache is read from there.
    mend: what an error about the hub advises, for callers that take other sources than these.
    The first row is read at once, so that a bad source fails here and not at the first use of the iterator.
    Raises UserError for a source that is missing, unreadable or empty, for a malformed row (while iterating), and for
    a `split` other than "train" where the source has no splits, because train rows would then pass for held-out ones.
    """
    rows = _open(source, config, split, streaming, mend)
    first = next(rows, None)
    if first is None:
        raise UserError(f'"{source}" holds no rows; choose another source')
    return chain([first], rows)


def _open(source: str, config: str | None, split: str, streaming: bool, mend: str | None) -> Iterator[dict]:
    path = Path(source).expanduser()
    is_local = source == EMBEDDED or _looks_like_path(source, path)
    if not is_local:
        return _hub_rows(source, config, split, streaming, mend)
    if split != "train":
        raise UserError(f'split="{split}" needs a hub dataset: "{source}" has no splits; leave split at "train"')
    return _embedded_rows() if source == EMBEDDED else _file_rows(path)


def _looks_like_path(source: str, path: Path) -> bool:
    return path.suffix.lower() in FILE_READERS or source.startswith(("/", "./", "../", "~")) or path.exists()


def _embedded_rows() -> Iterator[dict]:
    from pydoc_data.topics import topics

    return ({"text": topics[key]} for key in sorted(topics))


def _file_rows(path: Path) -> Iterator[dict]:
    if not path.exists():
        raise UserError(f"{path}: no such file")
    if path.is_dir():
        raise UserError(f"{path} is a folder; name one {_either(FILE_READERS)} file in it")
    reader = FILE_READERS.get(path.suffix.lower())
    if reader is None:
        raise UserError(f'{path}: cannot read "{path.suffix}" files; supported: {_either(FILE_READERS)}')
    return reader(path)


def _txt_rows(path: Path) -> Iterator[dict]:
    try:
        text = path.read_text(encoding="utf-8-sig")  # a byte order mark is no text
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 text at byte {error.start}; convert the file to UTF-8") from error
    if text.strip():
        yield {"text": text}


def _jsonl_rows(path: Path) -> Iterator[dict]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _json_row(line, path, number)


def _json_row(line: bytes, path: Path, number: int) -> dict:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:  # malformed JSON or malformed UTF-8; nested beyond reason
        raise UserError(f"{path} line {number}: not valid JSON ({error}); mend or remove the line") from error
    if not isinstance(row, dict):
        kind = type(row).__name__
        raise UserError(f'{path} line {number}: holds a {kind}; each line must be an object such as {{"text": "..."}}')
    return row


def _parquet_rows(path: Path) -> Iterator[dict]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=PARQUET_BATCH_ROWS):
                yield from batch.to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a readable parquet file ({first_line(error)}); write it anew") from error


FILE_READERS = {".txt": _txt_rows, ".jsonl": _jsonl_rows, ".parquet": _parquet_rows}


def _hub_rows(source: str, config: str | None, split: str, streaming: bool, mend: str | None) -> Iterator[dict]:
    import datasets
    from huggingface_hub.errors import HTTPError

    fault = hub_fault("dataset", source)
    if fault and "/" not in source:
        # `datasets` takes "json" and its like for a file format and reads whatever the working directory holds.
        raise _hub_error(source, fault, mend)
    try:
        with _offline(datasets.config) if fault else nullcontext():
            yield from datasets.load_dataset(source, config, split=split, streaming=streaming)
    except (OSError, ValueError, RuntimeError, HTTPError, datasets.exceptions.DatasetsError) as error:
        # A ValueError comes from a dataset that was found (in the cache, without a hub): no such split or config.
        reason = fault if fault and not isinstance(error, ValueError) else first_line(error)
        raise _hub_error(source, reason, mend) from error


def _hub_error(source: str, reason: str, mend: str | None) -> UserError:
    mend = mend or f'use "{EMBEDDED}" or a local {_either(FILE_READERS)} file'
    return UserError(f'cannot read "{source}" from the hub: {reason}; {mend}')


@contextmanager
def _offline(config):
    """Offline, `datasets` looks into its cache at once instead of retrying the hub first."""
    before, config.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE, True
    try:
        yield
    finally:
        config.HF_HUB_OFFLINE = before


def _either(names) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}"
