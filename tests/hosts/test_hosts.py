"""Two hosts that lose each other, come late or differ. `make test-hosts`; needs root and `ip`."""

import json
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pair import PY, SCRIPTS, Job, Pair, missing

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
def recovery(sharp_model_dir, sharp_cache, tmp_path_factory):
    """recovery(run, steps, …): the command of a recovery run of so many updates."""
    folder = tmp_path_factory.mktemp("student")
    subprocess.run(
        [PY, SCRIPTS / "train_qat.py", "--model", sharp_model_dir, "--cache-dir", sharp_cache, "--max-steps", "2",
         "--output-dir", folder / "qat", "--device", "cpu"], check=True, capture_output=True,
    )  # fmt: skip

    def command(run: Path, steps: int, *more, cache: Path = sharp_cache, model: Path = sharp_model_dir) -> list:
        return [
            SCRIPTS / "train_recovery_lora.py", "--checkpoint", folder / "qat" / "best.pt", "--kd-cache-dir", cache,
            "--model", model, "--batch-size", 2, "--max-steps", steps, "--save-every", 20, "--log-every", 5,
            "--eval-every", 0, "--output-dir", run, "--device", "cpu", "--host-timeout", 20, *more,
        ]  # fmt: skip

    return command


def losses(run: Path) -> list[dict]:
    """What metrics.jsonl has, without what was measured by the clock."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [{name: value for name, value in line.items() if name not in TIMED} for line in lines]


def one_line(job: Job, *words: str) -> None:
    """The job has ended with an error, which it says in one line that has these words."""
    assert job.process.returncode not in (0, None), job.said()
    assert len(job.lines()) == 1, job.said()
    assert all(word in job.lines()[0] for word in words), job.lines()
    assert "Traceback" not in job.said().partition("error: ")[0], job.said()


def ended(jobs: list[Job], within: float = 60) -> list[int]:
    end = time.monotonic() + within
    try:
        return [job.ends(max(1, end - time.monotonic())) for job in jobs]
    except subprocess.TimeoutExpired:
        raise AssertionError("\n---\n".join(job.said()[-2000:] for job in jobs)) from None


def trained(jobs: list[Job]) -> None:
    assert ended(jobs, 90) == [0, 0], "\n---\n".join(job.said()[-2000:] for job in jobs)


@pytest.fixture(scope="module")
def whole(pair, recovery, tmp_path_factory):
    """The losses of a run of 60 updates that nothing interrupts, with two workers."""
    run = tmp_path_factory.mktemp("whole") / "r"
    trained(pair.by_hand(*recovery(run, 60)))
    return losses(run)


# -- a lost host -----------------------------------------------------------------------------------------------------
LOSSES = [(what, host, launcher) for what in ("kill", "freeze", "cut") for host in "ab"
          for launcher in ("by_hand", "by_torchrun") if (what, host) != ("cut", "b")]  # fmt: skip


def lose(number: int, what: str, host: str, launcher: str, command: list) -> list[tuple[Job, float]]:
    """Lose a host while it trains; the jobs that are left, each with the seconds until it ended."""
    with Pair(number) as pair:
        jobs = getattr(pair, launcher)(*command)
        jobs[0].waits_for("step 25 ", 180)
        started = time.monotonic()
        if what == "cut":
            pair.cut()
        else:
            pair.signal(host, signal.SIGKILL if what == "kill" else signal.SIGSTOP)
        left = jobs if what == "cut" else [jobs["ba".index(host)]]
        seconds = []
        for job in left:
            ended([job], 60)
            seconds.append(time.monotonic() - started)
        for job in left:
            job.text = job.said()  # the folder goes with the hosts
            job.errors = job.lines()
        return list(zip(left, seconds))


def test_a_lost_host_is_named_by_the_other_within_the_promise(recovery, tmp_path):
    """Killed, frozen or cut off, by hand and under torchrun. The promise here is 20 s."""
    with ThreadPoolExecutor(5) as pool:
        waiting = [
            pool.submit(lose, number, *lost, recovery(tmp_path / str(number), 100000))
            for number, lost in enumerate(LOSSES)
        ]
        found = [each.result() for each in waiting]
    for number, ((what, host, launcher), left) in enumerate(zip(LOSSES, found)):
        for place, (job, seconds) in enumerate(left):
            lost = "hostb" if what == "cut" and place == 0 else "hosta" if what == "cut" else f"host{host}"
            assert job.process.returncode and seconds < 20, (what, host, launcher, seconds, job.text)
            assert lost in job.errors[0] and "--resume auto" in job.errors[0], (what, host, launcher, job.text)
            assert "Traceback" not in job.text.partition("error: ")[0], job.text
        newest = max((tmp_path / str(number) / "checkpoints").glob("step_*"))
        assert (newest / "meta.json").exists()


def test_what_takes_long_loses_nobody(pair, recovery, tmp_path, whole):
    """A worker that is busy for longer than the promise, here in its evaluation, gives signs of life all the while."""
    slow = tmp_path / "slow.py"
    slow.write_text(
        "import sys, time, runpy, os\n"
        "from qat_lora import evaluate\n"
        "before = evaluate.heldout_figures\n"
        "def slow(*args):\n"
        "    if os.environ['RANK'] == '1':\n"
        "        time.sleep(25)\n"
        "    return before(*args)\n"
        "evaluate.heldout_figures = slow\n"
        "sys.argv = sys.argv[1:]\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    jobs = pair.by_hand(slow, *recovery(tmp_path / "r", 60))
    trained(jobs)
    assert losses(tmp_path / "r") == whole


def test_sigterm_to_one_host_saves_and_ends_all_with_0(pair, recovery, tmp_path, whole):
    jobs = pair.by_hand(*recovery(tmp_path / "r", 60))
    jobs[0].waits_for("step 25 ")
    pair.signal("b", signal.SIGTERM)
    assert ended(jobs) == [0, 0]
    assert json.loads((tmp_path / "r" / "summary.json").read_text())["status"] == "preempted"
    trained(pair.by_hand(*recovery(tmp_path / "r", 60, "--resume", "auto")))
    assert losses(tmp_path / "r") == whole
