"""Text sources: each kind gives its rows in order, and each error is one line that names the fix."""

import json
import random
import unicodedata
from itertools import islice, pairwise
from pydoc_data.topics import topics

import pyarrow
import pytest
from pyarrow import parquet

from qat_lora.data import text
from qat_lora.data.text import END, in_pieces, read_rows
from qat_lora.errors import UserError

ROWS = [{"text": f"row {n} é", "n": n} for n in range(5)]


@pytest.fixture
def hub(monkeypatch):
    """A hub with one dataset that has a train split."""
    import datasets
    import huggingface_hub

    def load_dataset(name, config, *, split, streaming):
        if split != "train":
            raise ValueError(f"Unknown split \"{split}\". Should be one of ['train'].")
        table = datasets.Dataset.from_list([row | {"config": config} for row in ROWS])
        return table.to_iterable_dataset() if streaming else table

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, name, timeout: None)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def fault(source, **options) -> str:
    with pytest.raises(UserError) as caught:
        list(read_rows(str(source), **options))
    message = str(caught.value)
    assert "\n" not in message
    return message


def written(path, rows) -> str:
    """The path of a .jsonl or .parquet file with these rows."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    else:
        parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return str(path)


def texts(path) -> list[str]:
    return [row["text"] for row in read_rows(str(path))]


def test_embedded_text_is_every_help_topic_in_key_order():
    assert [row["text"] for row in read_rows("embedded")] == [topics[key] for key in sorted(topics)]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_txt_is_one_document(tmp_path, encoding):
    (tmp_path / "a.txt").write_text("first\n\nsecond é\n", encoding=encoding)
    assert list(read_rows(str(tmp_path / "a.txt"))) == [{"text": "first\n\nsecond é\n"}]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_files_give_their_rows_in_order(tmp_path, name):
    assert list(read_rows(written(tmp_path / name, ROWS))) == ROWS


def test_jsonl_skips_blank_lines_and_reads_only_the_rows_needed(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n\n{"n": 2}\nbroken\n')
    assert list(islice(read_rows(str(path)), 2)) == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize(
    "line, words", [("{'n': 2}", "not valid JSON"), ("[1]", "list"), ('"ab"', "str"), ("[" * 10**5, "JSON")]
)
def test_the_error_for_malformed_jsonl_names_file_and_line(tmp_path, line, words):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"n": 1}}\n\n{line}\n')
    message = fault(path)
    assert f"{path} line 3" in message and words in message


@pytest.mark.parametrize("name", ["gone.txt", "gone.jsonl", "gone.parquet", "gone.csv", "gone"])
def test_a_missing_file_is_refused(tmp_path, name):
    assert fault(tmp_path / name) == f"{tmp_path / name}: no such file; check the path"


def test_the_error_for_an_unsupported_file_lists_the_supported_types(tmp_path):
    (tmp_path / "a.csv").write_text("text\nx\n")
    assert ".txt, .jsonl or .parquet" in fault(tmp_path / "a.csv")
    assert "is a folder" in fault(tmp_path)


def test_a_damaged_parquet_file_is_refused(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    assert "not a readable parquet file" in fault(tmp_path / "a.parquet")


@pytest.mark.parametrize("bad", [
    pyarrow.array([10**15] * 2, pyarrow.date64()),  # beyond the year 9999
    pyarrow.array([10**18] * 2, pyarrow.duration("s")),
    pyarrow.array([0] * 2, pyarrow.timestamp("us", "Nowhere/Land")),
], ids=["date", "duration", "zone"])  # fmt: skip
def test_parquet_columns_that_are_not_in_use_are_not_read(tmp_path, bad):
    turns = [
        [{"role": "user", "content": "Hi", "name": None}, {"role": "assistant", "content": None, "name": "Bo"}]
    ] * 2
    table = pyarrow.table({"text": ["a", "b"], "messages": turns, "made": bad})
    parquet.write_table(table, tmp_path / "a.parquet")
    found = list(read_rows(str(tmp_path / "a.parquet"), columns=("text", "messages")))
    assert [row["text"] for row in found] == ["a", "b"] and found[0]["made"] is None
    # a key that only other turns have is absent, as in the rows that the file was made from
    assert found[0]["messages"] == [{"role": "user", "content": "Hi"}, {"role": "assistant", "name": "Bo"}]
    assert "not a readable parquet file" in fault(tmp_path / "a.parquet", columns=("made",))


@pytest.mark.parametrize("name, content", [("a.txt", "\n \n"), ("a.jsonl", "\n \n"), ("a.txt", f"{END}\n \n{END}")])
def test_an_empty_file_is_refused_when_opened(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match="has no rows"):
        read_rows(str(tmp_path / name))


def test_a_split_is_refused_for_a_source_without_splits():
    assert 'split="test" needs a hub dataset' in fault("embedded", split="test")


@pytest.mark.parametrize("source", ["roneneldan/TinyStories", "wikitext", "not a/valid/name", "json"])
def test_without_a_hub_a_dataset_name_is_refused_without_a_second_attempt(monkeypatch, tmp_path, source):
    """The datasets library retries for a long time unless it is told that it is offline."""
    import datasets

    offline, load = [], datasets.load_dataset
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")  # where nothing listens
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(
        datasets, "load_dataset", lambda *a, **k: offline.append(datasets.config.HF_HUB_OFFLINE) or load(*a, **k)
    )
    message = fault(source)
    assert f'"{source}"' in message and message.endswith('; use "embedded" or a local .txt, .jsonl or .parquet file')
    assert fault(source, fix="use a pencil").endswith("; use a pencil")
    assert offline == [True, True] * ("/" in source) and datasets.config.HF_HUB_OFFLINE is False


@pytest.mark.parametrize("streaming", [False, True])
def test_a_hub_dataset_gives_its_rows(hub, streaming):
    rows = read_rows("someone/something", config="small", streaming=streaming)
    assert list(rows) == [row | {"config": "small"} for row in ROWS]


def test_a_hub_dataset_without_the_split_is_refused(hub):
    message = fault("someone/something", split="test")
    assert 'Unknown split "test"' in message and "['train']" in message


# -- <|endoftext|> ---------------------------------------------------------------------------------------------------
@pytest.fixture(params=[1, 3, 7, 2**16])
def reading(request, monkeypatch):
    """Sets READ, the number of bytes read at a time."""
    monkeypatch.setattr(text, "READ", request.param)


@pytest.mark.parametrize("content", [
    "one é\n<|endoftext|>\ntwo\n\nlines\n<|endoftext|>\nthree",
    "<|endoftext|>one é<|endoftext|>two\n\nlines<|endoftext|>three<|endoftext|>",
    "one é\r\n<|endoftext|>\r\ntwo\r\n\r\nlines\r\n<|endoftext|>\r\nthree\r\n",
    "\ufeff one é \t<|endoftext|>two\r\rlines<|endoftext|>three\n\n",
    "\n<|endoftext|> <|endoftext|>\none é<|endoftext|><|endoftext|>two\n\nlines\n<|endoftext|>three<|endoftext|>\n",
])  # fmt: skip
def test_separated_texts_are_rows(tmp_path, reading, content):
    (tmp_path / "a.txt").write_bytes(content.encode())
    assert texts(tmp_path / "a.txt") == ["one é", "two\n\nlines", "three"]


def test_an_inexact_separator_is_text(tmp_path, reading):
    near = " <|endoftext|\n|endoftext|> <|ENDOFTEXT|> <|endof\ntext|> <|endoftex"
    (tmp_path / "a.txt").write_bytes(near.replace("\n", "\r\n").encode())
    assert texts(tmp_path / "a.txt") == [near]


def test_separated_texts_are_read_one_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "READ", 16)
    (tmp_path / "a.txt").write_bytes(b"first<|endoftext|>second<|endoftext|>" + b" " * 20 + b"\xff" * 99)
    assert [row["text"] for row in islice(read_rows(str(tmp_path / "a.txt")), 2)] == ["first", "second"]
    assert "not UTF-8 text at byte 57;" in fault(tmp_path / "a.txt")


@pytest.mark.parametrize("content, at", [(b"ab\xff", 2), (b"\xef\xbb\xbfab\xffc", 5), (b"abcdefgh\xe4\xb8", 8)])
def test_the_error_names_the_byte_that_is_not_utf8(tmp_path, reading, content, at):
    (tmp_path / "a.txt").write_bytes(content)
    assert f"not UTF-8 text at byte {at};" in fault(tmp_path / "a.txt")


# -- NFC -------------------------------------------------------------------------------------------------------------
NFD, NFC = "cafe\u0301 \u1112\u1161\u11ab", "caf\u00e9 \ud55c"


@pytest.mark.parametrize("name, more", [("a.jsonl", [2, None]), ("a.parquet", [])])  # a parquet list has one type
def test_every_string_of_a_row_is_in_nfc(tmp_path, name, more):
    def row(text):
        return {"text": text, "n": 1, "messages": [{"role": "user", "content": text, "parts": [text, *more]}]}

    assert list(read_rows(written(tmp_path / name, [row(NFD), row("plain")]))) == [row(NFC), row("plain")]


def test_txt_and_the_hub_are_in_nfc(tmp_path, monkeypatch, hub):
    (tmp_path / "a.txt").write_text(NFD, encoding="utf-8")
    assert texts(tmp_path / "a.txt") == [NFC]
    monkeypatch.setitem(ROWS[0], "text", NFD)
    assert next(read_rows("someone/something"))["text"] == NFC
    monkeypatch.setattr("pydoc_data.topics.topics", {"topic": NFD})
    assert texts("embedded") == [NFC]


def test_a_separator_is_recognised_before_any_character(tmp_path, reading):
    """NFC would otherwise compose > and U+0338."""
    (tmp_path / "a.txt").write_text("e\u0301<|endoftext|>\u0338 e\u0301", encoding="utf-8")
    assert texts(tmp_path / "a.txt") == ["é", "\u0338 é"]
    path = written(tmp_path / "a.jsonl", [{"text": "e\u0301<|endoftext|>\u0338 e\u0301"}])
    assert texts(path) == ["é<|endoftext|>\u0338 é"]


# -- pieces ----------------------------------------------------------------------------------------------------------
ODD = [*"\n \ta", "\n\n", "  ", "bc", "e\u0301", "\u2028", "\x1c", "\u3000", "'s", "12", "!?", "\u1112\u1161"]


@pytest.mark.parametrize("size", [1, 5, 40])
@pytest.mark.parametrize("read", [1, 6, 1000])
def test_pieces_make_up_the_text(monkeypatch, size, read):
    monkeypatch.setattr(text, "PIECE", size)
    for seed in range(20):
        whole = "".join(random.Random(seed).choices(ODD, k=200))
        pieces = list(in_pieces(whole[at : at + read] for at in range(0, len(whole), read)))
        assert "".join(piece for piece, _ in pieces) == unicodedata.normalize("NFC", whole.strip())
        assert [ends for _, ends in pieces] == [False] * (len(pieces) - 1) + [True]
        for (before, _), (piece, _) in pairwise(pieces):
            spaced = piece[0] in " \n" and not piece[1].isspace()
            assert spaced or (before[-1].isalnum() and piece[0] in ".,!?。")
        assert len(pieces) > 200 // (size + 20)


def test_pieces_of_several_texts():
    parts = [" ", None, "a", " b", None, "\n", " ", None, None, "c ", ""]
    assert list(in_pieces(parts)) == [("a b", True), ("c", True)] and list(in_pieces([])) == []


def test_a_text_without_a_place_to_cut_is_one_piece(monkeypatch):
    monkeypatch.setattr(text, "PIECE", 4)
    assert list(in_pieces(["abcdefghij", "klm\t\tn"])) == [("abcdefghijklm\t\tn", True)]
    assert list(in_pieces(["abcdefghij", "klm n"])) == [("abcdefghijklm", False), (" n", True)]


def test_a_text_without_spaces_is_cut_at_punctuation(monkeypatch):
    monkeypatch.setattr(text, "PIECE", 4)
    found = [("一二三", False), ("。四五六七八", False), ("，九", True)]
    assert list(in_pieces(["一二三。四", "五六七八，九"])) == found


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
@pytest.mark.parametrize("encoding, name", [
    ("utf-16", "UTF-16 LE"), ("utf-16-be", "UTF-16 BE"), ("utf-16-le", "UTF-16 LE"), ("utf-32", "UTF-32 LE"),
    ("utf-32-be", "UTF-32 BE"),
])  # fmt: skip
def test_another_encoding_is_named(tmp_path, suffix, encoding, name):
    file = tmp_path / f"rows{suffix}"
    file.write_bytes('{"text": "naïve “quotes” ünd 日本"}\n'.encode(encoding))
    with pytest.raises(UserError, match=f"rows{suffix} is encoded in {name}, not UTF-8; convert the file to UTF-8"):
        list(read_rows(str(file)))
