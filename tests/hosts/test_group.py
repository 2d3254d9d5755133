"""How a job's workers talk to each other on the host. Here they are threads, each with its link to one relay."""

import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from patience import PATIENCE

from qat_lora.errors import UserError
from qat_lora.hosts import link as link_module
from qat_lora.hosts import relay as relay_module
from qat_lora.hosts.environment import Timeouts
from qat_lora.hosts.group import ALONE, SIGTERM, AnotherFailed, Group, WorkerLost
from qat_lora.hosts.link import Link, Refused, this_member
from qat_lora.hosts.relay import Kind, Relay, as_json, frame
from qat_lora.hosts.rendezvous import join, serve

HOST = socket.gethostname()
CALM, HASTY = Timeouts(PATIENCE, PATIENCE), Timeouts(host=3, join=PATIENCE)  # HASTY: a worker is lost after 1.65 s
made: list[Link] = []


@pytest.fixture(autouse=True)
def links_end_with_the_test():
    """Otherwise their threads would end the process once they have lost the relay."""
    yield
    while made:
        made.pop().reporting = True


def to(relay: Relay) -> socket.socket:
    return socket.create_connection(("127.0.0.1", relay.port))


def enter(relay: Relay, rank: int, count: int, timeouts: Timeouts = CALM, **claims) -> Group:
    """The group of one worker that joins a relay in this process; claims: fields to change in its `Member`."""
    link = Link(to(relay), replace(this_member(rank), **claims), count, timeouts)
    made.append(link)
    link.enter()
    return Group(rank, count, link)


@pytest.fixture
def together(monkeypatch):
    """together(function, count): the results of function(group) in each of `count` workers, exceptions included."""
    for module in (relay_module, link_module):
        monkeypatch.setattr(module, "BEAT", 0.1)
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail(f"the process was ended with {code}"))

    def run(function, count: int = 2, timeouts: Timeouts = CALM, claims=lambda rank: {}) -> list:
        relay = serve(0, True, count, timeouts, tensors=False)

        def work(rank: int):
            try:
                group = enter(relay, rank, count, timeouts, **claims(rank))
                group.relay = relay if rank == 0 else None
                result = function(group)
                group.link.reporting = True  # a worker that has done its part is not stuck
            except (Exception, SystemExit) as error:
                return error
            return result

        with ThreadPoolExecutor(count) as pool:
            results = list(pool.map(work, range(count)))
        assert relay.ending or not relay.values, "values are dropped once they are answered"
        return results

    return run


def heard(group: Group, wait=lambda group: group.gather(None)) -> AnotherFailed:
    """The error that ends this worker's wait for the others."""
    with pytest.raises(AnotherFailed) as error:
        wait(group)
    return error.value


def test_gather_returns_all_values_in_rank_order(together):
    def calls(group):
        return [group.gather((group.rank, turn)) for turn in range(20)]

    assert together(calls, 3) == [[[(rank, turn) for rank in range(3)] for turn in range(20)]] * 3


def test_large_values_of_different_sizes_arrive_whole(together):
    """A carry of many rows has hundreds of megabytes; the watching thread reads it piece by piece."""

    def calls(group):
        large = [group.gather(bytes([group.rank]) * (3_000_000 * (group.rank + 1))) for _ in range(2)]
        return [[len(part) for part in parts] for parts in large], large[0] == large[1], group.gather(None)

    wanted = [3_000_000, 6_000_000, 9_000_000]
    assert together(calls, 3) == [([wanted, wanted], True, [None] * 3)] * 3


def test_a_single_worker_needs_no_others():
    assert ALONE.gather(1) == [1] and ALONE.on_main(lambda: 2) == 2 and ALONE.fail(OSError()) == ""
    ALONE.agree({"a": (1, "one")}, "nothing to do")
    assert ALONE.neighbours == [0] and ALONE.leads and ALONE.name(0) == "worker 0"
    ALONE.close()
    with ALONE.main_first():
        pass


def test_on_main_gives_worker_0s_result_to_all_workers(together):
    calls = []

    def work(group):
        return group.on_main(lambda: calls.append(group.rank) or "found")

    assert together(work, 3) == ["found"] * 3 and calls == [0]


def test_an_error_of_worker_0_is_raised_by_all_and_the_others_name_its_origin(together):
    def raising(error):
        def work():
            raise error

        return lambda group: group.on_main(work)

    first, *others = together(raising(UserError("no such cache; build it")), 3)
    assert type(first) is UserError and str(first) == "no such cache; build it"
    line = f"worker 0 on {HOST} failed: {first}"
    assert [(type(error), str(error)) for error in others] == [(AnotherFailed, line)] * 2
    assert [type(error) for error in together(raising(SystemExit(0)))] == [SystemExit] * 2


def test_main_first_runs_worker_0_first(together):
    entered = []

    def work(group):
        time.sleep(0.1 * (group.rank == 0))  # it comes last
        with group.main_first():
            entered.append(group.rank)
            time.sleep(0.1 * (group.rank == 0))
            entered.append(group.rank)

    together(work, 3)
    assert entered[:2] == [0, 0] and sorted(entered) == [0, 0, 1, 1, 2, 2]


def test_different_values_are_refused_naming_both_values_and_hosts(together):
    def work(group):
        rate = 1e-3 if group.rank == 2 else 8e-4
        group.agree({"seed": (0, "0"), "learning_rate": (rate, f"{rate:g}")}, "give every worker the same command")

    said = f"learning_rate is 0.0008 for worker 0 on {HOST}, 0.001 for worker 2 on {HOST}"
    wanted = UserError, f"the workers differ: {said}; give every worker the same command"
    assert {(type(error), str(error)) for error in together(work, 3)} == {wanted}


# -- failures --------------------------------------------------------------------------------------------------------
def test_one_terminal_shows_only_the_first_failure(together):
    lines = together(lambda group: group.fail(OSError("disk")), 3)
    assert sorted(lines, key=str) == ["", None, None]


def test_each_terminal_shows_the_failure_once(together):
    """Two workers share one terminal and the third has its own, as with two workers per host."""

    def work(group):
        group.link.members = [replace(m, terminal="ab"[m.rank == 2]) for m in group.link.members]
        return group.fail(heard(group) if group.rank else UserError("no such cache"))

    assert together(work, 3) == ["", None, f"worker 0 on {HOST} failed: no such cache"]


def test_a_worker_that_disconnects_without_a_goodbye_has_died(together):
    def work(group):
        return group.link.disconnect() if group.rank == 1 else group.fail(heard(group))

    first, _, third = together(work, 3)
    assert first.startswith(f"worker 1 on {HOST} (process {os.getpid()}) died (killed? out of memory?)")
    assert third is None, "they share a terminal"


def test_a_silent_worker_is_lost_and_a_busy_one_is_not(together):
    def work(group):
        if group.rank == 1:
            time.sleep(2.5)  # busy for longer than a worker may be silent
        assert group.gather(group.rank) == [0, 1]
        if group.rank == 1:
            group.link.sending.acquire()  # nothing is sent any more
            group.link.reporting = True  # otherwise its thread would end this process
            time.sleep(4)
            return None
        return str(heard(group))

    lost, _ = together(work, timeouts=HASTY)
    assert lost.startswith(f"no heartbeat from worker 1 on {HOST} for 1.65 s; check that the host")


def test_a_silent_relay_is_noticed(together):
    both_are_in = threading.Barrier(2)

    def work(group):
        both_are_in.wait(PATIENCE)
        if group.relay:
            group.relay._send = lambda *_: None  # it receives but sends nothing
        return str(heard(group))

    lost = f"no heartbeat from worker 0 on {HOST} for 1.65 s"
    assert all(line.startswith(lost) for line in together(work, timeouts=HASTY))


def test_values_in_flight_arrive_before_the_job_ends(together):
    def work(group):
        found = group.gather(group.rank)
        if group.rank:
            group.fail(OSError())
        else:
            assert heard(group) and heard(group)
        return found

    assert together(work) == [[0, 1], [0, 1]]


def test_a_broken_connection_is_a_lost_worker_and_the_relay_names_it(together):
    def work(group):
        if group.rank == 0:
            time.sleep(0.3)
            return group.fail(UserError("no memory"))
        with pytest.raises(WorkerLost, match=r"is lost \(Connection closed by peer\)") as error, group.losing_none():
            raise RuntimeError("[/pytorch/gloo/pair.cc:547] Connection closed by peer")
        group.link.members = [replace(m, terminal=str(m.rank)) for m in group.link.members]
        return group.fail(error.value)

    assert together(work) == ["", f"worker 0 on {HOST} failed: no memory"]


def test_no_worker_leaves_before_all_have_finished(together):
    done = []

    def work(group):
        time.sleep((0, 2.5, 0.2)[group.rank])  # one writes for longer than a worker may be silent
        done.append(group.rank)
        group.close()
        return {*done}

    assert together(work, 3, HASTY) == [{0, 1, 2}] * 3


def test_a_finished_worker_hears_that_another_died(together):
    """Worker 0, killed after the last step, has not written the summary: the job has failed."""

    def work(group):
        if group.rank:
            return str(heard(group, Group.close))
        time.sleep(0.5)
        return group.link.disconnect()

    _, said = together(work)
    assert said.startswith(f"worker 0 on {HOST} (process {os.getpid()}) died")


def test_a_finished_worker_hears_that_another_failed(together):
    def work(group):
        if group.rank:
            time.sleep(0.3)
            return group.fail(UserError("plots"))
        error = heard(group, Group.close)
        return str(error), group.fail(error)

    assert together(work) == [(f"worker 1 on {HOST} failed: plots", None), ""], "their terminal shows it once"


# -- joining ---------------------------------------------------------------------------------------------------------
def test_missing_workers_are_named_while_waiting_and_at_the_end(monkeypatch, capfd):
    monkeypatch.setattr(relay_module, "NOTICE", 0.5)
    monkeypatch.setattr(relay_module, "BEAT", 0.1)
    said = rf"workers 1, 2 of 3 did not arrive at here:29500 within 1 s \(arrived: worker 0 on {HOST}\); start every"
    with pytest.raises(UserError, match=said):
        enter(serve(0, True, 3, Timeouts(join=1), "here:29500", tensors=False), 0, 3)
    assert capfd.readouterr().err == "waiting for workers 1, 2 of 3 at here:29500\n"


@pytest.mark.parametrize(
    "rank, count, said",
    [
        (0, 2, "RANK=0 is taken by worker 0 on "),
        (1, 3, "WORLD_SIZE=3 contradicts the WORLD_SIZE=2 of worker 0 at here"),
    ],
)
def test_a_worker_that_contradicts_the_others_is_refused_and_they_stop(rank, count, said):
    relay = serve(0, True, 2, CALM, "here", tensors=False)
    with ThreadPoolExecutor() as pool:
        first = pool.submit(enter, relay, 0, 2)
        while 0 not in relay.members:
            time.sleep(0.01)
        with pytest.raises(Refused, match=said):
            enter(relay, rank, count)
        with pytest.raises(UserError, match=f"does not belong to this job: {said}"):
            first.result()


def test_a_complete_job_refuses_a_stray_worker_and_closes_connections_that_are_not_workers(together):
    def work(group):
        if group.relay:
            with pytest.raises(Refused, match="RANK=1 is taken"):
                enter(group.relay, 1, 2)
            nobody = {"rank": 1, "host": "x", "machine": "x", "terminal": "x", "pid": 1}
            claims = [nobody | wrong for wrong in ({"rank": 7}, {"rank": -1}, {"rank": "1"}, {"host": []}, {"x": 1})]
            joins = [frame(Kind.JOIN, as_json({"member": claim, "world_size": 2})) for claim in claims]
            joins += [frame(Kind.JOIN, content) for content in (b"{}", b"[1]", b"\xff", b"[" * 60000)]
            for greeting in (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n", b"J" + b"\xff" * 8, *joins):
                with to(group.relay) as stranger:
                    stranger.sendall(greeting)
                    assert stranger.recv(10) == b""
        return group.gather(group.rank)

    assert together(work) == [[0, 1]] * 2


def test_the_number_of_unidentified_connections_is_limited(together):
    def work(group):
        strangers = []
        if group.relay:
            strangers = [to(group.relay) for _ in range(100)]
            for stranger in strangers[2 + relay_module.STRANGERS :]:
                assert stranger.recv(1) == b"", "closed"
            assert group.relay.strangers == 2 + relay_module.STRANGERS
        found = group.gather(group.rank)
        for stranger in strangers:
            stranger.close()
        return found

    assert together(work) == [[0, 1]] * 2


def test_a_worker_waits_for_a_relay_that_is_not_there_yet_or_is_ending():
    """After an immediate restart the previous job's relay may still be there."""
    old = serve(0, True, 1, CALM, tensors=False)
    enter(old, 0, 1).link.leave()
    old.end("enough")
    relays = [old]
    threading.Timer(0.5, lambda: relays.append(serve(0, True, 1, CALM, tensors=False))).start()
    made.append(join(lambda: ("127.0.0.1", relays[-1].port), 0, 1, CALM, "here"))
    assert made[-1].nonce == relays[1].nonce


def test_hosts_with_the_same_name_are_told_apart_by_their_addresses(together):
    names = together(lambda group: [group.name(rank) for rank in range(2)])
    assert names[0] == [f"worker {rank} on {HOST}" for rank in range(2)]

    def places(group):
        return group.name(1), group.neighbours, group.leads

    found = together(places, claims=lambda rank: {"host": "localhost", "machine": f"machine {rank}"})
    assert found == [("worker 1 on localhost (127.0.0.1)", [rank], True) for rank in range(2)]


# -- the watching thread ---------------------------------------------------------------------------------------------
HANGS = """
import ctypes, os, signal, sys, threading
from qat_lora.hosts.group import Group, notice_sigterm
from qat_lora.hosts.relay import Timeouts
from qat_lora.hosts.rendezvous import join, serve
what, timeouts = sys.argv[1], Timeouts(host=3)
relay = serve(0, True, 2, timeouts, tensors=False)
at = lambda: ("127.0.0.1", relay.port)
threading.Thread(target=lambda: join(at, 1, 2, timeouts, "here"), daemon=True).start()
group = Group(0, 2, join(at, 0, 2, timeouts, "here"), relay)
notice_sigterm()
if what == "sigterm":
    os.kill(os.getpid(), signal.SIGTERM)
if what == "ended":
    relay.end("worker 1 on there is gone", 1, said=False)
with group.waiting():
    ctypes.CDLL(None).sleep(100)  # a signal interrupts the first one
    ctypes.CDLL(None).sleep(100)
"""


@pytest.mark.parametrize(
    "what, code, said",
    [("sigterm", 143, "error: SIGTERM: the other workers"), ("ended", 1, "error: worker 1 on there")],
)
def test_a_process_that_hangs_in_a_library_says_why_and_ends(what, code, said):
    done = subprocess.run([sys.executable, "-c", HANGS, what], capture_output=True, text=True)
    assert done.returncode == code, done.stderr
    assert done.stderr.count("error: ") == 1 and said in done.stderr, done.stderr


def test_a_second_sigterm_does_not_hang_the_handler_of_the_first():
    """Python may run the second handler inside the first; here it does so at every line that sets the flag."""

    def interrupt(*_):
        sys.settrace(None)
        SIGTERM.set()
        sys.settrace(interrupt)
        return interrupt

    def handle():
        sys.settrace(interrupt)
        SIGTERM.set()

    thread = threading.Thread(target=handle, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive() and SIGTERM.is_set()
    SIGTERM.clear()
