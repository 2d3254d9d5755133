"""Builds the reservoir language model, and baselines with about as many trained parameters."""

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn

from qat_lora.errors import UserError, first_line
from qat_lora.experiments.stories.baselines import MinGRUBlock, SmallLM, TransformerBlock, WindowAttention
from qat_lora.experiments.stories.reservoir import ReservoirBlock, ReservoirSpec
from qat_lora.experiments.stories.text import Stories
from qat_lora.run.checkpoint import read_best
from qat_lora.run.resuming import read_config
from qat_lora.train.loop import restore
from qat_lora.train.memory import ADAM, Parts, logits_memory


@dataclass(frozen=True)
class Shape:
    """Sizes of a reservoir language model: `blocks` blocks of width `embedding`, each with the reservoirs of `specs`
    and a mixing layer with `hidden` units. window: number of positions that attention after the last block sees; 0: no
    attention."""

    embedding: int
    blocks: int
    hidden: int
    specs: tuple[ReservoirSpec, ...]
    heads: int = 4
    dropout: float = 0.0
    window: int = 0

    def __post_init__(self):
        if self.embedding % (2 * self.heads):  # rotary embeddings rotate pairs
            raise UserError(f"--embedding {self.embedding} does not divide by twice --heads {self.heads}; change one")


def shape_of(settings) -> Shape:
    """The shape that a run's options describe. settings: an object with the training script's options as attributes."""
    specs, leak = [], (settings.leak_min, settings.leak_max)
    for text in settings.reservoirs.split(","):
        kind, _, units = text.strip().partition(":")
        if not (units.isascii() and units.isdecimal()):
            raise UserError(f"--reservoirs {settings.reservoirs!r}: {text!r} is not KIND:UNITS; use e.g. diagonal:256")
        specs.append(
            ReservoirSpec(int(units), kind, settings.spectral_radius, settings.density, leak, settings.input_scaling)
        )
    return Shape(
        settings.embedding, settings.blocks, settings.hidden, tuple(specs), settings.heads, settings.dropout,
        settings.attention_window,
    )  # fmt: skip


def build(kind: str, vocab: int, shape: Shape, seed: int) -> SmallLM:
    """A model of `kind`, initialised with `seed`. The baselines have the reservoir model's embedding width and number
    of blocks, and the hidden width that brings their number of trained parameters closest to its."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if kind == "reservoir":
            return _reservoir(vocab, shape, seed)
        wanted, least = trained(_reservoir(vocab, shape, seed)), trained(_baseline(kind, vocab, shape, 1))
        if least > wanted:
            raise UserError(
                f"--model {kind} has at least {least:,} trained parameters, the reservoir {wanted:,}; raise --hidden"
            )
        hidden = _nearest(lambda hidden: trained(_baseline(kind, vocab, shape, hidden)), wanted)
        return _baseline(kind, vocab, shape, hidden)


def trained(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def _reservoir(vocab: int, shape: Shape, seed: int) -> SmallLM:
    blocks = []
    for number in range(shape.blocks):
        specs = tuple(replace(spec, seed=_seed(seed, number, k)) for k, spec in enumerate(shape.specs))
        blocks.append(ReservoirBlock(shape.embedding, shape.hidden, specs, shape.dropout))
    if shape.window:
        blocks.append(WindowAttention(shape.embedding, shape.heads, shape.window, shape.dropout))
    return SmallLM(vocab, shape.embedding, blocks, shape.dropout)


def _seed(*place: int) -> int:
    """A different seed for each tuple of numbers."""
    return int(np.random.SeedSequence(place).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _baseline(kind: str, vocab: int, shape: Shape, hidden: int) -> SmallLM:
    def block() -> nn.Module:
        if kind == "mingru":
            return MinGRUBlock(shape.embedding, hidden, shape.dropout)
        return TransformerBlock(shape.embedding, hidden, shape.heads, shape.dropout)

    return SmallLM(vocab, shape.embedding, [block() for _ in range(shape.blocks)], shape.dropout)


def _nearest(count, wanted: int) -> int:
    """The hidden width whose `count`, linear in the width, is nearest to `wanted`."""
    one, two = count(1), count(2)
    return round(1 + (wanted - one) / (two - one))


def story_memory(vocab: int, shape: Shape, tokens: int, bf16: bool) -> dict[str, int]:
    """Lower bound on the bytes that a worker needs to train a reservoir language model, or a baseline of the same size,
    on `tokens` tokens per update, keyed by the options to lower: trained weights with gradients and moments, the fixed
    weights, and one output of each block."""
    width, blocks, hidden, specs = shape.embedding, shape.blocks, shape.hidden, shape.specs
    features = sum(spec.features for spec in specs)
    trained = vocab * width + blocks * (features * hidden + hidden * width + width * width)
    fixed = blocks * sum((spec.units**2 if spec.kind == "esn" else 0) + spec.features * width for spec in specs)
    return {
        "--vocab-size, --embedding, --hidden or --blocks": ADAM * trained,
        "--reservoirs, --embedding or --blocks": 4 * fixed,
        "--batch-size, --block-size or --blocks": tokens * blocks * width * (2 if bf16 else 4),
    }


def memory_of(model: SmallLM, shape: Shape, tokens: int, bf16: bool) -> dict[str, Parts]:
    """A worker's estimated memory on an XLA device, with what each block keeps for its backward pass: in fp32 its
    input, the inputs and outputs of both norms, and in the type of the products all other activations."""
    width, features, cast = shape.embedding, sum(spec.features for spec in shape.specs), 2 if bf16 else 4
    block = 8 * (width + features) + cast * (6 * width + features + 2 * shape.hidden) + width + shape.hidden
    parts = {
        "weights": sum(4 * value.numel() for value in model.state_dict().values()),
        "gradients and moments": (ADAM - 4) * trained(model),
        "activations": tokens * shape.blocks * block,
        "LM head": 2 * logits_memory(tokens, len(model.embedding.weight), bf16),  # logits and their gradient
    }
    return {"training": parts}


def load_run(run: Path) -> tuple[SmallLM, Stories, int]:
    """The best model of a finished run, its tokenizer as Stories without text, and its tokens per row. A
    reservoir's fixed weights follow from the run's options and seed. Raises UserError if a file is missing, damaged, or
    of another experiment."""
    state = read_best(run, "config.yaml", "tokenizer.json")
    settings = SimpleNamespace(**read_config(run))
    try:
        tokenizer = Tokenizer.from_file(str(run / "tokenizer.json"))
    except Exception as error:  # the only kind that tokenizers raises
        raise UserError(f"{run / 'tokenizer.json'} is missing or damaged ({first_line(error)}); restore it") from error
    try:
        model = build(settings.model, tokenizer.get_vocab_size(), shape_of(settings), settings.seed)
        restore(model, state)
        none = torch.zeros(0, dtype=torch.long)
        return model.eval(), Stories("", tokenizer, none, none, 0, ""), settings.length
    except (AttributeError, TypeError) as error:
        raise UserError(
            f"{run} is not a run of train_tinystories_reservoir.py ({first_line(error)}); give one of that script"
        ) from error
