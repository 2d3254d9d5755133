"""Least memory of a story model in training."""

from qat_lora.experiments.stories.reservoir import ReservoirSpec
from qat_lora.train.memory import ADAM


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
