"""What the hosts of a job have in common, checked before the first step, and runs that are on one of them alone."""

import dataclasses
import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from qat_lora.backend.group import Group, say
from qat_lora.errors import UserError
from qat_lora.run.config import RunConfig
from qat_lora.run.files import lock, read_json, sha256, write_atomically

PART = 16 * 2**20  # bytes of a file that are sent at once
SAME_COMMAND = "give every worker the same command"


def agree_on_config(config: RunConfig, facts: dict, group: Group) -> None:
    """Raise UserError, in every worker, where one has another config or other facts than worker 0. An option whose
    identity is a fact may differ where the fact is the same: a cache may lie in another place on each host."""
    by_fact = {f.name: f.metadata.get("identity") for f in dataclasses.fields(config)}
    options = {
        name: value for name, value in dataclasses.asdict(config).items()
        if name != "device" and by_fact[name] not in facts
    }  # fmt: skip
    group.agree({name: (value, repr(value)) for name, value in options.items()}, SAME_COMMAND)
    named: dict[str, str] = {}
    for name, fact in by_fact.items():
        if isinstance(fact, str) and getattr(config, name) is not None:
            named[fact] = f" (--{name.replace('_', '-')} {getattr(config, name)})"
    group.agree(
        {name: (value, f"{value!r}{named.get(name, '')}") for name, value in facts.items() if name != "device"},
        "give every host the same files and the same command",
    )


# -- runs ------------------------------------------------------------------------------------------------------------
def bring_runs(paths: list[Path], group: Group) -> None:
    """Bring the runs that --resume may mean to worker 0's host where another host alone has them, or has newer
    checkpoints: after a restart worker 0 may be elsewhere. paths: what this host has.

    Raises UserError, in every worker, where two hosts have different runs in one place.
    """
    mine = {str(path): _state(path) for path in paths} if group.leads else {}
    everyone = group.gather(mine)
    for name in sorted({name for found in everyone for name in found}):
        states = {rank: found[name] for rank, found in enumerate(everyone) if name in found}
        first = min(states)
        for rank, state in states.items():
            _check_same_run(name, group, (first, states[first]), (rank, state))
        newest = max(states, key=lambda rank: (states[rank]["step"], -rank))
        if 0 not in states or states[newest]["step"] > states[0]["step"]:
            _bring(Path(name), newest, group)


def _state(path: Path) -> dict:
    """Which run a directory holds, and its newest checkpoint: its step (-1: none) and its checksums."""
    manifest = read_json(path / "manifest.json")
    manifest.pop("resumed", None)  # what one host adds when it continues
    state = {"run": hashlib.sha256(repr(sorted(manifest.items())).encode()).hexdigest(), "step": -1, "sums": None}
    state["started"] = manifest.get("started")
    for folder in (path / "checkpoints").glob("step_*"):
        number = folder.name.removeprefix("step_")
        if number.isdecimal() and int(number) > state["step"] and (folder / "meta.json").is_file():
            state |= {"step": int(number), "sums": read_json(folder / "meta.json").get("sha256")}
    return state


def _check_same_run(name: str, group: Group, first: tuple[int, dict], other: tuple[int, dict]) -> None:
    (one, mine), (two, theirs) = first, other
    where = f"{group.name(one)} and {group.name(two)}"
    if mine["run"] != theirs["run"]:
        raise UserError(
            f"{name} is one run for {group.name(one)} (started {mine['started']}) and another for {group.name(two)} "
            f"(started {theirs['started']}); remove the one that you do not mean, or give another --output-dir"
        )
    if mine["step"] == theirs["step"] and mine["sums"] != theirs["sums"]:
        raise UserError(
            f"{name}/checkpoints/step_{mine['step']} differs between {where} (checksums); remove the one that you do "
            "not mean, or give another --output-dir"
        )


def _bring(path: Path, giver: int, group: Group) -> None:
    """Copy a run's directory from a worker's host to worker 0's."""
    files: dict[str, str] = {}
    if group.rank == giver:
        found = sorted(path.rglob("*"), key=lambda file: (file.name == "meta.json", file))  # that makes one whole
        names = [file for file in found if file.is_file() and file.name != ".lock" and ".part" not in str(file)]
        files = {str(file.relative_to(path)): sha256(file) for file in names}
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
    say(f"{path} comes from {group.name(giver)}")
    path.mkdir(parents=True, exist_ok=True)
    with lock(path):
        copy()


@contextmanager
def shared_file(path: Path, group: Group) -> Iterator[Path]:
    """Worker 0's file `path`: in its place where this host has the same, else a copy, there within this context."""
    total = group.on_main(lambda: sha256(path) if path.is_file() else None)
    here = total is None or (path.is_file() and sha256(path) == total)  # None: let whoever reads it say so
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
    """A file of one worker, in pieces, for all: every worker has to read to the end. path: the giver's."""
    size = group.gather(path.stat().st_size if path else 0)[giver]
    file = open(path, "rb") if path else None  # noqa: SIM115
    for _ in range(0, size, PART):
        yield group.gather(file.read(PART) if file else b"")[giver]
    if file:
        file.close()
