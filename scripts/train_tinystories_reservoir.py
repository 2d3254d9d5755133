# PYTHON_ARGCOMPLETE_OK
"""Can a language model whose memory is random and never trained tell stories? Compared with a transformer and a minGRU.

    python scripts/train_tinystories_reservoir.py --config cpu
    python scripts/train_tinystories_reservoir.py --config cpu --model transformer
    python scripts/train_tinystories_reservoir.py --dataset roneneldan/TinyStories --use-tpu

The memory is a reservoir, a fixed random recurrent network; embedding, mixing and readout are trained. The baselines
--model transformer and mingru have the same embedding, blocks and number of trained parameters. With --use-tpu, or
USE_TPU in SHARED_CONFIG below, if there is no TPU, a warning is printed and a GPU or the CPU is used; on TPU the batch
is doubled and the learning rate is 1.2 times as large, as the run's config.yaml shows. The text is tokenised once, into
caches/stories; --dry-run tokenises it too, but keeps nothing.
metrics.jsonl: loss, grad_norm, lr, tokens, tokens_per_s; heldout_nll, heldout_ppl and bits_per_byte over every held-out
token. The run directory also gets tokenizer.json, best.pt (lowest held-out loss) and samples.txt.
docs/reservoir.md is the runbook. Untested on hardware: TPU, CUDA; make check-hardware tests them.
"""

from dataclasses import dataclass
from typing import Literal

from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, parse, run_script
from qat_lora.run.options import JobConfig
from qat_lora.train.options import LoopOptions

NAME = "train_tinystories_reservoir"
SHARED_CONFIG = {"USE_TPU": False}  # all other defaults are in Config


@dataclass(frozen=True, kw_only=True)
class Config(LoopOptions, JobConfig):
    model: Literal["reservoir", "transformer", "mingru"] = opt.model(
        "reservoir", "architecture: a reservoir, or a baseline with as many trained parameters"
    )
    embedding: int = opt.model(256, "width of the embedding and of the blocks", at_least=1)
    blocks: int = opt.model(2, "number of blocks", at_least=1)
    hidden: int = opt.model(512, "hidden units of the MLP in a reservoir block", at_least=1)
    reservoirs: str = opt.model(
        "diagonal:256", "reservoirs in each block, as KIND:UNITS,…; the kinds are diagonal and esn"
    )
    spectral_radius: float = opt.model(
        0.99, "spectral radius of every reservoir", above=0, at_most=1e6, fix="about 1 keeps a long memory"
    )
    density: float = opt.model(
        0.1, "share of an esn reservoir's connections that exist", above=0, at_most=1,
        fix="0.1 connects a tenth of the pairs",
    )  # fmt: skip
    leak_min: float = opt.model(0.05, "leak rate of the slowest unit")
    leak_max: float = opt.model(1.0, "leak rate of the fastest unit")
    input_scaling: float = opt.model(1.0, "scale of a reservoir's input", above=0, at_most=1e6, fix="1 is a common one")
    attention_window: int = opt.model(0, "tokens that a reservoir block attends to; 0 uses no attention", at_least=0)
    heads: int = opt.model(4, "attention heads", at_least=1)
    dropout: float = opt.model(0.1, "dropout rate", at_least=0, below=1, fix="use e.g. 0.1")
    start: str | None = opt.model(
        None, "start from the best model and the tokenizer of this run, of the same sizes and seed", identity="start"
    )
    dataset: str = opt.data(
        "embedded",
        "text: embedded (Python's help topics), a local .txt, .jsonl or .parquet file, or a hub dataset",
        identity="data",
    )
    max_stories: int = opt.data(
        10_000, "read at most this many stories; <|endoftext|> separates them in a text file", identity=False
    )
    heldout_fraction: float = opt.data(0.05, "share of the text, from its end, held out for evaluation")
    tokenizer: str = opt.data(
        "auto",
        "tokenizer: gpt2, bpe (trained on the text) or chars; auto is gpt2 if it can be loaded, else bpe; unused with "
        "--start",
        identity=False,
    )
    vocab_size: int = opt.data(2048, "vocabulary size of a bpe tokenizer", identity=False)
    length: int = opt.data(128, "tokens per row", "--block-size", at_least=1)
    epochs: int = opt.training(3, "passes over the text", at_least=1, at_most=opt.MOST_UPDATES)
    max_steps: int | None = opt.training(
        None, "number of updates [--epochs passes]", at_least=1, at_most=opt.MOST_UPDATES
    )
    global_batch_size: int = opt.training(
        64, "rows per update over all workers; on TPU twice this", "--batch-size", at_least=1
    )
    learning_rate: float = opt.training(2e-3, "peak learning rate; on TPU 1.2 times this", **opt.RATE)
    warmup_steps: int = opt.training(50, "updates of linear warm-up", at_least=0)
    temperature: float = opt.run(0.8, "sampling temperature of the stories; 0 is greedy")
    top_k: int = opt.run(50, "sample from this many of the most probable tokens; 0 samples from all")
    top_p: float = opt.run(0.9, "sample from the most probable tokens that hold this share of the probability")
    eval_every: int = opt.with_default(LoopOptions, "eval_every", 200)
    save_every: int = opt.with_default(LoopOptions, "save_every", 200)
    log_every: int = opt.with_default(LoopOptions, "log_every", 20)
    use_tpu: bool = opt.device(SHARED_CONFIG["USE_TPU"], "use a TPU if there is one, else a GPU or the CPU")


if __name__ == "__main__":
    check_command_line(Config, NAME, __doc__)  # before the imports that take seconds

import dataclasses
import os
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import nn

from qat_lora.backend import TorchBackend, open_planned, planned_workers
from qat_lora.backend.detect import has_static_shapes
from qat_lora.backend.machine import check_memory
from qat_lora.backend.opening import launch
from qat_lora.errors import UserError
from qat_lora.experiments.stories.baselines import SmallLM
from qat_lora.experiments.stories.evaluation import (
    Evaluation,
    get_device,
    on_tpu,
    story_loss,
    tell_stories,
    unigram_perplexity,
)
from qat_lora.experiments.stories.models import build, load_run, memory_of, shape_of, story_memory, trained
from qat_lora.experiments.stories.scan import CHUNK, LEVELS
from qat_lora.experiments.stories.text import Blocks, Stories, load_stories, planned_stories
from qat_lora.rl.rollout import Sampling
from qat_lora.run.console import attempt, command, say, summarise
from qat_lora.run.files import sha256, write_atomically
from qat_lora.run.metrics import Share, Total
from qat_lora.run.report import write_report
from qat_lora.run.resuming import prepare, read_config
from qat_lora.run.rundir import Run, open_run
from qat_lora.run.session import Session
from qat_lora.train.loop import Plan, plain_stage, restore, tokens_of
from qat_lora.train.memory import Parts, check_fits, memory_line
from qat_lora.train.options import checked_updates

SAMPLE_TOKENS = 120
CACHE = Path("caches/stories")  # token files for later runs; a dry run writes none
PJRT_TPU = os.environ.get("PJRT_DEVICE", "").upper() == "TPU"  # also asks for a TPU


# -- the experiment --------------------------------------------------------------------------------------------------
def main(cfg: Config) -> None:
    cfg = resolved(cfg, cfg.device if cfg.device != "auto" else get_device(cfg.use_tpu or PJRT_TPU))
    check(cfg)
    if cfg.dry_run:
        return work(open_planned(cfg.device, cfg.precision), cfg)
    launch(work, (cfg,), cfg.device, cfg.precision, cfg.num_chips, cfg.debug, cfg.timeouts)


def work(backend: TorchBackend, cfg: Config) -> None:
    """The experiment, as each worker runs it."""
    prepare(NAME, cfg, backend.group)
    here = planned_workers(backend.kind, cfg.num_chips) if cfg.dry_run else backend.world_size
    check_share(cfg, here)
    text = (cfg.dataset, cfg.max_stories, cfg.heldout_fraction, cfg.tokenizer, cfg.vocab_size)
    start, given = starting_model(cfg) if cfg.start else (None, None)
    stories = load_stories(*text, cache=None if cfg.dry_run else CACHE, given=given)
    train = Blocks(stories.train, cfg.length)
    plan = plan_of(cfg, len(train), here)
    shape, tokens = shape_of(cfg), plan.batch_size * cfg.length
    if not cfg.dry_run:  # a dry run may plan for another machine
        what = f"training on --global-batch-size {cfg.global_batch_size} × {cfg.length} tokens"
        check_fits(backend, story_memory(stories.vocab, shape, tokens, backend.bf16), what, here)
    model = start or build(cfg.model, stories.vocab, shape, cfg.seed)
    if backend.is_main:
        describe(cfg, backend, stories, train, model, plan)
        if backend.static_shapes:
            say(memory_line(memory_of(model, shape, tokens, backend.bf16), backend))
    if cfg.dry_run:
        return

    facts = backend.facts | {"data": stories.fingerprint}
    facts |= {"start": sha256(Path(cfg.start, "best.pt"))} if cfg.start else {}
    run = open_run(NAME, cfg, facts, backend.group)
    backend.seed(cfg.seed + backend.rank)  # each worker draws its own dropout
    session = Session(run, backend, cfg.every(), ("loss", "heldout_ppl"))
    if backend.is_main:
        write_atomically(run.path / "tokenizer.json", lambda file: file.write(stories.tokenizer.to_str().encode()))
    backend.place(model)
    evaluate = Evaluation(model, stories, cfg.length, plan.batch_size, backend)
    train_language_model(model, train, plan, session, evaluate)
    cost = session.cost()
    if backend.is_main:
        finish(cfg, run, model, stories, backend, evaluate.best, cost)


def train_language_model(model: nn.Module, train: Blocks, plan: Plan, session: Session, evaluate: Evaluation) -> None:
    """Next-token prediction; the recurrent weights of a reservoir have no gradient."""
    backend = session.backend
    model.train()
    for update in plain_stage("train", model, train, plan, session, evaluate, evaluate.best):
        for batch in update:  # on the device
            with backend.autocast():
                loss = story_loss(model, batch)
            backend.backward(loss)
            update.add(loss=Share(loss), tokens=Total(tokens_of(batch)))
        norm = update.step()  # reduces over workers, clips, steps
        update.record(grad_norm=norm)


def resolved(cfg: Config, device: str) -> Config:
    """The config that is used and recorded: with the device and, on TPU, a larger batch and learning rate, unless they
    are those of the run that --resume names."""
    batch_size, rate = cfg.global_batch_size, cfg.learning_rate
    run = read_config(Path(cfg.resume)) if Path(cfg.resume, "config.yaml").is_file() else {}
    if has_static_shapes(device) and batch_size != run.get("global_batch_size"):
        batch_size, rate = on_tpu(batch_size, rate)
    return dataclasses.replace(cfg, device=device, global_batch_size=batch_size, learning_rate=rate)


def check(cfg: Config) -> None:
    """Raise UserError for options that are wrong whatever the text, before minutes are spent on tokenising it."""
    least = story_memory(1, shape_of(cfg), tokens=0, bf16=False)
    least["--attention-window"] = 8 * cfg.embedding * cfg.attention_window  # keys and values of one row
    check_memory(sum(least.values()), "the model", max(least, key=least.__getitem__))
    Sampling(cfg.temperature, cfg.top_k, cfg.top_p)
    if cfg.model != "transformer" and cfg.length > CHUNK**LEVELS:
        raise UserError(f"--length {cfg.length} is more than the {CHUNK**LEVELS} steps of a scan; shorten it")


def starting_model(cfg: Config) -> tuple[SmallLM, Tokenizer]:
    """The best model of the run --start, to train further, and its tokenizer. Raises UserError if its sizes differ."""
    model, stories, _ = load_run(Path(cfg.start))
    was = read_config(Path(cfg.start))
    names = [field.name for field in dataclasses.fields(cfg) if field.metadata["group"] == "model"]
    for name in ("seed", *names):  # the seed decides the reservoirs, which no file holds
        if name != "start" and getattr(cfg, name) != was.get(name):
            flag = name.replace("_", "-")
            raise UserError(
                f"--start {cfg.start} was trained with --{flag} {was.get(name)}, and this run has "
                f"{getattr(cfg, name)}; use the same value"
            )
    return model, stories.tokenizer


def check_share(cfg: Config, workers: int) -> None:
    if cfg.global_batch_size % workers:
        raise UserError(
            f"--global-batch-size {cfg.global_batch_size} does not divide by {workers} workers; use a multiple of them"
        )


def plan_of(cfg: Config, rows: int, workers: int) -> Plan:
    """The plan of one worker. Its batch is its share of an update's rows."""
    if cfg.global_batch_size > rows:
        raise UserError(
            f"--global-batch-size {cfg.global_batch_size} is more than the {rows} rows of the text; lower it, or add "
            "text"
        )
    return Plan(
        steps=cfg.max_steps or checked_updates(cfg.epochs * rows // cfg.global_batch_size, "--epochs", cfg.epochs),
        batch_size=cfg.global_batch_size // workers, accumulation=1, learning_rate=cfg.learning_rate,
        warmup_steps=cfg.warmup_steps, clip_grad_norm=cfg.clip_grad_norm, seed=cfg.seed,
    )  # fmt: skip


# -- the steps -------------------------------------------------------------------------------------------------------
def describe(cfg: Config, backend: TorchBackend, stories: Stories, train: Blocks, model: SmallLM, plan: Plan) -> None:
    fixed = sum(value.numel() for value in model.state_dict().values()) - sum(p.numel() for p in model.parameters())
    say(f"{cfg.model} on {backend}: {trained(model):,} trained parameters, {fixed:,} fixed values")
    say(
        f"{len(stories.train):,} tokens to train on (tokenizer {stories.kind}, vocabulary {stories.vocab}), "
        f"{len(stories.heldout):,} held out"
    )
    say(
        f"{plan.steps} updates of {cfg.global_batch_size} × {train.length} tokens ({plan.batch_size} rows per worker), "
        f"{len(train) // cfg.global_batch_size} per epoch, learning rate {plan.learning_rate:g}"
    )


def finish(
    cfg: Config, run: Run, model: SmallLM, stories: Stories, backend: TorchBackend, best: dict, cost: dict
) -> None:
    """Write the best state, its figures, and its stories: one from nothing, two that continue held-out texts."""
    restore(model, best["state"])
    write_atomically(run.path / "best.pt", lambda file: torch.save(best["state"], file))
    backend.seed(0)
    told = tell_stories(model, stories, SAMPLE_TOKENS, Sampling(cfg.temperature, cfg.top_k, cfg.top_p), backend)
    write_atomically(run.path / "samples.txt", lambda file: file.write(("\n---\n".join(told) + "\n").encode()))
    figures = best["figures"]
    result = {**figures, "trained_parameters": trained(model), **cost}
    page = attempt("writing the report", write_report, run.path, result)
    run.finish("finished", **result)
    say(f"\na held-out story, continued:\n{told[-1]}")
    summarise(
        {"model": run.path / "best.pt", "stories": run.path / "samples.txt", "report": page},
        [
            f"held-out perplexity {figures['heldout_ppl']:.2f}, {figures['bits_per_byte']:.4f} bits per byte; "
            f"perplexity of the token frequencies alone {unigram_perplexity(stories):.2f}"
        ],
        command("tell_stories", run=run.path),
        "make report" if cfg.model == "transformer" else baseline(cfg),
    )


def baseline(cfg: Config) -> str:
    """The command that trains a transformer of this size on this text: every option that differs from the preset's, as
    it was typed, so that a TPU doubles the batch only once."""
    usual = parse(Config, NAME, ["--config", cfg.config] if cfg.config else [])
    changed, scaled = {}, resolved(usual, cfg.device)
    for field in dataclasses.fields(cfg):
        value, compared = getattr(cfg, field.name), field.metadata["group"] in ("model", "data", "optimisation")
        if compared and field.name != "start" and value != getattr(scaled, field.name):
            changed[field.name] = value
    for name in changed.keys() & {"global_batch_size", "learning_rate"}:
        changed[name] = type(changed[name])(changed[name] * getattr(usual, name) / getattr(scaled, name))
    return command(NAME, config=cfg.config, **changed | {"model": "transformer"})


def rehearse(cfg: Config, backend: TorchBackend) -> dict[str, Parts]:
    """Record the graphs of every phase, for compile_for_tpu.py, and estimate their memory. Only shapes matter: the
    model has no weights, and all tokens are the same. cfg: as given; a TPU doubles its batch size."""
    check(cfg)
    cfg = dataclasses.replace(resolved(cfg, "tpu"), max_steps=1000)
    check_share(cfg, backend.world_size)
    stories = planned_stories(cfg.tokenizer, cfg.vocab_size, cfg.global_batch_size * cfg.length + 1)
    train = Blocks(stories.train, cfg.length)
    plan = plan_of(cfg, len(train), backend.world_size)
    model = backend.place(build(cfg.model, stories.vocab, shape_of(cfg), cfg.seed))
    session = backend.rehearsal(cfg.global_batch_size * cfg.length)
    evaluate = Evaluation(model, stories, cfg.length, plan.batch_size, backend)
    train_language_model(model, train, plan, session, evaluate)
    with backend.phase("stories"):
        # a transformer's state grows, so each token has its own graph; the others repeat that of the second token
        tokens = SAMPLE_TOKENS if cfg.model == "transformer" else 3
        tell_stories(model, stories, tokens, Sampling(cfg.temperature, cfg.top_k, cfg.top_p), backend)
    return memory_of(model, shape_of(cfg), plan.batch_size * cfg.length, backend.bf16)


if __name__ == "__main__":
    run_script(main, Config, NAME, __doc__)
