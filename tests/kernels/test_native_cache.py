"""The C kernels are compiled once for a machine, whatever happens to the file that keeps them. Two short functions
stand for native.c, which takes seconds to compile."""

import multiprocessing
import shutil

import pytest

from qat_lora.kernels import native

COMPILER = shutil.which("cc")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no C compiler (cc)")
load = native.library.__wrapped__


@pytest.fixture
def compilations(tmp_path, monkeypatch):
    """Call this for the number of compilations so far; the cache folder is new, and `kept` lists its files."""
    log, compiler, source = tmp_path / "log", tmp_path / "cc", tmp_path / "native.c"
    source.write_text("long move_moments(void) { return 0; }\nlong add_rows(void) { return 0; }\n")
    monkeypatch.setattr(native, "SOURCE", source)
    compiler.write_text(f'#!/bin/sh\ncase "$*" in *-###*) ;; *) echo >>{log} ;; esac\nexec {COMPILER} "$@"\n')
    compiler.chmod(0o755)
    log.touch()
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return lambda: log.read_text().count("\n")


@pytest.fixture
def kept(tmp_path):
    return lambda: list((tmp_path / "cache" / "qat_lora").iterdir())


def test_kernels_are_compiled_once_and_again_when_the_kept_file_is_damaged(compilations, kept):
    assert load() and load() and compilations() == 1
    (file,) = kept()
    whole = file.read_bytes()
    file.unlink()  # this process still runs the old one
    file.write_bytes(whole[: len(whole) // 2])
    assert load() and load() and compilations() == 2
    assert kept() == [file] and file.read_bytes() == whole


def test_other_flags_or_another_source_are_another_file(compilations, kept, monkeypatch):
    assert load()
    monkeypatch.setattr(native, "FLAGS", [*native.FLAGS, "-DOTHER"])
    assert load()
    native.SOURCE.write_text(native.SOURCE.read_text() + "\n")
    assert load() and compilations() == len(kept()) == 3


def test_a_cache_folder_that_cannot_be_written_costs_only_time(compilations, tmp_path):
    (tmp_path / "cache").write_text("a file, not a folder")
    assert load() and load() and compilations() == 2


@pytest.mark.parametrize("compiler", ["false", "no-such-compiler"])
def test_without_a_working_compiler_there_are_no_kernels(compilations, monkeypatch, capsys, compiler):
    monkeypatch.setenv("CC", compiler)
    assert load() is None and f"{compiler} does not compile C" in capsys.readouterr().err


def test_processes_that_start_together_all_get_whole_kernels(compilations, kept):
    jobs = [multiprocessing.get_context("fork").Process(target=load) for _ in range(4)]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
    assert [job.exitcode for job in jobs] == [0] * 4 and len(kept()) == 1
    assert load() and compilations() <= 4
