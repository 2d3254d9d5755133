"""An error names the file that cannot be written, whichever library reports the failure."""

import errno
import io
import os

import numpy as np
import pytest
from safetensors import SafetensorError

from qat_lora.errors import OUTPUT, Output, UserError
from qat_lora.run import files
from qat_lora.run.files import copy_file, new_folder, write_atomically, write_json, writing


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
        OSError("9720 requested and 4064 written"),  # numpy
        Exception("No space left on device (os error 28)"),  # tokenizers
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
        RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
        RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0"),
        PermissionError(errno.EACCES, "Permission denied"),
        OSError(errno.EROFS, "Read-only file system"),
    ],
)
def test_a_failed_write_names_the_path_whatever_the_library_raises(tmp_path, error):
    for context in (writing(tmp_path / "model"), new_folder(tmp_path / "model")):
        with pytest.raises(UserError, match=r"/model could not be written \(.*; free some space") as caught, context:
            raise error
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_the_reason_is_found_behind_another_exception(tmp_path):
    with pytest.raises(UserError, match="No space left on device"), writing(tmp_path / "a"):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            raise RuntimeError("while saving") from error


@pytest.mark.parametrize("error", [KeyError("x"), RuntimeError("CUDA out of memory"), ValueError("shape")])
def test_other_exceptions_pass_unchanged(tmp_path, error):
    with pytest.raises(type(error)), writing(tmp_path / "a"):
        raise error


class Full(io.StringIO):
    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_an_error_of_standard_output_does_not_name_the_path(tmp_path):
    with pytest.raises(OSError) as error, writing(tmp_path / "a"):
        Output(Full()).write("half way")
    assert error.value.filename == OUTPUT


def test_a_full_disk_is_reported_as_such_whatever_the_library_says(tmp_path, monkeypatch):
    monkeypatch.setattr(files.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 100}))
    with pytest.raises(UserError, match="No space left on device"), writing(tmp_path / "a"):
        raise OSError("9720 requested and 4064 written")


def test_an_error_inside_a_new_folder_names_the_requested_folder(tmp_path):
    with pytest.raises(UserError) as caught, new_folder(tmp_path / "data") as part:
        (part / "x.json").mkdir()
        write_json(part / "x.json", {})
    assert f"{tmp_path}/data/x.json could not be written" in str(caught.value)


def test_copies_and_arrays_are_complete(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(10**6))
    copy_file(tmp_path / "a.npy", tmp_path / "deep" / "b.npy")
    assert (tmp_path / "deep" / "b.npy").read_bytes() == (tmp_path / "a.npy").read_bytes()
    write_atomically(tmp_path / "c", lambda file: file.write(b"c"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npy", "c", "deep"]


def test_a_file_has_all_its_bytes_on_the_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    """Otherwise a power cut can leave an empty file under the new name."""
    flushed = []
    monkeypatch.setattr(files.os, "fsync", lambda number: flushed.append((os.fstat(number).st_size, there.exists())))
    there = tmp_path / "file"
    write_atomically(there, lambda file: file.write(b"x" * 100))
    there = tmp_path / "folder"
    with new_folder(there) as folder:
        folder.mkdir(exist_ok=True)
        (folder / "file").write_bytes(b"x" * 50)
    assert flushed == [(100, False), (50, False)]
