"""Text sources: each kind of source gives its rows in order, and each fault is one line with the mend."""

import json
import time
from itertools import islice
from pydoc_data.topics import topics

import pytest

from qat_lora.data.text import read_rows
from qat_lora.errors import UserError

ROWS = [{"text": f"row {n} é", "n": n} for n in range(5)]


@pytest.fixture
def no_hub(monkeypatch, tmp_path):
    """A hub that nothing listens at, and an empty cache of datasets, wherever the test runs."""
    import datasets

    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture
def hub(monkeypatch):
    """A hub that knows one dataset with a train split."""
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


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_parquet(path, rows):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)
    return str(path)


def test_embedded_text_is_every_help_topic_in_key_order():
    assert [row["text"] for row in read_rows("embedded")] == [topics[key] for key in sorted(topics)]


def test_txt_is_one_document(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("first\n\nsecond é\n", encoding="utf-8")
    assert list(read_rows(str(path))) == [{"text": "first\n\nsecond é\n"}]
    path.write_text("first\n\nsecond é\n", encoding="utf-8-sig")
    assert list(read_rows(str(path))) == [{"text": "first\n\nsecond é\n"}], "a byte order mark is no text"


@pytest.mark.parametrize("write, name", [(write_jsonl, "a.jsonl"), (write_parquet, "a.parquet")])
def test_files_give_their_rows_in_order(tmp_path, write, name):
    path = write(tmp_path / name, ROWS)
    assert list(read_rows(path)) == ROWS


def test_jsonl_skips_blank_lines_and_reads_no_further_than_asked(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"n": 1}\n\n{"n": 2}\nbroken\n')
    assert list(islice(read_rows(str(path)), 2)) == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize(
    "line, words", [("{'n': 2}", "not valid JSON"), ("[1]", "list"), ('"ab"', "str"), ("[" * 10**5, "JSON")]
)
def test_malformed_jsonl_names_file_and_line(tmp_path, line, words):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"n": 1}}\n\n{line}\n')
    message = fault(path)
    assert f"{path} line 3" in message and words in message


@pytest.mark.parametrize("name", ["gone.txt", "gone.jsonl", "gone.parquet", "gone.csv", "gone"])
def test_missing_file(tmp_path, name):
    assert fault(tmp_path / name) == f"{tmp_path / name}: no such file"


def test_unsupported_file_lists_the_supported_ones(tmp_path):
    (tmp_path / "a.csv").write_text("text\nx\n")
    assert ".txt, .jsonl or .parquet" in fault(tmp_path / "a.csv")
    assert "is a folder" in fault(tmp_path)


def test_damaged_files(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab\xff")
    (tmp_path / "a.parquet").write_bytes(b"no parquet")
    assert "byte 2" in fault(tmp_path / "a.txt")
    assert "not a readable parquet file" in fault(tmp_path / "a.parquet")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_empty_file_is_refused_when_opened(tmp_path, name):
    (tmp_path / name).write_text("\n \n")
    with pytest.raises(UserError, match="holds no rows"):
        read_rows(str(tmp_path / name))


def test_a_split_of_a_file_is_refused():
    assert 'split="test" needs a hub dataset' in fault("embedded", split="test")


@pytest.mark.parametrize("source", ["roneneldan/TinyStories", "wikitext", "not a/valid/name", "json"])
def test_without_a_hub_a_dataset_name_fails_fast_and_names_the_mend(no_hub, source):
    start = time.monotonic()
    message = fault(source)
    assert time.monotonic() - start < 15
    assert f'"{source}"' in message and '"embedded"' in message and ".txt, .jsonl or .parquet" in message


def test_without_a_hub_a_caller_with_other_sources_names_its_own(no_hub):
    assert fault("nobody/nothing", mend="use a pencil").endswith("; use a pencil")


def test_without_a_hub_the_process_does_not_stay_offline(no_hub):
    import datasets

    fault("roneneldan/TinyStories")
    assert datasets.config.HF_HUB_OFFLINE is False


@pytest.mark.parametrize("streaming", [False, True])
def test_hub_dataset(hub, streaming):
    rows = list(read_rows("someone/something", config="small", streaming=streaming))
    assert rows == [row | {"config": "small"} for row in ROWS]


def test_hub_dataset_without_the_split(hub):
    message = fault("someone/something", split="test")
    assert 'Unknown split "test"' in message and "['train']" in message
