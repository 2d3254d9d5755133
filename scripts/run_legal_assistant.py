# PYTHON_ARGCOMPLETE_OK
"""What does a legal fine-tune answer, and do its citations exist? Ask it in the terminal or on a local web page.

    python scripts/run_legal_assistant.py --run runs/law --question "When does the time for a claim end?"
    python scripts/run_legal_assistant.py --run runs/law --web
    python scripts/run_legal_assistant.py --model runs/law/model --authorities runs/law/authorities.json --web
    python scripts/run_legal_assistant.py --model Qwen/Qwen2.5-0.5B-Instruct --adapter law/adapter

--run takes the model, the adapter and the list of authorities from a run directory of train_cot_sft.py. Without
--question and --web, each line of standard input is a question. The answer appears as it is generated; then each
citation is looked up in the list, and those that are not in it are marked. Answers are greedy unless --temperature is
given; then the same --seed gives the same answers to the same questions in the same order. Runs on CPU and CUDA.
Not legal advice. docs/cot-sft.md is the runbook.
"""

from dataclasses import dataclass
from typing import Literal

from qat_lora.data.options import ChatOptions
from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import ScriptConfig


@dataclass(frozen=True, kw_only=True)
class Config(ChatOptions, ScriptConfig):
    run: str | None = opt.model(None, "run directory of train_cot_sft.py, which has the model, adapter and authorities")
    model: str | None = opt.model(None, "base model: a folder, .gguf file or hub name [the run's, else smollm2-135m]")
    checkpoint: str | None = opt.model(None, "quantised base model (base.pt) under the adapter")
    adapter: str | None = opt.model(None, "adapter: a PEFT folder, e.g. the adapter/ of train_recovery_lora.py")
    authorities: str | None = opt.data(
        None, "authorities.json, the list of what may be cited [the run's, else the generator's]"
    )
    thinking: Literal["on", "off"] | None = opt.data(
        None, "render the question with thinking on or off [as in the run, else off]"
    )
    question: str | None = opt.data(None, "question [each line of standard input]")
    web: bool = opt.run(False, "serve a web page instead of answering in the terminal")
    host: str = opt.run("127.0.0.1", "address of the web page; 0.0.0.0 lets other machines in")
    port: int = opt.run(7860, "port of the web page", at_least=1, at_most=65535, fix="use e.g. 7860")
    max_new_tokens: int | None = opt.run(None, "longest answer, in tokens [as in the run, else 256]", at_least=1)
    temperature: float = opt.run(0.0, "sampling temperature; 0 is greedy")
    top_p: float = opt.run(
        1.0, "sample from the most probable tokens that hold this share of the probability", above=0, at_most=1
    )


if __name__ == "__main__":
    check_command_line(Config, "run_legal_assistant", __doc__)  # before the imports that take seconds

import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from qat_lora.backend import open_backend
from qat_lora.data.appearance import visible
from qat_lora.data.chat import after_thought, check_template, opens_thought
from qat_lora.errors import UserError, first_line, load_package
from qat_lora.experiments.legal.answers import messages
from qat_lora.experiments.legal.authorities import Authorities
from qat_lora.experiments.legal.page import CUT_OFF, STYLE, checked_question, page, verdict_line, verdicts
from qat_lora.experiments.legal.rules import AUTHORITIES
from qat_lora.experiments.legal.sections import Answer
from qat_lora.lora.adapter import load_trained
from qat_lora.models.generate import check_sampling
from qat_lora.models.loading import load_config
from qat_lora.models.packaged import PACKAGED
from qat_lora.models.source import SPEECH
from qat_lora.rl.completion import Stream, check_device, check_room
from qat_lora.run.console import say, typed_lines
from qat_lora.run.files import check_files, read_json
from qat_lora.run.resuming import read_config


def main(cfg: Config) -> None:
    cfg = from_run(cfg)
    check(cfg)
    thinks = cfg.thinks
    authorities = read_authorities(cfg.authorities)
    backend = open_backend(cfg.device, cfg.precision)
    model, name = load_trained(cfg.model, cfg.checkpoint, cfg.adapter)
    # The run's own tokenizer has the chat template that the model was trained with.
    tokenizer = cfg.tokenizer(str(Path(cfg.run) / "model") if cfg.run else name)
    check_template(tokenizer)
    check_room(model, tokenizer, messages("?"), cfg.max_new_tokens, thinks)
    about = f"{name}{f' + {cfg.adapter}' if cfg.adapter else ''} on {backend}, {len(authorities.names)} authorities"
    say(about)
    if cfg.dry_run:
        return
    backend.place(model)
    backend.seed(cfg.seed)  # only once, so that the same question gets another answer next time

    opened = opens_thought(tokenizer, thinks)

    def ask(question: str) -> Stream:
        return Stream(
            model, tokenizer, messages(question), backend, turns=cfg.web, max_new_tokens=cfg.max_new_tokens,
            temperature=cfg.temperature, top_p=cfg.top_p, thinking=thinks,
        )  # fmt: skip

    if cfg.web:
        return serve(cfg, ask, authorities, about, opened)
    for question in questions(cfg):
        try:
            answer_in_terminal(ask(question), authorities, opened)
        except UserError as error:
            if cfg.question is not None:
                raise
            say(f"not answered: {error}")  # the next question may work


def check(cfg: Config) -> None:
    check_device(cfg.device)
    check_sampling(cfg.temperature, top_p=cfg.top_p)
    if cfg.web and cfg.question is not None:
        raise UserError("--web and --question exclude each other; give one of them")
    if cfg.question is not None:
        checked_question(cfg.question)
    if cfg.web:
        check_address(cfg.host, cfg.port)


def check_address(host: str, port: int) -> None:
    """Raise UserError if the web page cannot be opened: gradio would report it only after the model is loaded, without
    the reason."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        socket.create_server(address[:2], family=family).close()
    except (OSError, UnicodeError) as error:
        raise cannot_open(host, port, error) from error


def cannot_open(host: str, port: int, error: Exception) -> UserError:
    reason = getattr(error, "strerror", None) or first_line(error)
    return UserError(f"--host {host} --port {port} cannot be opened ({reason}); give another --host or --port")


def from_run(cfg: Config) -> Config:
    """The config with the settings of --run: its base model and adapter, or the full model that it trained, its list of
    authorities and its longest answer."""
    if cfg.run is None:
        return replace(
            cfg,
            thinking=cfg.thinking or "off",
            max_new_tokens=256 if cfg.max_new_tokens is None else cfg.max_new_tokens,
        )
    whole = not (Path(cfg.run) / "adapter").is_dir()
    names = ("checkpoint", "adapter", "authorities", *(["model"] if whole else []))
    given = [f"--{name}" for name in names if getattr(cfg, name) is not None]
    if given:
        raise UserError(f"--run {cfg.run} already sets {given[0]}; leave one of them out")
    folder = Path(cfg.run)
    # with an adapter, the weights in model/ are not read
    spoken = ["model"] if whole else [f"model/{name}" for name in SPEECH]
    check_files(folder, "config.yaml", "authorities.json", "base.pt", *spoken)
    trained = read_config(folder)
    model, length = trained.get("model"), trained.get("max_new_tokens")
    if not isinstance(model, str) or not isinstance(length, int):
        raise UserError(
            f"{folder / 'config.yaml'} does not say which model was trained or how long an answer may be: it is "
            "damaged, or of another script; give a run of train_cot_sft.py"
        )
    if not (folder / "model").is_dir():
        raise UserError(
            f"--run {cfg.run} holds no model/: it has not finished; resume it with train_cot_sft.py --resume"
        )
    found = {"authorities": str(folder / "authorities.json")}
    found |= {"thinking": trained.get("thinking", "off")} if cfg.thinking is None else {}
    found |= {"max_new_tokens": length} if cfg.max_new_tokens is None else {}
    if not whole:
        base = folder / "base.pt"
        found |= {"model": cfg.model or base_model(folder, model), "adapter": str(folder / "adapter")}
        found |= {"checkpoint": str(base)} if base.exists() else {}
    else:
        found["model"] = str(folder / "model")
    return replace(cfg, **found)


def base_model(run: Path, name: str) -> str:
    """Where the base model of a run is now. name: its name in the run's config.yaml.

    Looks at the path that the run's adapter records, relative to each folder above the run, relative to the working
    directory, and on the hub. Raises UserError if it is in none of these places.
    """
    if name in PACKAGED:
        return name
    recorded = read_json(run / "adapter" / "adapter_config.json").get("base_model_name_or_path") or name
    known = [path for path in (Path(str(recorded)), Path(name).expanduser()) if path.is_absolute()]
    for place in (*known, *(above / Path(name).expanduser() for above in run.resolve().parents), Path(name)):
        if (place / "config.json").is_file() or (place.suffix == ".gguf" and place.is_file()):
            return str(place.absolute())
    if known:
        raise UserError(
            f"--run {run} was trained on the model {known[0]}, which is missing; give its path with --model"
        )
    try:
        load_config(name)
    except UserError as error:
        reason = str(error).partition(";")[0]
        raise UserError(
            f"--run {run} was trained on model {name!r}, which is in no folder above the run, not here and not on the "
            f"hub ({reason}); give its path with --model"
        ) from error
    return name


def read_authorities(path: str | None) -> Authorities:
    if path is None:
        return Authorities(AUTHORITIES)
    names = read_json(Path(path)).get("authorities")
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UserError(f'--authorities {path} holds no list "authorities" of texts; give the file of a training run')
    return Authorities(names)


def questions(cfg: Config) -> Iterator[str]:
    return filter(visible, typed_lines("question")) if cfg.question is None else iter([cfg.question])


def answer_in_terminal(pieces: Stream, authorities: Authorities, opened: bool) -> None:
    for piece in pieces:
        print(piece, end="", flush=True)
    print()
    for name, known in verdicts(Answer.read(after_thought(pieces.text, opened), pieces.ended), authorities):
        say(verdict_line(name, known))
    if not pieces.ended:
        say(CUT_OFF)


def serve(cfg: Config, ask, authorities: Authorities, about: str, opened: bool) -> None:
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"  # a local page sends no analytics
    gradio = load_package("gradio", "--web", ", or ask without --web")
    plain = gradio.themes.Default(
        font=["system-ui", "sans-serif"], font_mono=["monospace"]
    )  # no fonts from the internet
    try:
        page(ask, authorities, about, opened).launch(
            server_name=cfg.host, server_port=cfg.port, css=STYLE, theme=plain, footer_links=[]
        )
    except OSError as error:
        raise cannot_open(cfg.host, cfg.port, error) from error


if __name__ == "__main__":
    run_script(main, Config, "run_legal_assistant", __doc__)
