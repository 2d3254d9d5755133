"""Fixtures for runs on a tiny model that are refused or resumed."""

import gc
from pathlib import Path

import pytest
from forked import Forks
from matplotlib.figure import Figure
from small import CACHE, CPU, IN_SHARDS, LEARNS, SMALL

from qat_lora.errors import UserError

DRAW = (  # modules whose tests look at pictures
    "test_pipeline", "test_pretrain", "test_report_recovery", "test_report_run", "test_train_cot_sft",
    "test_train_musclebob", "test_train_tinystories",
)  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def placeholders(request):
    """Drawing takes four fifths of the time of a small run, so only the modules in DRAW draw."""
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__ not in DRAW:
            patch.setattr(Figure, "tight_layout", lambda *_, **__: None)
            patch.setattr(Figure, "savefig", lambda _, path, **__: Path(path).write_bytes(b"\x89PNG"))
        yield


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    return Forks(tmp_path_factory.mktemp("said"))


@pytest.fixture(scope="module")
def cache(run, tiny_model_dir, tmp_path_factory):
    """A small valid cache. Do not write to it."""
    folder = tmp_path_factory.mktemp("bad") / "cache"
    run("build_kd_cache", "--model", tiny_model_dir, "--cache-dir", folder, *CACHE)
    return folder


@pytest.fixture(scope="module")
def cache_flags(sharp_model_dir):
    """Flags that build a cache of eight files."""
    return ["--model", sharp_model_dir, *CPU, *IN_SHARDS]


@pytest.fixture(scope="module")
def whole_cache(run, cache_flags, tmp_path_factory):
    """That cache, by one worker in a folder: seven files of training rows and one of held-out rows. Do not write
    to it."""
    folder = tmp_path_factory.mktemp("one")
    run("build_kd_cache", *cache_flags, "--cache-dir", folder)
    return folder


@pytest.fixture(scope="module")
def tiny_student(make_student, tiny_model_dir):
    return make_student(tiny_model_dir)


@pytest.fixture(scope="module")
def make_files(run):
    """make_files(model): a cache c/, a QAT run r/ and a recovery run l/ in the working directory."""

    def make(model: str) -> None:
        run("build_kd_cache", "--model", model, "--cache-dir", "c", *CACHE)
        run("train_qat", "--model", model, "--cache-dir", "c", "--output-dir", "r", *LEARNS)
        run("train_recovery_lora", "--checkpoint", "r/best.pt", "--kd-cache-dir", "c", "--output-dir", "l", *SMALL)

    return make


@pytest.fixture
def refuse(run):
    """refuse(script, *flags): the message of the UserError, checked to be one line."""

    def refused(script: str, *flags) -> str:
        gc.freeze()  # the collection below then takes milliseconds
        with pytest.raises(UserError) as error:
            run(script, *flags)
        message = str(error.value)
        assert len(message.splitlines()) == 1, message
        del error
        gc.collect()  # the process would end here and release its run directory
        gc.unfreeze()
        return message

    return refused


@pytest.fixture
def qat(tiny_model_dir, cache, tmp_path):
    """Flags for a small run of train_qat on the valid cache."""
    return ["--model", tiny_model_dir, "--cache-dir", cache, "--output-dir", tmp_path / "run", *SMALL]


@pytest.fixture
def recovery(tiny_student, cache, tmp_path):
    """Flags for a small run of train_recovery_lora on the valid cache."""
    return ["--checkpoint", tiny_student, "--kd-cache-dir", cache, "--output-dir", tmp_path / "run", *SMALL]
