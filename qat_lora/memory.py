"""How much memory a run takes, computed from shapes: estimates to show, and lower bounds to check against
(`qat_lora.machine.check_memory`)."""

import torch
from torch import nn

from qat_lora.backend import TorchBackend
from qat_lora.backend.environment import read_place
from qat_lora.backend.tiles import HEAD_BYTES
from qat_lora.machine import check_memory
from qat_lora.models.architecture import decoder_layers, matrices, text_config, unwrap
from qat_lora.models.recursive import RecursiveSpec
from qat_lora.models.reservoir import ReservoirSpec

ADAM = 16  # bytes per trained fp32 weight, with its gradient and two moments


def training_memory(
    model: nn.Module, trained: int, frozen: int, batch_size: int, length: int, bf16: bool, checkpointing: bool
) -> dict[str, float]:
    """An estimate in GB (1e9 bytes) of what one worker holds at its peak.

    trained parameters: fp32 weight, gradient and two Adam moments (16 bytes each); frozen: 4 bytes. Activations of a
    decoder block: about 10 tensors of the hidden and 4 of the intermediate width are kept for the backward pass;
    checkpointing keeps one hidden tensor a block and one block whole. Working copies: the weights as multiplied, and
    one chunk of logits.
    """
    width = 2 if bf16 else 4
    positions = batch_size * length
    hidden, layers = unwrap(model).get_output_embeddings().weight.shape[1], decoder_layers(model)
    block = positions * (10 * hidden + 4 * _inner_width(model)) * width
    blocks = len(layers)
    activations = blocks * positions * hidden * width + block if checkpointing else blocks * block
    parts = {
        "weights, gradients, optimiser": 16 * trained + 4 * frozen,
        "activations": activations,
        "weights as multiplied, logits": width * (trained + frozen) + HEAD_BYTES,
    }
    return {name: size / 1e9 for name, size in parts.items()} | {"total": sum(parts.values()) / 1e9}


def _inner_width(model: nn.Module) -> int:
    """What the widest MLP of a block works with for one token: of experts, those that a token chooses."""
    chosen = _number(model, "num_experts_per_tok", 1)
    widths = [
        matrix.shape[-1] * (chosen if matrix.is_experts else 1)
        for block in decoder_layers(model)
        for matrix in matrices(block)
        if matrix.part == "mlp"
    ]
    return max(widths, default=0)


def _number(model: nn.Module, name: str, default: int) -> int:
    """A whole number of a config that may not have it, or may have one for each layer."""
    try:
        value = getattr(text_config(model), name, None)
    except (AttributeError, RuntimeError):  # one that says so of numbers that differ from layer to layer
        value = None
    return value if isinstance(value, int) else default


def cache_memory(model: nn.Module, rows: int, length: int, bf16: bool) -> float:
    """GB (1e9 bytes) of the keys and values of `rows` completions of `length` tokens, prompts included."""
    heads = _number(model, "num_attention_heads", 1)
    head = _number(model, "head_dim", 0) or unwrap(model).get_output_embeddings().weight.shape[1] // heads
    layers = _number(model, "num_hidden_layers", 1)
    values = 2 * layers * _number(model, "num_key_value_heads", heads) * head * rows * length
    return (2 if bf16 else 4) * values / 1e9


def check_fits(backend: TorchBackend, parts: dict[str, float], what: str, workers: int = 1) -> None:
    """Raise UserError if the device of a worker cannot hold the sum of `parts`: a GPU, or this machine with all its
    workers. A TPU is not checked, because its memory is not known here.

    parts: {the options to lower: least bytes of one worker}. what: the subject of the message. workers: how many share
    this machine, unless LOCAL_WORLD_SIZE says so.
    """
    if backend.on_tpu:
        return
    here, available = 1, None
    if backend.kind == "cuda":
        available = torch.cuda.get_device_properties(backend.device).total_memory
    else:  # all workers of this host share its memory
        place = read_place()
        here = place.local_world_size if place else workers
    check_memory(here * sum(parts.values()), what, max(parts, key=parts.__getitem__), available)


# -- lower bounds: what is held at the same time in any case ----------------------------------------------------------
def least_training_memory(model: nn.Module, batch_size: int, length: int, bf16: bool) -> int:
    """Least bytes that a worker holds while it trains a loaded model on micro-batches [batch_size, length]: all weights
    in their types, gradients and two Adam moments of the trained ones, and one hidden state per trained block. Valid
    with and without gradient checkpointing."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    blocks = sum(any(p.requires_grad for p in block.parameters()) for block in decoder_layers(model))
    hidden = unwrap(model).get_output_embeddings().weight.shape[1]
    return weights + (ADAM - 4) * trained + blocks * batch_size * length * hidden * (2 if bf16 else 4)


def least_rollout_memory(model: nn.Module, prompts: int, group: int, length: int) -> int:
    """Least bytes that `rl.rollout.rollout` takes for `group` answers of at most `length` tokens to each of `prompts`
    prompts: tokens, their log-probabilities and entropies, and one row of logits per answer, in bf16 or wider."""
    rows, vocab = prompts * group, unwrap(model).get_output_embeddings().weight.shape[0]
    return rows * (16 * length + 2 * vocab)


def least_teacher_memory(model: nn.Module, batch_size: int, length: int, draws: int, bf16: bool) -> int:
    """Least bytes of a teacher pass over rows [batch_size, length]: weights, tokens, hidden states, and the numbers
    behind the draws."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    hidden = unwrap(model).get_output_embeddings().weight.shape[1]
    return weights + batch_size * length * (8 + hidden * (2 if bf16 else 4) + 4 * draws)


def weight_options(spec: RecursiveSpec) -> str:
    """The options to lower for fewer weights in a recursive model, for messages."""
    wide = spec.mlp_t and spec.positions > spec.hidden_size  # then most weights are those that mix positions
    return ("arch.mlp_t to false, or " if wide else "") + "arch.hidden_size, arch.L_layers or arch.expansion"


def recursive_memory(spec: RecursiveSpec, rows: int, ema: bool, bf16: bool, checkpointing: bool) -> dict[str, int]:
    """Least bytes that a worker holds while it trains a recursive model on `rows` rows per update, by the options to
    lower.

    Weights with gradient, moments and average; the puzzles' embeddings and the sums of their gradients; for each row
    the carry, its tokens and labels, the logits, and what no compiler recomputes for the backward pass: the inputs and
    outputs of each block's matrices (checkpointing: the input of each update of a state).
    """
    positions, width, cast = spec.positions, spec.hidden_size, 2 if bf16 else 4
    updates = 2 if spec.one_step_gradient else spec.L_cycles + 1  # of the states, with a gradient
    mixed = 2 * spec.inner(positions) * width if spec.mlp_t else positions * (spec.heard + width)
    block = mixed + 2 * positions * (width + spec.inner(width))
    kept = positions * width if checkpointing else spec.L_layers * block
    row = 2 * 4 * positions * width + updates * kept * cast + spec.length * (2 * 8 + 4 * spec.vocab)
    return {
        weight_options(spec): (ADAM + 4 * ema) * spec.parameters,
        "arch.hidden_size, or take data with fewer puzzle identifiers": 2 * 4 * spec.identifiers * width,
        "global_batch_size, arch.hidden_size or arch.L_cycles": rows * row,
    }


def story_memory(
    vocab: int, width: int, blocks: int, hidden: int, specs: tuple[ReservoirSpec, ...], tokens: int, bf16: bool
) -> dict[str, int]:
    """Least bytes that a worker holds while it trains a reservoir language model, or a baseline of the same size, on
    `tokens` tokens per update, by the options to lower: trained weights with gradient and moments, the fixed weights,
    and one output of each block."""
    features = sum(spec.features for spec in specs)
    trained = vocab * width + blocks * (features * hidden + hidden * width + width * width)
    fixed = blocks * sum((spec.units**2 if spec.kind == "esn" else 0) + spec.features * width for spec in specs)
    return {
        "--vocab-size, --embedding, --hidden or --blocks": ADAM * trained,
        "--reservoirs, --embedding or --blocks": 4 * fixed,
        "--batch-size, --block-size or --blocks": tokens * blocks * width * (2 if bf16 else 4),
    }
