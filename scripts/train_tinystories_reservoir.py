"""Can a language model whose memory is random and never trained tell stories? Beside a transformer and a minGRU.

    python scripts/train_tinystories_reservoir.py --config cpu
    python scripts/train_tinystories_reservoir.py --config cpu --model transformer
    python scripts/train_tinystories_reservoir.py --dataset roneneldan/TinyStories --use-tpu

The recurrent part is a fixed reservoir; embedding, mixing and readout are trained. --model transformer and mingru have the
same embedding, blocks and number of trained parameters. SHARED_CONFIG below holds what every field is unless a flag
or a preset says otherwise. With USE_TPU (--use-tpu) a missing TPU is a warning and a GPU or the CPU takes its place;
on TPU the batch is doubled and the learning rate is 1.2 times as large, as config.yaml of the run shows.

metrics.jsonl: loss, grad_norm, tokens_per_s; held-out nll, perplexity and bits a byte, over every held-out token.
The run directory also gets tokenizer.json, model.pt (the best state), samples.txt. docs/reservoir.md says what to expect.
Untested on hardware: TPU, CUDA.
"""

import dataclasses
from dataclasses import dataclass

import torch

from qat_lora.backend import TorchBackend, open_backend
from qat_lora.data.stories import Blocks, Stories, load_stories
from qat_lora.experiments.stories import (
    MODELS, TPU_BATCH, TPU_LEARNING_RATE, Shape, build, get_device, heldout, story_loss, tell, trained,
)  # fmt: skip
from qat_lora.models.reservoir import ReservoirSpec
from qat_lora.models.small_lm import SmallLM
from qat_lora.qat import Plan, train_plain
from qat_lora.rl.rollout import Sampling
from qat_lora.run.config import RunConfig, option, run_script
from qat_lora.run.files import write_atomically
from qat_lora.run.plots import plot_run
from qat_lora.run.rundir import Run, open_run, say
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
BEGINNINGS = ("", "Once upon a time", "The little dog")


@dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    use_tpu: bool = option(SHARED_CONFIG["USE_TPU"], "use a TPU where there is one, else a GPU or the CPU")
    model: str = option("reservoir", "reservoir, or transformer or mingru of as many trained parameters")
    dataset: str = option(SHARED_CONFIG["dataset"], "embedded, a local .txt, .jsonl or .parquet file, or a hub dataset")
    max_stories: int = option(SHARED_CONFIG["max_stories"], "read that many texts")
    heldout_fraction: float = option(SHARED_CONFIG["heldout_fraction"], "share of the text at its end to measure on")
    tokenizer: str = option(SHARED_CONFIG["tokenizer"], "gpt2, bpe (trained on the text), chars; auto: gpt2, else bpe")
    vocab_size: int = option(SHARED_CONFIG["vocab_size"], "tokens of a bpe tokenizer")
    epochs: int = option(SHARED_CONFIG["epochs"], "passes over the text")
    batch_size: int = option(SHARED_CONFIG["batch_size"], "blocks in an update; twice as many on TPU")
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
    heads: int = option(SHARED_CONFIG["heads"], "attention heads of the transformer")
    dropout: float = option(SHARED_CONFIG["dropout"], "share of activations dropped in training")
    learning_rate: float = option(SHARED_CONFIG["learning_rate"], "peak learning rate; 1.2 times as large on TPU")
    warmup_steps: int = option(SHARED_CONFIG["warmup_steps"], "updates of linear warm-up")
    clip_grad_norm: float = option(SHARED_CONFIG["clip_grad_norm"], "largest global gradient norm; 0 clips nothing")
    temperature: float = option(SHARED_CONFIG["temperature"], "of the samples")
    top_k: int = option(SHARED_CONFIG["top_k"], "of the samples; 0: all")
    top_p: float = option(SHARED_CONFIG["top_p"], "of the samples")
    eval_every: int = option(200, "updates between measurements; 0: at the ends")
    save_every: int = option(200, "updates between checkpoints; 0: at the end")
    log_every: int = option(20, "updates between lines of metrics.jsonl")


def main(cfg: Config) -> None:
    kind = cfg.device if cfg.device != "auto" else get_device(cfg.use_tpu)
    backend = open_backend(kind, cfg.precision)
    cfg = resolved(cfg, backend)
    shape, sampling = shape_of(cfg), Sampling(cfg.temperature, cfg.top_k, cfg.top_p)
    stories = load_stories(cfg.dataset, cfg.max_stories, cfg.heldout_fraction, cfg.tokenizer, cfg.vocab_size)
    train = Blocks(stories.train, cfg.block_size)
    plan = plan_of(cfg, len(train))
    model = build(cfg.model, stories.vocab, shape, cfg.seed)
    describe(cfg, backend, stories, train, model, plan)
    if cfg.dry_run:
        return

    run = open_run("train_tinystories_reservoir", cfg, {"device": str(backend), "data": stories.fingerprint})
    backend.seed(cfg.seed)
    session = Session(run, backend, Every(cfg.log_every, cfg.eval_every, cfg.save_every), ("loss", "heldout_ppl"))
    backend.place(model)

    def evaluate(step: int) -> dict[str, float]:
        figures = heldout(model, stories, cfg.block_size, cfg.batch_size, backend)
        if figures["heldout_nll"] < session.best("heldout_nll"):
            save(run, model, backend)
        return figures

    train_plain(model, train, story_loss, plan, session, backend, evaluate, "train")
    finish(run, model, stories, sampling, backend, session)
