"""One page about a run: its result, plots, samples and settings."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2

from qat_lora.errors import UserError
from qat_lora.run.console import attempt, summarise
from qat_lora.run.files import read_json, write_atomically
from qat_lora.run.resuming import read_config
from qat_lora.run.rundir import Run

FILE = "report.html"
TASKS_FILE = "tasks.json"  # what evaluate_model.py measured
TASK_COLUMNS = ("task", "questions", "shots", "metric", "value", "±")
TEXTS = ("samples.txt", "transcripts.md")  # text that a model generated
LONGEST = 6000  # most characters of a text to show
PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{{ name }}</title>
<style>
  body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #1d2330 }
  h1 { font-size: 1.5rem; margin-bottom: 0 } h2 { font-size: 1.1rem; margin-top: 2rem }
  table { border-collapse: collapse } td, th { padding: .15rem .9rem .15rem 0; text-align: left; vertical-align: top }
  td.number { text-align: right; font-variant-numeric: tabular-nums }
  img { max-width: 100% } pre { background: #f3f4f7; padding: .8rem; overflow-x: auto; white-space: pre-wrap }
  .faint { color: #667 }
</style>
<h1>{{ experiment }}</h1>
<p class="faint">{{ name }} · {{ status }} · started {{ started }} on {{ device }} · commit {{ commit }}</p>
{% if measured %}
<h2>Evaluations</h2>
<table>
  <tr><th>figure<th>first<th>lowest<th>highest<th>last</tr>
  {% for row in measured %}
  <tr><td>{{ row.name }}{% for cell in row.cells %}<td class="number">{{ cell }}{% endfor %}</tr>
  {% endfor %}
</table>
{% endif %}
{% if summary %}
<h2>Result</h2>
<table>{% for key, value in summary %}<tr><td>{{ key }}<td class="number">{{ value }}</tr>{% endfor %}</table>
{% endif %}
{% if tasks %}
<h2>Tasks</h2>
<table>
  <tr>{% for name in task_columns %}<th>{{ name }}{% endfor %}</tr>
  {% for row in tasks %}<tr>{% for cell in row %}<td>{{ cell }}{% endfor %}</tr>
  {% endfor %}
</table>
{% endif %}
{% if pictures %}<h2>Plots</h2>{% endif %}
{% for name, data in pictures %}<p><img alt="{{ name }}" src="data:image/png;base64,{{ data }}">{% endfor %}
{% for text in texts %}
<h2>{{ text.name }}</h2>
<pre>{{ text.content }}</pre>
{% endfor %}
<h2>Command</h2>
<pre>{{ command }}</pre>
<details><summary>Settings</summary>
<table>{% for key, value in config %}<tr><td>{{ key }}<td>{{ value }}</tr>{% endfor %}</table></details>
<details><summary>Versions and inputs</summary>
<table>{% for key, value in manifest %}<tr><td>{{ key }}<td>{{ value }}</tr>{% endfor %}</table></details>
</html>
"""


def finish(run: Run, result: dict[str, Any], made: dict[str, Any], quality: list[str], following: str) -> None:
    """End a run with its final figures: write the report and summary.json, and print the summary, see `summarise`."""
    page = attempt("writing the report", write_report, run.path, result)
    run.finish("finished", **result)
    summarise(made | {"report": page}, quality, following)


def write_report(path: Path, result: dict[str, Any] | None = None) -> Path:
    """Draw the plots of the run in `path` and write report.html there, a single self-contained file.

    Works for every experiment, and for runs that are still in progress or were stopped. result: final figures of a run
    that has just ended, used instead of summary.json. Raises UserError if there is no run, or it has logged nothing.
    """
    from qat_lora.run.plots import plot_run

    if not (path / "metrics.jsonl").exists():
        runs = ", ".join(sorted(str(log.parent) for log in path.glob("*/metrics.jsonl")))
        fix = f"give one of its runs: {runs}" if runs else "give a run directory such as runs/train_qat/NAME"
        raise UserError(f"{path} has no metrics.jsonl; {fix}")
    curves = plot_run(path)
    manifest = read_json(path / "manifest.json")
    summary = read_json(path / "summary.json") if (path / "summary.json").exists() else {}
    summary = {"status": "finished", **result} if result else summary
    pictures = [curves, *sorted({*path.glob("*.png"), *path.glob("plots/*.png")} - {curves})]
    page = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(PAGE).render(
        name=path.name,
        experiment=manifest["experiment"],
        status=summary.get("status", "not finished"),
        started=manifest["started"],
        device=manifest["device"],
        commit=f"{manifest['git']}{' with changes' if manifest['dirty'] else ''}",
        command="python " + " ".join(manifest["argv"]),
        measured=list(_measured(Run(path, resumed=False).metrics())),
        summary=[pair for pair in _flat(summary) if pair[0] != "status"],
        tasks=task_rows(read_json(path / TASKS_FILE)) if (path / TASKS_FILE).exists() else [],
        task_columns=TASK_COLUMNS,
        pictures=[(picture.name, base64.b64encode(picture.read_bytes()).decode()) for picture in pictures],
        texts=[{"name": name, "content": _start(path / name)} for name in TEXTS if (path / name).exists()],
        config=[(key, value) for key, value in read_config(path).items() if value is not None],
        manifest=[(key, value) for key, value in _flat(manifest) if not key.startswith(("argv", "git", "dirty"))],
    )  # fmt: skip
    write_atomically(path / FILE, lambda file: file.write(page.encode()))
    return path / FILE


def task_rows(results: dict[str, dict]) -> list[list[str]]:
    """The cells of a table of tasks, a row for each metric, under TASK_COLUMNS."""
    rows = []
    for task, found in results.items():
        for metric, (value, error) in found["metrics"].items():
            uncertain = f"{error:.4f}" if isinstance(error, float) else ""
            rows.append([task, str(found["items"]), str(found["shots"]), metric, f"{value:.4f}", uncertain])
    return rows


def _measured(lines: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """A row for each figure of the evaluations, which are the lines without a learning rate."""
    lines = [line for line in lines if "lr" not in line]
    for name in dict.fromkeys(name for line in lines for name in line if name not in ("step", "stage")):
        values = [line[name] for line in lines if isinstance(line.get(name), int | float)]
        if values and not name.endswith(("_low", "_high", "_rows")):
            cells = (values[0], min(values), max(values), values[-1])
            yield {"name": name, "cells": [f"{value:.4g}" for value in cells]}


def _flat(values: dict[str, Any], above: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, text) of each value in nested dicts."""
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        elif value is not None:
            yield f"{above}{key}", f"{value:.4g}" if isinstance(value, float) else str(value)


def _start(path: Path) -> str:
    text = path.read_text(errors="replace")
    return text if len(text) <= LONGEST else text[:LONGEST] + f"\n… (the rest is in {path.name})"
