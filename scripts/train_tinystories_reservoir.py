# PYTHON_ARGCOMPLETE_OK
"""Can a language model whose memory is random and never trained tell stories? Compared with a transformer and a minGRU.

    python scripts/train_tinystories_reservoir.py --config cpu
    python scripts/train_tinystories_reservoir.py --config cpu --model transformer
    python scripts/train_tinystories_reservoir.py --dataset roneneldan/TinyStories --use-tpu

The memory is a reservoir, a fixed random recurrent network; embedding, mixing and readout are trained. The baselines
--model transformer and mingru have the same embedding, blocks and number of trained parameters. The defaults of the
options are in SHARED_CONFIG, in this file. With --use-tpu (USE_TPU), if there is no TPU, a warning is printed and a GPU
or the CPU is used; on TPU the batch is doubled and the learning rate is 1.2 times as large, as the run's config.yaml
shows. The text is tokenised once, into caches/stories; --dry-run tokenises it too, but keeps nothing.
metrics.jsonl: loss, grad_norm, lr, tokens, tokens_per_s; heldout_nll, heldout_ppl and bits_per_byte over every held-out
token. The run directory also gets tokenizer.json, best.pt (lowest held-out loss) and samples.txt.
docs/reservoir.md is the runbook. Untested on hardware: TPU, CUDA; make check-hardware tests them.
"""

from dataclasses import dataclass
from typing import Literal

from qat_lora.run import options as opt
from qat_lora.run.command_line import check_command_line, run_script
from qat_lora.run.options import JobConfig
from qat_lora.train.options import LoopOptions

NAME = "train_tinystories_reservoir"
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


@dataclass(frozen=True, kw_only=True)
class Config(LoopOptions, JobConfig):
    model: Literal["reservoir", "transformer", "mingru"] = opt.model(
        "reservoir", "architecture: a reservoir, or a baseline with as many trained parameters"
    )
    embedding: int = opt.model(SHARED_CONFIG["embedding"], "width of the embedding and of the blocks", at_least=1)
    blocks: int = opt.model(SHARED_CONFIG["blocks"], "number of blocks", at_least=1)
    hidden: int = opt.model(SHARED_CONFIG["hidden"], "hidden units of the MLP in a reservoir block", at_least=1)
    reservoirs: str = opt.model(
        SHARED_CONFIG["reservoirs"], "reservoirs in each block, as KIND:UNITS,…; the kinds are diagonal and esn"
    )
    spectral_radius: float = opt.model(
        SHARED_CONFIG["spectral_radius"],
        "spectral radius of every reservoir",
        above=0,
        at_most=1e6,
        fix="about 1 keeps a long memory",
    )
    density: float = opt.model(
        SHARED_CONFIG["density"],
        "share of an esn reservoir's connections that exist",
        above=0,
        at_most=1,
        fix="0.1 connects a tenth of the pairs",
    )
    leak_min: float = opt.model(SHARED_CONFIG["leak_min"], "leak rate of the slowest unit")
    leak_max: float = opt.model(SHARED_CONFIG["leak_max"], "leak rate of the fastest unit")
    input_scaling: float = opt.model(
        SHARED_CONFIG["input_scaling"], "scale of a reservoir's input", above=0, at_most=1e6, fix="1 is a common one"
    )
    attention_window: int = opt.model(
        SHARED_CONFIG["attention_window"], "tokens that a reservoir block attends to; 0 uses no attention", at_least=0
    )
    heads: int = opt.model(SHARED_CONFIG["heads"], "attention heads", at_least=1)
    dropout: float = opt.model(SHARED_CONFIG["dropout"], "dropout rate", at_least=0, below=1, fix="use e.g. 0.1")
    dataset: str = opt.data(
        SHARED_CONFIG["dataset"],
        "text: embedded (Python's help topics), a local .txt, .jsonl or .parquet file, or a hub dataset",
        identity="data",
    )
    max_stories: int = opt.data(
        SHARED_CONFIG["max_stories"],
        "read at most this many stories; <|endoftext|> separates them in a text file",
        identity=False,
    )
    heldout_fraction: float = opt.data(
        SHARED_CONFIG["heldout_fraction"], "share of the text, from its end, held out for evaluation"
    )
    tokenizer: str = opt.data(
        SHARED_CONFIG["tokenizer"],
        "tokenizer: gpt2, bpe (trained on the text) or chars; auto is gpt2 if it can be loaded, else bpe",
        identity=False,
    )
    vocab_size: int = opt.data(SHARED_CONFIG["vocab_size"], "vocabulary size of a bpe tokenizer", identity=False)
    length: int = opt.data(SHARED_CONFIG["block_size"], "tokens per row", "--block-size", at_least=1)
    epochs: int = opt.training(SHARED_CONFIG["epochs"], "passes over the text", at_least=1, at_most=opt.MOST_UPDATES)
    max_steps: int | None = opt.training(
        None, "number of updates [--epochs passes]", at_least=1, at_most=opt.MOST_UPDATES
    )
    global_batch_size: int = opt.training(
        SHARED_CONFIG["batch_size"], "rows per update over all workers; on TPU twice this", "--batch-size", at_least=1
    )
    learning_rate: float = opt.training(
        SHARED_CONFIG["learning_rate"], "peak learning rate; on TPU 1.2 times this", **opt.RATE
    )
    warmup_steps: int = opt.training(SHARED_CONFIG["warmup_steps"], "updates of linear warm-up", at_least=0)
    clip_grad_norm: float = opt.with_default(LoopOptions, "clip_grad_norm", SHARED_CONFIG["clip_grad_norm"])
    temperature: float = opt.run(SHARED_CONFIG["temperature"], "sampling temperature of the stories; 0 is greedy")
    top_k: int = opt.run(
        SHARED_CONFIG["top_k"], "sample from this many of the most probable tokens; 0 samples from all"
    )
    top_p: float = opt.run(
        SHARED_CONFIG["top_p"], "sample from the most probable tokens that hold this share of the probability"
    )
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
from torch import nn

from qat_lora.ahead.rehearsal import Rehearsal
from qat_lora.backend import TorchBackend, open_planned, planned_workers
from qat_lora.backend.detect import has_static_shapes
from qat_lora.backend.machine import check_memory
from qat_lora.backend.opening import launch
from qat_lora.errors import UserError
from qat_lora.experiments.stories.baselines import SmallLM
from qat_lora.experiments.stories.evaluation import get_device, heldout, on_tpu, story_loss, tell, unigram_perplexity
from qat_lora.experiments.stories.models import Shape, build, story_memory, trained
from qat_lora.experiments.stories.reservoir import ReservoirSpec
from qat_lora.experiments.stories.scan import CHUNK, LEVELS
from qat_lora.experiments.stories.text import Blocks, Stories, load_stories, planned_stories
from qat_lora.rl.rollout import Sampling
from qat_lora.run.console import attempt, say, summarise
from qat_lora.run.files import write_atomically
from qat_lora.run.metrics import Share, Total
from qat_lora.run.report import write_report
from qat_lora.run.resuming import prepare
from qat_lora.run.rundir import Run, open_run
from qat_lora.run.session import Session
from qat_lora.train.loop import Plan, plain_stage, restore, tokens_of, trained_parameters
from qat_lora.train.memory import ADAM, Parts, check_fits, logits_memory, memory_line
from qat_lora.train.options import checked_updates

SAMPLE_TOKENS = 120
OPENING = 6  # tokens of a held-out story that the model continues
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
    stories = load_stories(*text, cache=None if cfg.dry_run else CACHE)
    train = Blocks(stories.train, cfg.length)
    plan = plan_of(cfg, len(train), here)
    check_sizes(cfg, stories, plan, backend, here)
    model = build(cfg.model, stories.vocab, shape_of(cfg), cfg.seed)
    if backend.is_main:
        describe(cfg, backend, stories, train, model, plan)
        if backend.static_shapes:
            say(memory_line(memory(cfg, model, plan, backend), backend))
    if cfg.dry_run:
        return

    run = open_run(NAME, cfg, backend.facts | {"data": stories.fingerprint}, backend.group)
    backend.seed(cfg.seed + backend.rank)  # each worker draws its own dropout
    session = Session(run, backend, cfg.every(), ("loss", "heldout_ppl"))
    if backend.is_main:
        write_atomically(run.path / "tokenizer.json", lambda file: file.write(stories.tokenizer.to_str().encode()))
    backend.place(model)
    evaluate = Evaluation(cfg, model, stories, plan, backend)
    train_language_model(model, train, plan, session, evaluate)
    cost = session.cost()
    if backend.is_main:
        finish(cfg, run, model, stories, Sampling(cfg.temperature, cfg.top_k, cfg.top_p), backend, evaluate.best, cost)


def train_language_model(model: nn.Module, train: Blocks, plan: Plan, session: Session, evaluate: "Evaluation") -> None:
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


class Evaluation:
    """evaluate(step): figures over every held-out token; `best` holds the state of the lowest loss and its figures."""

    def __init__(self, cfg: Config, model: nn.Module, stories: Stories, plan: Plan, backend: TorchBackend):
        self.cfg, self.model, self.stories, self.plan, self.backend = cfg, model, stories, plan, backend
        self.best: dict = {}  # saved in checkpoints

    def __call__(self, step: int) -> dict[str, float]:
        backend, best = self.backend, self.best
        figures = heldout(self.model, self.stories, self.cfg.length, self.plan.batch_size, backend)
        if backend.is_main and (not best or figures["heldout_nll"] < best["figures"]["heldout_nll"]):
            state = backend.to_host(trained_parameters(self.model))
            state = {name: tensor.clone() for name, tensor in state.items()}  # on a CPU the originals keep changing
            best.update(figures={"step": step, **figures}, state=state)
        return figures


def resolved(cfg: Config, device: str) -> Config:
    """The config that is used and recorded: with the device and, on TPU, a larger batch and learning rate."""
    cfg = dataclasses.replace(cfg, device=device)
    if not has_static_shapes(device):
        return cfg
    batch_size, learning_rate = on_tpu(cfg.global_batch_size, cfg.learning_rate)
    return dataclasses.replace(cfg, global_batch_size=batch_size, learning_rate=learning_rate)


def shape_of(cfg: Config) -> Shape:
    specs = []
    for text in cfg.reservoirs.split(","):
        kind, _, units = text.strip().partition(":")
        if not (units.isascii() and units.isdecimal()):
            raise UserError(f"--reservoirs {cfg.reservoirs!r}: {text!r} is not KIND:UNITS; use e.g. diagonal:256")
        leak = cfg.leak_min, cfg.leak_max
        specs.append(ReservoirSpec(int(units), kind, cfg.spectral_radius, cfg.density, leak, cfg.input_scaling))
    return Shape(cfg.embedding, cfg.blocks, cfg.hidden, tuple(specs), cfg.heads, cfg.dropout, cfg.attention_window)


def check(cfg: Config) -> None:
    """Raise UserError for options that are wrong whatever the text, before minutes are spent on tokenising it."""
    least = story_memory(1, *shape_sizes(cfg), tokens=0, bf16=False)
    least["--attention-window"] = 8 * cfg.embedding * cfg.attention_window  # keys and values of one row
    check_memory(sum(least.values()), "the model", max(least, key=least.__getitem__))
    Sampling(cfg.temperature, cfg.top_k, cfg.top_p)
    if cfg.model != "transformer" and cfg.length > CHUNK**LEVELS:
        raise UserError(f"--length {cfg.length} is more than the {CHUNK**LEVELS} steps of a scan; shorten it")


def check_share(cfg: Config, workers: int) -> None:
    if cfg.global_batch_size % workers:
        raise UserError(
            f"--global-batch-size {cfg.global_batch_size} does not divide by {workers} workers; use a multiple of them"
        )


def shape_sizes(cfg: Config) -> tuple:
    return cfg.embedding, cfg.blocks, cfg.hidden, shape_of(cfg).specs


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
def check_sizes(cfg: Config, stories: Stories, plan: Plan, backend: TorchBackend, workers: int) -> None:
    if cfg.dry_run:
        return
    tokens = plan.batch_size * cfg.length
    parts = story_memory(stories.vocab, *shape_sizes(cfg), tokens, backend.bf16)
    what = f"training on --global-batch-size {cfg.global_batch_size} × {cfg.length} tokens"
    check_fits(backend, parts, what, workers)


def memory(cfg: Config, model: SmallLM, plan: Plan, backend: TorchBackend) -> dict[str, Parts]:
    """A worker's estimated memory on an XLA device, with what each block keeps for its backward pass: in fp32 its
    input, the inputs and outputs of both norms, and in the type of the products all other activations."""
    count, cast = trained(model), 2 if backend.bf16 else 4
    width, features = cfg.embedding, sum(spec.features for spec in shape_of(cfg).specs)
    block = 8 * (width + features) + cast * (6 * width + features + 2 * cfg.hidden) + width + cfg.hidden
    tokens, vocab = plan.batch_size * cfg.length, len(model.embedding.weight)
    parts = {
        "weights": sum(4 * value.numel() for value in model.state_dict().values()),
        "gradients and moments": (ADAM - 4) * count,
        "activations": tokens * cfg.blocks * block,
        "LM head": 2 * logits_memory(tokens, vocab, backend.bf16),  # logits and their gradient
    }
    return {"training": parts}


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
    cfg: Config, run: Run, model: SmallLM, stories: Stories, sampling: Sampling, backend: TorchBackend, best: dict,
    cost: dict,
) -> None:  # fmt: skip
    """Write the best state, its figures, and its stories: one from nothing, two that continue held-out texts."""
    restore(model, best["state"])
    write_atomically(run.path / "best.pt", lambda file: torch.save(best["state"], file))
    backend.seed(0)
    told = tell_stories(model, stories, SAMPLE_TOKENS, sampling, backend)
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
        following(cfg),
    )


def tell_stories(model: SmallLM, stories: Stories, tokens: int, sampling: Sampling, backend: TorchBackend) -> list[str]:
    """One story from nothing, and two that continue held-out texts, each by at most `tokens` tokens."""
    openings = [[], *stories.openings(2, OPENING)]
    return [tell(model, stories, begin, tokens, sampling, backend) for begin in openings]


def following(cfg: Config) -> str:
    """The next command: the transformer baseline of the same size, or after that the report."""
    if cfg.model == "transformer":
        return "make report"
    chosen = f"--config {cfg.config} " if cfg.config else ""
    return f"python scripts/train_tinystories_reservoir.py {chosen}--dataset {cfg.dataset} --model transformer"


def rehearse(cfg: Config, backend: TorchBackend) -> dict[str, Parts]:
    """Record the graphs of every phase, for compile_for_tpu.py, and estimate their memory. Only shapes matter: the
    model has no weights, and all tokens are the same. cfg: as given; a TPU doubles its batch size."""
    check(cfg)
    batch_size, rate = on_tpu(cfg.global_batch_size, cfg.learning_rate)
    cfg = dataclasses.replace(cfg, global_batch_size=batch_size, learning_rate=rate, max_steps=1000)
    check_share(cfg, backend.world_size)
    stories = planned_stories(cfg.tokenizer, cfg.vocab_size, cfg.global_batch_size * cfg.length + 1)
    train = Blocks(stories.train, cfg.length)
    plan = plan_of(cfg, len(train), backend.world_size)
    model = backend.place(build(cfg.model, stories.vocab, shape_of(cfg), cfg.seed))
    session = Rehearsal(backend, cfg.global_batch_size * cfg.length)
    train_language_model(model, train, plan, session, Evaluation(cfg, model, stories, plan, backend))
    with backend.phase("stories"):
        # a transformer's state grows, so each token has its own graph; the others repeat that of the second token
        tokens = SAMPLE_TOKENS if cfg.model == "transformer" else 3
        tell_stories(model, stories, tokens, Sampling(cfg.temperature, cfg.top_k, cfg.top_p), backend)
    return memory(cfg, model, plan, backend)


if __name__ == "__main__":
    run_script(main, Config, NAME, __doc__)
