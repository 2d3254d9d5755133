"""The run directory: what was asked for, on what, what came out."""

import dataclasses
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import BinaryIO

import yaml
from tqdm import tqdm

from qat_lora.backend.group import ALONE, Group
from qat_lora.errors import UserError, first_line
from qat_lora.run.config import RunConfig
from qat_lora.run.files import cannot_write, lock, read_json, write_json

tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a worker that is killed leaves behind

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("torch", "torch_xla", "transformers", "peft", "datasets", "safetensors", "numpy")
# How the rows of an update are split over workers and micro-batches, and what is compiled, changes no figure beyond
# rounding; the facts hold how many workers there are. What --bos and --chat-template do to the text shows in the facts:
# the fingerprint of the rows, and of the template.
NOT_IDENTITY = {
    "config", "device", "tpu", "use_tpu", "output_dir", "resume", "dry_run", "debug", "num_chips", "accumulation_steps",
    "from_scratch", "checkpoint_path", "compile", "wandb", "bos", "chat_template",
}  # fmt: skip
FORMER_DEFAULTS = {"targets": ("q,v,o,gate,up,down", "auto")}  # of a run begun before: the same under another name

BEFORE_MANIFEST = {".lock", "config.yaml", "manifest.json.part"}  # what a process that died at once leaves


class Run:
    """A directory with config.yaml, manifest.json, metrics.jsonl, summary.json, checkpoints/ and plots/.

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
        try:
            with open(self.metrics_path, "a") as file:
                file.write(json.dumps({"step": step} | values) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise cannot_write(self.metrics_path, error) from error
        if self.mirror:
            self.mirror(step, values)
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
                    f"{self.metrics_path} is damaged in line {number} ({first_line(error)}); mend it, or start in "
                    "another folder"
                ) from error
        return lines

    def metrics_size(self) -> int:
        return self.metrics_path.stat().st_size if self.metrics_path.exists() else 0

    def rewind_metrics(self, size: int) -> None:
        """Forget what was logged after a checkpoint was taken; raises UserError where lines before it are missing."""
        if not self.writes:
            return
        if self.metrics_size() < size:
            raise UserError(
                f"{self.metrics_path} is shorter than at the last checkpoint: it says which state was best; "
                "put it back, or start again with another --output-dir"
            )
        if self.metrics_path.exists():
            with open(self.metrics_path, "r+b") as file:
                file.truncate(size)

    def finish(self, status: str, **values) -> None:
        """Write summary.json (status: finished, preempted, failed; final figures) and give the directory free."""
        if not self.writes:
            return
        write_json(self.path / "summary.json", {"status": status, **values})
        if self.held:
            self.held.close()


def say(line: str) -> None:
    """A line for people, above a progress bar if there is one."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()


def identity(config: RunConfig) -> dict:
    """The part of a config that decides the numbers of a run."""
    return _identity(dataclasses.asdict(config))


def _identity(values: dict) -> dict:
    former = {k: now for k, (then, now) in FORMER_DEFAULTS.items() if values.get(k) == then}
    return {k: v for k, v in (values | former).items() if k not in NOT_IDENTITY}


def open_run(
    experiment: str, config: RunConfig, facts: dict, group: Group = ALONE, places: dict[str, str] | None = None
) -> Run:
    """A new run directory, or the one that --resume names; `facts` (device, fingerprints, …) go into manifest.json.

    places: options that say where something is, each with the fact that says what is there ({"model": "base"}). Where
    both runs know the fact, it alone is compared: the same thing elsewhere, or spelled differently, is the same.

    Raises UserError where the directory already holds a run and --resume is off, holds a run of another config or other
    facts (the device aside), or is being written by another process, and where the workers of a job differ in config or
    facts. Resuming a finished run ends the program with exit code 0. Worker 0 alone opens the directory; the others
    get a Run that writes nothing.
    """
    group.agree({**dataclasses.asdict(config), **facts, "device": None})  # each has a name of its own
    run = None

    def opened() -> tuple[Path, bool]:
        nonlocal run
        run = _open(experiment, config, facts, places)
        return run.path.absolute(), run.resumed

    path, resumed = group.on_main(opened)
    return run or Run(path, resumed, writes=False)


def _open(experiment: str, config: RunConfig, facts: dict, places: dict[str, str] | None) -> Run:
    lasting = {key: value for key, value in facts.items() if key != "device"}
    path = _resumed_path(experiment, config, lasting, places)
    if path is not None:
        held = lock(path)
        manifest = check_same(path, config, lasting, places)
        if _status(path) == "finished":
            say(f"{path} is finished")
            raise SystemExit(0)
        earlier = manifest.get("resumed", [])
        if not isinstance(earlier, list):
            raise UserError(
                f"{path}/manifest.json is damaged: resumed is no list; put it back, or start in another folder"
            )
        write_json(path / "manifest.json", manifest | {"resumed": [*earlier, {"time": _now(), "argv": sys.argv}]})
        say(f"resuming {path}")
        return Run(path, resumed=True, held=held)
    commit, dirty = _git()
    label = f"{_now()}-{Path(config.config or 'default').stem}-s{config.seed}-{commit}"
    path = Path(config.output_dir or Path("runs") / experiment / label)
    if (path / "manifest.json").exists():
        raise UserError(f"{path} already holds a run; --resume auto continues it, or give another --output-dir")
    others = sorted({file.name for file in path.glob("*")} - BEFORE_MANIFEST)
    if others:
        raise UserError(f"{path} holds {others[0]} and no run that wrote it; give another --output-dir, or empty it")
    held = lock(path)
    try:
        (path / "config.yaml").write_text(yaml.safe_dump(dataclasses.asdict(config), sort_keys=False))
    except OSError as error:
        raise cannot_write(path, error) from error
    write_json(
        path / "manifest.json",
        {
            "experiment": experiment,
            "started": _now(),
            "argv": sys.argv,
            "git": commit,
            "dirty": dirty,
            "python": platform.python_version(),
            "packages": {name: _version(name) for name in PACKAGES},
            "seed": config.seed,
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
    """The identity part of a run directory's config.yaml."""
    try:
        return _identity(yaml.safe_load((path / "config.yaml").read_text()))
    except (OSError, yaml.YAMLError, UnicodeDecodeError, AttributeError) as error:
        raise UserError(f"{path}/config.yaml is missing or damaged ({first_line(error)})") from error


def _resumed_path(experiment: str, config: RunConfig, facts: dict, places: dict[str, str] | None) -> Path | None:
    if config.resume == "off":
        return None
    if config.resume != "auto":
        path = Path(config.resume)
        if not (path / "manifest.json").exists():
            raise UserError(f"--resume {path}: no run there (no manifest.json); give a run directory, auto or off")
        if config.output_dir and path.resolve() != Path(config.output_dir).resolve():
            raise UserError(
                f"--resume {path} goes on there, and --output-dir {config.output_dir} is elsewhere; drop one"
            )
        return path
    if config.output_dir:
        path = Path(config.output_dir)
        return path if (path / "manifest.json").exists() else None
    for manifest in sorted(Path("runs", experiment).glob("*/manifest.json"), reverse=True):
        path = manifest.parent
        try:
            read_config(path), read_json(manifest)
            finished = _status(path) == "finished"
        except UserError as error:
            say(f"passing over {path}: {error}")
            continue
        if not finished and _is_same(path, config, facts, places):
            return path
    say("--resume auto: no unfinished run of this config; starting a new one")
    return None


def _is_same(path: Path, config: RunConfig, facts: dict, places: dict[str, str] | None) -> bool:
    try:
        check_same(path, config, facts, places)
    except UserError:
        return False
    return True


def _status(path: Path) -> str | None:
    """What summary.json says of a run, or None before it has one."""
    return read_json(path / "summary.json").get("status") if (path / "summary.json").exists() else None


def check_same(path: Path, config: RunConfig, facts: dict, places: dict[str, str] | None = None) -> dict:
    """The manifest.json beside a config.yaml; raises UserError where they are of another config or of other facts. In a
    run from before one of `places` had a fact, the option itself has to agree."""
    places = places or {}
    was, now, manifest = read_config(path), identity(config), read_json(path / "manifest.json")
    known = {option: fact for option, fact in places.items() if fact in manifest and fact in facts}
    for option, fact in known.items():
        if manifest[fact] != facts[fact] and now.get(option):
            raise UserError(
                f"{path} is a run of another config: {fact} is {str(manifest[fact])[:12]!r} ({option} "
                f"{was.get(option)!r}) there, {str(facts[fact])[:12]!r} ({option} {now[option]!r}) here; give the same "
                "one, or another --output-dir"
            )
    _check_same(path, was, {key: value for key, value in now.items() if key not in known})
    new = set(places.values()) - set(known.values())
    _check_same(path, manifest, {key: value for key, value in facts.items() if key not in new})
    return manifest


def _check_same(path: Path, there: dict, wanted: dict) -> None:
    for key in sorted(wanted):
        if key not in there:
            raise UserError(
                f"{path} does not say its {key}: config.yaml or manifest.json is damaged, or of another version; put "
                "it back, or give another --output-dir"
            )
        if there[key] != wanted[key]:
            raise UserError(
                f"{path} is a run of another config: {key} is {there.get(key)!r} there, {wanted[key]!r} here; "
                "give the same flags, or another --output-dir"
            )


def _now() -> str:
    return datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git() -> tuple[str, bool | None]:
    """Short revision and whether the tree has changes; ("nogit", None) outside a checkout."""
    try:
        git = ["git", "-C", str(ROOT)]
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
        return head.stdout.strip(), bool(status.stdout.strip())
    except (OSError, subprocess.CalledProcessError):
        return "nogit", None


def revision() -> str:
    """The commit that a figure was measured at, for people."""
    commit, dirty = _git()
    return f"{commit} with changes" if dirty else commit
