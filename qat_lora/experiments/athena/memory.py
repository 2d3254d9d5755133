"""Least memory of a recursive model in training."""

from qat_lora.experiments.athena.model import RecursiveSpec
from qat_lora.train.memory import ADAM


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
