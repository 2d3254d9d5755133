"""How much memory a training run will take, from shapes alone."""

from torch import nn

from qat_lora.kd.losses import CHUNK_BYTES
from qat_lora.models.architecture import decoder_layers, matrices, text_config, unwrap


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
        "weights as multiplied, logits": width * (trained + frozen) + 3 * CHUNK_BYTES,
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
