"""Tokens on disk are written once, are either complete or absent, and are checked whenever they are read."""

import errno
import multiprocessing
import os
import signal
import threading

import pytest
from patience import PATIENCE

from qat_lora.errors import UserError
from qat_lora.experiments.stories import text as stories
from qat_lora.experiments.stories import token_files
from qat_lora.experiments.stories.text import END, load_stories

WORDS = [f"Tom had {n} cats.\nHe kept {n - 1}." for n in range(1, 61)]


@pytest.fixture
def source(tmp_path):
    (tmp_path / "s.txt").write_text(f"\n{END}\n".join(WORDS))
    return tmp_path / "s.txt"


@pytest.fixture
def load(source, tmp_path):
    """load(**changes): the stories, through the cache."""

    def loaded(**changes):
        asked = {"source": str(source), "max_stories": 99, "heldout": 0.2, "tokenizer": "chars", "vocab": 0}
        return load_stories(**asked | {"cache": tmp_path / "cache"} | changes)

    return loaded


def folders(tmp_path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "cache").iterdir() if path.name != ".lock")


def same(one, other) -> bool:
    kept = ("kind", "heldout_bytes", "fingerprint", "vocab", "end")
    tokens = all(getattr(one, side)[:].tolist() == getattr(other, side)[:].tolist() for side in ("train", "heldout"))
    return tokens and all(getattr(one, name) == getattr(other, name) for name in kept)


def never(*_):
    raise AssertionError("the tokens were written again")


@pytest.mark.parametrize("kind, vocab", [("chars", 0), ("bpe", 300)])
def test_a_text_is_tokenised_once(load, tmp_path, monkeypatch, kind, vocab):
    one = load(tokenizer=kind, vocab=vocab)
    (folder,) = folders(tmp_path)
    names = {path.name for path in (tmp_path / "cache" / folder).iterdir()}
    assert names == {"tokenizer.json", "train.bin", "heldout.bin", "meta.json"}
    assert (tmp_path / "cache" / folder / "train.bin").stat().st_size == 2 * len(one.train)
    monkeypatch.setattr(stories, "_write", never)
    assert same(load(tokenizer=kind, vocab=vocab), one)
    assert same(load(tokenizer=kind, vocab=vocab, heldout=0.2001), one), "the same stories are held out"


def test_the_same_stories_in_another_file_use_the_same_cache(load, source, tmp_path, monkeypatch):
    one = load()
    other = tmp_path / "other.txt"
    other.write_bytes(source.read_bytes().replace(b"\n", b"\r\n") + b"<|endoftext|>")
    monkeypatch.setattr(stories, "_write", never)
    assert same(load(source=str(other)), one)


def test_another_text_and_options_that_change_the_tokens_get_their_own_cache(load, source, tmp_path):
    one, bpe = load(), ({"tokenizer": "bpe", "vocab": vocab} for vocab in (300, 310))
    for count, changes in enumerate(({"max_stories": 50}, {"heldout": 0.3}, *bpe), 2):
        load(**changes)
        assert len(folders(tmp_path)) == count
    source.write_text(source.read_text().replace("cats", "dogs"))
    assert load().fingerprint != one.fingerprint and len(folders(tmp_path)) == 6


def test_without_a_cache_no_files_are_left(load, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    (tmp_path / "temporary").mkdir()
    one = load(cache=None)
    assert not list((tmp_path / "temporary").iterdir()) and not (tmp_path / "cache").exists()
    assert same(one, load())


# -- damage ----------------------------------------------------------------------------------------------------------
def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path):
    os.truncate(path, path.stat().st_size // 2)


@pytest.mark.parametrize("damage", [flip, truncate, os.remove])
@pytest.mark.parametrize("name", ["tokenizer.json", "train.bin", "heldout.bin", "meta.json"])
def test_a_damaged_cache_is_detected_and_rebuilt(load, tmp_path, capsys, damage, name):
    load()
    (folder,) = folders(tmp_path)
    damage(tmp_path / "cache" / folder / name)
    capsys.readouterr()
    assert same(load(), load(cache=None))
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3 and folder in said[0] and said[0].endswith("; rebuilding it") and "tokenising" in said[1]
    load()
    assert capsys.readouterr().out == "" and folders(tmp_path) == [folder]


def test_a_changed_value_in_meta_json_is_detected(load, tmp_path):
    one = load()
    meta = tmp_path / "cache" / folders(tmp_path)[0] / "meta.json"
    meta.write_text(meta.read_text().replace(f'"heldout_bytes": {one.heldout_bytes}', '"heldout_bytes": 9'))
    assert load().heldout_bytes == one.heldout_bytes


# -- writing ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("cached", [True, False])
def test_a_full_disk_is_reported_with_the_path_and_leaves_nothing(load, tmp_path, monkeypatch, cached):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(token_files, "sha256", full)  # called after the tokens are written
    with pytest.raises(UserError) as error:
        load(**({} if cached else {"cache": None}))
    assert "could not be written" in str(error.value) and "No space left" in str(error.value)
    assert "free some space" in str(error.value) and (str(tmp_path / "cache") in str(error.value)) is cached
    assert not cached or folders(tmp_path) == []


def test_a_cache_that_cannot_be_written_is_reported_with_its_path(load, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(UserError, match=f"{tmp_path}/cache could not be written"):
        load()


def test_a_text_that_grows_while_it_is_read_is_refused(load, source, tmp_path, monkeypatch):
    write = stories._write

    def growing(*args):
        source.write_text(source.read_text() + " More.")
        write(*args)

    monkeypatch.setattr(stories, "_write", growing)
    with pytest.raises(UserError, match="changed while it was read; start again"):
        load()
    assert folders(tmp_path) == []


def test_files_of_a_killed_process_are_not_used(load, tmp_path):
    fork = multiprocessing.get_context("fork")
    ready = fork.Event()

    def batches(pieces):
        yield list(pieces)[:30]
        ready.set()
        signal.pause()

    def stopping():
        stories._batches = batches
        load()

    child = fork.Process(target=stopping)
    child.start()
    assert ready.wait(PATIENCE)
    (part,) = folders(tmp_path)
    assert part.startswith(".") and part.endswith(".part")
    child.kill()
    child.join()
    assert same(load(), load(cache=None)) and folders(tmp_path) == [part[1:-5]]


def test_a_second_process_waits_for_the_first(load, monkeypatch):
    """Uses threads; the file lock works between them, too."""
    write, calls, found, waits = stories._write, [], [], threading.Event()

    def written(*args):
        calls.append(args)
        assert waits.wait(PATIENCE)
        write(*args)

    monkeypatch.setattr(stories, "_write", written)
    monkeypatch.setattr(token_files, "say", lambda line: "waiting for the process that" in line and waits.set())
    threads = [threading.Thread(target=lambda: found.append(load())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and len(found) == 2 and same(*found)
