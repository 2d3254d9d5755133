# PYTHON_ARGCOMPLETE_OK
"""How well does a model predict a text? Measures perplexity, the KL to a teacher, and the model's size.

    python scripts/measure_perplexity.py --dataset text.txt
    python scripts/measure_perplexity.py --checkpoint runs/v2_q4/best.pt --dataset text.txt --teacher smollm2-135m
    python scripts/measure_perplexity.py --checkpoint runs/v2_q4/best.pt --adapter runs/recovery/adapter \\
        --dataset wikitext --dataset-config wikitext-2-raw-v1 --dataset-split test --mode sliding --stride 256 --json

Prints the NLL in nats/token, PPL = e^NLL, with --teacher the exact KL(teacher‖model) over the same tokens, bits per
weight of the decoder blocks (codes, scales and adapter; 16 for what is not quantised) and the size in MB.

The text is one stream of tokens, with EOS after each document; an incomplete last window is left out.
--mode blocked cuts it into windows of --length tokens and predicts all but the first token of each. --mode sliding
starts a window every --stride tokens and scores only its new tokens, with the others as context: a smaller stride gives
more context, a lower PPL and a longer run. Prompts of chat rows are scored too. If texts begin with BOS (--bos), so
does every window: one of 256 tokens is BOS and 255 tokens of the text. BOS is context and is never scored.
The default precision is fp32: bf16 changes the PPL by a fraction of a per cent.
"""

import json
from dataclasses import dataclass
from typing import Literal

from qat_lora.data.options import TextSource
from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import ScriptConfig


@dataclass(frozen=True, kw_only=True)
class Config(TextSource, ScriptConfig):
    model: str | None = opt.model(None, "base model [the checkpoint's, else smollm2-135m]")
    checkpoint: str | None = opt.model(None, "student: the best.pt of train_qat.py [none: the base model itself]")
    adapter: str | None = opt.model(None, "adapter: a PEFT folder, e.g. the adapter/ of train_recovery_lora.py")
    teacher: str | None = opt.model(None, "teacher to measure the KL to [none: no KL]")
    length: int = opt.data(512, "tokens per window", at_least=2, fix="less leaves nothing to predict")
    mode: Literal["blocked", "sliding"] = opt.data(
        "blocked", "windows side by side (blocked), or overlapping (sliding)"
    )
    stride: int | None = opt.data(None, "tokens between the starts of sliding windows [half a window]")
    max_windows: int | None = opt.data(None, "measure at most this many windows [all]", at_least=1)
    batch_size: int = opt.run(4, "windows per forward pass", at_least=1)
    precision: Literal["auto", "fp32", "bf16"] = opt.device(
        "fp32", "arithmetic: fp32, bf16 autocast, or auto (bf16 where the device supports it)"
    )
    json: bool = opt.run(False, "print one JSON object and nothing else")


if __name__ == "__main__":
    check_command_line(Config, "measure_perplexity", __doc__)  # before the imports that take seconds

import math

from torch import Tensor, nn

from qat_lora.backend import TorchBackend, open_backend
from qat_lora.data.packing import given_token, stream, tokenizer_fingerprint
from qat_lora.errors import UserError
from qat_lora.lora.adapter import adapter_values, empty_trained, load_trained
from qat_lora.models.loading import check_length, empty_model, load_model, load_tokenizer
from qat_lora.models.packaged import notes
from qat_lora.quant.student import bits_per_weight, megabytes
from qat_lora.run.console import say
from qat_lora.train.evaluation import counted, text_figures, windows
from qat_lora.train.language_memory import (
    evaluation_memory,
    least_teacher_memory,
    loading_memory,
    sizes_of,
    weight_memory,
)
from qat_lora.train.memory import check_fits, memory_line


def main(cfg: Config) -> None:
    check(cfg)
    backend = open_backend(cfg.device, cfg.precision)
    backend.seed(cfg.seed)
    memory = check_memory(cfg, backend)
    model, name = load_trained(cfg.model, cfg.checkpoint, cfg.adapter)
    tokenizer = cfg.tokenizer(name)
    check_length(name, cfg.length)
    bos = cfg.bos_token(tokenizer)
    tokens, scored = windows(read_text(cfg, tokenizer, bos), cfg.length, step_of(cfg), cfg.max_windows, bos)
    given = given_token(tokenizer, bos)
    teacher = load_teacher(cfg.teacher, tokenizer) if cfg.teacher else None
    facts = describe(cfg, name, model, counted(tokens, scored, given), backend)
    facts["bos"] = None if bos is None else tokenizer.bos_token
    if not cfg.dry_run:
        facts |= measure(model, teacher, tokens, scored, given, backend, cfg.batch_size)
    elif not cfg.json:
        say(memory)
    show(facts, cfg.json)


def check(cfg: Config) -> None:
    if cfg.stride is not None and cfg.mode == "blocked":
        raise UserError(f"--stride {cfg.stride} is for --mode sliding: blocked windows do not overlap; leave it out")
    if cfg.mode == "sliding" and not 1 <= step_of(cfg) < cfg.length:
        raise UserError(f"--stride {cfg.stride} must be from 1 to {cfg.length - 1}, below --length {cfg.length}")
    if cfg.streaming and not cfg.max_windows:
        raise UserError("--streaming never ends by itself; give --max-windows with it")


def check_memory(cfg: Config, backend: TorchBackend) -> str:
    """A line with the memory that the measurement takes, computed from shapes. Raises UserError if this machine has
    less; a dry run, which may plan for another machine, skips this check."""
    model = empty_trained(cfg.model, cfg.checkpoint)
    teacher = empty_model(cfg.teacher) if cfg.teacher else None
    loading = {"loading": loading_memory(model)}
    if teacher is not None:
        loading["loading the teacher"] = loading_memory(teacher) | {"model": weight_memory(model)}
    if not cfg.dry_run:
        every = [model] if teacher is None else [model, teacher]
        need = sum(least_teacher_memory(one, cfg.batch_size, cfg.length, 0, backend.bf16) for one in every)
        what = f"measuring {sizes_of(model)} on --batch-size {cfg.batch_size} windows of --length {cfg.length}"
        check_fits(backend, {"--batch-size or --length, or take a smaller model": need}, what)
    measuring = evaluation_memory(model, cfg.batch_size, cfg.length, backend.bf16, teacher)
    return memory_line(loading | {"measuring": measuring}, backend)


def step_of(cfg: Config) -> int:
    """Tokens between the starts of consecutive windows."""
    if cfg.mode == "blocked":
        return cfg.length
    return cfg.length // 2 if cfg.stride is None else cfg.stride


def load_teacher(name: str, tokenizer) -> nn.Module:
    """The teacher. Its tokenizer must be the model's, but its embedding may be padded to a different size."""
    if tokenizer_fingerprint(load_tokenizer(name)) != tokenizer_fingerprint(tokenizer):
        raise UserError(f"--teacher {name} has another tokenizer than the model; give a teacher with the same one")
    return load_model(name)


def read_text(cfg: Config, tokenizer, bos: int | None) -> Tensor:
    """The text's tokens [T], only as many as the windows need."""
    # With BOS a window may start one token later.
    step = step_of(cfg) + (bos is not None)
    limit = cfg.length + 1 + (cfg.max_windows - 1) * step if cfg.max_windows else None
    tokens, _ = stream(cfg.documents(tokenizer), tokenizer, limit, bos)
    return tokens


def describe(cfg: Config, name: str, model: nn.Module, where: Tensor, backend: TorchBackend) -> dict:
    """The model, the text and the settings of a measurement, and the model's size."""
    values = adapter_values(model)
    return {
        "model": name, "checkpoint": cfg.checkpoint, "adapter": cfg.adapter, "teacher": cfg.teacher,
        "dataset": cfg.dataset, "windows": len(where), "length": cfg.length, "stride": step_of(cfg),
        "tokens": int(where.sum()), "precision": backend.precision, "device": backend.kind,
        "bits_per_weight": bits_per_weight(model, values), "mb": megabytes(model, values),
        **({"note": note} if (note := notes(name, cfg.teacher)) else {}),
    }  # fmt: skip


def measure(
    model, teacher, tokens: Tensor, scored: Tensor, given: int | None, backend: TorchBackend, batch_size: int
) -> dict:
    """ppl, nll, kl and tokens; raises UserError if a figure is not finite."""
    batch_size = min(batch_size, len(tokens))
    backend.place(model)
    if teacher is not None:
        backend.place(teacher)
    figures = text_figures(model, tokens, scored, backend, batch_size, teacher, given)
    for name, holder in (("nll", "the weights or the adapter hold"), ("kl", "the teacher's weights hold")):
        if not math.isfinite(figures.get(name, 0)):
            raise UserError(
                f"the {name.upper()} is {figures[name]}: {holder} NaN or infinity; train or download them again"
            )
    return figures


def show(facts: dict, as_json: bool) -> None:
    """Print one JSON object, or a line for each kind of figure."""
    if as_json:
        print(json.dumps(facts))
        return
    parts = [f"{kind} {facts[kind]}" for kind in ("checkpoint", "adapter") if facts[kind]]
    say(f"model  {', '.join([facts['model'], *parts])}; {facts['precision']} on {facts['device']}")
    say(
        f"text   {facts['dataset']}: {facts['windows']} windows of {facts['length']} tokens, one every "
        f"{facts['stride']}; {facts['tokens']} tokens scored"
        + (f", each window begins with {facts['bos']}" if facts["bos"] else "")
    )
    if "nll" in facts:
        say(f"NLL    {facts['nll']:.4f} nats/token")
        say(f"PPL    {facts['ppl']:.4g}")
    if "kl" in facts:
        say(f"KL     {facts['kl']:.4f} nats/token to {facts['teacher']}")
    say(f"size   {facts['bits_per_weight']:.3f} bits per weight, {facts['mb']:.1f} MB")
    if "note" in facts:
        say(f"note   {facts['note']}")


if __name__ == "__main__":
    run_script(main, Config, "measure_perplexity", __doc__)
