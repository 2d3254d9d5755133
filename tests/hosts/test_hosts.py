"""Two hosts that lose each other, join late or differ. `make test-hosts`; needs root and `ip`."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pair import PATIENCE, PY, SCRIPTS, Job, Pair, missing

pytestmark = [pytest.mark.hosts, pytest.mark.skipif(bool(lack := missing()), reason=f"two hosts: {lack}")]

ROOT = SCRIPTS.parent
TIMED = ("tokens_per_s",)


@pytest.fixture(scope="module")
def pair():
    with Pair(90) as made:
        yield made


@pytest.fixture(autouse=True)
def cleared(pair):
    yield
    pair.clear()


@pytest.fixture(scope="module")
def recovery(run, sharp_model_dir, sharp_cache, tmp_path_factory):
    """recovery(run, steps, …): the command of a recovery run with that many updates."""
    folder = tmp_path_factory.mktemp("student")
    flags = "--model", sharp_model_dir, "--cache-dir", sharp_cache, "--max-steps", 2, "--device", "cpu"
    run("train_qat", *flags, "--output-dir", folder / "qat")

    def command(run: Path, steps: int, *more, cache: Path = sharp_cache) -> list:
        return [
            SCRIPTS / "train_recovery_lora.py", "--checkpoint", folder / "qat" / "best.pt", "--kd-cache-dir", cache,
            "--model", sharp_model_dir, "--batch-size", 2, "--max-steps", steps, "--save-every", 20, "--log-every", 5,
            "--eval-every", 0, "--output-dir", run, "--device", "cpu", "--host-timeout", 20, *more,
        ]  # fmt: skip

    return command


def losses(run: Path) -> list[dict]:
    """The lines of metrics.jsonl without timings."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in TIMED} for line in lines]


def one_line(job: Job, *words: str) -> None:
    """Check that the job has failed with one error line that contains these words."""
    assert job.process.returncode not in (0, None), job.said()
    assert len(job.lines()) == 1, job.said()
    assert all(word in job.lines()[0] for word in words), job.lines()
    assert "Traceback" not in job.said().partition("error: ")[0], job.said()


def ended(jobs: list[Job], within: float = PATIENCE) -> list[int]:
    try:
        return [job.process.wait(within) for job in jobs]
    except subprocess.TimeoutExpired:
        raise AssertionError("\n---\n".join(job.said()[-2000:] for job in jobs)) from None


def trained(jobs: list[Job]) -> None:
    assert ended(jobs) == [0, 0], "\n---\n".join(job.said()[-2000:] for job in jobs)


def refused(jobs: list[Job], *words: str) -> None:
    """Check that all of them end with one error line that contains these words."""
    ended(jobs)
    for job in jobs:
        one_line(job, *words)


def preempted(run: Path) -> bool:
    return json.loads((run / "summary.json").read_text())["status"] == "preempted"


@pytest.fixture(scope="module")
def whole_run(pair, recovery, tmp_path_factory):
    """An uninterrupted run of 60 updates with two workers."""
    run = tmp_path_factory.mktemp("whole") / "r"
    trained(pair.by_hand(*recovery(run, 60)))
    return run


@pytest.fixture(scope="module")
def whole(whole_run):
    return losses(whole_run)


# -- a lost host -----------------------------------------------------------------------------------------------------
SHARED = ["--shard", "on"]
LOSSES = [
    ("kill", "a", "by_hand", []), ("kill", "b", "by_torchrun", []), ("freeze", "a", "by_torchrun", []),
    ("freeze", "b", "by_hand", []), ("cut", "a", "by_hand", []), ("cut", "a", "by_torchrun", []),
    ("kill", "b", "by_hand", SHARED), ("freeze", "a", "by_hand", SHARED), ("cut", "a", "by_torchrun", SHARED),
]  # fmt: skip


def lose(number: int, what: str, host: str, launcher: str, command: list) -> list[tuple]:
    """Lose a host during training. Returns (the lost host, the other's output, its errors, its exit code)."""
    with Pair(number) as pair:
        jobs = getattr(pair, launcher)(*command)
        jobs[0].waits_for("step 25 ")
        found = []
        for lost, job in pair.lose(what, host, jobs).items():
            ended([job], 60)  # three times the timeout, for a busy machine
            found.append((f"host{lost}", job.said(), job.lines(), job.process.returncode))
        return found


def test_the_other_host_ends_by_itself_and_names_the_lost_host(recovery, tmp_path):
    """The timeout here is 20 s. table.py tries all combinations, and measures the seconds."""
    with ThreadPoolExecutor(5) as pool:
        waiting = [
            pool.submit(lose, number, *lost, recovery(tmp_path / str(number), 100000, *flags))
            for number, (*lost, flags) in enumerate(LOSSES)
        ]
    for number, (loss, ends) in enumerate(zip(LOSSES, (each.result() for each in waiting))):
        for lost, said, errors, code in ends:
            assert code and lost in errors[0] and "--resume auto" in errors[0], (loss, said)
            assert "Traceback" not in said.partition("error: ")[0], said
        newest = max((tmp_path / str(number) / "checkpoints").glob("step_*"))
        assert (newest / "meta.json").exists()


def test_sigterm_to_one_host_saves_and_ends_all_with_0(pair, recovery, tmp_path, whole):
    jobs = pair.by_hand(*recovery(tmp_path / "r", 60))
    jobs[0].waits_for("step 25 ")
    pair.signal("b", signal.SIGTERM)
    assert ended(jobs) == [0, 0] and preempted(tmp_path / "r")
    trained(pair.by_hand(*recovery(tmp_path / "r", 60, "--resume", "auto")))
    assert losses(tmp_path / "r") == whole


def test_sigterm_to_one_torchrun_saves_and_ends_the_other_with_0(pair, recovery, tmp_path):
    """The one that gets it exits with 1, as torchrun always does. Without our help the other would wait 5 minutes."""
    for number, static in ((0, False), (1, True)):
        run = tmp_path / f"{number}{static}"
        jobs = pair.by_torchrun(*recovery(run, 60), static=static)
        jobs[0].waits_for("step 25 ")
        jobs[number].process.send_signal(signal.SIGTERM)
        codes = ended(jobs)
        assert codes[1 - number] == 0 and codes[number] == 1, jobs[1 - number].said()[-3000:]
        assert preempted(run)
        pair.clear()


# -- joining ---------------------------------------------------------------------------------------------------------
def test_a_missing_host_is_named_with_the_address_and_the_workers_that_arrived(pair, recovery, tmp_path):
    command = recovery(tmp_path / "r", 60, "--join-timeout", 4)
    jobs = [*pair.by_hand(*command, of="a", port=29500), *pair.by_hand(*command, of="b", port=29501)]
    ended(jobs)
    one_line(jobs[0], "worker 1 of 2 did not arrive at hosta:29500 within 4 s", "worker 0 on hosta", "--join-timeout")
    one_line(jobs[1], "worker 1 on hostb found no worker 0 at hosta:29501 within 4 s", "Connection refused")


def test_the_first_host_waits_for_a_late_one(pair, recovery, tmp_path):
    """For longer than a worker may be silent later."""
    command = recovery(tmp_path / "r", 10, "--host-timeout", 10)
    jobs = pair.by_hand(*command, of="a")
    time.sleep(12)
    trained([*jobs, *pair.by_hand(*command, of="b")])


def test_an_address_of_no_host_is_named(pair, recovery, tmp_path):
    nobody = pair.address("a").rsplit(".", 1)[0] + ".9"
    command = recovery(tmp_path / "r", 60, "--join-timeout", 4)
    refused(pair.by_hand(*command, address=nobody), f"found no worker 0 at {nobody}:29500 within 4 s")


def test_two_jobs_on_one_port_are_told_apart(pair, recovery, tmp_path):
    first = pair.by_hand(*recovery(tmp_path / "r", 100000))
    first[0].waits_for("step 5 ")
    second = pair.by_hand(*recovery(tmp_path / "s", 60))
    ended(second)
    one_line(second[0], "MASTER_PORT=29500 is in use on hosta", "give all workers another MASTER_PORT")
    one_line(second[1], "RANK=1 is taken by worker 1 on hostb", "each job its own MASTER_PORT")
    assert [job.process.poll() for job in first] == [None, None], "the first keeps running"


def test_a_host_name_that_resolves_to_loopback_on_its_own_host_works(pair, recovery, tmp_path, whole):
    """Debian maps a host's own name to 127.0.1.1."""
    command, table = recovery(tmp_path / "r", 60), f"127.0.0.1 localhost\n127.0.1.1 hosta\n{pair.address('b')} hostb\n"
    trained([*pair.by_hand(*command, of="a", hosts=table), *pair.by_hand(*command, of="b")])
    assert losses(tmp_path / "r") == whole


def test_a_single_host_addressed_by_name_works(pair, recovery, tmp_path, whole):
    """As Slurm does on one node; the workers listen on the loopback interface only."""
    place = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "hosta", "MASTER_PORT": 29500}
    command = recovery(tmp_path / "r", 60)
    trained([pair.fork("a", *command, **place, RANK=rank, LOCAL_RANK=rank) for rank in range(2)])
    assert losses(tmp_path / "r") == whole


# -- agreement -------------------------------------------------------------------------------------------------------
def differ(pair: Pair, command: list, other: list, *words: str, **more) -> None:
    """Check that both workers refuse the job with these words if the second host has another command or bind mounts."""
    refused([*pair.by_hand(*command, of="a"), *pair.by_hand(*other, of="b", **more)], *words)


def test_a_differing_option_is_named_with_both_values_and_hosts(pair, recovery, tmp_path):
    command = recovery(tmp_path / "r", 60)
    said = "resume is 'off' for worker 0 on hosta, 'auto' for worker 1 on hostb"
    differ(pair, command, [*command, "--resume", "auto"], said)


def test_different_code_is_refused(pair, recovery, tmp_path):
    optimiser = ROOT / "qat_lora" / "kernels" / "optimizer.py"
    other = tmp_path / "optimizer.py"
    other.write_text(optimiser.read_text() + "\nEPS_OF_ANOTHER_DAY = 1e-7\n")
    command = recovery(tmp_path / "r", 60)
    words = "code is", "for worker 0 on hosta", "for worker 1 on hostb", "check out the same revision"
    differ(pair, command, command, *words, binds={other: optimiser})


def test_a_different_torch_version_causes_a_warning(pair, recovery, tmp_path):
    import torch

    version = Path(torch.__file__).with_name("version.py")
    other = tmp_path / "version.py"
    other.write_text(re.sub("^__version__ = .*", "__version__ = '2.9.0+other'", version.read_text(), flags=re.M))
    command = recovery(tmp_path / "r", 10)
    place = {"WORLD_SIZE": 2, "RANK": 1, "MASTER_ADDR": "hosta", "MASTER_PORT": 29500}
    # started anew: a forked process has already read torch's version
    jobs = [*pair.by_hand(*command, of="a"), pair.start("b", PY, *command, binds={other: version}, **place)]
    trained(jobs)
    for job in jobs:
        assert re.search(r"warning: torch is \S+ for worker 0 on hosta, 2\.9\.0\+other", job.said()), job.said()


def test_a_cache_may_be_in_another_folder_but_must_be_the_same(
    run, pair, recovery, sharp_model_dir, sharp_cache, tmp_path, whole
):
    elsewhere, another = tmp_path / "elsewhere", tmp_path / "another"
    shutil.copytree(sharp_cache, elsewhere)
    command = recovery(tmp_path / "r", 60)
    trained([*pair.by_hand(*command, of="a"), *pair.by_hand(*recovery(tmp_path / "r", 60, cache=elsewhere), of="b")])
    assert losses(tmp_path / "r") == whole
    text = "--length", 32, "--max-rows", 40, "--top-k", 8, "--precision", "fp32"
    run("build_kd_cache", "--model", sharp_model_dir, "--cache-dir", another, *text)
    command = recovery(tmp_path / "s", 60)
    words = "data is", "for worker 0 on hosta", "for worker 1 on hostb", f"--cache-dir {sharp_cache}"
    differ(pair, command, command, *words, binds={another: sharp_cache})


def test_a_different_model_setting_is_refused(pair, recovery, sharp_model_dir, tmp_path):
    shutil.copytree(sharp_model_dir, tmp_path / "other")
    settings = json.loads((tmp_path / "other" / "config.json").read_text()) | {"rms_norm_eps": 0.001}
    (tmp_path / "other" / "config.json").write_text(json.dumps(settings))
    command = recovery(tmp_path / "r", 20)
    said = "the model's rms_norm_eps is 1e-06 for worker 0 on hosta, 0.001 for worker 1 on hostb"
    differ(pair, command, command, said, binds={tmp_path / "other": sharp_model_dir})


def test_an_update_sends_little_more_than_its_gradients(pair, recovery, tmp_path):
    """Bytes received over the link per update, network headers included."""
    seen = []
    for steps in (20, 120):
        before = pair.received("a")
        jobs = pair.by_hand(*recovery(tmp_path / str(steps), steps, "--save-every", 0, "--recovery-r", 32))
        trained(jobs)
        seen.append(pair.received("a") - before)
    values = int(re.search(r", (\d+) values", jobs[0].said())[1])
    ratio = (seen[1] - seen[0]) / 100 / (4 * values)
    print(f"{values} trained values: {ratio:.3f} times their bytes")
    assert 1 < ratio <= 1.1


@pytest.mark.parametrize("what, host", [("cache", "a"), ("cache", "b"), ("model", "b")])
def test_a_folder_missing_on_one_host_is_named_on_both(
    pair, recovery, tmp_path, what, host, sharp_cache, sharp_model_dir
):
    folder, empty = sharp_cache if what == "cache" else sharp_model_dir, tmp_path / "empty"
    empty.mkdir()
    command, number = recovery(tmp_path / "r", 60), "ab".index(host)
    jobs = [pair.by_hand(*command, of=each, binds={empty: folder} if each == host else {})[0] for each in "ab"]
    ended(jobs)
    one_line(jobs[1 - number], f"worker {number} on host{host} failed: ", str(folder))
    one_line(jobs[number], str(folder))


# -- the run directory -----------------------------------------------------------------------------------------------
def interrupted(run: Path, copy: Path) -> None:
    """A copy of a finished run as it would be if all hosts had been killed after its second checkpoint."""
    shutil.copytree(run, copy)
    for name in ("summary.json", "checksums.json"):
        (copy / name).unlink()
    for folder in (copy / "checkpoints").glob("step_*"):
        if int(folder.name.removeprefix("step_")) > 40:
            shutil.rmtree(folder)


def test_a_resumed_run_on_one_host_is_copied_to_the_other(pair, recovery, tmp_path, whole, whole_run):
    """Whichever host has the run, worker 0 resumes it, and its host then has a copy."""
    for keeper in "ab":
        r, other = tmp_path / keeper, tmp_path / f"other{keeper}"
        interrupted(whole_run, r)
        other.mkdir()
        command = recovery(r, 60, "--resume", "auto")
        binds = [{other: r} if host != keeper else {} for host in "ab"]
        trained([pair.by_hand(*command, of=host, binds=bound)[0] for host, bound in zip("ab", binds)])
        assert losses(r if keeper == "a" else other) == whole


def test_a_damaged_run_on_the_other_host_is_refused(pair, recovery, tmp_path, whole_run):
    r, other = tmp_path / "r", tmp_path / "other"
    interrupted(whole_run, other)
    (other / "config.yaml").unlink()
    r.mkdir()
    command = recovery(r, 60, "--resume", "auto")
    differ(pair, command, command, f"{r}/config.yaml is missing or damaged", binds={other: r})


def test_a_different_run_in_the_same_folder_is_refused(pair, recovery, tmp_path, whole_run):
    for name in ("r", "other"):
        interrupted(whole_run, tmp_path / name)
    manifest = tmp_path / "other" / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"started": "20250101-000000"}))
    command = recovery(tmp_path / "r", 60, "--resume", "auto")
    words = f"{tmp_path / 'r'} is one run for worker 0 on hosta", "another for worker 1 on hostb"
    differ(pair, command, command, *words, binds={tmp_path / "other": tmp_path / "r"})


def test_an_older_copy_on_the_other_host_does_not_replace_a_finished_run(pair, recovery, tmp_path, whole_run):
    r, older = tmp_path / "r", tmp_path / "older"
    shutil.copytree(whole_run, r)
    interrupted(whole_run, older)
    command = recovery(r, 60, "--resume", "auto")
    before = (r / "summary.json").read_bytes()
    jobs = [*pair.by_hand(*command, of="a", binds={older: r}), *pair.by_hand(*command, of="b")]
    assert ended(jobs) == [0, 0] and f"{r} is finished" in jobs[0].said(), jobs[0].said()
    assert (older / "summary.json").read_bytes() == before == (r / "summary.json").read_bytes()


# -- restarts --------------------------------------------------------------------------------------------------------
def worker_of(pair: Pair, host: str) -> int | None:
    """The process ID of the worker that torchrun has started on a host; None if there is none."""
    for pid in pair.pids(host):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        except OSError:
            continue
        if any(word.endswith("train_recovery_lora.py") for word in words) and "--nnodes" not in words:
            return pid
    return None


def test_torchrun_restarts_killed_workers_and_the_run_stays_bit_equal(pair, recovery, tmp_path, whole):
    """A worker on each host is killed, one after the other."""
    jobs = pair.by_torchrun(*recovery(tmp_path / "r", 60, "--resume", "auto"), options=("--max-restarts", 3))
    for host, step in (("b", "step 25 "), ("a", "step 45 ")):
        end = time.monotonic() + PATIENCE
        while not any(step in job.said() for job in jobs):
            assert time.monotonic() < end and None in [job.process.poll() for job in jobs], jobs[0].said()[-3000:]
            time.sleep(0.02)
        os.kill(worker_of(pair, host), signal.SIGKILL)
    trained(jobs)
    assert losses(tmp_path / "r") == whole


def test_with_one_host_fewer_torchrun_continues_with_as_many_rows_per_update(pair, recovery, tmp_path, whole):
    command = recovery(tmp_path / "r", 60, "--resume", "auto", "--join-timeout", 10)
    jobs = pair.by_torchrun(*command, nodes="1:2", options=("--max-restarts", 3, "--rdzv-conf", "last_call_timeout=5"))
    jobs[0].waits_for("step 25 ")
    pair.signal("b", signal.SIGKILL)
    assert ended(jobs[:1]) == [0], jobs[0].said()[-3000:]
    assert "--accumulation-steps 2 keeps 4 rows in an update" in jobs[0].said()
    for line, wanted in zip(losses(tmp_path / "r"), whole, strict=True):
        assert line.pop("stage") == wanted["stage"]
        assert line == pytest.approx({name: value for name, value in wanted.items() if name != "stage"}, rel=1e-4)


def test_a_slice_of_which_a_process_sees_only_one_host_is_refused(pair, recovery, tmp_path):
    """On torch_xla's CPU device each host would train its own model."""
    command, addresses = recovery(tmp_path / "r", 20, "--device", "xla", "--num-chips", 0), "hosta:8476,hostb:8476"
    place = {"TPU_PROCESS_ADDRESSES": addresses, "CPU_NUM_DEVICES": 1, "USE_TORCH_XLA": 1}
    jobs = [pair.start(host, PY, *command, **place, CLOUD_TPU_TASK_ID=task) for task, host in enumerate("ab")]
    refused(jobs, f"TPU_PROCESS_ADDRESSES={addresses} means a slice of at least 2 hosts", "unset")
