"""The memory that a language model needs in each phase of a script, see memory.py. The model may have no storage
(`models.loading.empty_model`)."""

import math

from torch import nn

from qat_lora.backend.machine import PIECES
from qat_lora.backend.sharding import SPARE
from qat_lora.kernels.tiles import HEAD_BYTES, STRIP_BYTES
from qat_lora.models.architecture import Matrix, decoder_layers, matrices, text_config, unwrap
from qat_lora.train.memory import ADAM, FREED, PROGRAM, Parts, xla_room

# -- estimates: the parts of each phase of a script, in bytes; the largest phase is its peak --------------------------
LIBRARIES = 720_000_000  # bytes of the interpreter with torch, transformers and peft
TOKEN = 1_200  # bytes of a tokenizer and the tables made from it, per token of the vocabulary
DRAWN = 6  # sampling a token needs this many tensors as large as its logits


def program_memory(model: nn.Module) -> Parts:
    """The memory of a process before it loads any weights."""
    return {PROGRAM: LIBRARIES + TOKEN * len(unwrap(model).get_input_embeddings().weight)}


def weight_memory(model: nn.Module) -> int:
    """Bytes of parameters and buffers; a frozen student's buffers are its codes, one byte per weight."""
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def head_memory(model: nn.Module, positions: int, bf16: bool, room: int) -> int:
    """Bytes of the LM head at `positions` positions: its weight in the type used for the product, at most `room` bytes
    of logits, and the gradient of the hidden states."""
    vocab, hidden = unwrap(model).get_output_embeddings().weight.shape
    logits = min(room, positions * vocab * (2 if bf16 else 4))
    return 2 * vocab * hidden * bf16 + logits + positions * hidden * (2 + 4 if bf16 else 4)


def block_memory(model: nn.Module, block: nn.Module, positions: int, bf16: bool) -> int:
    """Bytes that a decoder block keeps for its backward pass at `positions` positions: inputs and outputs of its
    matrices, the product in its MLP, and two fp32 tensors per norm, its input and its normalised input."""
    chosen, linear, inner = _number(model, "num_experts_per_tok", 1), 0, 0
    for matrix in matrices(block):
        times = chosen if matrix.is_experts else 1
        linear += times * sum(matrix.shape[-2:])
        inner = max(inner, times * matrix.shape[-1] * (matrix.part == "mlp"))
    sizes = {name: module.out_features for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    norms = sum(  # a per-head norm is as wide as the projection before it
        sizes.get(name.replace("_norm.weight", "_proj"), p.numel())
        for name, p in block.named_parameters()
        if p.ndim == 1 and name.endswith("norm.weight")
    )
    return positions * ((2 if bf16 else 4) * (linear + inner) + 8 * norms)


def multiplied_memory(block: nn.Module, bf16: bool) -> int:
    """Bytes of the copies of a block's matrices that the products use: in bf16, or quantised on the fly."""
    return sum(
        math.prod(matrix.shape) * (2 if bf16 else 4)
        for matrix in matrices(block)
        if bf16 or _is_quantised_in_training(matrix)
    )


def _is_quantised_in_training(matrix: Matrix) -> bool:
    quantizer = getattr(matrix.module, "quantizer", None)
    if isinstance(quantizer, nn.ModuleDict):
        quantizer = dict(quantizer.items()).get(matrix.name)
    return quantizer is not None and quantizer.codes is None


def loading_memory(model: nn.Module) -> Parts:
    """Memory while weights are read: the file is mapped, 2 bytes per weight."""
    stored = 2 * sum(p.numel() for p in model.parameters())
    return program_memory(model) | {"weights": weight_memory(model), "the file": stored}


def reading_memory(model: nn.Module) -> Parts:
    """Memory while the trained model is read back from its file and compared with the one in memory."""
    whole = 4 * sum(p.numel() for p in model.parameters())
    return program_memory(model) | {"weights": whole, "read back": whole, "the file": whole}


def training_memory(
    model: nn.Module, batch_size: int, length: int, bf16: bool, checkpointing: bool, beside: Parts | None = None,
    compiled: bool = False, workers: int = 1,
) -> Parts:  # fmt: skip
    """Memory while a model is trained on micro-batches [batch_size, length]: 16 bytes per trained parameter for weight,
    gradient and two moments. With checkpointing, every block keeps its input, and only one block at a time keeps all
    its activations; on the CPU, the process does not return all the memory that the other blocks have freed.

    beside: other memory in use; compiled: on a device that compiles whole graphs (XLA), which holds more logits.
    workers: how many share the model out; the embedding and the head are then whole in every step, beside a block.
    """
    positions, layers = batch_size * length, decoder_layers(model)
    kept = [block_memory(model, block, positions, bf16) for block in layers]
    copies = [multiplied_memory(block, bf16) for block in layers]
    hidden = unwrap(model).get_output_embeddings().weight.shape[1]
    pieces = {}
    if checkpointing:
        whole, kept, copies = sum(kept), [len(layers) * positions * hidden * 4, max(kept)], [max(copies)]
        pieces = {FREED: min(PIECES if workers == 1 else SPARE, max(0, whole - sum(kept)))}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return program_memory(model) | {
        "weights": weight_memory(model) // workers,
        "gradients and moments": (ADAM - 4) * trained // workers,
        **({} if workers == 1 else {"gathered weights": gathered_memory(model)}),
        "activations": sum(kept),
        "bf16 copies of weights": sum(copies),
        "LM head": head_memory(model, positions, bf16, xla_room(bf16) if compiled else STRIP_BYTES),
    } | pieces | (beside or {})  # fmt: skip


def gathered_memory(model: nn.Module) -> int:
    """Bytes of the parts that are whole at a time in a model that is shared out: all outside the blocks, and twice what
    is largest, which is copied while it is gathered: that, or a block with its gradient."""
    block = max(weight_memory(block) for block in decoder_layers(model))
    outside = weight_memory(model) - sum(map(weight_memory, decoder_layers(model)))
    return outside + max(outside, 4 * block)


def evaluation_memory(
    model: nn.Module, batch_size: int, length: int, bf16: bool, teacher: nn.Module | None = None,
    compiled: bool = False, workers: int = 1,
) -> Parts:  # fmt: skip
    """Memory while a model and, if given, a teacher process rows [batch_size, length] without gradients: only one
    block's activations exist at a time, and only one block's bf16 copies of weights; a device that compiles whole
    graphs (compiled) makes all copies at the start."""
    both = [model] if teacher is None else [model, teacher]
    positions = batch_size * length
    copies = [[multiplied_memory(block, bf16) for block in decoder_layers(one)] for one in both]
    return program_memory(model) | {
        "weights": weight_memory(model) // workers,
        **({} if workers == 1 else {"gathered weights": gathered_memory(model)}),
        **({} if teacher is None else {"teacher": weight_memory(teacher)}),
        "bf16 copies of weights": sum(map(sum, copies)) if compiled else max(map(max, copies)),
        "a block": max(block_memory(one, block, positions, bf16) for one in both for block in decoder_layers(one)),
        "LM head": sum(head_memory(one, positions, bf16, xla_room(bf16) if compiled else HEAD_BYTES) for one in both),
    }


def answer_memory(model: nn.Module, rows: int, length: int, bf16: bool, beside: Parts | None = None) -> Parts:
    """Memory while `rows` answers of at most `length` tokens (with prompts) are generated: their keys and values, with
    copies of one block's at a time, all weights in the type used for products, and the logits of one token."""
    vocab, hidden = unwrap(model).get_output_embeddings().weight.shape
    copies = sum(multiplied_memory(block, bf16) for block in decoder_layers(model)) + 2 * vocab * hidden * bf16
    cache = cache_memory(model, rows, length, bf16)
    return program_memory(model) | {
        "weights": weight_memory(model),
        "bf16 copies of weights": copies,
        f"keys and values of {rows} answers": cache + 2 * cache // max(1, len(decoder_layers(model))),
        "logits": DRAWN * 4 * rows * vocab,
    } | (beside or {})  # fmt: skip


def cache_memory(model: nn.Module, rows: int, length: int, bf16: bool) -> int:
    """Bytes of the keys and values of `rows` completions of `length` tokens, including prompts."""
    heads = _number(model, "num_attention_heads", 1)
    head = _number(model, "head_dim", 0) or unwrap(model).get_output_embeddings().weight.shape[1] // heads
    layers = _number(model, "num_hidden_layers", 1)
    values = 2 * layers * _number(model, "num_key_value_heads", heads) * head * rows * length
    return (2 if bf16 else 4) * values


def _number(model: nn.Module, name: str, default: int) -> int:
    """An integer setting of a config; `default` if the config lacks it or has one per layer."""
    try:
        value = getattr(text_config(model), name, None)
    except (AttributeError, RuntimeError):  # some configs raise if layers differ in this setting
        value = None
    return value if isinstance(value, int) else default


def sizes_of(model: nn.Module) -> str:
    """A model's sizes, for messages."""
    vocab, hidden = unwrap(model).get_output_embeddings().weight.shape
    count = sum(p.numel() for p in model.parameters())
    return f"a model with {count:,} weights (vocabulary {vocab:,}, width {hidden:,})"


# -- lower bounds: what must be in memory at the same time ------------------------------------------------------------
def least_training_memory(model: nn.Module, batch_size: int, length: int, bf16: bool, workers: int = 1) -> int:
    """Lower bound in bytes for training a loaded model in one worker on micro-batches [batch_size, length]: all weights
    in their types, gradients and two Adam moments of the trained ones, and one hidden state per position and trained
    block. Valid with and without gradient checkpointing. workers: how many the weights, gradients and moments are
    shared out over."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    blocks = sum(any(p.requires_grad for p in block.parameters()) for block in decoder_layers(model))
    hidden = unwrap(model).get_output_embeddings().weight.shape[1]
    return (weights + (ADAM - 4) * trained) // workers + blocks * batch_size * length * hidden * (2 if bf16 else 4)


def least_rollout_memory(model: nn.Module, prompts: int, group: int, length: int) -> int:
    """Lower bound in bytes of `rl.rollout.rollout` for `group` answers of at most `length` tokens to each of `prompts`
    prompts: tokens, their log-probabilities and entropies, and one row of logits per answer, in bf16 or wider."""
    rows, vocab = prompts * group, unwrap(model).get_output_embeddings().weight.shape[0]
    return rows * (16 * length + 2 * vocab)


def least_teacher_memory(
    model: nn.Module, batch_size: int, length: int, draws: int, bf16: bool, workers: int = 1
) -> int:
    """Lower bound in bytes of a teacher pass over rows [batch_size, length]: weights, which `workers` share, tokens,
    hidden states, and the uniform numbers for the `draws` tail draws."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    hidden = unwrap(model).get_output_embeddings().weight.shape[1]
    return weights // workers + batch_size * length * (8 + hidden * (2 if bf16 else 4) + 4 * draws)
