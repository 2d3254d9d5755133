"""Can a language model whose memory is random and never trained tell stories? Beside a transformer and a minGRU.

    python scripts/train_tinystories_reservoir.py --config cpu
    python scripts/train_tinystories_reservoir.py --config cpu --model transformer
    python scripts/train_tinystories_reservoir.py --dataset roneneldan/TinyStories --use-tpu

The recurrent part is a fixed reservoir; embedding, mixing and readout are trained. --model transformer and mingru have
the same embedding, blocks and number of trained parameters. SHARED_CONFIG below holds what every field is unless a flag
or a preset says otherwise. With USE_TPU (--use-tpu) a missing TPU is a warning and a GPU or the CPU takes its place;
on TPU the batch is doubled and the learning rate is 1.2 times as large, as config.yaml of the run shows.

metrics.jsonl: loss, grad_norm, tokens_per_s; held-out nll, perplexity and bits per byte, over every held-out token.
The text is tokenised once, into caches/stories; --dry-run does so too, but keeps nothing.
The run directory also gets tokenizer.json, best.pt (the state with the least held-out loss) and samples.txt.
docs/reservoir.md says what to expect.
Untested on hardware: TPU, CUDA.
"""

import dataclasses
import os
from dataclasses import dataclass
from pathlib import Path

import qat_lora  # noqa: F401 — it sets what torch reads when it is imported

# isort: split
import torch

from qat_lora.backend import TorchBackend, launch, open_backend, planned_workers, resolve
from qat_lora.data.stories import Blocks, Stories, load_stories
from qat_lora.errors import UserError
from qat_lora.experiments.stories import (
    Shape,
    build,
    check_kind,
    get_device,
    heldout,
    on_tpu,
    story_loss,
    tell,
    trained,
)
from qat_lora.machine import check_memory
from qat_lora.memory import check_fits, story_memory
from qat_lora.models.reservoir import ReservoirSpec
from qat_lora.models.scan import CHUNK, LEVELS
from qat_lora.models.small_lm import SmallLM
from qat_lora.qat import MOST_UPDATES, Plan, check_range, restore, train_plain
from qat_lora.rl.rollout import Sampling
from qat_lora.run.config import JobConfig, option, run_script
from qat_lora.run.files import write_atomically
from qat_lora.run.plots import plot_run
from qat_lora.run.rundir import Run, attempt, open_run, prepare, say
from qat_lora.run.session import Every, Session

SHARED_CONFIG = {
    "USE_TPU": False,
    "dataset": "embedded",
    "max_stories": 10_000,
    "heldout_fraction": 0.05,
    "tokenizer": "auto",
    "vocab_size": 2048,
    "epochs": 3,
    "batch_size": 64,
    "block_size": 128,
    "embedding": 256,
    "blocks": 2,
    "hidden": 512,
    "reservoirs": "diagonal:256",
    "spectral_radius": 0.99,
    "density": 0.1,
    "leak_min": 0.05,
    "leak_max": 1.0,
    "input_scaling": 1.0,
    "attention_window": 0,
    "heads": 4,
    "dropout": 0.1,
    "learning_rate": 2e-3,
    "warmup_steps": 50,
    "clip_grad_norm": 1.0,
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.9,
}
SAMPLE_TOKENS = 120
PJRT_TPU = os.environ.get("PJRT_DEVICE", "").upper() == "TPU"  # asks for a TPU as well
OPENING = 6  # tokens of a held-out story to continue
NAME = "train_tinystories_reservoir"
CACHE = Path("caches/stories")  # where tokens are kept for later runs; a dry run keeps none


@dataclass(frozen=True, kw_only=True)
class Config(JobConfig):
    use_tpu: bool = option(
        SHARED_CONFIG["USE_TPU"], "use a TPU where there is one, else a GPU or the CPU", identity=False
    )
    num_chips: int | None = option(
        None, "TPU chips, GPUs or CPU processes of this host; 0: every chip or GPU there is", identity=False
    )
    model: str = option("reservoir", "reservoir, or transformer or mingru of as many trained parameters")
    dataset: str = option(
        SHARED_CONFIG["dataset"], "embedded, a local .txt, .jsonl or .parquet file, or a hub dataset", identity="data"
    )
    max_stories: int = option(
        SHARED_CONFIG["max_stories"], "stories to read at most; <|endoftext|> separates them in a text", identity=False
    )
    heldout_fraction: float = option(SHARED_CONFIG["heldout_fraction"], "share of the text at its end to measure on")
    tokenizer: str = option(
        SHARED_CONFIG["tokenizer"], "gpt2, bpe (trained on the text), chars; auto: gpt2, else bpe", identity=False
    )
    vocab_size: int = option(SHARED_CONFIG["vocab_size"], "tokens of a bpe tokenizer", identity=False)
    epochs: int = option(SHARED_CONFIG["epochs"], "passes over the text")
    batch_size: int = option(SHARED_CONFIG["batch_size"], "blocks in an update, of all workers; twice as many on TPU")
    block_size: int = option(SHARED_CONFIG["block_size"], "tokens in a block")
    embedding: int = option(SHARED_CONFIG["embedding"], "width of embedding and blocks")
    blocks: int = option(SHARED_CONFIG["blocks"], "blocks")
    hidden: int = option(SHARED_CONFIG["hidden"], "hidden units of a reservoir block's mix")
    reservoirs: str = option(SHARED_CONFIG["reservoirs"], "reservoirs of a block, KIND:UNITS,… of diagonal and esn")
    spectral_radius: float = option(SHARED_CONFIG["spectral_radius"], "of every reservoir")
    density: float = option(SHARED_CONFIG["density"], "share of an esn's connections that are there")
    leak_min: float = option(SHARED_CONFIG["leak_min"], "slowest unit's leak")
    leak_max: float = option(SHARED_CONFIG["leak_max"], "fastest unit's leak")
    input_scaling: float = option(SHARED_CONFIG["input_scaling"], "of what goes into a reservoir")
    attention_window: int = option(SHARED_CONFIG["attention_window"], "reservoir: attend to so many tokens; 0: to none")
    heads: int = option(SHARED_CONFIG["heads"], "attention heads")
    dropout: float = option(SHARED_CONFIG["dropout"], "share of activations dropped in training")
    learning_rate: float = option(SHARED_CONFIG["learning_rate"], "peak learning rate; 1.2 times as large on TPU")
    warmup_steps: int = option(SHARED_CONFIG["warmup_steps"], "updates of linear warm-up")
    clip_grad_norm: float = option(SHARED_CONFIG["clip_grad_norm"], "largest global gradient norm; 0 clips nothing")
    temperature: float = option(SHARED_CONFIG["temperature"], "temperature of the samples; 0: greedy", identity=False)
    top_k: int = option(
        SHARED_CONFIG["top_k"], "how many of the likeliest tokens to sample from; 0: all", identity=False
    )
    top_p: float = option(
        SHARED_CONFIG["top_p"], "probability mass of the likeliest tokens to sample from", identity=False
    )
    eval_every: int = option(200, "updates between measurements; 0: at the ends", identity=False)
    save_every: int = option(200, "updates between checkpoints; 0: at the end", identity=False)
    log_every: int = option(20, "updates between lines of metrics.jsonl", identity=False)


def main(cfg: Config) -> None:
    cfg = resolved(cfg, cfg.device if cfg.device != "auto" else get_device(cfg.use_tpu or PJRT_TPU))
    sizes = cfg.embedding, cfg.blocks, cfg.hidden, shape_of(cfg).specs
    least = story_memory(1, *sizes, tokens=0, bf16=False)  # a first check, before the text is tokenised
    least["--attention-window"] = 8 * cfg.embedding * cfg.attention_window  # keys and values of one row
    check_memory(sum(least.values()), "the model", max(least, key=least.__getitem__))
    Sampling(cfg.temperature, cfg.top_k, cfg.top_p)
    Every(cfg.log_every, cfg.eval_every, cfg.save_every)
    check(cfg)
    if cfg.dry_run:
        return work(open_backend(cfg.device, cfg.precision), cfg)
    launch(work, (cfg,), cfg.device, cfg.precision, cfg.num_chips, cfg.debug, cfg.timeouts)


def work(backend: TorchBackend, cfg: Config) -> None:
    """One worker's part: all of it, or its share of every update's rows."""
    prepare(NAME, cfg, backend.group)
    here = planned_workers(backend.kind, cfg.num_chips) if cfg.dry_run else backend.world_size
    if cfg.batch_size % here:
        raise UserError(f"--batch-size {cfg.batch_size} does not divide by {here} workers; use a multiple of them")
    text = (cfg.dataset, cfg.max_stories, cfg.heldout_fraction, cfg.tokenizer, cfg.vocab_size)
    stories = load_stories(*text, cache=None if cfg.dry_run else CACHE)
    train = Blocks(stories.train, cfg.block_size)
    plan = plan_of(cfg, len(train), here)
    parts = story_memory(
        stories.vocab, cfg.embedding, cfg.blocks, cfg.hidden, shape_of(cfg).specs, plan.batch_size * cfg.block_size,
        backend.bf16,
    )  # fmt: skip
    if not cfg.dry_run:
        check_fits(backend, parts, f"training on --batch-size {cfg.batch_size} × {cfg.block_size} tokens", here)
    model = build(cfg.model, stories.vocab, shape_of(cfg), cfg.seed)
    if backend.is_main:
        describe(cfg, backend, stories, train, model, plan)
    if cfg.dry_run:
        return

    facts = backend.facts | {"data": stories.fingerprint}
    run = open_run(NAME, cfg, facts, backend.group)
    backend.seed(cfg.seed + backend.rank)  # each worker's dropout is its own
    session = Session(run, backend, Every(cfg.log_every, cfg.eval_every, cfg.save_every), ("loss", "heldout_ppl"))
    if backend.is_main:
        write_atomically(run.path / "tokenizer.json", lambda file: file.write(stories.tokenizer.to_str().encode()))
    backend.place(model)
    best: dict = {}  # figures and state of the least held-out loss; checkpoints carry it

    def evaluate(step: int) -> dict[str, float]:
        figures = heldout(model, stories, cfg.block_size, plan.batch_size, backend)
        if backend.is_main and (not best or figures["heldout_nll"] < best["figures"]["heldout_nll"]):
            state = backend.to_host({name: p for name, p in model.named_parameters() if p.requires_grad})
            state = {name: tensor.clone() for name, tensor in state.items()}  # on a CPU the originals keep changing
            best.update(figures={"step": step, **figures}, state=state)
        return figures

    train_plain(model, train, story_loss, plan, session, evaluate, "train", best)
    cost = session.cost()
    if backend.is_main:
        finish(run, model, stories, Sampling(cfg.temperature, cfg.top_k, cfg.top_p), backend, best, cost)


# -- what is asked for -----------------------------------------------------------------------------------------------
def resolved(cfg: Config, device: str) -> Config:
    """The config in use, which the run directory keeps: its device, and on TPU a larger batch and learning rate."""
    cfg = dataclasses.replace(cfg, device=device)
    if resolve(device) != "xla":
        return cfg
    batch_size, learning_rate = on_tpu(cfg.batch_size, cfg.learning_rate)
    return dataclasses.replace(cfg, batch_size=batch_size, learning_rate=learning_rate)


def shape_of(cfg: Config) -> Shape:
    specs = []
    for text in cfg.reservoirs.split(","):
        kind, _, units = text.strip().partition(":")
        if not (units.isascii() and units.isdecimal()):
            raise UserError(f"--reservoirs {cfg.reservoirs!r}: {text!r} is not KIND:UNITS, such as diagonal:256")
        specs.append(ReservoirSpec(
            units=int(units), kind=kind, radius=cfg.spectral_radius, density=cfg.density,
            leak=(cfg.leak_min, cfg.leak_max), scaling=cfg.input_scaling,
        ))  # fmt: skip
    return Shape(cfg.embedding, cfg.blocks, cfg.hidden, tuple(specs), cfg.heads, cfg.dropout, cfg.attention_window)


def check(cfg: Config) -> None:
    """Raise UserError for what is wrong with any text, before minutes are spent on tokenising it."""
    check_kind(cfg.model)
    if cfg.batch_size < 1:
        raise UserError(f"--batch-size {cfg.batch_size} must be at least 1")
    if cfg.block_size < 1:
        raise UserError(f"--block-size {cfg.block_size} must be at least 1")
    if cfg.model != "transformer" and cfg.block_size > CHUNK**LEVELS:
        raise UserError(f"--block-size {cfg.block_size} is more than the {CHUNK**LEVELS} steps of a scan; shorten it")
    check_range("--epochs", cfg.epochs, 1, MOST_UPDATES)  # each is an update or more


def plan_of(cfg: Config, blocks: int, workers: int) -> Plan:
    """Of one worker, whose batch is its share of an update's blocks."""
    if cfg.batch_size > blocks:
        raise UserError(
            f"--batch-size {cfg.batch_size} is more than the {blocks} blocks of the text; lower it, or add text"
        )
    return Plan(
        steps=cfg.epochs * blocks // cfg.batch_size, batch_size=cfg.batch_size // workers, accumulation=1,
        learning_rate=cfg.learning_rate, warmup_steps=cfg.warmup_steps, clip_grad_norm=cfg.clip_grad_norm,
        seed=cfg.seed, options={"steps": f"--epochs {cfg.epochs}"},
    )  # fmt: skip


def describe(cfg: Config, backend: TorchBackend, stories: Stories, train: Blocks, model: SmallLM, plan: Plan) -> None:
    fixed = sum(value.numel() for value in model.state_dict().values()) - sum(p.numel() for p in model.parameters())
    say(f"{cfg.model} on {backend}: {trained(model):,} trained parameters, {fixed:,} fixed values")
    say(
        f"{len(stories.train):,} tokens of {stories.vocab} kinds ({stories.kind}) to train on, "
        f"{len(stories.heldout):,} held out"
    )
    say(f"{plan.steps} updates of {cfg.batch_size} × {train.length} tokens ({plan.batch_size} blocks a worker), "
        f"{len(train) // cfg.batch_size} an epoch, learning rate {plan.learning_rate:g}")  # fmt: skip


# -- the steps -------------------------------------------------------------------------------------------------------
def finish(
    run: Run, model: SmallLM, stories: Stories, sampling: Sampling, backend: TorchBackend, best: dict, cost: dict
) -> None:
    """The best state, its figures, and what it tells: from nothing, and from what two held-out texts begin with."""
    restore(model, best["state"])
    write_atomically(run.path / "best.pt", lambda file: torch.save(best["state"], file))
    backend.seed(0)
    openings = [[], *stories.openings(2, OPENING)]
    told = [tell(model, stories, begin, SAMPLE_TOKENS, sampling, backend) for begin in openings]
    write_atomically(run.path / "samples.txt", lambda file: file.write(("\n---\n".join(told) + "\n").encode()))
    figures, curves = best["figures"], attempt("plotting", plot_run, run.path)
    run.finish("finished", **figures, trained_parameters=trained(model), **cost)
    say(
        f"best at step {figures['step']}: perplexity {figures['heldout_ppl']:.2f}, "
        f"{figures['bits_per_byte']:.4f} bits per byte"
    )
    say("\n".join([told[-1], *([str(curves)] if curves else [])]))


if __name__ == "__main__":
    run_script(main, Config, NAME, __doc__)
