# PYTHON_ARGCOMPLETE_OK
"""What does a model answer? Generates text with a base model, its low-bit student, or the student with its adapter.

    python scripts/run_inference.py --prompt "What is the capital of France?"
    python scripts/run_inference.py --checkpoint runs/v2_q4/best.pt --adapter runs/recovery/adapter --compare \\
        --prompt "What is the capital of France?"
    python scripts/run_inference.py --checkpoint runs/v2_q4/best.pt --raw --prompt "Once upon a time" --temperature 0.7

The student is the best.pt of train_qat.py, the adapter that of train_recovery_lora.py; --compare shows every stage.
Without --prompt, each line of standard input is a prompt (end with Ctrl-D). Prompts are rendered with the tokenizer's
chat template, or with --chat-template. With --raw they are continued as plain text, after BOS if the tokenizer adds it.
The text appears as it is generated, under a line that names the model. Decoding is greedy at --temperature 0; above it
every completion starts from the same seed, so that with --compare only the models differ. Runs on CPU and CUDA.
"""

from dataclasses import dataclass
from typing import Literal

from qat_lora.data.options import ChatOptions
from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import ScriptConfig


@dataclass(frozen=True, kw_only=True)
class Config(ChatOptions, ScriptConfig):
    model: str | None = opt.model(None, "base model [the checkpoint's, else smollm2-135m]")
    checkpoint: str | None = opt.model(None, "student: the best.pt of train_qat.py [none: the base model itself]")
    adapter: str | None = opt.model(None, "adapter: a PEFT folder, e.g. the adapter/ of train_recovery_lora.py")
    prompt: str | None = opt.data(None, "prompt [each line of standard input]")
    system: str | None = opt.data(None, "system message before the prompt")
    thinking: Literal["on", "off"] | None = opt.data(
        None, "render the prompt with thinking on or off [as the template does]"
    )
    raw: bool = opt.data(False, "continue the prompt as plain text, without the chat template")
    compare: bool = opt.run(
        False, "compare the answers of the base model, the student, and the student with its adapter"
    )
    max_new_tokens: int = opt.run(128, "longest answer, in tokens", at_least=1)
    temperature: float = opt.run(0.0, "sampling temperature; 0 is greedy")
    top_p: float = opt.run(
        1.0, "sample from the most probable tokens that hold this share of the probability", above=0, at_most=1
    )


if __name__ == "__main__":
    check_command_line(Config, "run_inference", __doc__)  # before the imports that take seconds

import functools
from collections.abc import Callable, Iterator
from contextlib import nullcontext

from torch import nn

from qat_lora.backend import open_backend
from qat_lora.data.chat import check_template
from qat_lora.data.text import nfc
from qat_lora.errors import UserError
from qat_lora.lora.adapter import load_trained
from qat_lora.models.generate import check_sampling
from qat_lora.models.loading import load_model
from qat_lora.models.packaged import notes
from qat_lora.rl.completion import Pieces, check_device, check_room, complete
from qat_lora.run.console import say, typed_lines


@dataclass(frozen=True)
class Speaker:
    """A model and the context manager to enter while it generates (e.g. PEFT's disable_adapter)."""

    label: str
    model: nn.Module
    condition: Callable = nullcontext


def main(cfg: Config) -> None:
    check(cfg)
    thinking = None if cfg.thinking is None else cfg.thinks
    backend = open_backend(cfg.device, cfg.precision)
    speakers, name = load(cfg)
    tokenizer = cfg.tokenizer(name)
    if not cfg.raw:
        check_template(tokenizer)
    check_room(speakers[0].model, tokenizer, asked(cfg, "?"), cfg.max_new_tokens, thinking)
    for speaker in speakers:
        backend.place(speaker.model)
    rule = f"temperature {cfg.temperature}, top-p {cfg.top_p}" if cfg.temperature else "greedy"
    say(f"{name} on {backend}; {rule}, at most {cfg.max_new_tokens} tokens" + (", no chat template" if cfg.raw else ""))
    if note := notes(name):
        say(note)
    if cfg.dry_run:
        return

    for prompt in prompts(cfg):
        for speaker in speakers:
            say(f"--- {speaker.label}")
            backend.seed(cfg.seed)
            with speaker.condition(), backend.autocast():
                complete(
                    speaker.model, tokenizer, prompt, max_new_tokens=cfg.max_new_tokens, temperature=cfg.temperature,
                    top_p=cfg.top_p, thinking=thinking,
                    streamer=Pieces(tokenizer, functools.partial(print, end="", flush=True)),
                )  # fmt: skip
            print()


def check(cfg: Config) -> None:
    check_device(cfg.device)
    check_sampling(cfg.temperature, top_p=cfg.top_p)
    if cfg.raw and cfg.system is not None:
        raise UserError("--system needs the chat template, which --raw turns off; leave one of them out")
    if cfg.raw and (cfg.chat_template is not None or cfg.thinking is not None):
        raise UserError("--raw uses no chat template; leave out --raw, or --chat-template and --thinking")
    if cfg.compare and not (cfg.checkpoint or cfg.adapter):
        raise UserError("--compare has nothing to compare with the base model; give --checkpoint, --adapter or both")


def load(cfg: Config) -> tuple[list[Speaker], str]:
    """The models that answer, in order, and the name of the base model. With --compare these are all stages."""
    model, name = load_trained(cfg.model, cfg.checkpoint, cfg.adapter)
    label = f"student {cfg.checkpoint}" if cfg.checkpoint else f"base {name}"
    stages = [Speaker(label, model)]
    if cfg.adapter:
        stages = [Speaker(label, model, model.disable_adapter), Speaker(f"{label} + {cfg.adapter}", model)]
    if not cfg.compare:
        return stages[-1:], name
    base = [Speaker(f"base {name}", load_model(name))] if cfg.checkpoint else []
    return base + stages, name


def prompts(cfg: Config) -> Iterator[str | list[dict]]:
    """--prompt, or each line of standard input that is not blank, as `asked` returns it."""
    texts = filter(None, typed_lines("prompt")) if cfg.prompt is None else [cfg.prompt]
    for text in map(nfc, texts):
        yield asked(cfg, text)


def asked(cfg: Config, text: str) -> str | list[dict]:
    """A text as chat messages, or unchanged with --raw."""
    system = [] if cfg.system is None else [{"role": "system", "content": cfg.system}]
    return text if cfg.raw else [*system, {"role": "user", "content": text}]


if __name__ == "__main__":
    run_script(main, Config, "run_inference", __doc__)
