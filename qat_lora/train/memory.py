"""How much memory a run takes, computed from shapes: estimates to show, and lower bounds to check against
(`qat_lora.backend.machine.check_memory`). A model may be without storage (`models.loading.empty_model`)."""

import math

from torch import nn

from qat_lora.backend import TorchBackend
from qat_lora.backend.environment import read_place
from qat_lora.backend.heap import PIECES
from qat_lora.backend.machine import check_memory
from qat_lora.backend.tiles import HEAD_BYTES, STRIP_BYTES
from qat_lora.models.architecture import Matrix, decoder_layers, matrices, text_config, unwrap

ADAM = 16  # bytes per trained fp32 weight, with its gradient and two moments


# -- estimates: parts in bytes of each phase of a script, of which the largest is its peak ----------------------------
LIBRARIES = 720_000_000  # bytes of the interpreter with torch, transformers and peft
TOKEN = 1_200  # bytes that a tokenizer and the tables made of it take for each token of the vocabulary
PROGRAM = "interpreter and libraries"
FREED = "freed, in pieces"
DRAWN = 6  # tensors like the logits of a token that drawing the next one takes

Parts = dict[str, int]


def program_memory(model: nn.Module) -> Parts:
    """What a process holds before any weights."""
    return {PROGRAM: LIBRARIES + TOKEN * len(unwrap(model).get_input_embeddings().weight)}


def weight_memory(model: nn.Module) -> int:
    """Bytes of parameters and buffers; a frozen student's buffers are its codes, a byte a weight."""
    return sum(t.numel() * t.element_size() for t in (*model.parameters(), *model.buffers()))


def head_memory(model: nn.Module, positions: int, bf16: bool, room: int = STRIP_BYTES) -> int:
    """The LM head over so many positions: its weight as it is multiplied, at most `room` bytes of logits, and the
    gradient of the hidden states."""
    vocab, hidden = unwrap(model).get_output_embeddings().weight.shape
    logits = min(room, positions * vocab * (2 if bf16 else 4))
    return 2 * vocab * hidden * bf16 + logits + positions * hidden * (2 + 4 if bf16 else 4)


def block_memory(model: nn.Module, block: nn.Module, positions: int, bf16: bool) -> int:
    """What a decoder block keeps of so many positions for its backward pass: inputs and outputs of its matrices, the
    product in its MLP, and of each norm its input and what it is multiplied with, both in fp32."""
    chosen, linear, inner = _number(model, "num_experts_per_tok", 1), 0, 0
    for matrix in matrices(block):
        times = chosen if matrix.is_experts else 1
        linear += times * sum(matrix.shape[-2:])
        inner = max(inner, times * matrix.shape[-1] * (matrix.part == "mlp"))
    sizes = {name: module.out_features for name, module in block.named_modules() if isinstance(module, nn.Linear)}
    norms = sum(  # one of each head is as wide as the projection before it
        sizes.get(name.replace("_norm.weight", "_proj"), p.numel())
        for name, p in block.named_parameters()
        if p.ndim == 1 and name.endswith("norm.weight")
    )
    return positions * ((2 if bf16 else 4) * (linear + inner) + 8 * norms)


def multiplied_memory(block: nn.Module, bf16: bool) -> int:
    """A block's matrices as they are multiplied, where that is a copy: in bf16, or quantised on the fly."""
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


def loading_memory(model: nn.Module, stored: int = 2) -> Parts:
    """While weights are read: the file is mapped, `stored` bytes a weight."""
    count = sum(p.numel() for p in model.parameters())
    return program_memory(model) | {"weights": weight_memory(model), "the file": stored * count}


def training_memory(
    model: nn.Module, batch_size: int, length: int, bf16: bool, checkpointing: bool, beside: Parts | None = None
) -> Parts:
    """While a model is trained on micro-batches [batch_size, length]: of a trained parameter weight, gradient and two
    moments, 16 bytes. beside: what else is held. With checkpointing each block keeps its input, and one block at a time
    all of it; on the CPU, what the others have freed lies about in pieces."""
    positions, layers = batch_size * length, decoder_layers(model)
    kept = [block_memory(model, block, positions, bf16) for block in layers]
    copies = [multiplied_memory(block, bf16) for block in layers]
    hidden = unwrap(model).get_output_embeddings().weight.shape[1]
    pieces = {}
    if checkpointing:
        whole, kept, copies = sum(kept), [len(layers) * positions * hidden * 4, max(kept)], [max(copies)]
        pieces = {FREED: min(PIECES, max(0, whole - sum(kept)))}
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return program_memory(model) | {
        "weights": weight_memory(model),
        "gradients and moments": (ADAM - 4) * trained,
        "activations": sum(kept),
        "weights as multiplied": sum(copies),
        "LM head": head_memory(model, positions, bf16),
    } | pieces | (beside or {})  # fmt: skip


def evaluation_memory(
    model: nn.Module, batch_size: int, length: int, bf16: bool, teacher: nn.Module | None = None
) -> Parts:
    """While a model, and a teacher beside it, answers rows [batch_size, length] without gradients: one block is alive
    at a time."""
    both = [model] if teacher is None else [model, teacher]
    positions = batch_size * length
    return program_memory(model) | {
        "weights": weight_memory(model),
        **({} if teacher is None else {"teacher": weight_memory(teacher)}),
        "a block": max(
            block_memory(one, block, positions, bf16) + multiplied_memory(block, bf16)
            for one in both
            for block in decoder_layers(one)
        ),
        "LM head": sum(head_memory(one, positions, bf16, HEAD_BYTES) for one in both),
    }


def answer_memory(model: nn.Module, rows: int, length: int, bf16: bool, beside: Parts | None = None) -> Parts:
    """While `rows` answers of at most `length` tokens are drawn, prompts included: their keys and values, copied once
    for each block, all weights as they are multiplied, and the logits of a token."""
    vocab, hidden = unwrap(model).get_output_embeddings().weight.shape
    copies = sum(multiplied_memory(block, bf16) for block in decoder_layers(model)) + 2 * vocab * hidden * bf16
    cache = cache_memory(model, rows, length, bf16)
    return program_memory(model) | {
        "weights": weight_memory(model),
        "weights as multiplied": copies,
        f"keys and values of {rows} answers": cache + 2 * cache // max(1, len(decoder_layers(model))),
        "logits": DRAWN * 4 * rows * vocab,
    } | (beside or {})  # fmt: skip


def cache_memory(model: nn.Module, rows: int, length: int, bf16: bool) -> int:
    """Bytes of the keys and values of `rows` completions of `length` tokens, prompts included."""
    heads = _number(model, "num_attention_heads", 1)
    head = _number(model, "head_dim", 0) or unwrap(model).get_output_embeddings().weight.shape[1] // heads
    layers = _number(model, "num_hidden_layers", 1)
    values = 2 * layers * _number(model, "num_key_value_heads", heads) * head * rows * length
    return (2 if bf16 else 4) * values


def _number(model: nn.Module, name: str, default: int) -> int:
    """A whole number of a config that may not have it, or may have one for each layer."""
    try:
        value = getattr(text_config(model), name, None)
    except (AttributeError, RuntimeError):  # one that says so of numbers that differ from layer to layer
        value = None
    return value if isinstance(value, int) else default


def memory_line(phases: dict[str, Parts], backend: TorchBackend) -> str:
    """What a worker holds in the phase that takes the most, in GB (1e9 bytes), for people. On the CPU that is its whole
    process; of a GPU or TPU its own memory alone, without the interpreter and what the host needs to load."""
    where = "a worker's process"
    if not backend.shares_host_memory:
        where = f"a worker's {backend.kind} device, without its host"
        phases = {
            phase: {name: size for name, size in parts.items() if name not in (PROGRAM, FREED)}
            for phase, parts in phases.items()
            if not phase.startswith("loading")
        }
    phase = max(phases, key=lambda name: sum(phases[name].values()))
    sizes = phases[phase] | {"total": sum(phases[phase].values())}
    shown = ", ".join(f"{name} {size / 1e9:.2f} GB" for name, size in sizes.items())
    return f"memory of {where} (estimated; the peak is in {phase}): {shown}"


def check_fits(backend: TorchBackend, parts: dict[str, float], what: str, workers: int = 1) -> None:
    """Raise UserError if the device of a worker cannot hold the sum of `parts`: a GPU, or this machine with all its
    workers. A TPU is not checked, because its memory is not known here.

    parts: {the options to lower: least bytes of one worker}. what: the subject of the message. workers: how many share
    this machine, unless LOCAL_WORLD_SIZE says so.
    """
    if (available := backend.memory()) is None:
        return
    here, place = 1, read_place()
    if backend.shares_host_memory:  # as all workers of this host do
        here = place.local_world_size if place else workers
    check_memory(here * sum(parts.values()), what, max(parts, key=parts.__getitem__), available)


def sizes_of(model: nn.Module) -> str:
    """A model's sizes for messages."""
    vocab, hidden = unwrap(model).get_output_embeddings().weight.shape
    count = sum(p.numel() for p in model.parameters())
    return f"a model of {count:,} weights (vocabulary {vocab:,}, width {hidden:,})"


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
