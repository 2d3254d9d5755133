"""Check that the hosts of a job agree before the first step, and copy runs that only one of them has."""

import dataclasses
import hashlib
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from qat_lora.errors import UserError, to_stderr
from qat_lora.hosts.group import Group
from qat_lora.run.files import lock, read_json, sha256, write_atomically
from qat_lora.run.options import ScriptConfig

PART = 16 * 2**20  # bytes of a file that are sent at once


def agree_on_options(config: ScriptConfig, group: Group) -> None:
    """Raise UserError in every worker if the options of one differ from worker 0's. Options that say where an input is
    may differ (their identity is a fact): `agree_on_facts` compares the inputs themselves."""
    options = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if isinstance(field.metadata.get("identity"), str) and field.name != "precision":
            value = "given" if value is not None else None
        if field.name != "device":  # each worker may have its own
            options[field.name] = (value, repr(value))
    group.agree(options, "give every worker the same command")


def agree_on_facts(config: ScriptConfig, facts: dict, group: Group) -> None:
    """Raise UserError in every worker if the input files of one differ from worker 0's."""
    named: dict[str, str] = {}
    for field in dataclasses.fields(config):
        fact, value = field.metadata.get("identity"), getattr(config, field.name)
        if isinstance(fact, str) and value is not None:
            named[fact] = f" (--{field.name.replace('_', '-')} {value})"
    found = {name: (value, f"{value!r}{named.get(name, '')}") for name, value in facts.items() if name != "device"}
    group.agree(found, "give every host the same files and the same command")


# -- runs ------------------------------------------------------------------------------------------------------------
def bring_run(path: Path | None, group: Group) -> None:
    """Copy the run that --resume refers to from another host to worker 0's host, if worker 0 has none or an older
    state of it: after a restart, worker 0 may be on a different host. path: that run, as far as this host knows.

    Raises UserError in every worker if two hosts have different runs at the same path.
    """
    for name in sorted({str(path) for path in group.gather(path if group.leads else None) if path}):
        states = dict(enumerate(group.gather(_state(Path(name)) if group.leads else None)))
        states = {rank: state for rank, state in states.items() if state}
        if not states:
            continue
        first = min(states)
        for rank, state in states.items():
            _check_same_run(name, group, (first, states[first]), (rank, state))
        newest = max(states, key=lambda rank: (states[rank]["step"], -rank))
        if 0 not in states or states[newest]["step"] > states[0]["step"]:
            _bring(Path(name), newest, group)


def _state(path: Path) -> dict | None:
    """Which run a directory holds, and its progress: the step and checksums of its newest checkpoint, step -1 without
    one, infinity for a finished run. None if there is no run."""
    if not (path / "manifest.json").exists():
        return None
    manifest = read_json(path / "manifest.json")
    manifest.pop("resumed", None)  # only the host that resumes the run adds this
    state = {"run": hashlib.sha256(repr(sorted(manifest.items())).encode()).hexdigest(), "step": -1, "sums": None}
    state["started"] = manifest.get("started")
    for folder in (path / "checkpoints").glob("step_*"):
        number = folder.name.removeprefix("step_")
        with suppress(UserError):  # a damaged one, which loading sets aside
            if number.isdecimal() and int(number) > state["step"]:
                state |= {"step": int(number), "sums": read_json(folder / "meta.json").get("sha256")}
    if (path / "summary.json").exists() and read_json(path / "summary.json").get("status") == "finished":
        state |= {"step": math.inf, "sums": None}
    return state


def _check_same_run(name: str, group: Group, first: tuple[int, dict], other: tuple[int, dict]) -> None:
    (one, mine), (two, theirs) = first, other
    if mine["run"] != theirs["run"]:
        raise UserError(
            f"{name} is one run for {group.name(one)} (started {mine['started']}) and another for {group.name(two)} "
            f"(started {theirs['started']}); remove the one that you do not want, or give another --output-dir"
        )
    if mine["step"] == theirs["step"] and mine["sums"] != theirs["sums"]:
        raise UserError(
            f"{name}/checkpoints/step_{mine['step']} differs between {group.name(one)} and {group.name(two)} "
            "(checksums); remove the one that you do not want, or give another --output-dir"
        )


def _bring(path: Path, giver: int, group: Group) -> None:
    """Copy a run's directory from a worker's host to worker 0's."""
    files: dict[str, str] = {}
    if group.rank == giver:
        found = sorted(path.rglob("*"), key=lambda file: (file.name == "meta.json", file))  # it completes a checkpoint
        names = [file.relative_to(path) for file in found if file.is_file() and file.name != ".lock"]
        files = {str(name): sha256(path / name) for name in names if ".part" not in str(name)}  # still written
    files = group.gather(files)[giver]

    def copy() -> None:
        for name, total in files.items():
            target = path / name
            there = group.rank == 0 and target.is_file() and sha256(target) == total
            if group.gather(there)[0]:
                continue
            pieces = share(target if group.rank == giver else None, giver, group)
            if group.rank == 0:
                target.parent.mkdir(parents=True, exist_ok=True)
                write_atomically(target, lambda file, pieces=pieces: file.writelines(pieces))
            else:
                for _ in pieces:
                    pass

    if group.rank:
        return copy()
    to_stderr(f"copying {path} from {group.name(giver)}")
    path.mkdir(parents=True, exist_ok=True)
    with lock(path):
        copy()


@contextmanager
def shared_file(path: Path, group: Group) -> Iterator[Path]:
    """Yield worker 0's file `path`: `path` itself if this host has the same file, else a temporary copy."""
    total = group.on_main(lambda: sha256(path) if path.is_file() else None)
    here = total is None or (path.is_file() and sha256(path) == total)  # missing on worker 0: the reader reports it
    if all(group.gather(here)):
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, path.name)
        with nullcontext() if here else open(copy, "wb") as file:
            for piece in share(path if group.rank == 0 else None, 0, group):
                if file:
                    file.write(piece)
        yield path if here else copy


def share(path: Path | None, giver: int, group: Group) -> Iterator[bytes]:
    """Send one worker's file to all workers in pieces, and yield them; every worker must read to the end. path: given
    only on the sending worker, `giver`."""
    size = group.gather(path.stat().st_size if path else 0)[giver]
    file = open(path, "rb") if path else None  # noqa: SIM115
    for _ in range(0, size, PART):
        yield group.gather(file.read(PART) if file else b"")[giver]
    if file:
        file.close()
