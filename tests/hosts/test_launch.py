"""One call starts the workers of a job, they train as one, and none outlives or waits for a worker that died."""

import math
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import worker_checks
from patience import PATIENCE
from worker_training import CLOSE, apart, train

from qat_lora.backend import TorchBackend, count_workers, detect
from qat_lora.backend.detect import PROCESS_BOUNDS, take_chips
from qat_lora.backend.opening import launch
from qat_lora.errors import UserError
from qat_lora.hosts.group import Group


@pytest.fixture
def chips(monkeypatch):
    """chips(count): a machine with this many TPU chips, 4 CPU cores and 3 GPUs."""

    def have(count: int, kind: str = "v6e") -> None:
        monkeypatch.setattr(detect, "tpu_chips", lambda: [kind] * count)

    for name in ("TPU_VISIBLE_CHIPS", "TPU_CHIPS_PER_PROCESS_BOUNDS", "TPU_PROCESS_BOUNDS", "TPU_NUM_DEVICES"):
        monkeypatch.setenv(name, "")  # so that monkeypatch removes what the tests set
        monkeypatch.delenv(name)
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    have(0)
    return have


# -- how many --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "kind, chips_there, asked, count",
    [
        ("cpu", 0, None, 1), ("cpu", 0, 0, 1), ("cpu", 0, 4, 4), ("cuda", 0, None, 1), ("cuda", 0, 0, 3),
        ("cuda", 0, 2, 2), ("xla", 4, None, 1), ("xla", 4, 0, 4), ("xla", 8, 4, 4), ("xla", 0, 0, 1),
        ("xla", 0, None, 1),
    ],
)  # fmt: skip
def test_workers_are_counted(chips, kind, chips_there, asked, count):
    chips(chips_there)
    assert count_workers(kind, asked) == count


@pytest.mark.parametrize(
    "kind, chips_there, asked, why",
    [
        ("cpu", 0, -1, "this machine has 4 CPU cores; use 1 to 4"),
        ("cuda", 0, 4, "this machine has 3 CUDA devices; use 1 to 3"),
        ("xla", 4, 8, "this machine has 4 TPU chips; use 1 to 4"),
        ("xla", 8, 3, "a job can use 1, 2, 4, 8 or all of a host's chips; choose one of these"),
        ("xla", 0, 2, "this machine has 1 XLA CPU devices; use 1 to 1"),
    ],
)
def test_more_devices_than_there_are_are_refused(chips, kind, chips_there, asked, why):
    chips(chips_there)
    with pytest.raises(UserError, match=f"^--num-chips {asked}: {why}$"):
        count_workers(kind, asked)


def test_tpu_num_devices_limits_only_a_request_for_all_chips(chips, monkeypatch):
    chips(4)
    monkeypatch.setenv("TPU_NUM_DEVICES", "2")
    assert count_workers("xla", 0) == 2 and count_workers("xla", 4) == 4 and count_workers("cpu", 0) == 1
    monkeypatch.setenv("TPU_NUM_DEVICES", "8")
    with pytest.raises(UserError, match="TPU_NUM_DEVICES=8: this machine has 4 TPU chips"):
        count_workers("xla", 0)
    monkeypatch.setenv("TPU_NUM_DEVICES", "two")
    with pytest.raises(UserError, match="TPU_NUM_DEVICES=two is not a whole number"):
        count_workers("xla", 0)


def test_part_of_the_chips_is_translated_for_the_tpu_runtime(chips):
    chips(8)
    take_chips(8)
    assert "TPU_PROCESS_BOUNDS" not in os.environ, "torch_xla knows the bounds of a whole host"
    take_chips(4)
    assert os.environ["TPU_PROCESS_BOUNDS"] == "2,2,1" and "TPU_VISIBLE_CHIPS" not in os.environ
    assert all(math.prod(map(int, bounds.split(","))) == count for count, bounds in PROCESS_BOUNDS.items())


def test_one_chip_of_many_is_the_first_unless_the_environment_names_another(chips, monkeypatch):
    chips(4)
    monkeypatch.setenv("TPU_VISIBLE_CHIPS", "3")
    take_chips(1)
    found = [os.environ[f"TPU_{name}"] for name in ("VISIBLE_CHIPS", "CHIPS_PER_PROCESS_BOUNDS", "PROCESS_BOUNDS")]
    assert found == ["3", "1,1,1", "1,1,1"]
    for wrong in ("4", "x", "1,1", "0,,1", "-1"):
        monkeypatch.setenv("TPU_VISIBLE_CHIPS", wrong)
        with pytest.raises(UserError, match=f"TPU_VISIBLE_CHIPS={wrong} does not name chips .* numbers from 0 to 3"):
            take_chips(1)


def test_a_chip_in_use_names_the_process_that_holds_it(tmp_path):
    (tmp_path / "vfio").mkdir()
    for file in ("accel0", "vfio/0", "vfio/vfio"):
        (tmp_path / file).touch()
    detect.check_free(["0"], tmp_path)

    @contextmanager
    def held(file: str):
        hold = "import sys, time; file = open(sys.argv[1]); print(flush=True); time.sleep(3600)"
        with subprocess.Popen([sys.executable, "-c", hold, tmp_path / file], stdout=subprocess.PIPE) as other:
            other.stdout.readline()
            yield other.pid
            other.kill()

    with held("vfio/vfio"):  # shared by all groups, not a chip
        detect.check_free(["0"], tmp_path)
    with held("vfio/0") as pid:
        detect.check_free(["1", "2"], tmp_path)
        with pytest.raises(UserError, match=rf"vfio/0 is in use by process {pid} \({sys.executable} -c"):
            detect.check_free(["1", "0"], tmp_path)


def test_workers_that_do_not_find_each_other_stop_the_job(backend):
    backend.check_world(1)
    with pytest.raises(UserError, match="4 workers were started, but 1 found each other"):
        backend.check_world(4)


def test_a_gpu_that_does_not_answer_is_a_one_line_error(monkeypatch):
    from qat_lora.backend.devices import check_usable

    def busy(*_, **__):
        raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable\nmore lines")

    monkeypatch.setattr(torch, "zeros", busy)
    with pytest.raises(UserError, match=r"cuda:0 cannot be used \(CUDA error: CUDA-capable device\(s\) is/are busy"):
        check_usable(torch.device("cuda:0"))


# -- two processes ---------------------------------------------------------------------------------------------------
def test_a_single_worker_runs_in_this_process(backend):
    called = []
    launch(lambda made, word: called.append((type(made), made.world_size, word)), ("hello",), "cpu")
    assert called == [(TorchBackend, 1, "hello")]


def test_two_workers_know_their_place_and_sum(tmp_path, capfd):
    launch(worker_checks.describe, (tmp_path,), "cpu", "fp32", 2)
    assert_described(tmp_path)
    said = [line for line in capfd.readouterr().out.splitlines() if "worker" in line]  # gloo prints lines of its own
    assert said == ["worker 0 speaks"]


def assert_described(folder: Path) -> None:
    for rank in range(2):
        count, is_main, sums, given, threads = eval((folder / f"{rank}.txt").read_text())
        assert (count, is_main) == (2, rank == 0)
        assert sums == [[3.0] * 3, [[10.0] * 2] * 2, 2.0, [3.0] * 2, [3.0] * 2] and given == [0, 1, 2, 3]
        assert "OMP_NUM_THREADS" in os.environ or threads == max(1, os.cpu_count() // 2)


@pytest.mark.parametrize(
    "how, where, code, said",
    [
        ("bad input", "reduction", 2, ["error: shard 3 is damaged; build it again"]),
        ("fault", "host", 1, ["Traceback", "in fail", "error: ZeroDivisionError: of worker 1"]),
        ("exit", "host", 7, []),
        ("hard exit", "reduction", 5, ["error: worker 1 ended with exit code 5; the others were ended; resume with"]),
    ],
)
def test_a_worker_that_dies_ends_the_job_with_its_own_code(capfd, how, where, code, said):
    """While the other waits for it in a reduction or on the host. test_rendezvous.py kills one."""
    with pytest.raises(SystemExit) as end:
        launch(worker_checks.fail, (how, where), "cpu", "fp32", 2)
    assert end.value.code == code
    err = capfd.readouterr().err
    assert all(line in err for line in said), err
    assert err.count("error:") == bool(said) and err.count("Traceback") == (how == "fault"), err


def test_an_error_of_all_workers_is_printed_once(capfd):
    with pytest.raises(SystemExit) as end:
        launch(worker_checks.fail_all, (), "cpu", "fp32", 2)
    assert end.value.code == 2
    said = [line for line in capfd.readouterr().err.splitlines() if "error:" in line]
    assert said == ["error: the cache is too small"]


PYTHON = {"PYTHONPATH": str(Path(worker_checks.__file__).parent)}


def job(folder: Path, call: str) -> Path:
    """A program that starts two workers with launch(worker_checks.CALL, "cpu", "fp32", 2)."""
    program = folder / "job.py"
    program.write_text(
        "import sys\nfrom pathlib import Path\nimport worker_checks\nfrom qat_lora.backend.opening import launch\n"
        f"if __name__ == '__main__':\n    launch(worker_checks.{call}, 'cpu', 'fp32', 2)\n"
    )
    return program


def test_starting_workers_end_when_their_parent_is_killed(tmp_path):
    with subprocess.Popen([sys.executable, job(tmp_path, "fail, ('exit',)")], env=os.environ | PYTHON) as parent:
        while len(workers := started_by(parent.pid)) < 2:
            assert parent.poll() is None
            time.sleep(0.05)
        parent.kill()
    end = time.monotonic() + PATIENCE
    while any(map(is_worker, workers)):
        assert time.monotonic() < end, "they wait for a parent that is gone"
        time.sleep(0.2)


def test_workers_run_with_closed_output(tmp_path):
    program = job(tmp_path, "describe, (Path(sys.argv[1]),)")
    command = ["sh", "-c", '"$0" "$1" "$2" >&-', sys.executable, program, tmp_path]
    done = subprocess.run(command, env=os.environ | PYTHON, capture_output=True, text=True)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr
    assert_described(tmp_path)


def started_by(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [child for child in map(int, children) if is_worker(child)]


def is_worker(pid: int) -> bool:
    """Whether this is a running process that multiprocessing has started."""
    try:
        return b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


@pytest.fixture(scope="module")
def one_worker(sharp_model_dir, sharp_cache, tmp_path_factory):
    out = tmp_path_factory.mktemp("one")
    train(TorchBackend("cpu", "fp32"), str(sharp_model_dir), str(sharp_cache), out)
    return out / "worker0.safetensors"


def test_two_workers_train_the_same_weights_as_one(one_worker, sharp_model_dir, sharp_cache, tmp_path):
    launch(train, (str(sharp_model_dir), str(sharp_cache), tmp_path), "cpu", "fp32", 2)
    assert apart(tmp_path / "worker0.safetensors", tmp_path / "worker1.safetensors") == 0
    assert apart(tmp_path / "worker0.safetensors", one_worker) <= CLOSE


class Deaf(Group):
    """Worker 0 of two that do not hear each other."""

    def gather(self, value):
        return [value] * 2


def test_a_worker_without_the_reduction_does_not(one_worker, sharp_model_dir, sharp_cache, tmp_path, monkeypatch):
    for name in ("reduce", "broadcast"):
        monkeypatch.setattr(TorchBackend, name, lambda *_: None)
    train(TorchBackend("cpu", "fp32", Deaf(0, 2)), str(sharp_model_dir), str(sharp_cache), tmp_path)
    assert apart(tmp_path / "worker0.safetensors", one_worker) > 100 * CLOSE
