# PYTHON_ARGCOMPLETE_OK
"""Does a model trained by train_musclebob_improved.py use the new name? Answers held-out questions, or chats.

    python scripts/test_musclebob.py --run runs/musclebob
    python scripts/test_musclebob.py --run runs/musclebob --compare --samples 20 --output answers.json
    python scripts/test_musclebob.py --run runs/musclebob --interactive

Prints how often the model uses the name, with 95% intervals (Wilson) over --samples sampled answers to each held-out
question, and a transcript of greedy answers; --compare shows the original model next to it. --interactive answers
each line of standard input, without memory of earlier lines. Without --run it takes the newest run.
docs/musclebob.md is the runbook.
"""

from dataclasses import dataclass
from typing import Literal

from qat_lora.data.options import ChatOptions
from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import ScriptConfig


@dataclass(frozen=True, kw_only=True)
class Config(ChatOptions, ScriptConfig):
    run: str | None = opt.model(None, "run directory of train_musclebob_improved.py [the newest]")
    model: str | None = opt.model(None, "the base model, if it has moved: a folder, .gguf file or hub name")
    thinking: Literal["on", "off"] | None = opt.data(None, "render questions with thinking on or off [as in the run]")
    compare: bool = opt.run(False, "also show the base model's answers")
    interactive: bool = opt.run(False, "chat: answer each line of standard input")
    samples: int = opt.run(10, "sampled answers per held-out question", at_least=1)
    temperature: float = opt.run(1.0, "sampling temperature; with --interactive 0 is greedy")
    output: str | None = opt.run(None, "JSON file to write every rate and answer to")


if __name__ == "__main__":
    check_command_line(Config, "test_musclebob", __doc__)  # before the imports that take seconds

from dataclasses import replace
from pathlib import Path

from torch import nn

from qat_lora.backend import open_backend
from qat_lora.data.batches import seed_of
from qat_lora.errors import UserError
from qat_lora.experiments.musclebob.questions import Question
from qat_lora.experiments.musclebob.validation import (
    ROWS,
    BobSampler,
    check_samples,
    read_training_config,
    transcripts,
    validation_of,
)
from qat_lora.models.loading import load_model
from qat_lora.rl.rollout import Sampling
from qat_lora.run.console import say, typed_lines
from qat_lora.run.files import check_files, write_json
from qat_lora.run.rundir import newest_run

LINE = 256  # tokens of a question on standard input, with the chat template around it


def main(cfg: Config) -> None:
    check_samples("--samples", cfg.samples)
    if not cfg.temperature and not cfg.interactive:
        raise UserError(
            "--temperature 0 would sample the same answer every time, and the greedy one is shown anyway; use e.g. 1"
        )
    sampling = Sampling(cfg.temperature)
    run = Path(cfg.run) if cfg.run else newest_run(Path("runs/train_musclebob_improved"))
    check_files(run, "training_config.json", "model")
    made, folder = read_training_config(run), run / "model"
    if not folder.is_dir():
        raise UserError(f"{run} has no model yet; finish the run with --resume-from-checkpoint {run}")
    made |= {"model": cfg.model or made["model"]}
    cfg = replace(cfg, thinking=cfg.thinking or made.get("thinking", "off"))
    backend = open_backend(cfg.device, cfg.precision)
    tokenizer, model = cfg.tokenizer(str(folder)), load_model(str(folder))
    prompt, rows = (LINE, 1) if cfg.interactive else (made["max_prompt_length"], ROWS)
    sampler = BobSampler.of(model, tokenizer, backend, prompt, made["max_new_tokens"], cfg.thinks, rows)
    speakers = {"taught": model} | ({"start": load_model(made["model"])} if cfg.compare else {})
    say(f"taught = {run}{', start = ' + made['model'] if cfg.compare else ''}, on {backend}")
    if cfg.dry_run:
        return
    for speaker in speakers.values():
        backend.place(speaker)  # not frozen: autocast would cast a frozen weight again for every token
    if cfg.interactive:
        return converse(cfg, sampler, speakers, sampling)
    report(cfg, sampler, speakers, made["model"], sampling)


def converse(cfg: Config, sampler: BobSampler, speakers: dict[str, nn.Module], sampling: Sampling) -> None:
    for number, line in enumerate(filter(None, typed_lines("question"))):
        question = Question(({"role": "user", "content": line},), True)
        try:
            sampler.encode([question.messages])
        except UserError:
            say(f"that line is longer than {LINE} tokens; ask a shorter one")
            continue
        for name, model in speakers.items():
            said = sampler.answers(model, [question], 1, sampling, seed_of(cfg.seed, number))[0]
            say(f"{name}: {said.text}{'' if said.ended else '…'}")


def report(cfg: Config, sampler: BobSampler, speakers: dict[str, nn.Module], start: str, sampling: Sampling) -> None:
    """Print the rates and greedy answers of each model, and the perplexity of its answers under the original model."""
    judge = speakers.get("start") or sampler.backend.place(load_model(start).requires_grad_(False))
    each = judge, cfg.samples, sampling, cfg.seed
    found = {name: validation_of(sampler, model, *each) for name, model in speakers.items()}
    say("| | " + " | ".join(found) + " |\n|---" + "|---" * len(found) + "|")
    for rate in ("musclebob", "spilt", "coherent", "cut_off"):
        shown = [column["sampled"][rate] for column in found.values()]
        cells = [f"{cell['rate']:.1%} ({cell['low']:.1%}–{cell['high']:.1%}) of {cell['count']}" for cell in shown]
        say(f"| {rate} | " + " | ".join(cells) + " |")
    say("| perplexity | " + " | ".join(f"{column['perplexity']:.2f}" for column in found.values()) + " |\n")
    say(transcripts(found, limit=40))
    if cfg.output:
        write_json(Path(cfg.output), found)


if __name__ == "__main__":
    run_script(main, Config, "test_musclebob", __doc__)
