"""How much memory a training run will take, from shapes alone."""

from qat_lora.kd.losses import CHUNK_BYTES


def training_memory(
    config, trained: int, frozen: int, batch_size: int, length: int, bf16: bool, checkpointing: bool
) -> dict[str, float]:
    """An estimate in GB (1e9 bytes) of what one worker holds at its peak.

    trained parameters: fp32 weight, gradient and two Adam moments (16 bytes each); frozen: 4 bytes. Activations of a
    Llama-type block: about 10 tensors of the hidden and 4 of the intermediate width are kept for the backward pass;
    checkpointing keeps one hidden tensor a block and one block whole. Working copies: the weights as multiplied, and
    one chunk of logits.
    """
    width = 2 if bf16 else 4
    positions = batch_size * length
    block = positions * (10 * config.hidden_size + 4 * config.intermediate_size) * width
    blocks = config.num_hidden_layers
    activations = blocks * positions * config.hidden_size * width + block if checkpointing else blocks * block
    parts = {
        "weights, gradients, optimiser": 16 * trained + 4 * frozen,
        "activations": activations,
        "weights as multiplied, logits": width * (trained + frozen) + 3 * CHUNK_BYTES,
    }
    return {name: size / 1e9 for name, size in parts.items()} | {"total": sum(parts.values()) / 1e9}


def cache_memory(config, rows: int, length: int, bf16: bool) -> float:
    """GB (1e9 bytes) of the keys and values of `rows` completions of `length` tokens, prompts included."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * head * rows * length
    return (2 if bf16 else 4) * values / 1e9
