"""Checkpoints in a bucket: complete or absent, the newest is found, older ones are removed."""

import asyncio
import errno
import uuid

import fsspec
import pytest

from qat_lora.errors import UserError
from qat_lora.run import remote as urls


@pytest.fixture(params=["memory", "folder"])
def bucket(request, tmp_path):
    return f"memory://bucket/{uuid.uuid4()}" if request.param == "memory" else str(tmp_path / "bucket")


@pytest.fixture
def checkpoint(tmp_path):
    def make(step: int, text: str = "x"):
        folder = tmp_path / "run" / f"step_{step}"
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("meta.json", "trainer.pt", "model.safetensors"):
            (folder / name).write_text(f"{name} {step} {text}")
        return folder

    return make


def test_the_newest_checkpoint_comes_back_unchanged(bucket, checkpoint, tmp_path):
    assert urls.newest(bucket) is None and urls.pull(bucket, tmp_path) == []
    for step in (9, 10):  # sorted by number, not by letter
        urls.push(checkpoint(step), bucket)
    assert urls.newest(bucket) == "step_10"
    found, older = urls.pull(bucket, tmp_path / "back")
    assert found == tmp_path / "back" / "step_10" and older == tmp_path / "back" / "step_9"
    back, sent = ({file.name: file.read_text() for file in folder.iterdir()} for folder in (found, checkpoint(10)))
    assert back == sent


def test_an_incomplete_checkpoint_is_skipped(bucket, checkpoint, monkeypatch):
    urls.push(checkpoint(1), bucket)
    kind = type(fsspec.core.url_to_fs(bucket)[0])
    put, count = kind.put_file, iter(range(9))

    def breaks(self, *args, **kwargs):
        if next(count) == 2:
            raise ConnectionError("the line is dead")
        return put(self, *args, **kwargs)

    dead = r"cannot be used \(ConnectionError: the line is"
    with monkeypatch.context() as patch, pytest.raises(UserError, match=dead):
        patch.setattr(kind, "put_file", breaks)
        urls.push(checkpoint(2), bucket)
    assert urls.newest(bucket) == "step_1"
    urls.push(checkpoint(2, "again"), bucket)  # replaces the incomplete one
    assert urls.newest(bucket) == "step_2"


@pytest.mark.parametrize(
    "error, said",
    [
        (SystemExit(3), r"cannot be used \(SystemExit: 3\); check the address"),
        (asyncio.CancelledError(), r"cannot be used \(CancelledError: CancelledError\); check the address"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device.; free some space there"),
    ],
)
def test_any_error_of_a_cloud_package_names_the_bucket(bucket, monkeypatch, error, said):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(type(fsspec.core.url_to_fs(bucket)[0]), "makedirs", fails)
    with pytest.raises(UserError, match=said):
        urls.check_writable(bucket)
    error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        urls.check_writable(bucket)


def test_older_checkpoints_are_removed(bucket, checkpoint, tmp_path):
    for step in (1, 2, 3):
        urls.push(checkpoint(step), bucket)
        urls.prune(bucket, 2)
    files, path = fsspec.core.url_to_fs(bucket)
    assert sorted(name.rsplit("/", 1)[-1] for name in files.ls(path, detail=False)) == ["step_2", "step_3"]


def test_a_bucket_that_cannot_be_written_is_found_at_once(bucket, tmp_path):
    urls.check_writable(bucket)
    files, path = fsspec.core.url_to_fs(bucket)
    assert files.ls(path) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot be used"):
        urls.check_writable(str(tmp_path / "file"))
