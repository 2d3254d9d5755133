"""The run directory: the options, inputs, log and results of a run."""

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import yaml

from qat_lora.errors import STOPS, UserError, first_line, installed_version
from qat_lora.hosts.group import ALONE, Group
from qat_lora.hosts.revision import git_state
from qat_lora.run.console import attempt, say
from qat_lora.run.files import SUMS, as_json, lock, write_atomically, write_json, write_sums, writing
from qat_lora.run.hosts import agree_on_facts
from qat_lora.run.options import RunConfig
from qat_lora.run.resuming import (
    CONFIG_SUM,
    EXTENDED,
    FORMAT,
    _changed,
    _resumed_path,
    _stamp,
    _status,
    check_same,
    extension,
    not_begun,
    options_sum,
    read_config,
)

PACKAGES = ("torch", "torch_xla", "transformers", "peft", "datasets", "safetensors", "numpy")
# what a process that died early leaves behind
BEFORE_MANIFEST = {".lock", "config.yaml", "config.yaml.part", "manifest.json.part"}


class Run:
    """A directory with config.yaml, manifest.json, metrics.jsonl, summary.json, checkpoints/ and plots/; a finished run
    also has checksums.json.

    Created by `open_run`. resumed: whether it continues an earlier process. held: the lock of the directory, if any.
    writes: True only in the first worker; the others neither log nor write. ended: the steps, counted over all stages,
    at which it had finished before each extension.
    """

    def __init__(
        self, path: Path, resumed: bool, held: BinaryIO | None = None, writes: bool = True, ended: Sequence[int] = ()
    ):
        self.path, self.resumed, self.held, self.writes, self.ended = path, resumed, held, writes, ended
        self.metrics_path = path / "metrics.jsonl"
        self.mirror: Callable[[int, dict], None] | None = None  # also gets every logged line

    def log(self, step: int, values: dict, note: str = "") -> None:
        """Append one line to metrics.jsonl and print it, followed by `note`, which is not recorded."""
        if not self.writes:
            return
        with writing(self.metrics_path), open(self.metrics_path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step} | values) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if self.mirror:
            try:
                self.mirror(step, values)
            except STOPS:
                raise
            except BaseException as error:  # network libraries can raise anything
                self.mirror = None
                say(
                    f"warning: the tracker failed ({first_line(error)}) and gets no more lines; training continues, "
                    f"and {self.metrics_path} stays complete"
                )
        shown = "  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in values.items())
        say(f"step {step}  {shown}" + (f"  {note}" if note else ""))

    def metrics(self) -> list[dict]:
        """Every line logged so far."""
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

    def first_and_best(self, figure: str) -> tuple[float, float]:
        """The first and the lowest logged value of a figure."""
        values = [line[figure] for line in self.metrics() if figure in line]
        return values[0], min(values)

    def finish(self, status: str, **values) -> None:
        """Write summary.json (status: finished, preempted, failed; final figures) and release the lock. Call it last: a
        finished run is not resumed, only extended."""
        if not self.writes:
            return
        text = as_json({"status": status, **values})
        if status == "finished":
            write_sums(self.path, {"summary.json": text})
        write_atomically(self.path / "summary.json", lambda file: file.write(text))
        if self.held:
            self.held.close()


def open_run(experiment: str, config: RunConfig, facts: dict, group: Group = ALONE) -> Run:
    """Create a run directory, or open the one to resume. facts: for manifest.json (device, fingerprints, …).

    A run is resumed only with the same identity: the options that are declared as part of it, and all facts except the
    device. An option whose identity is a fact (`--model` and "base") may differ if both runs have the fact and it is
    equal: a model that was moved is still the same.

    Raises UserError if the directory already holds a run and --resume is off, holds a run of another config or other
    facts, or is being written by another process, or if the workers of a job differ in config or facts. Resuming a
    finished run ends the program with exit code 0, unless --max-steps extends it (see `extension`). Only worker 0
    opens the directory; the others get a Run that writes nothing.
    """
    agree_on_facts(config, facts, group)
    run = None

    def opened() -> tuple[Path, bool, Sequence[int]]:
        nonlocal run
        run = _open(experiment, config, facts)
        return run.path.absolute(), run.resumed, run.ended

    path, resumed, ended = group.on_main(opened)
    if run and config.report_to != "none":
        from qat_lora.run.tracking import open_tracker

        what = f"--report-to {config.report_to}"
        run.mirror = attempt(what, open_tracker, config.report_to, path, dataclasses.asdict(config))
    return run or Run(path, resumed, writes=False, ended=ended)


def _open(experiment: str, config: RunConfig, facts: dict) -> Run:
    lasting = {key: value for key, value in facts.items() if key != "device"}
    path = _resumed_path(experiment, config, lasting)
    if path is not None:
        held = lock(path)
        more = extension(path, config)
        same = dataclasses.replace(config, max_steps=read_config(path)["max_steps"]) if more else config
        manifest = check_same(path, same, lasting)
        if more:
            manifest["extended"] = [*manifest.get("extended", []), more]
            manifest[CONFIG_SUM] = options_sum((path / "config.yaml").read_bytes(), manifest)
            say(f"extending {path} from {more['done']} to {more['max_steps']} updates; {EXTENDED}")
            say("its results are replaced; if an adapter was trained on them, stop now and copy the folder first")
        elif _status(path) == "finished" and not not_begun(path, manifest):
            say(f"{path} is finished; extend it with a larger --max-steps")
            raise SystemExit(0)
        again = {"time": _stamp(), "argv": sys.argv, "changed": _changed(path, config)}
        write_json(path / "manifest.json", manifest | {"resumed": [*manifest.get("resumed", []), again]})
        for name in ("summary.json", SUMS):  # how it ended before
            (path / name).unlink(missing_ok=True)
        say(f"resuming {path}")
        return Run(path, resumed=True, held=held, ended=[end["after"] for end in manifest.get("extended", ())])
    commit, dirty = git_state()
    label = f"{_stamp()}-{Path(config.config or 'default').stem}-s{config.seed}-{commit}"
    path = Path(config.output_dir or Path("runs") / experiment / label)
    if (path / "manifest.json").exists():
        raise UserError(f"{path} already holds a run; resume it with --resume auto, or give another --output-dir")
    others = sorted({file.name for file in path.glob("*")} - BEFORE_MANIFEST)
    if others:
        raise UserError(
            f"{path} holds {others[0]} but no manifest.json of a run that wrote it; restore that file, give another "
            "--output-dir, or empty the folder"
        )
    held = lock(path)
    text = yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)
    write_atomically(path / "config.yaml", lambda file: file.write(text.encode()))
    write_json(
        path / "manifest.json",
        {
            "format": FORMAT,
            "experiment": experiment,
            "started": _stamp(),
            "argv": sys.argv,
            "git": commit,
            "dirty": dirty,
            "python": platform.python_version(),
            "packages": {name: installed_version(name) for name in PACKAGES},
            "seed": config.seed,
            CONFIG_SUM: options_sum(text.encode(), {}),
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
