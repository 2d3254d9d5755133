"""What the workers of a job tell each other on the host: threads here, each with a client of one store."""

import os
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from qat_lora.backend import group as module
from qat_lora.backend.group import ALONE, Group, WorkerLost, losing_none
from qat_lora.errors import UserError


@pytest.fixture
def together():
    """together(function, count): function(group) in each of `count` workers; its results, exceptions included."""

    def run(function, count: int = 3) -> list:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        results = [None] * count

        def work(rank: int) -> None:
            try:
                results[rank] = function(Group(rank, count, dist.TCPStore("127.0.0.1", server.port, is_master=False)))
            except (Exception, SystemExit) as error:
                results[rank] = error

        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(count)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not any(thread.is_alive() for thread in threads)
        assert server.num_keys() <= 4 * count + 3, "answers are not kept"
        return results

    return run


def test_everyone_gathers_everything_in_the_order_of_ranks(together):
    def calls(group):
        return [group.gather((group.rank, turn)) for turn in range(20)]

    assert together(calls) == [[[(rank, turn) for rank in range(3)] for turn in range(20)]] * 3


def test_what_is_larger_than_the_store_takes_is_gathered_in_parts(together, monkeypatch):
    """TCPStore refuses 8 MiB; a carry of many rows has more. Nothing of it stays."""
    monkeypatch.setattr(module, "PART", 2**10)

    def calls(group):
        large = [group.gather(bytes([group.rank]) * (1000 * (group.rank + 1) ** 3)) for _ in range(2)]
        return large, group.gather(None)

    wanted = [bytes([rank]) * (1000 * (rank + 1) ** 3) for rank in range(3)]
    assert together(calls) == [([wanted, wanted], [None] * 3)] * 3


def test_a_part_is_one_that_the_store_takes(together):
    def calls(group):
        return [len(value) for value in group.gather(bytes(9 * 2**20))], group.gather(None)

    assert together(calls, 2) == [([9 * 2**20] * 2, [None] * 2)] * 2


def test_one_worker_needs_no_store():
    assert ALONE.gather(1) == [1] and ALONE.on_main(lambda: 2) == 2 and ALONE.is_first_to_fail(OSError())
    ALONE.agree({"a": 1})
    ALONE.close()
    with ALONE.main_first():
        pass


def test_what_worker_0_does_is_known_to_all(together):
    calls = []

    def work(group):
        return group.on_main(lambda: calls.append(group.rank) or "found")

    assert together(work) == ["found"] * 3 and calls == [0]


@pytest.mark.parametrize("error", [UserError("no such cache; build it"), SystemExit(0)], ids=["bad input", "finished"])
def test_what_worker_0_raises_all_raise(together, error):
    def fail():
        raise error

    raised = together(lambda group: group.on_main(fail))
    assert [type(e) for e in raised] == [type(error)] * 3 and [str(e) for e in raised] == [str(error)] * 3


def test_worker_0_goes_first(together):
    entered = []

    def work(group):
        time.sleep(0.05 * (2 - group.rank))
        with group.main_first():
            entered.append(group.rank)
            time.sleep(0.1)
            entered.append(group.rank)

    together(work)
    assert entered[:2] == [0, 0] and sorted(entered) == [0, 0, 1, 1, 2, 2]


def test_different_configs_are_refused_by_name(together):
    errors = together(lambda group: group.agree({"seed": 0, "learning_rate": 1e-3 if group.rank == 2 else 8e-4}))
    assert {type(e) for e in errors} == {UserError}
    assert str(errors[1]) == (
        "the workers were started with different configs: learning_rate is 0.0008 on worker 0, 0.001 on worker 2; "
        "give every worker the same command"
    )


def test_only_the_first_failure_is_reported(together):
    firsts = together(lambda group: group.is_first_to_fail(OSError()))
    assert sorted(firsts) == [False, False, True]


def test_a_failed_worker_is_not_waited_for(together):
    def work(group):
        if group.rank == 1:
            return group.is_first_to_fail(OSError())
        group.gather(None)

    results = together(work)
    assert results[1] is True
    assert [str(results[k]) for k in (0, 2)] == ["another worker has failed; its message says why"] * 2


def test_a_worker_that_never_answers_is_named(together, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.3)
    results = together(lambda group: None if group.rank == 1 else group.gather(None))
    assert str(results[0]).startswith("no answer from worker 1 for 0.3 s")


# -- meeting ---------------------------------------------------------------------------------------------------------
def test_workers_that_never_come_are_named_once_while_waiting_and_at_the_end(together, monkeypatch, capfd):
    monkeypatch.setattr(module, "RENDEZVOUS", 2)
    monkeypatch.setattr(module, "NOTICE", 0.5)
    results = together(lambda group: None if group.rank else group.meet("here:29500"))
    assert isinstance(results[0], UserError)
    assert str(results[0]).startswith(
        "workers 1, 2 of 3 did not arrive at here:29500 within 2 s; start every RANK from 0"
    )
    assert capfd.readouterr().err == "waiting for workers 1, 2 of 3 at here:29500\n"


def test_workers_that_meet_know_each_others_processes_and_notice_a_death(together, monkeypatch):
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie: nobody has waited for it yet

        def work(group):
            group.meet("here")
            assert group.processes == {rank: os.getpid() for rank in range(3)}
            group.processes[1] = ended.pid
            return None if group.rank == 1 else group.gather(None)

        results = together(work)
    assert {type(error) for error in (results[0], results[2])} == {WorkerLost}
    assert f"worker 1 has died (process {ended.pid})" in str(results[0])


def test_a_worker_that_contradicts_the_others_is_named_and_they_stop(together):
    def twice(group):
        group.rank = min(group.rank, 1)
        try:
            group.meet("here")
        except UserError as error:
            return str(error), group.is_first_to_fail(error)

    said = together(twice)
    assert said.count(("RANK=1 is taken by another worker at here; give each its own RANK", True)) == 1
    assert said.count(("another worker has failed; its message says why", False)) == 2


def test_a_stray_worker_does_not_end_a_job_that_is_complete():
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    Group(0, 1, server).meet("here")
    stray = Group(0, 2, server)
    with pytest.raises(UserError, match="WORLD_SIZE=2 contradicts WORLD_SIZE=1 of another worker at here") as error:
        stray.meet("here")
    assert stray.is_first_to_fail(error.value) and not server.check(["failed"])


def test_a_connection_that_breaks_is_a_lost_worker_and_waits_for_somebody_to_say_why(together):
    lost = WorkerLost("gone")

    def work(group):
        if group.rank:
            return group.is_first_to_fail(lost)
        time.sleep(0.3)
        return group.is_first_to_fail(OSError())

    assert together(work) == [True, False, False]
    with pytest.raises(WorkerLost, match=r"is lost \(Connection closed by peer\)"), losing_none():
        raise RuntimeError("[/pytorch/gloo/pair.cc:547] Connection closed by peer")


def test_the_one_that_serves_the_store_leaves_last(together):
    left = []

    def work(group):
        group.serves = group.rank == 0
        time.sleep(0.2 * group.rank)
        if group.rank:
            left.append(group.rank)
        group.close()
        if not group.rank:
            left.append(0)

    together(work)
    assert left == [1, 2, 0]
