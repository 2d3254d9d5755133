"""Makes the table of docs/scaling.md: two hosts, one of them lost, five trials of each kind (`make hosts-table`).

The trials combine kill -9, freeze or cut × the lost host × torchrun or by hand × recovery or pretrain. Each records the
seconds until the other host has ended, its error line, and whether the resumed run has the losses of an uninterrupted
one. Restarts by torchrun follow. Every trial is one line of runs/hosts/rows.jsonl; the same command resumes.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pair import PY, SCRIPTS, Pair, missing
from test_hosts import losses, worker_of

from qat_lora.hardware import tiny

ROOT = SCRIPTS.parent
WORK = ROOT / "runs" / "hosts"
ROWS = WORK / "rows.jsonl"
TRIALS, RESTARTS, AT_ONCE = 5, 10, 5
LAUNCHERS = {"by hand": "by_hand", "torchrun": "by_torchrun"}
STEP = {"recovery": "step 100 ", "pretrain": "step 45 "}
writing = threading.Lock()


def prepare() -> None:
    """Make a tiny model, its cache and a student."""
    if (WORK / "student" / "best.pt").exists():
        return
    tokenizer = tiny.tokenizer()
    tiny.model(tokenizer).save_pretrained(WORK / "model")
    tokenizer.save_pretrained(WORK / "model")
    common = ["--model", WORK / "model", "--device", "cpu"]
    for command in (
        ["build_kd_cache.py", "--cache-dir", WORK / "cache", "--length", 32, "--max-rows", 80, "--top-k", 8],
        ["train_qat.py", "--cache-dir", WORK / "cache", "--max-steps", 2, "--output-dir", WORK / "student"],
    ):
        command = [PY, SCRIPTS / command[0], *command[1:], *common]
        subprocess.run(list(map(str, command)), check=True, capture_output=True)


def command(experiment: str, run: Path, *more) -> list:
    if experiment == "recovery":
        return [
            SCRIPTS / "train_recovery_lora.py", "--checkpoint", WORK / "student" / "best.pt", "--kd-cache-dir",
            WORK / "cache", "--model", WORK / "model", "--batch-size", 2, "--max-steps", 400, "--save-every", 40,
            "--log-every", 20, "--eval-every", 0, "--output-dir", run, "--device", "cpu", *more,
        ]  # fmt: skip
    return [
        ROOT / "pretrain.py", "--config", "nano", "--device", "cpu", "--num-chips", 1, "--steps", 100, "compile=off",
        "--save-interval", 20, "--log-interval", 5, "--eval-interval", 0, "--eval-rows", 8, "--global-batch-size", 8,
        "--halt-max-segments", 2, "--H-cycles", 1, "--hidden-size", 32, "--puzzles", 40, "--output-dir", run, *more,
    ]  # fmt: skip


def finish(pair: Pair, launcher: str, experiment: str, run: Path, wanted: list | None, *more) -> bool:
    """Run to the end; returns whether the losses are as expected."""
    jobs = getattr(pair, LAUNCHERS[launcher])(*command(experiment, run, *more))
    codes = [job.process.wait(400) for job in jobs]
    return codes == [0, 0] and (wanted is None or losses(run) == wanted)


def lose(number: int, trial: dict, wanted: list) -> list[dict]:
    """Run one trial; a cut link gives one row per host."""
    what, host, launcher, experiment = trial["what"], trial["host"], trial["launcher"], trial["experiment"]
    run, found = WORK / f"run{number}-{time.time_ns()}", []
    with Pair(number) as pair:
        jobs = getattr(pair, LAUNCHERS[launcher])(*command(experiment, run))
        jobs[0].waits_for(STEP[experiment])
        started = time.monotonic()
        left = pair.lose(what, host, jobs)
        while left and time.monotonic() - started < 120:
            time.sleep(0.05)
            for lost, job in list(left.items()):
                if job.process.poll() is not None:
                    seconds, line = round(time.monotonic() - started, 1), (left.pop(lost).lines() or [""])[0]
                    found.append(
                        trial | {"host": lost, "seconds": seconds, "code": job.process.returncode, "line": line}
                    )
        found += [trial | {"host": lost, "seconds": 120.0, "code": None, "line": ""} for lost in left]
        pair.clear()
        equal = finish(pair, launcher, experiment, run, wanted, "--resume", "auto")
    return [row | {"equal": equal} for row in found]


def restart(number: int, trial: dict, wanted: list) -> list[dict]:
    """Kill a worker on each host, one after the other, under torchrun --max-restarts 3 … --resume auto."""
    run = WORK / f"run{number}-{time.time_ns()}"
    with Pair(number) as pair:
        words = command("recovery", run, "--resume", "auto")
        jobs = pair.by_torchrun(*words, options=("--max-restarts", 3))
        order = "ba" if trial["trial"] % 2 else "ab"
        for host, step in zip(order, ("step 100 ", "step 240 ")):
            end = time.monotonic() + 200
            while not any(step in job.said() for job in jobs) and time.monotonic() < end:
                time.sleep(0.02)
            if pid := worker_of(pair, host):
                os.kill(pid, signal.SIGKILL)
        try:
            codes = [job.process.wait(200) for job in jobs]
        except subprocess.TimeoutExpired:
            codes = None
        return [trial | {"code": codes, "equal": codes == [0, 0] and losses(run) == wanted}]


def main() -> None:
    if lack := missing():
        sys.exit(f"two hosts: {lack}")
    WORK.mkdir(parents=True, exist_ok=True)
    prepare()
    wanted = {}
    for experiment in STEP:
        run = WORK / f"whole-{experiment}"
        if not (run / "summary.json").exists():
            with Pair(0) as pair:
                assert finish(pair, "by hand", experiment, run, None)
        wanted[experiment] = losses(run)
    done = [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []
    trials = [
        {"what": what, "host": host, "launcher": launcher, "experiment": experiment, "trial": trial}
        for trial in range(TRIALS)
        for experiment in STEP
        for launcher in LAUNCHERS
        for what, host in (("kill -9", "a"), ("kill -9", "b"), ("freeze", "a"), ("freeze", "b"), ("cut", "a"))
    ]
    trials += [{"what": "restart", "trial": trial, "experiment": "recovery"} for trial in range(RESTARTS)]
    known = [{name: row.get(name) for name in trials[0]} for row in done]
    trials = [t for t in trials if {name: t.get(name) for name in trials[0]} not in known]
    free = list(range(1, AT_ONCE + 1))

    def one(trial: dict) -> None:
        with writing:
            number = free.pop()
        try:
            rows = (restart if trial["what"] == "restart" else lose)(number, trial, wanted[trial["experiment"]])
        finally:
            with writing:
                free.append(number)
        with writing, open(ROWS, "a") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
            print(rows, flush=True)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(one, trials))
    print(table([json.loads(line) for line in ROWS.read_text().splitlines()]))


def table(rows: list[dict]) -> str:
    lines = [
        "| experiment | launcher | lost | how | trials | seconds: median (worst) | named | exit codes | bit-equal |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lost: dict[tuple, list] = {}
    for row in rows:
        if row["what"] != "restart":
            lost.setdefault((row["experiment"], row["launcher"], f"host{row['host']}", row["what"]), []).append(row)
    for kind, found in sorted(lost.items()):
        seconds = [row["seconds"] for row in found]
        named, equal = sum(kind[2] in row["line"] for row in found), sum(row["equal"] for row in found)
        codes, took = (
            sorted({str(row["code"]) for row in found}),
            f"{statistics.median(seconds):.1f} ({max(seconds):.1f})",
        )
        cells = (*kind, len(found), took, named, ", ".join(codes), equal)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    again = [row for row in rows if row["what"] == "restart"]
    lines.append(f"\nRestarts: {sum(row['equal'] for row in again)} of {len(again)} resumed and ended bit-equal.")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
