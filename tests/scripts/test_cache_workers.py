"""Several workers write one cache: the same bytes as one, also if they are killed or share the teacher out."""

import signal

import pytest

from qat_lora.kd import cache


def content(folder) -> dict:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name != "summary.json"}


@pytest.mark.parametrize("workers, shard", [(2, "off"), (3, "off"), (3, "on")])
def test_workers_write_the_bytes_of_one(forks, cache_flags, whole_cache, tmp_path, workers, shard):
    folder = tmp_path / "cache"
    said, *_ = forks.several(
        "build_kd_cache", *cache_flags, "--shard", shard, "--cache-dir", folder, expect=(0,) * workers
    )
    assert content(folder) == content(whole_cache)
    assert ("share the model out" in said) == (shard == "on")


@pytest.mark.parametrize("workers", [1, 3])
def test_after_a_killed_worker_any_number_goes_on(forks, cache_flags, whole_cache, tmp_path, workers):
    flags = [*cache_flags, "--cache-dir", tmp_path / "cache"]
    death = "kd.cache._targets", 4, signal.SIGKILL, False  # in the second file of worker 1
    said, _ = forks.pair("build_kd_cache", *flags, expect=(1, -signal.SIGKILL), death=death)
    assert said.count("error:") == 1 and "worker 1" in said and "Traceback" not in said
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cache").glob("shard-0000[01]*")}
    assert len(before) == 2
    forks.several("build_kd_cache", *flags, expect=(0,) * workers)
    assert content(tmp_path / "cache") == content(whole_cache)
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_the_worker_that_dies_inside_a_collective_is_named(forks, cache_flags, tmp_path):
    """The others are in FSDP's collectives, which fail before the death is known."""
    flags = [*cache_flags, "--shard", "on", "--cache-dir", tmp_path / "cache"]
    death = "kd.cache._targets", 3, signal.SIGKILL, False
    for said in forks.several("build_kd_cache", *flags, expect=(1, 1, -signal.SIGKILL), death=death)[:2]:
        assert said.count("error:") == 1 and "error: worker 2 on" in said and "Traceback" not in said, said


def test_sigterm_to_one_worker_stops_all(forks, cache_flags, whole_cache, tmp_path):
    flags = [*cache_flags, "--cache-dir", tmp_path / "cache"]
    death = "kd.cache._targets", 4, signal.SIGTERM, False
    said, _ = forks.pair("build_kd_cache", *flags, expect=(0, 0), death=death)
    assert "stopped: 4 of 8 shards are missing; run the same command to resume" in said
    forks.pair("build_kd_cache", *flags)
    assert content(tmp_path / "cache") == content(whole_cache)


def test_a_file_that_worker_0_does_not_see_is_named(refuse, cache_flags, tmp_path, monkeypatch):
    """As with hosts that do not share the folder."""
    monkeypatch.setattr(cache, "put", lambda path, content: None)
    said = refuse("build_kd_cache", *cache_flags, "--cache-dir", tmp_path / "cache")
    assert said.endswith("shard-00000.safetensors of worker 0 is not here; give a --cache-dir that all hosts share")


def test_one_worker_has_nobody_to_share_the_teacher_with(refuse, cache_flags, tmp_path):
    said = refuse("build_kd_cache", *cache_flags, "--shard", "on", "--cache-dir", tmp_path / "cache")
    assert said == "--shard on needs several workers; give --num-chips, or leave it out"
    assert not [*tmp_path.iterdir()]


def test_workers_with_other_text_are_refused(forks, cache_flags, tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text(f"A line of text {name} and more of it.\n" * 400)
    flags = [*cache_flags, "--cache-dir", tmp_path / "cache", "--dataset"]
    for said in forks.pair(
        "build_kd_cache", *flags, tmp_path / "a.txt", second=("--dataset", tmp_path / "b.txt"), expect=(2, 2)
    ):
        assert "the workers differ: text is" in said
