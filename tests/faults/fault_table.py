"""Makes docs/reliability.md: which faults runs survive, from hundreds of trials on every script that writes.

python tests/faults/fault_table.py            (make test-faults)
python tests/faults/fault_table.py --subject QAT --only "SIGTERM/" --jobs 1     (some trials; no page)

Results are kept in runs/faults/ by commit, so that the same command resumes. The exit code is 1 if a trial was lost or
ended in a way that is not allowed.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import server

ROOT = server.ROOT
PAGE = ROOT / "docs" / "reliability.md"


# -- the trials ------------------------------------------------------------------------------------------------------
def every_trial(bench) -> Iterator:
    import damage
    import disk
    import interruptions

    yield from interruptions.trials(bench)
    yield from damage.trials(bench)
    yield from damage.hostile_trials(bench)
    if disk.allowed(bench.base):
        yield from disk.trials(bench)
    else:
        print("full and read-only disks are skipped: this machine does not allow mounting a disk")


def tried(bench, trial, folder: Path) -> dict:
    """Run one trial and return its outcome."""
    from trials import Lost, Unexpected

    started = time.monotonic()
    try:
        outcome, how = "ok", trial.run(bench, folder, trial)
    except (Lost, Unexpected) as error:
        outcome, how = type(error).__name__.lower(), str(error)
    except Exception:
        outcome, how = "unexpected", traceback.format_exc()
    return {"outcome": outcome, "how": how, "seconds": round(time.monotonic() - started, 2)}


def run_all(bench, trials: list, jobs: int, done) -> None:
    """Run all trials, `jobs` at a time, each in its own forked process; done(line) gets each outcome."""
    from trials import BY_NAME

    running: dict[int, tuple] = {}
    for number, trial in enumerate(trials):
        bench.reference(BY_NAME[trial.subject])  # in this process, so that it is made only once
        while len(running) >= jobs:
            _collect(running, done)
        folder = bench.base / "trials" / f"{number:04d}"
        pid = os.fork()
        if not pid:
            try:
                shutil.rmtree(folder, ignore_errors=True)  # left by an interrupted earlier call
                folder.parent.mkdir(exist_ok=True)
                folder.with_suffix(".json").write_text(json.dumps(tried(bench, trial, folder)))
            finally:
                os._exit(0)
        running[pid] = trial, folder
    while running:
        _collect(running, done)


def _collect(running: dict[int, tuple], done) -> None:
    pid, _ = os.waitpid(-1, 0)
    trial, folder = running.pop(pid)
    found = folder.with_suffix(".json")
    died = {"outcome": "unexpected", "how": "the trial itself died", "seconds": 0}
    line = json.loads(found.read_text()) if found.exists() else died
    done({"name": trial.name, "kind": trial.kind, "subject": trial.subject} | line)
    if line["outcome"] == "ok":
        shutil.rmtree(folder, ignore_errors=True)
    for path in folder.parent.glob(f"{folder.name}.*"):
        path.unlink()


def measured(asked: argparse.Namespace, some: bool) -> list[dict]:
    """The outcome of every trial. Those recorded by an earlier call are reused, unless only some trials are chosen."""
    server.preload()
    import subjects
    from trials import Bench

    from qat_lora.hosts.revision import revision

    subjects.DEVICE = asked.device
    commit, kept = revision(), asked.base
    record = ROOT / "runs" / "faults" / f"{commit}.jsonl"
    record.parent.mkdir(parents=True, exist_ok=True)
    known = {}
    if record.exists() and "changes" not in commit and not some:
        known = {(line := json.loads(text))["name"]: line for text in record.read_text().splitlines()}
    base = kept or Path(tempfile.gettempdir(), f"qat_lora_faults_{os.getuid()}_{commit.replace(' ', '_')}")
    if "changes" in commit and not kept:
        shutil.rmtree(base, ignore_errors=True)
    bench = Bench(base.resolve(), asked.subject)
    trials = [trial for trial in every_trial(bench) if not asked.only or re.search(asked.only, trial.name)]
    left = [trial for trial in trials if trial.name not in known]
    print(f"{len(trials)} trials, {len(left)} to do; folders in {base}", flush=True)
    with open(os.devnull if some else record, "a" if known else "w") as file:

        def done(line: dict) -> None:
            known[line["name"]] = line
            file.write(json.dumps(line) + "\n")
            file.flush()
            if line["outcome"] != "ok" or some:
                print(f"{line['outcome']:<11}{line['seconds']:6.1f} s  {line['name']}: {line['how']}", flush=True)

        run_all(bench, left, asked.jobs, done)
    if not kept:
        shutil.rmtree(base, ignore_errors=True)
    return [known[trial.name] for trial in trials]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", help="run only the trials whose names match this expression; writes no page")
    parser.add_argument("--subject", help="use only the subjects whose whole names match it; writes no page")
    parser.add_argument("--device", default="cpu", help="device of the commands [cpu]; any other writes no page")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="trials at a time [number of cores]")
    parser.add_argument("--base", type=Path, help="folder of the trials, kept with the folders of failed ones")
    asked = parser.parse_args()
    started = time.monotonic()
    some = asked.only or asked.subject or asked.device != "cpu"
    lines = measured(asked, some)
    print(f"{len(lines)} trials in {(time.monotonic() - started) / 60:.1f} minutes")
    from page import page, table

    if not some:
        PAGE.write_text(page(PAGE.read_text(), lines))
    print(table(lines))
    if wrong := [line for line in lines if line["outcome"] != "ok"]:
        sys.exit(f"{len(wrong)} of {len(lines)} trials were lost or ended in a way that is not allowed")


if __name__ == "__main__":
    main()
