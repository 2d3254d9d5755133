"""Stories become tokens: each once an epoch, the tail held out, every held-out token predicted once."""

import pytest
import torch

from qat_lora.data.stories import END, Blocks, load_stories, spans
from qat_lora.errors import UserError

TEXT = "\n".join(f"Story {n}: a cat met a dog, and they were {['glad', 'sad', 'hungry'][n % 3]}." for n in range(200))


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "stories.txt"
    path.write_text(TEXT)
    return str(path)


@pytest.mark.parametrize("kind, vocab", [("bpe", 400), ("auto", 400), ("chars", 0)])
def test_both_parts_are_the_text(text, kind, vocab):
    found = load_stories(text, 10, 0.1, kind, vocab)
    said = [found.tokenizer.decode(part[:-1].tolist()) for part in (found.train, found.heldout)]
    assert "\n".join(said) == TEXT and 0.08 < len(said[1]) / len(TEXT) < 0.12
    assert found.train[-1:] == found.heldout[-1:] == found.end and found.heldout_bytes == len(said[1].encode())
    assert max(found.train[:].max(), found.heldout[:].max()) < found.vocab


def test_several_stories_keep_apart(tmp_path):
    (tmp_path / "s.jsonl").write_text(
        "".join(f'{{"text": "story number {n}"}}\n' for n in range(20)) + '{"text": ""}\n'
    )
    found = load_stories(str(tmp_path / "s.jsonl"), 15, 0.2, "chars", 0)
    assert (found.train[:] == found.end).sum() == 12 and (found.heldout[:] == found.end).sum() == 3
    assert found.tokenizer.decode(found.heldout[:].tolist(), skip_special_tokens=False).count(END) == 3


def test_openings_are_of_several_texts_or_places(text, tmp_path):
    one = load_stories(text, 10, 0.3, "chars", 0)
    first, second = (one.tokenizer.decode(tokens) for tokens in one.openings(2, 9))
    assert first.startswith("Story") and len(first) == len(second) == 9 and first != second
    (tmp_path / "s.jsonl").write_text("".join(f'{{"text": "tale {n}"}}\n' for n in range(20)))
    several = load_stories(str(tmp_path / "s.jsonl"), 20, 0.2, "chars", 0)
    assert [several.tokenizer.decode(tokens) for tokens in several.openings(2, 9)] == ["tale 16", "tale 17"]


@pytest.mark.parametrize(
    "line, part",
    [
        ('{"story": "x"}', 'row 1: no text in column "text" (columns: story)'), ('{"text": 7}', "row 1: no text"),
        (r'{"text": "\ud800"}', "row 1: the text is not Unicode"),
    ],
)  # fmt: skip
def test_rows_without_text_are_refused(tmp_path, line, part):
    (tmp_path / "s.jsonl").write_text('{"text": "fine"}\n' + line)
    with pytest.raises(UserError) as error:
        load_stories(str(tmp_path / "s.jsonl"), 20, 0.2, "chars", 0)
    assert part in str(error.value)


@pytest.mark.parametrize("length", [1, 5, 13])
def test_every_token_is_predicted_once_an_epoch(length):
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


@pytest.mark.parametrize(
    "changes, part",
    [
        ({"tokenizer": "words"}, "--tokenizer 'words' is not one of auto, gpt2, bpe, chars"),
        ({"max_stories": 0}, "--max-stories 0"), ({"heldout": 0.0}, "--heldout-fraction 0.0"),
        ({"heldout": 1e-9}, "too short to hold out"), ({"tokenizer": "bpe", "vocab": 100}, "--vocab-size 100"),
    ],
)  # fmt: skip
def test_bad_input(text, changes, part):
    asked = {"source": text, "max_stories": 5, "heldout": 0.1, "tokenizer": "chars", "vocab": 0} | changes
    with pytest.raises(UserError, match=part):
        load_stories(**asked)


def test_a_block_longer_than_the_text_is_refused():
    with pytest.raises(UserError, match="--block-size 200 and a text of 50 tokens"):
        Blocks(torch.arange(50), 200)


def test_an_empty_text_is_refused(tmp_path):
    (tmp_path / "none.txt").write_text(" \n")
    with pytest.raises(UserError, match="holds no rows"):
        load_stories(str(tmp_path / "none.txt"), 5, 0.1, "chars", 0)
