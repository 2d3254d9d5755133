"""Finds the run that --resume refers to, and checks that it matches the current config."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from qat_lora.errors import UserError, first_line, to_stderr
from qat_lora.hosts.environment import slice_hosts
from qat_lora.hosts.group import ALONE, Group
from qat_lora.run.console import say
from qat_lora.run.files import read_json
from qat_lora.run.hosts import agree_on_options, bring_run
from qat_lora.run.options import JobConfig, RunConfig

FORMAT = 4  # of a run directory; another is refused
CONFIG_SUM = "config_sha256"  # in manifest.json
EXTENDED = "the learning rate warms up and decays again over the added updates"  # how a run is extended
STAMP = "%Y%m%dT%H%M%SZ"
MADE_OF = {
    "rows_per_update": "batch size × accumulation steps × workers",
    "layer_rows_per_update": "batch size × workers",
}  # facts that depend on several options


def read_config(path: Path) -> dict:
    """The options that a run was started with, from config.yaml, with the --max-steps that it was last extended to;
    raises UserError if the file is missing or damaged."""
    try:
        found = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("no options in it")
    except (OSError, yaml.YAMLError, ValueError) as error:
        raise UserError(
            f"{path}/config.yaml is missing or damaged ({first_line(error)}); restore it, or start in another folder"
        ) from error
    manifest = path / "manifest.json"
    extended = read_json(manifest).get("extended") if manifest.exists() else None
    try:
        return found | {"max_steps": extended[-1]["max_steps"]} if extended else found
    except (TypeError, KeyError) as error:
        raise UserError(f"{manifest} is damaged (extended); restore it, or start in another folder") from error


def options_of(path: Path, script: str) -> dict:
    """The options of the run that --resume names, {} if it may be on another host. Raises UserError if there is no run,
    or one of another script."""
    if not (path / "manifest.json").exists():
        if "RANK" in os.environ or slice_hosts()[0] > 1:
            return {}
        raise _no_run(path)
    made = read_json(path / "manifest.json").get("experiment")
    if made != script:
        raise UserError(f"--resume {path} is a run of {made}.py, not of {script}.py; give one of this script")
    return read_config(path)


def _no_run(path: Path) -> UserError:
    return UserError(f"--resume {path}: no run there (no manifest.json); give a run directory, auto or off")


def options_sum(config: bytes, manifest: dict) -> str:
    """sha256 (hex) of what a run's options are read from: the content of config.yaml, and its extensions."""
    extended = manifest.get("extended")
    return hashlib.sha256(config + (json.dumps(extended).encode() if extended else b"")).hexdigest()


def extension(path: Path, config: RunConfig) -> dict | None:
    """How `config` extends a finished run, for its manifest: `after` (all its updates so far, over all stages), `done`
    (those of the last stage) and the new max_steps; None if --max-steps is not given or is the run's own.

    Raises UserError if that is not more than the updates done so far, or if the run has no checkpoint left.
    """
    from qat_lora.run.checkpoint import checkpoints_of

    wanted = None if getattr(config, "sft_only", False) else getattr(config, "max_steps", None)  # which counts GRPO
    if _status(path) != "finished" or wanted in (None, read_config(path).get("max_steps")):
        return None
    kept, before = checkpoints_of(path), None
    for checkpoint in kept:  # a damaged one is replaced by the one before it
        with suppress(UserError, KeyError, TypeError):
            meta = read_json(checkpoint / "meta.json")
            before = meta["step"] - meta["done"]  # updates of earlier stages
            break
    if before is None:
        raise UserError(
            f"{path} has no intact checkpoint left, so it cannot be extended; start a new run from its result"
        )
    step = int(kept[0].name.removeprefix("step_"))
    done = step - before
    if read_config(path).get("max_steps") == 0:  # the stage that --max-steps counts had no update
        done = 0
    if wanted <= done:
        raise UserError(
            f"--max-steps {wanted}: {path} has had {done} updates already; give more than {done} to extend it"
        )
    return {"time": _stamp(), "after": step, "done": done, "max_steps": wanted, "schedule": EXTENDED}


def not_begun(path: Path, manifest: dict) -> bool:
    """Whether the extension of a finished run was recorded, but the process ended before it removed summary.json."""
    from qat_lora.run.checkpoint import checkpoints_of

    kept, ends = checkpoints_of(path), [more["after"] for more in manifest.get("extended", ())]
    return bool(ends and kept) and kept[0].name == f"step_{ends[-1]}"


def _resumed_path(experiment: str, config: RunConfig, facts: dict) -> Path | None:
    """The run to resume: the named one, or the newest with the same identity."""
    named = config.output_dir or config.resume != "auto"
    path = next((p for p in _candidates(experiment, config, say) if named or _is_same(p, config, facts)), None)
    if path is None and not named:
        say("--resume auto: no unfinished run of this config; starting a new one")
    return path


def _candidates(experiment: str, config: RunConfig, tell: Callable[[str], None] | None = None) -> Iterator[Path]:
    """The run directories that --resume may refer to: the named one, or all unfinished ones, newest first. tell: called
    with a message about each directory that cannot be read."""
    if config.resume == "off":
        return
    if config.resume != "auto":
        path = Path(config.resume)
        if not (path / "manifest.json").exists():
            raise _no_run(path)
        if config.output_dir and path.resolve() != Path(config.output_dir).resolve():
            raise UserError(
                f"--resume {path} and --output-dir {config.output_dir} are different directories; leave one out"
            )
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
    """When the run that --resume refers to was started, in local time; the current time for a new run. Of several
    unfinished runs, the one with the fewest differing options is chosen, and of these the newest. Chat templates that
    print the date print this one, so that a run can be resumed on another day."""

    def found() -> datetime:
        path = _meant(experiment, config)
        return date_of(read_json(path / "manifest.json"), path / "manifest.json") if path else now()

    return group.on_main(found)


def _meant(experiment: str, config: RunConfig, tell: Callable[[str], None] | None = None) -> Path | None:
    """The run that --resume refers to, as far as can be told before its data is read."""
    named = config.output_dir or config.resume != "auto"
    found = [path for path in _candidates(experiment, config, tell) if named or _may_be(path, config)]
    return min(found, key=lambda path: len(_changed(path, config))) if found else None


def prepare(experiment: str, config, group: Group):
    """Compare the options of all workers, copy the run to resume to worker 0's host, and return the config.

    Call it before reading anything from a run. Raises UserError in every worker if the options differ. If there are
    fewer workers than the run had, the returned config has more accumulation steps, so that an update has as many rows
    as before. `open_run` checks all other differences from the run.
    """
    agree_on_options(config, group)
    if config.resume == "off" or config.dry_run:
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
    """The run that --resume refers to, as far as this host knows: a run named explicitly may be on another host."""
    if named := config.output_dir if config.resume == "auto" else config.resume:
        return Path(named)
    return _meant(experiment, config, to_stderr if group.rank else None)  # on worker 0 open_run reports them


def _rows_before(experiment: str, config: RunConfig) -> tuple[int, dict]:
    path = _meant(experiment, config)
    return (read_json(path / "manifest.json").get("rows_per_update", 0), read_config(path)) if path else (0, {})


def _may_be(path: Path, config: RunConfig) -> bool:
    """Whether a run may match this config, as far as can be told before its data is read."""
    was = read_config(path)
    fields = [field for field in dataclasses.fields(config) if field.metadata["identity"] is True]
    return all(field.name in was and getattr(config, field.name) == was[field.name] for field in fields)


def now() -> datetime:
    """The current local time, in whole seconds and without a time zone."""
    return datetime.now().replace(microsecond=0)


def date_of(manifest: dict, path: Path) -> datetime:
    """The date that a manifest records for chat templates, in local time; the current time if it records none. path:
    the manifest, for messages. Raises UserError if the date cannot be read."""
    try:
        return datetime.fromisoformat(manifest["date"]) if "date" in manifest else now()
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged ({first_line(error)}); restore it, or start in another folder") from error


def _is_same(path: Path, config: RunConfig, facts: dict) -> bool:
    try:
        check_same(path, config, facts)
    except UserError:
        return False
    return True


def _status(path: Path) -> str | None:
    """The status of a run in its summary.json, or None if it has none yet."""
    return read_json(path / "summary.json").get("status") if (path / "summary.json").exists() else None


def check_same(path: Path, config: RunConfig, facts: dict) -> dict:
    """The manifest.json of a run; raises UserError if the run's identity differs from that of `config` and `facts`, or
    if its files are damaged."""
    was, manifest = read_config(path), read_json(path / "manifest.json")
    if manifest.get("format") != FORMAT:
        raise UserError(
            f"{path} is a run of format {manifest.get('format')}, and this version resumes format {FORMAT}; give "
            "another --output-dir"
        )
    if options_sum((path / "config.yaml").read_bytes(), manifest) != manifest.get(CONFIG_SUM):
        raise UserError(
            f"{path}/config.yaml is damaged (checksum), or the extensions in manifest.json are; restore them, or give "
            "another --output-dir"
        )
    for name in sorted(facts.keys() & manifest.keys()):  # facts that list files come first: others may follow from them
        there, here = manifest[name], facts[name]
        if isinstance(there, dict) and isinstance(here, dict):
            for key in sorted(there.keys() | here.keys()):
                _check_equal(path, f"{name}: {key}", there.get(key), here.get(key))
    for field in sorted(dataclasses.fields(config), key=lambda field: field.name):
        _check_option(path, field, config, was, facts, manifest)
    for name in sorted(facts.keys() & manifest.keys()):
        _check_equal(path, name, manifest[name], facts[name])
    return manifest


def _check_option(
    path: Path, field: dataclasses.Field, config: RunConfig, was: dict, facts: dict, manifest: dict
) -> None:
    """Raise UserError if an option that is part of a run's identity differs from the run's own options, `was`. If
    its identity is a fact, the fact is compared instead."""
    name, kind, now = field.name, field.metadata["identity"], getattr(config, field.name)
    before = was.get(name)
    if isinstance(kind, str) and kind in manifest and kind in facts:
        for fact in sorted({kind, f"heldout_{kind}"} & manifest.keys() & facts.keys()):  # the same option decides both
            there, here = str(manifest[fact])[:12], str(facts[fact])[:12]
            if manifest[fact] != facts[fact] and now:
                raise UserError(
                    f"{path} is a run of another config: {fact} is {there!r} ({name} {before!r}) there "
                    f"(manifest.json), {here!r} ({name} {now!r}) here; give the same one, or another --output-dir"
                )
    elif kind:
        flags = f"flags and preset (--config {config.config} here)" if config.config else "flags"
        _check_equal(path, name, before, now, flags)


def _check_equal(path: Path, name: str, there: Any, here: Any, flags: str | None = None) -> None:
    """Raise UserError if an option or fact of a run differs from the current one. flags: None for a fact."""
    if there != here:
        where = "there" if flags else "there (manifest.json)"
        of = f" ({MADE_OF[name]})" if name in MADE_OF else ""
        raise UserError(
            f"{path} is a run of another config: {name}{of} is {there!r} {where}, {here!r} here; give the same "
            f"{flags or 'flags'}, or another --output-dir"
        )


def _changed(path: Path, config: RunConfig) -> dict:
    """The options that differ from those the run was started with, except those that every script has."""
    was, own = read_config(path), {field.name for field in dataclasses.fields(JobConfig)} - {"num_chips"}
    now = {name: value for name, value in dataclasses.asdict(config).items() if name not in own}
    return {name: value for name, value in now.items() if value != was.get(name)}


def _stamp() -> str:
    """The current time in UTC, in the format of run directory names."""
    return datetime.now(UTC).strftime(STAMP)
