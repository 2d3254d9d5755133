# PYTHON_ARGCOMPLETE_OK
"""How many questions does a model answer? Runs tasks of lm-evaluation-harness on a model, a student or an export.

    python scripts/evaluate_model.py --tasks agreement,recall,docstring                     # the embedded model
    python scripts/evaluate_model.py --checkpoint runs/q2/best.pt --adapter runs/lora/adapter
    python scripts/evaluate_model.py --model exports/q2/model.gguf --tasks recall
    python scripts/evaluate_model.py --checkpoint runs/q2/best.pt --tasks arc_easy,hellaswag --items 500
    python scripts/evaluate_model.py --tasks my_task.yaml --output results.json

Three tasks need no download, and are multiple choice: agreement (does a verb agree with its noun, two choices), recall
(what comes next when a list is repeated, four) and docstring (how a docstring of Python's library goes on, four). Any
other name is one of the harness's own tasks, whose data come from the hub; a path is a task of yours in its YAML.

--model takes what every script takes, and exports: hf and merged folders, compressed-tensors, gptq and autoround
folders if their library is installed, and .gguf files of a student, which run in llama.cpp (llama-cpp-python). An mlx
folder runs on a Mac: mlx_lm.evaluate.

Prints a table. The results are added to tasks.json in the run of the adapter or student, whose report
(make report) then shows them; --output writes them elsewhere. 200 questions of each local task take a few minutes on
two cores with the embedded model.
"""

from dataclasses import dataclass
from typing import Literal

from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import ScriptConfig


@dataclass(frozen=True, kw_only=True)
class Config(ScriptConfig):
    model: str | None = opt.model(None, "model or export [the checkpoint's base, else smollm2-135m]")
    checkpoint: str | None = opt.model(None, "student: the best.pt of train_qat.py [none: the model itself]")
    adapter: str | None = opt.model(None, "adapter: a PEFT folder, e.g. the adapter/ of train_recovery_lora.py")
    tasks: str = opt.data("agreement,recall,docstring", "tasks, separated by commas: names, or YAML files")
    items: int = opt.data(200, "questions of each task, from the first on", "--limit", at_least=1)
    shots: int | None = opt.data(None, "solved examples before each question [the task's own]", at_least=0)
    batch_size: int = opt.run(
        8, "questions per forward pass, which holds their logits for every token of the vocabulary", at_least=1
    )
    precision: Literal["auto", "fp32", "bf16"] = opt.device(
        "fp32", "arithmetic: fp32, bf16 autocast, or auto (bf16 where the device supports it)"
    )
    output: str | None = opt.run(None, "JSON file to write [tasks.json in the run of the adapter or student]")


if __name__ == "__main__":
    check_command_line(Config, "evaluate_model", __doc__)  # before the imports that take seconds

import logging
from pathlib import Path

import lm_eval
import torch
from lm_eval.tasks import TaskManager
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from qat_lora.backend import TorchBackend, open_backend
from qat_lora.data.tasks import TASKS, local_task
from qat_lora.errors import UserError, first_line
from qat_lora.hosts.revision import revision
from qat_lora.lora.adapter import load_adapter, load_trained
from qat_lora.models.harness import Harness, LlamaCpp, on_backend
from qat_lora.models.loading import load_tokenizer
from qat_lora.models.source import stored_quantised
from qat_lora.run.console import say
from qat_lora.run.files import read_json, write_json
from qat_lora.run.report import TASK_COLUMNS, TASKS_FILE, task_rows


def main(cfg: Config) -> None:
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    output = output_of(cfg)
    tasks = load_tasks(cfg)
    if cfg.dry_run:
        return say(
            f"tasks {', '.join(tasks)}, at most {cfg.items} questions each; results to {output or 'the terminal'}"
        )
    backend = open_backend(cfg.device, cfg.precision)
    backend.seed(cfg.seed)
    model = open_model(cfg, backend)
    found = lm_eval.evaluate(model, {"tasks": tasks, "groups": {}, "group_map": {}}, limit=cfg.items, log_samples=False)
    facts = {"model": cfg.model, "checkpoint": cfg.checkpoint, "adapter": cfg.adapter, "precision": backend.precision}
    facts |= {"device": backend.kind, "commit": revision(), "lm_eval": lm_eval.__version__}
    results = {name: result(found, name) | facts for name in tasks}
    say(table(results))
    if output:
        write_json(output, (read_json(output) if output.exists() else {}) | results)
        say(f"results in {output}")


def load_tasks(cfg: Config) -> dict:
    """The harness's tasks by name. Raises UserError for a name that it does not know, and for data out of reach."""
    names = [name.strip() for name in cfg.tasks.split(",") if name.strip()]
    own = all(name in TASKS for name in names)
    manager, local = TaskManager(include_defaults=not own), ", ".join(TASKS)
    found = {}
    for name in names:
        try:
            found |= manager.load([local_task(name, cfg.items) if name in TASKS else name])["tasks"]
        except KeyError as error:
            raise UserError(
                f"--tasks {name} is not a task of lm_eval {lm_eval.__version__} or a YAML file; local ones: {local}"
            ) from error
        except Exception as error:  # datasets raises anything when its data cannot be had
            raise UserError(f"--tasks {name} cannot be loaded ({first_line(error)}); local ones: {local}") from error
    for task in found.values():
        if cfg.shots is not None:
            task.set_config(key="num_fewshot", value=cfg.shots)
        elif task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=cfg.seed)
    if not found:
        raise UserError(f"--tasks {cfg.tasks!r} names no task; local ones: {local}")
    return found


def open_model(cfg: Config, backend: TorchBackend) -> Harness | LlamaCpp:
    """The model of --model, --checkpoint and --adapter, placed; a .gguf file runs in llama.cpp, and a folder of packed
    codes is read by transformers with the format's own library."""
    if cfg.model and cfg.model.endswith(".gguf") and not cfg.checkpoint:
        return LlamaCpp(cfg.model, cfg.adapter)
    method = stored_quantised(cfg.model) if cfg.model and not cfg.checkpoint else None
    if method == "quantization":
        raise UserError(
            f"--model {cfg.model} is an mlx folder, which runs on a Mac: mlx_lm.evaluate --model {cfg.model}"
        )
    if method:
        model, tokenizer = load_packed(cfg.model)
        model = load_adapter(model, cfg.adapter) if cfg.adapter else model
    else:
        model, name = load_trained(cfg.model, cfg.checkpoint, cfg.adapter)
        tokenizer = load_tokenizer(name)
    return on_backend(model, tokenizer, backend, cfg.batch_size)


def load_packed(folder: str) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """A folder of packed codes in transformers. Raises UserError with its words if a library is missing."""
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
        return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ImportError, ValueError, OSError) as error:
        raise UserError(f"--model {folder}: {first_line(error)}") from error


def output_of(cfg: Config) -> Path | None:
    """The file for the results: --output, or tasks.json in the run that made the adapter or student."""
    if cfg.output:
        output = Path(cfg.output)
        if output.is_dir() or not output.parent.is_dir():
            raise UserError(f"--output {output} is not a file in a folder that exists; give another path")
        return output
    made = cfg.adapter or cfg.checkpoint
    run = Path(made).parent if made else None
    return run / TASKS_FILE if run and (run / "manifest.json").exists() else None


def result(found: dict, name: str) -> dict:
    """The record of one task: its questions, shots and {metric: [value, standard error]}."""
    values = {key.partition(",")[0]: value for key, value in found["results"][name].items() if "," in key}
    errors = {key.removesuffix("_stderr"): value for key, value in values.items() if key.endswith("_stderr")}
    return {
        "items": found["n-samples"][name]["effective"],
        "shots": found["n-shot"][name],
        "metrics": {key: [value, errors[key]] for key, value in values.items() if key in errors},
    }


def table(results: dict) -> str:
    lines = [TASK_COLUMNS, ("---",) + ("---:",) * 2 + ("---",) + ("---:",) * 2, *task_rows(results)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


if __name__ == "__main__":
    run_script(main, Config, "evaluate_model", __doc__)
