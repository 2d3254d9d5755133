"""Caches are built in a bucket and trained from there: the same bytes and the same figures as in a folder."""

import json
import re
import signal

import fsspec
import pytest
import s3
from small import CACHE, CPU, LEARNS, SMALL

from qat_lora.kd import dataset as datasets
from qat_lora.kd import shelf
from qat_lora.run import buckets


@pytest.fixture(scope="module")
def server():
    with s3.served() as server:
        yield server


@pytest.fixture(autouse=True)
def soon(server, forks, monkeypatch):
    """No faults at first, and short waits; scripts in other processes find the server too."""
    server.fault = lambda *_: None
    server.requests.clear()
    monkeypatch.setattr(buckets, "SILENCE", 10.0)
    monkeypatch.setattr(buckets, "PAUSES", (0.01, 0.01))
    monkeypatch.setattr(forks, "env", s3.environment())


def content(place) -> dict:
    files, path = fsspec.core.url_to_fs(str(place))
    files.invalidate_cache()
    found = {name.rsplit("/", 1)[-1]: files.cat_file(name) for name in files.find(path)}
    return {name: data for name, data in found.items() if name not in ("summary.json", ".lock")}


# -- building ----------------------------------------------------------------------------------------------------------
def test_a_cache_in_a_bucket_has_the_bytes_of_one_in_a_folder(run, cache_flags, whole_cache, capsys):
    url = s3.new_folder()
    run("build_kd_cache", *cache_flags, "--cache-dir", f"{url}/")
    said = capsys.readouterr().out
    assert content(url) == content(whole_cache) and f"made     cache: {url}" in said
    size = sum(file.stat().st_size for file in whole_cache.glob("*.safetensors"))
    assert f"{size / 1e6:.1f} MB; 720 tokens" in said and f"--cache-dir {url}" in said
    run("build_kd_cache", *cache_flags, "--cache-dir", url)
    assert f"{url} was complete already" in capsys.readouterr().out


def test_two_workers_write_it_and_go_on_after_one_was_killed(forks, cache_flags, whole_cache, server):
    url = s3.new_folder()
    death = "kd.cache._targets", 4, signal.SIGKILL, False  # in the second file of worker 1
    said, _ = forks.pair("build_kd_cache", *cache_flags, "--cache-dir", url, expect=(1, -signal.SIGKILL), death=death)
    assert said.count("error:") == 1 and "worker 1" in said and "Traceback" not in said
    files = fsspec.filesystem("s3")
    assert set(json.loads(files.cat_file(f"{url}/manifest.json"))["shards"]) == {
        "shard-00000.safetensors",
        "shard-00001.safetensors",
    }
    server.requests.clear()
    forks.pair("build_kd_cache", *cache_flags, "--cache-dir", url)
    assert content(url) == content(whole_cache)
    assert not [
        path for method, path in server.requests if method == "PUT" and "shard-0000" in path and path[-13] in "01"
    ]


@pytest.mark.parametrize("fault", ["denied", 30.0, "busy"])
def test_a_write_that_fails_midway_is_one_line_and_the_command_goes_on(
    run, refuse, cache_flags, whole_cache, server, fault
):
    url = s3.new_folder()
    server.only(fault, "shard-00003", "PUT")
    said = refuse("build_kd_cache", *cache_flags, "--cache-dir", url)
    assert said.startswith(f"{url}/shard-00003.safetensors ") and re.search("cannot be used|has not answered", said)
    server.fault = lambda *_: None
    server.requests.clear()
    run("build_kd_cache", *cache_flags, "--cache-dir", url)
    assert not server.got("shard-")
    assert len({path for method, path in server.requests if method == "PUT" and "shard-" in path}) == 4
    assert content(url) == content(whole_cache)


def test_a_bucket_that_cannot_be_written_is_found_before_the_first_row(refuse, cache_flags, server, capsys):
    server.only("denied", "", "PUT")
    said = refuse("build_kd_cache", *cache_flags, "--cache-dir", "s3://bucket/new")
    assert said.startswith("s3://bucket/new/manifest.json cannot be used (PermissionError")
    server.fault = lambda *_: None
    assert refuse("build_kd_cache", *cache_flags, "--cache-dir", "s3://no-such-bucket/new") == (
        "s3://no-such-bucket/new/manifest.json: no such file or folder; check the address"
    )
    assert refuse("build_kd_cache", *cache_flags, "--cache-dir", "gs://bucket/new").startswith(
        "gs://bucket/new/manifest.json: the package for gs:// is missing; pip install gcsfs"
    )
    assert "rows of the cache" not in capsys.readouterr().out


def test_half_a_shard_and_a_missing_one_are_written_again(run, cache_flags, whole_cache):
    url, files = s3.new_folder(), fsspec.filesystem("s3")
    run("build_kd_cache", *cache_flags, "--cache-dir", url)
    shard = files.cat_file(f"{url}/shard-00002.safetensors")
    files.pipe_file(f"{url}/shard-00002.safetensors", shard[: len(shard) // 2])
    files.rm(f"{url}/heldout-00000.safetensors")
    run("build_kd_cache", *cache_flags, "--cache-dir", url)
    assert content(url) == content(whole_cache)


def test_another_cache_and_a_finished_one_are_refused(run, refuse, cache_flags):
    url = s3.new_folder()
    run("build_kd_cache", *cache_flags, "--cache-dir", url)
    assert f"{url} holds another cache: k is 8, not 4" in refuse(
        "build_kd_cache", *cache_flags, "--top-k", 4, "--cache-dir", url
    )
    assert f"{url} already holds 8 shards" in refuse(
        "build_kd_cache", *cache_flags, "--resume", "off", "--cache-dir", url
    )


# -- training ----------------------------------------------------------------------------------------------------------
def metrics(path) -> list[dict]:
    """The record of a run without its times."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if "per_s" not in key and "second" not in key} for line in lines]


@pytest.fixture(scope="module")
def copies(run, tiny_model_dir, tmp_path_factory, server):
    """A cache in a folder, and in a bucket: six files of training rows."""
    folder, url = tmp_path_factory.mktemp("cache"), s3.new_folder()
    run("build_kd_cache", "--model", tiny_model_dir, "--cache-dir", folder, *CACHE, "--rows-per-shard", 4)
    fsspec.filesystem("s3").put(str(folder), url, recursive=True)
    return folder, url


@pytest.fixture
def few(monkeypatch):
    """Windows of two shards, and at most four here."""
    for module in (shelf, datasets):
        monkeypatch.setattr(module, "WINDOW", 2)
    monkeypatch.setattr(shelf, "MOST", 4)


def test_the_whole_path_gives_the_same_from_a_bucket(run, tiny_model_dir, copies, tmp_path, few, capsys):
    """Bits, QAT, its resumption, recovery and the report, with more shards than may be here at a time."""
    for place, name in zip(copies, "ab"):
        out, flags = tmp_path / name, ["--cache-dir", place]
        run("allocate_bits", *flags, "--model", tiny_model_dir, "--bits", 3, "--rows", 4, *CPU[:2],
            "--output", out / "bits.yaml")  # fmt: skip
        qat = ["--model", tiny_model_dir, *flags, "--output-dir", out / "q", *LEARNS, "--layer-steps", 2,
               "--layer-rows", 8, "--batch-size", 3, "--init", "mse"]  # fmt: skip
        run("train_qat", *qat, "--max-steps", 12, "--eval-every", 4, "--save-every", 4)
        run("train_qat", *qat, "--max-steps", 16, "--resume", out / "q")
        run("train_recovery_lora", "--checkpoint", out / "q/best.pt", *flags, "--output-dir", out / "l", *SMALL,
            "--anchor-cache", place)  # fmt: skip
        run("report_recovery", "--qat-run", out / "q", "--recovery-run", out / "l", *flags, *CPU, "--rows", 4)
    for name in ("q", "l"):
        assert metrics(tmp_path / "a" / name) == metrics(tmp_path / "b" / name) != []
        facts = [json.loads((tmp_path / run / name / "manifest.json").read_text()) for run in "ab"]
        assert facts[0]["cache" if name == "q" else "data"] == facts[1]["cache" if name == "q" else "data"]
    presets = [(tmp_path / run / "bits.yaml").read_text().partition("\n")[2] for run in "ab"]
    assert presets[0] == presets[1]
    assert (
        f"train_recovery_lora.py --checkpoint {tmp_path}/b/q/best.pt --cache-dir {copies[1]}" in capsys.readouterr().out
    )


def test_two_workers_train_from_a_bucket(forks, tiny_model_dir, copies, tmp_path):
    for place, name in zip(copies, "ab"):
        flags = ["--model", tiny_model_dir, "--cache-dir", place, *LEARNS, "--batch-size", 2, "--max-steps", 3]
        forks.pair("train_qat", *flags, "--output-dir", tmp_path / name)
    assert metrics(tmp_path / "a") == metrics(tmp_path / "b")


@pytest.mark.parametrize("fault", ["denied", "half", 30.0])
def test_a_fault_ends_training_with_one_line_and_it_resumes(
    run, refuse, tiny_model_dir, copies, tmp_path, server, few, fault
):
    flags = ["--model", tiny_model_dir, *LEARNS, "--batch-size", 2, "--max-steps", 12, "--save-every", 2]
    there = [*flags, "--cache-dir", copies[1], "--output-dir", tmp_path / "run"]
    server.only(fault, "shard-00005")
    assert f"{copies[1]}/shard-00005.safetensors" in refuse("train_qat", *there)
    server.fault = lambda *_: None
    run("train_qat", *there, "--resume", "auto")
    run("train_qat", *flags, "--cache-dir", copies[0], "--output-dir", tmp_path / "whole")
    assert metrics(tmp_path / "run") == metrics(tmp_path / "whole")
