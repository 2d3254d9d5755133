"""Stories as tokens: each is used once per epoch, the tail is held out, and held-out tokens are predicted once."""

import json
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from qat_lora.data import text as text_source
from qat_lora.errors import UserError
from qat_lora.experiments.stories import text as stories
from qat_lora.experiments.stories.text import END, Blocks, load_stories, spans
from qat_lora.experiments.stories.token_files import Tokens, token_type

TEXT = "\n".join(f"Story {n}: a cat met a dog, and they were {['glad', 'sad', 'hungry'][n % 3]}." for n in range(200))


PARTS = [*"\n \ta\u2028\x1c\u3000\u4e2d", "\n\n", "  ", "bc", "e\u0301", "'s", "12", "!?", *["they're so glad"] * 2]
KINDS = pytest.mark.parametrize("kind, vocab", [("bpe", 300), ("chars", 0), ("gpt2", 0)])


def jsonl(path, texts) -> str:
    """The path of a new file with one row for each text."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


@pytest.fixture
def load(tmp_path):
    """load(content, …): the stories of a text or of a list of rows."""

    def loaded(content: str | list, most=10, heldout=0.1, kind="chars", vocab=0):
        path = tmp_path / "stories.txt"
        if isinstance(content, str):
            path.write_text(content, encoding="utf-8")
        else:
            path = jsonl(path.with_suffix(".jsonl"), content)
        return load_stories(str(path), most, heldout, kind, vocab)

    return loaded


def ends(found) -> tuple[int, int]:
    """How many stories each part has."""
    return (found.train[:] == found.end).sum(), (found.heldout[:] == found.end).sum()


@pytest.mark.parametrize("kind, vocab", [("bpe", 400), ("auto", 400), ("chars", 0)])
def test_both_parts_together_are_the_text(load, kind, vocab):
    found = load(TEXT, kind=kind, vocab=vocab)
    said = [found.tokenizer.decode(part[:-1].tolist()) for part in (found.train, found.heldout)]
    assert "\n".join(said) == TEXT and 0.08 < len(said[1]) / len(TEXT) < 0.12
    assert found.train[-1:] == found.heldout[-1:] == found.end and found.heldout_bytes == len(said[1].encode())
    assert max(found.train[:].max(), found.heldout[:].max()) < found.vocab


TALES = [f"Tale {n}: it's {'warm' if n % 2 else 'cold'}.\n\nThe end, caf\u00e9 {n}." for n in range(20)]


@pytest.fixture
def gpt2(monkeypatch, tmp_path):
    """A stand-in for GPT-2's tokenizer, with the separator as a special token."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TALES, trainers.BpeTrainer(vocab_size=300, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    )
    monkeypatch.setattr(stories, "load_tokenizer", lambda name: SimpleNamespace(backend_tokenizer=made))


def published(tmp_path, suffix: str) -> str:
    """The tales as a file with this suffix, with empty stories in between."""
    path = tmp_path / f"tales{suffix}"
    if suffix == ".txt":
        path.write_bytes((f"\ufeff\n{END}\n" + f"\n{END}\n{END} \n".join(TALES) + "\n").encode())
    elif suffix == ".crlf.txt":
        path.write_bytes("".join(f"{tale}\n{END}\n" for tale in TALES).replace("\n", "\r\n").encode())
    else:
        texts = [f" {END}\n".join(["", *TALES[at : at + 5], ""]) for at in range(0, 20, 5)]
        if suffix == ".jsonl":
            return jsonl(path, texts)
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.table({"text": texts}), path)
    return str(path)


@KINDS
@pytest.mark.parametrize("suffix", [".txt", ".crlf.txt", ".jsonl", ".parquet"])
def test_published_layouts_give_the_same_tokens(load, tmp_path, gpt2, suffix, kind, vocab):
    plain = load(TALES, 1000, 0.2, kind, vocab)
    found = load_stories(published(tmp_path, suffix), 1000, 0.2, kind, vocab)
    assert found.fingerprint == plain.fingerprint and found.tokenizer.to_str() == plain.tokenizer.to_str()
    assert ends(found) == (16, 4) and found.heldout_bytes == sum(len(tale.encode()) for tale in TALES[16:])
    assert {token for token in found.tokenizer.get_vocab() if "|" in token} - {"|"} == {END}


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
@pytest.mark.parametrize("most, sizes", [(7, (6, 1)), (2, (1, 1)), (20, (18, 2)), (99, (18, 2))])
def test_max_stories_counts_stories(tmp_path, suffix, most, sizes):
    assert ends(load_stories(published(tmp_path, suffix), most, 0.1, "chars", 0)) == sizes


def test_empty_rows_do_not_count_as_stories(load):
    found = load([text for n in range(9) for text in (END, None, f"tale {n}")], 5, 0.2)
    assert ends(found)[0] == 4 and found.heldout_bytes == len("tale 4")


def test_separators_around_one_story_change_nothing(load):
    one, other = load(f"{END}\n{TEXT}\n{END}\n"), load(TEXT)
    assert one.fingerprint == other.fingerprint and one.heldout_bytes == other.heldout_bytes


@pytest.mark.parametrize(
    "kind, vocab, one, rows",
    [("bpe", 400, "86c9443fffbbedb6", "1950700694863897"), ("chars", 0, "6472932aa90d170b", "b1cf98440c779462")],
)
def test_fingerprints_do_not_change(load, kind, vocab, one, rows):
    """Otherwise existing runs could not be resumed."""
    assert load(TEXT, kind=kind, vocab=vocab).fingerprint.startswith(one)
    lines = [line if number % 9 else "" for number, line in enumerate(TEXT.splitlines())]
    assert load(lines, 133, kind=kind, vocab=vocab).fingerprint.startswith(rows)


@KINDS
@pytest.mark.parametrize("separator", [[], [END]])
def test_tokens_do_not_depend_on_how_a_text_is_cut_into_pieces(load, monkeypatch, gpt2, kind, vocab, separator):
    text = "x" + "".join(random.Random(0).choices([*PARTS, *separator], k=3000))
    whole = load(text, 999, 0.3, kind, vocab)
    for piece, read, batch in ((1, 7, 50), (100, 64, 10)):
        monkeypatch.setattr(text_source, "PIECE", piece)
        monkeypatch.setattr(text_source, "READ", read)
        monkeypatch.setattr(stories, "BATCH", batch)
        found = load(text, 999, 0.3, kind, vocab)
        assert found.fingerprint == whole.fingerprint and found.heldout_bytes == whole.heldout_bytes
        assert found.openings(9, 5) == whole.openings(9, 5)
        for side in (found.train, found.heldout):  # equals the tokenizer's own encoding
            tokens = side[: side[:].tolist().index(found.end)].tolist()
            assert kind == "gpt2" or found.tokenizer.encode(found.tokenizer.decode(tokens)).ids == tokens


def test_a_bpe_is_trained_on_a_limited_number_of_distinct_words(load, monkeypatch):
    """The trainer's memory grows with the distinct words, not with the text."""
    seen, training_text = [], stories._training_text
    monkeypatch.setattr(stories, "DISTINCT", 400)
    monkeypatch.setattr(stories, "_training_text", lambda text: (seen.append(p) or p for p in training_text(text)))
    load(END.join(["one two one two"] * 50 + [f"word{n}" for n in range(500)] + ["zz"] * 500), 9999, 0.1, "bpe", 300)
    assert seen[:50] == ["one two one two"] * 50 and 100 < len(seen) < 130


@pytest.mark.parametrize("vocab, kind", [(2, "<u2"), (2**16, "<u2"), (2**16 + 1, "<i4")])
def test_a_slice_of_tokens_is_a_tensor(tmp_path, vocab, kind):
    assert token_type(vocab) == np.dtype(kind)
    values = torch.randint(vocab, (100,))
    (tmp_path / "t.bin").write_bytes(values.numpy().astype(kind).tobytes())
    found = Tokens(tmp_path / "t.bin", token_type(vocab))
    (tmp_path / "t.bin").unlink()
    assert len(found) == 100 and found[:].dtype == torch.int64
    assert len(found[9:3]) == 0
    for part in (slice(None), slice(3, 9), slice(-5, None), slice(90, 200), slice(7, 7)):
        assert torch.equal(found[part], values[part])
    blocks, wanted = Blocks(found, 9), Blocks(values, 9)
    assert all(torch.equal(blocks[i]["tokens"], wanted[i]["tokens"]) for i in range(len(wanted)))
    for one, other in zip(spans(found, 1, 9, 4, 3), spans(values, 1, 9, 4, 3), strict=True):
        assert torch.equal(one["tokens"], other["tokens"]) and torch.equal(one["mask"], other["mask"])


def test_openings_come_from_several_stories_or_places(load):
    one = load(TEXT, heldout=0.3)
    first, second = (one.tokenizer.decode(tokens) for tokens in one.openings(2, 9))
    assert first.startswith("Story") and len(first) == len(second) == 9 and first != second
    several = load([f"tale {n}" for n in range(20)], 20, 0.2)
    assert [several.tokenizer.decode(tokens) for tokens in several.openings(2, 9)] == ["tale 16", "tale 17"]


@pytest.mark.parametrize("line, said", [
    ('{"story": "x"}', r'row 1: no text in column "text" \(columns: story\)'), ('{"text": 7}', "row 1: no text"),
    (r'{"text": "\ud800"}', "row 1: the text is not valid Unicode"),
])  # fmt: skip
def test_rows_with_bad_text_are_refused(tmp_path, line, said):
    (tmp_path / "s.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(UserError, match=said):
        load_stories(str(tmp_path / "s.jsonl"), 20, 0.2, "chars", 0)


@pytest.mark.parametrize("length", [1, 5, 13])
def test_every_token_is_predicted_once_per_epoch(length):
    stream = torch.arange(100)
    blocks = Blocks(stream, length)
    predicted = torch.cat([blocks[i]["tokens"][1:] for i in range(len(blocks))])
    assert predicted.tolist() == list(range(1, 1 + len(blocks) * length)) and len(predicted) > 99 - length
    assert sum(blocks.kept(i) for i in range(len(blocks))) == len(predicted)


@pytest.mark.parametrize("length, stride, count", [(8, 4, 50), (8, 8, 51), (8, 1, 9), (8, 4, 3), (8, 4, 8), (8, 3, 30)])
def test_every_heldout_token_counts_once(length, stride, count):
    stream, seen = torch.arange(count) + 100, []
    for batch in spans(stream, 7, length, stride, rows=4):
        assert batch["tokens"].shape == (4, length + 1) and batch["mask"].shape == (4, length)
        seen += batch["tokens"][:, 1:][batch["mask"].bool()].tolist()
    assert sorted(seen) == stream.tolist()


@pytest.mark.parametrize("content, changes, said", [
    (TEXT, {"kind": "words"}, "--tokenizer 'words' is not one of auto, gpt2, bpe, chars"),
    (TEXT, {"most": 0}, "--max-stories 0"), (TEXT, {"heldout": 0.0}, "--heldout-fraction 0.0"),
    (TEXT, {"heldout": 1e-9}, "too short to hold out"), (TEXT, {"kind": "bpe", "vocab": 100}, "--vocab-size 100"),
    (" \n", {}, "holds no rows"), (f"{END}\n{END}", {}, "holds no rows"),
])  # fmt: skip
def test_an_empty_text_and_bad_options_are_refused(load, content, changes, said):
    with pytest.raises(UserError, match=said):
        load(content, **changes)


def test_a_block_longer_than_the_text_is_refused():
    with pytest.raises(UserError, match="--block-size 200 must be at least 1 and less than the text's 50 tokens"):
        Blocks(torch.arange(50), 200)
