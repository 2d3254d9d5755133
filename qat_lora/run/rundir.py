"""The run directory: what was asked for, on what, what came out."""

import dataclasses
import hashlib
import json
import os
import platform
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, BinaryIO

import yaml
from tqdm import tqdm

from qat_lora.backend import relay
from qat_lora.backend.group import ALONE, Group
from qat_lora.errors import STOPS, UserError, first_line
from qat_lora.git import git_state
from qat_lora.run.checksums import write_sums
from qat_lora.run.config import JobConfig, RunConfig
from qat_lora.run.files import as_json, lock, read_json, sha256, write_atomically, write_json, writing
from qat_lora.run.hosts import agree_on_facts, agree_on_options, bring_run

tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a worker that is killed leaves behind

PACKAGES = ("torch", "torch_xla", "transformers", "peft", "datasets", "safetensors", "numpy")
CONFIG_SUM = "config_sha256"  # in manifest.json
DATE, STAMP = "date", "%Y%m%dT%H%M%SZ"
# what a process that died early leaves behind
BEFORE_MANIFEST = {".lock", "config.yaml", "config.yaml.part", "manifest.json.part"}


class Run:
    """A directory with config.yaml, manifest.json, metrics.jsonl, summary.json, checkpoints/ and plots/, and once it is
    finished checksums.json.

    Made by `open_run`. resumed: whether it continues an earlier process. held: the lock of the directory, if any.
    writes: False in all workers but the first, for which nothing is logged or written.
    """

    def __init__(self, path: Path, resumed: bool, held: BinaryIO | None = None, writes: bool = True):
        self.path, self.resumed, self.held, self.writes = path, resumed, held, writes
        self.metrics_path = path / "metrics.jsonl"
        self.mirror: Callable[[int, dict], None] | None = None  # gets every logged line as well

    def log(self, step: int, values: dict) -> None:
        """Append one line to metrics.jsonl and show it."""
        if not self.writes:
            return
        with writing(self.metrics_path), open(self.metrics_path, "a") as file:
            file.write(json.dumps({"step": step} | values) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if self.mirror:
            try:
                self.mirror(step, values)
            except STOPS:
                raise
            except BaseException as error:  # network libraries raise anything
                self.mirror = None
                say(f"warning: the mirror of {self.metrics_path} failed ({first_line(error)}) and gets no more lines; "
                    "training continues, and the file itself is complete")  # fmt: skip
        shown = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
        say(f"step {step}  {shown}")

    def metrics(self) -> list[dict]:
        """Every logged line so far."""
        if not self.metrics_path.exists():
            return []
        lines = []
        for number, line in enumerate(self.metrics_path.read_text(errors="replace").splitlines(), 1):
            try:
                lines.append(json.loads(line))
                lines[-1]["step"]
            except (ValueError, TypeError, KeyError) as error:
                raise UserError(
                    f"{self.metrics_path} is damaged in line {number} ({first_line(error)}); fix it, or start in "
                    "another folder"
                ) from error
        return lines

    def finish(self, status: str, **values) -> None:
        """Write summary.json (status: finished, preempted, failed; final figures) and release the lock. Call it last: a
        finished run is never resumed."""
        if not self.writes:
            return
        text = as_json({"status": status, **values})
        if status == "finished":
            write_sums(self.path, {"summary.json": text})
        write_atomically(self.path / "summary.json", lambda file: file.write(text))
        if self.held:
            self.held.close()


def say(line: str) -> None:
    """A line for people, above a progress bar if there is one."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()


def attempt(what: str, function: Callable[..., Any], *args) -> Any:
    """function(*args), or None if it fails: then a warning is printed and the program continues. For what a run can do
    without, such as plots. what: the subject of the warning."""
    try:
        return function(*args)
    except STOPS:
        raise
    except BaseException as error:  # plotting and network libraries raise anything
        say(f"warning: {what} failed ({first_line(error)}); the run continues without")
        return None


def identity(config: RunConfig) -> dict:
    """The options that decide the numbers of a run, as their declarations say."""
    return {f.name: getattr(config, f.name) for f in dataclasses.fields(config) if f.metadata.get("identity", True)}


def open_run(experiment: str, config: RunConfig, facts: dict, group: Group = ALONE) -> Run:
    """A new run directory, or the one that --resume names; `facts` (device, fingerprints, …) go into manifest.json.

    A run is resumed only with the same identity: the options that declare themselves part of it, and all facts except
    the device. An option whose identity is a fact (`--model` and "base") may differ if both runs have the fact and it
    is equal: the same model in another place is the same. A fact that an older run did not record is not compared.

    Raises UserError if the directory already holds a run and --resume is off, holds a run of another config or other
    facts, or is being written by another process, and if the workers of a job differ in config or facts. Resuming a
    finished run ends the program with exit code 0. Only worker 0 opens the directory; the others get a Run that writes
    nothing.
    """
    agree_on_facts(config, facts, group)
    run = None

    def opened() -> tuple[Path, bool]:
        nonlocal run
        run = _open(experiment, config, facts)
        return run.path.absolute(), run.resumed

    path, resumed = group.on_main(opened)
    return run or Run(path, resumed, writes=False)


def _open(experiment: str, config: RunConfig, facts: dict) -> Run:
    lasting = {key: value for key, value in facts.items() if key != "device"}
    path = _resumed_path(experiment, config, lasting)
    if path is not None:
        held = lock(path)
        manifest = check_same(path, config, lasting)
        if _status(path) == "finished":
            say(f"{path} is finished")
            raise SystemExit(0)
        earlier = manifest.get("resumed", [])
        if not isinstance(earlier, list):
            raise UserError(
                f"{path}/manifest.json is damaged: resumed is not a list; put it back, or start in another folder"
            )
        again = {"time": _stamp(), "argv": sys.argv, "changed": _changed(path, config)}
        write_json(path / "manifest.json", manifest | {"resumed": [*earlier, again]})
        say(f"resuming {path}")
        return Run(path, resumed=True, held=held)
    commit, dirty = git_state()
    label = f"{_stamp()}-{Path(config.config or 'default').stem}-s{config.seed}-{commit}"
    path = Path(config.output_dir or Path("runs") / experiment / label)
    if (path / "manifest.json").exists():
        raise UserError(f"{path} already holds a run; --resume auto continues it, or give another --output-dir")
    others = sorted({file.name for file in path.glob("*")} - BEFORE_MANIFEST)
    if others:
        raise UserError(
            f"{path} holds {others[0]} but no manifest.json of a run that wrote it; put that back, give another "
            "--output-dir, or empty the folder"
        )
    held = lock(path)
    text = yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)
    write_atomically(path / "config.yaml", lambda file: file.write(text.encode()))
    write_json(
        path / "manifest.json",
        {
            "experiment": experiment,
            "started": _stamp(),
            "argv": sys.argv,
            "git": commit,
            "dirty": dirty,
            "python": platform.python_version(),
            "packages": {name: _version(name) for name in PACKAGES},
            "seed": config.seed,
            CONFIG_SUM: hashlib.sha256(text.encode()).hexdigest(),
            **facts,
        },
    )
    say(f"run directory {path}")
    return Run(path, resumed=False, held=held)


def newest_run(runs: Path) -> Path:
    """The directory below `runs` whose metrics.jsonl was written last."""
    logs = list(runs.rglob("metrics.jsonl"))
    if not logs:
        raise UserError(f"no run under {runs.resolve()}; train one, or name a run directory with --run")
    return max(logs, key=lambda log: log.stat().st_mtime).parent


def read_config(path: Path) -> dict:
    """The options that a run was started with, from config.yaml; raises UserError if it is missing or damaged."""
    try:
        found = yaml.safe_load((path / "config.yaml").read_text())
        if not isinstance(found, dict):
            raise ValueError("no options in it")
        return found
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise UserError(
            f"{path}/config.yaml is missing or damaged ({first_line(error)}); put it back, or start in another folder"
        ) from error


def _resumed_path(experiment: str, config: RunConfig, facts: dict) -> Path | None:
    """The run to resume: the one that is named, or the newest with the same identity."""
    path = _first_match(experiment, config, facts)
    if path is None and config.resume == "auto" and not config.output_dir:
        say("--resume auto: no unfinished run of this config; starting a new one")
    return path


def _first_match(experiment: str, config: RunConfig, facts: dict) -> Path | None:
    named = config.output_dir or config.resume != "auto"
    return next((p for p in _candidates(experiment, config, say) if named or _is_same(p, config, facts)), None)


def _candidates(experiment: str, config: RunConfig, tell: Callable[[str], None] | None = None) -> Iterator[Path]:
    """The run directories that --resume may mean: the one that is named, or all unfinished ones, newest first. tell:
    gets a line about each that cannot be read."""
    if config.resume == "off":
        return
    if config.resume != "auto":
        path = Path(config.resume)
        if not (path / "manifest.json").exists():
            raise UserError(f"--resume {path}: no run there (no manifest.json); give a run directory, auto or off")
        if config.output_dir and path.resolve() != Path(config.output_dir).resolve():
            raise UserError(f"--resume {path} and --output-dir {config.output_dir} are different directories; drop one")
        yield path
    elif config.output_dir:
        path = Path(config.output_dir)
        if (path / "manifest.json").exists():
            yield path
    else:
        for manifest in sorted(Path("runs", experiment).glob("*/manifest.json"), reverse=True):
            try:
                read_config(manifest.parent)
                read_json(manifest)
                finished = _status(manifest.parent) == "finished"
            except UserError as error:
                if tell:
                    tell(f"skipping {manifest.parent}: {error}")
                continue
            if not finished:
                yield manifest.parent


def begun(experiment: str, config: RunConfig, group: Group = ALONE) -> datetime:
    """When the run that --resume means was started, in local time; the current time for a new run. Of several
    unfinished runs it is the one with the fewest other options, and of these the newest. Chat templates that print the
    date print this one, so that a run can be resumed on another day."""
    return group.on_main(lambda: _begun(experiment, config))


def _begun(experiment: str, config: RunConfig) -> datetime:
    path = _meant(experiment, config)
    return date_of(read_json(path / "manifest.json"), path / "manifest.json") if path else now()


def _meant(experiment: str, config: RunConfig, tell: Callable[[str], None] | None = None) -> Path | None:
    """The run that --resume means, as far as can be told before its data is read."""
    named = config.output_dir or config.resume != "auto"
    found = [path for path in _candidates(experiment, config, tell) if named or _may_be(path, config)]
    return min(found, key=lambda path: len(_changed(path, config))) if found else None


def prepare(experiment: str, config, group: Group):
    """The config of a job, once its workers have compared their options and worker 0's host has the run that --resume
    means. Call it before anything of a run is read. Raises UserError, in every worker, if they do not agree.

    If there are fewer workers than the run had, each takes more micro-batches, so that an update keeps its rows: the
    config says so. What else differs from the run is left for `open_run` to refuse.
    """
    agree_on_options(config, group)
    if config.resume == "off":
        return config
    if group.world_size > 1:
        bring_run(_meant_here(experiment, config, group) if group.leads else None, group)
    if not hasattr(config, "accumulation_steps"):
        return config
    rows, was = group.on_main(lambda: _rows_before(experiment, config))
    each = config.batch_size * group.world_size
    as_before = all(getattr(config, name) == was.get(name) for name in ("batch_size", "accumulation_steps"))
    if not as_before or rows <= each * config.accumulation_steps or rows % each:
        return config
    if group.rank == 0:
        say(f"fewer workers than before: --accumulation-steps {rows // each} keeps {rows} rows in an update")
    return dataclasses.replace(config, accumulation_steps=rows // each)


def _meant_here(experiment: str, config: RunConfig, group: Group) -> Path | None:
    """The run that --resume means as far as this host knows: a named one may be on another."""
    if named := config.output_dir if config.resume == "auto" else config.resume:
        return Path(named)
    return _meant(experiment, config, relay.say if group.rank else None)  # on worker 0 open_run tells


def _rows_before(experiment: str, config: RunConfig) -> tuple[int, dict]:
    path = _meant(experiment, config)
    return (read_json(path / "manifest.json").get("rows_per_update", 0), read_config(path)) if path else (0, {})


def _may_be(path: Path, config: RunConfig) -> bool:
    """Whether a run may be one of this config, as far as can be told before its data is read."""
    was = read_config(path)
    return all(
        getattr(config, field.name) in _names_of(field, was.get(field.name, field.default))
        for field in dataclasses.fields(config)
        if field.metadata.get("identity", True) is True
    )


def _names_of(field: dataclasses.Field, value: Any) -> list:
    """A value that a run has of an option, and what it is called now, where an earlier version wrote it."""
    return [value, *(now for before, now in field.metadata.get("renamed", {}).items() if before == value)]


def now() -> datetime:
    """The current local time, in whole seconds and without a time zone."""
    return datetime.now().replace(microsecond=0)


def date_of(manifest: dict, path: Path) -> datetime:
    """The date that a manifest keeps for chat templates or, in an older one, when the run was started; local time.
    path: the manifest, for messages. Raises UserError if the date cannot be read."""
    try:
        if DATE in manifest:
            return datetime.fromisoformat(manifest[DATE])
        if "started" in manifest:
            started = datetime.strptime(manifest["started"], STAMP).replace(tzinfo=UTC)
            return started.astimezone().replace(tzinfo=None)
        return now()
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({first_line(error)}); put it back, or start in another folder") from error


def _is_same(path: Path, config: RunConfig, facts: dict) -> bool:
    try:
        check_same(path, config, facts)
    except UserError:
        return False
    return True


def _status(path: Path) -> str | None:
    """What summary.json says of a run, or None before it has one."""
    return read_json(path / "summary.json").get("status") if (path / "summary.json").exists() else None


def check_same(path: Path, config: RunConfig, facts: dict) -> dict:
    """The manifest.json of a run; raises UserError if the run's identity differs from that of `config` and `facts`, or
    if its files are damaged."""
    was, manifest = read_config(path), read_json(path / "manifest.json")
    wanted = manifest.get(CONFIG_SUM)
    if wanted is not None and sha256(path / "config.yaml") != wanted:
        raise UserError(f"{path}/config.yaml is damaged (checksum); put it back, or give another --output-dir")
    for name in sorted(facts.keys() & manifest.keys()):  # first those that name a file: others may follow from it
        there, here = manifest[name], facts[name]
        if isinstance(there, dict) and isinstance(here, dict):
            for key in sorted(there.keys() | here.keys()):
                _check_equal(path, f"{name}: {key}", there.get(key), here.get(key))
    for field in sorted(dataclasses.fields(config), key=lambda field: field.name):
        name, kind, now = field.name, field.metadata.get("identity", True), getattr(config, field.name)
        if not kind:
            continue
        if isinstance(kind, str) and kind in manifest and kind in facts:
            both = {kind, f"heldout_{kind}"} & manifest.keys() & facts.keys()  # the second comes from the same place
            for fact in sorted(both):
                if manifest[fact] != facts[fact] and now:
                    raise UserError(
                        f"{path} is a run of another config: {fact} is {str(manifest[fact])[:12]!r} ({name} "
                        f"{was.get(name)!r}) there (manifest.json), {str(facts[fact])[:12]!r} ({name} {now!r}) here; "
                        "give the same one, or another --output-dir"
                    )
            continue
        if name not in was and wanted is None:
            raise UserError(
                f"{path}/config.yaml has no {name}: it is damaged, or of another version; put it back, or "
                "give another --output-dir"
            )
        before = was.get(name, field.default)  # the default of an option that is newer than the run
        flags = f"flags and preset (--config {config.config} here)" if config.config else "flags"
        if now not in _names_of(field, before):
            _check_equal(path, name, before, now, flags)
    for name in sorted(facts.keys() & manifest.keys()):
        _check_equal(path, name, manifest[name], facts[name])
    return manifest


UPDATE = "batch size × accumulation steps × workers"
MADE_OF = {
    "rows_per_update": UPDATE,
    "prompts_per_update": UPDATE,
    "layer_rows_per_update": "batch size × workers",
}  # facts that several options decide


def _check_equal(path: Path, name: str, there: Any, here: Any, flags: str | None = None) -> None:
    """Raise UserError if an option or a fact (then without `flags`) of a run differs from the present one."""
    if there != here:
        where = "there" if flags else "there (manifest.json)"
        of = f" ({MADE_OF[name]})" if name in MADE_OF else ""
        raise UserError(
            f"{path} is a run of another config: {name}{of} is {there!r} {where}, {here!r} here; give the same "
            f"{flags or 'flags'}, or another --output-dir"
        )


def _changed(path: Path, config: RunConfig) -> dict:
    """The options that differ from those the run was started with, except those that every script has (--resume)."""
    was, own = read_config(path), {field.name for field in dataclasses.fields(JobConfig)}
    now = {name: value for name, value in dataclasses.asdict(config).items() if name not in own}
    return {name: value for name, value in now.items() if was.get(name, value) != value}


def _stamp() -> str:
    """The current time in UTC, as in names of run directories."""
    return datetime.now(UTC).strftime(STAMP)


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
