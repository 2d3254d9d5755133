"""What an update of training costs on paper: floating-point operations, bytes over the network, seconds. Everything is
computed from shapes, so a model needs no storage. step_on_paper.py prints the tables, step_check.py measures.

Only dense models: experts are not counted.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import transformers
from shapes import CONFIGS
from torch import nn

from qat_lora.backend.eager import SMALL_BYTES
from qat_lora.backend.opening import Planned
from qat_lora.lora.add import add_adapter
from qat_lora.models.architecture import decoder_layers, text_config, unwrap
from qat_lora.quant.linear import freeze
from qat_lora.quant.student import StudentSpec, quantize
from qat_lora.train.memory import peak_phase
from qat_lora.train.options import TrainOptions

# -- assumptions: untested on hardware --------------------------------------------------------------------------------
MFU = 0.4  # share of the peak FLOP/s that forward and backward pass reach
LINK = 0.8  # share of its nominal speed that a link or memory reaches
FILL = 0.95  # share of the memory that a worker may use
OPTIMISER_BYTES = 28  # per trained weight and update: reads weight, gradient and two moments, writes all but gradient
HOP_BETWEEN = 9.6e-6  # seconds of a hop of a ring between boxes; this and `Box.hop`: NCCL's src/graph/tuning.cc


@dataclass(frozen=True)
class Box:
    """Devices of one kind, as their vendor states them. flops: peak bf16 FLOP/s without sparsity; memory: bytes;
    hbm: bytes/s of the memory; inside, between: bytes/s of a device in one direction, to the devices of its box and to
    other boxes; hop: seconds of a hop inside; most: how many devices are considered; kind: the backend's."""

    flops: float
    memory: float
    hbm: float
    per_box: int
    inside: float
    between: float
    hop: float
    most: int
    kind: str = "cuda"


BOXES = {
    # NVIDIA's L4 data sheet; a link is half of PCIe 4.0 x16's 64 GB/s
    "L4": Box(121e12, 24e9, 300e9, 8, 32e9, 0, 5.7e-6, 8),
    # NVIDIA's A100 80GB SXM data sheet (NVLink 600 GB/s, both directions), DGX A100 guide (200 Gb/s per GPU)
    "A100": Box(312e12, 80e9, 2039e9, 8, 300e9, 25e9, 3.4e-6, 1024),
    # NVIDIA's H100 SXM data sheet (NVLink 900 GB/s, both directions), DGX H100 guide (400 Gb/s per GPU)
    "H100": Box(989e12, 80e9, 3350e9, 8, 450e9, 50e9, 3.4e-6, 1024),
    # NVIDIA's H200 SXM data sheet: an H100 with more memory
    "H200": Box(989e12, 141e9, 4800e9, 8, 450e9, 50e9, 3.4e-6, 1024),
    # Google Cloud's page on TPU v6e (800 GB/s per chip, both directions); the pod is one box, its hops are not counted
    "v6e": Box(918e12, 32e9, 1638e9, 256, 400e9, 0, 0, 256, "xla"),
}


# -- models ----------------------------------------------------------------------------------------------------------
QWEN3 = {"vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8}
PUBLISHED = {  # as in the models' config.json
    "qwen3-4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "qwen3-8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "qwen3-32b": {"hidden_size": 5120, "intermediate_size": 25600, "num_hidden_layers": 64, "num_attention_heads": 64},
}
UNTIED = ("qwen3-8b", "qwen3-32b")
MODELS = {name: CONFIGS[name] for name in ("smollm2-135m", "qwen3-0.6b")}
MODELS |= {name: ("Qwen3Config", QWEN3 | sizes) for name, sizes in PUBLISHED.items()}
STAGES = ("QAT", "SFT", "recovery")


def config_of(name: str, **changed) -> transformers.PreTrainedConfig:
    """The config of a model; changed: other sizes."""
    kind, sizes = MODELS[name]
    return getattr(transformers, kind)(**sizes | changed, tie_word_embeddings=name not in UNTIED)


def empty(config: transformers.PreTrainedConfig) -> nn.Module:
    """A model without storage."""
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def trained(
    model: nn.Module, stage: str, rank: int, initialise: Callable = lambda student: None
) -> nn.Module:  # fmt: skip
    """The model as a stage trains it: QAT of a 2-bit student, SFT of all weights, or an adapter on the frozen student.
    initialise(student) sets the scales of a student that has values."""
    if stage == "SFT":
        return model.requires_grad_(True)
    model = quantize(model, StudentSpec())
    initialise(model)
    if stage == "QAT":
        return model
    freeze(model)
    return add_adapter(model.requires_grad_(False), rank, rank, ("auto",), seed=0)


# -- floating-point operations ---------------------------------------------------------------------------------------
def micro_batch_flops(model: nn.Module, rows: int, length: int, recompute: bool, logits: int = 1) -> int:
    """Operations of a micro-batch [rows, length]: 2 per weight and token in the forward pass, as many again for the
    gradient of the inputs, of a trained weight, and for a recomputed block. Attention is counted without leaving out
    what causality discards.

    logits: how often the head's logits are computed; a trained head on the CPU computes them twice.
    """
    tokens, config = rows * length, text_config(model)
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    total = 0
    for block in decoder_layers(model):
        weights = [module.weight for module in block.modules() if isinstance(module, nn.Linear)]
        total += sum(2 * tokens * weight.numel() * (2 + recompute + weight.requires_grad) for weight in weights)
        total -= 2 * tokens * weights[-1].numel() * recompute  # torch stops once it has what the backward pass needs
        total += 4 * tokens * length * width * (3 + recompute)
    head = unwrap(model).get_output_embeddings().weight
    return total + 2 * tokens * head.numel() * (logits + 1 + head.requires_grad)


# -- bytes over the network ------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Traffic:
    """Bytes of the whole tensors that the workers exchange, and in how many collectives: gathered and scattered in
    every micro-batch, reduced once per update."""

    gathered: int
    scattered: int
    reduced: int
    gathers: int
    scatters: int
    reductions: int


def traffic(model: nn.Module, workers: int, shard: bool) -> Traffic:
    """What `workers` exchange (see backend/sharding.py and `TorchBackend.reduce`). With shards, all parameters of a
    block, frozen or not, are gathered before its forward and its backward pass, those outside blocks once, and the
    gradients of trained ones are scattered; buffers, such as codes, are whole everywhere."""
    trained = [p for p in model.parameters() if p.requires_grad]
    if not shard:
        large = sum(p.nbytes >= SMALL_BYTES for p in trained)
        return Traffic(0, 0, sum(p.nbytes for p in trained), 0, 0, large + any(p.nbytes < SMALL_BYTES for p in trained))
    blocks = [list(block.parameters()) for block in decoder_layers(model)]
    within = {id(p) for block in blocks for p in block}
    parts = [*blocks, [p for p in model.parameters() if id(p) not in within]]
    gathered = 2 * sum(padded(part, workers) for part in parts) - padded(parts[-1], workers)
    scatters = sum(any(p.requires_grad for p in part) for part in parts)
    # reduced: the gradient's norm, and for each parameter the share of elements that agree with their gradient
    return Traffic(gathered, padded(trained, workers), 4 * (1 + len(trained)), 2 * len(blocks) + 1, scatters, 2)


def padded(parameters: Iterable[nn.Parameter], workers: int) -> int:
    """Bytes of parameters whose rows are filled up to a multiple of `workers`, as FSDP2 does."""
    return sum(-(-len(p) // workers) * workers * p[:1].nbytes for p in parameters)


def bytes_sent(found: Traffic, workers: int, micro_batches: int, gloo: bool = False) -> float:
    """Bytes that a worker sends in an update, with rings: (N − 1)/N of a tensor that is gathered or scattered, and
    twice that of one that is reduced. gloo: it scatters by reducing."""
    often = found.gathered + found.scattered * (2 if gloo else 1)
    return (workers - 1) / workers * (micro_batches * often + 2 * found.reduced)


# -- seconds ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Step:
    """Seconds of the parts of an update. inside and between: sending, which takes the longer of both; hops: waiting for
    every device of a ring in turn. With shards, the network works while blocks are computed; gradients of a whole model
    are reduced after the backward pass."""

    compute: float
    optimiser: float
    inside: float
    between: float
    hops: float
    shard: bool

    @property
    def network(self) -> float:
        return max(self.inside, self.between) + self.hops

    @property
    def seconds(self) -> float:
        both = max(self.compute, self.network) if self.shard else self.compute + self.network
        return both + self.optimiser

    @property
    def binds(self) -> str:
        """The part that takes the longest."""
        names = ("compute", "optimiser", "inside", "between", "hops")
        return max(names, key=lambda name: getattr(self, name))


def step(
    model: nn.Module, box: Box, workers: int, rows: int, length: int, micro_batches: int, shard: bool, recompute: bool
) -> Step:
    """An update of `workers` devices, each with micro-batches [rows, length]."""
    found = traffic(model, workers, shard)
    boxes, each = -(-workers // box.per_box), min(workers, box.per_box)
    sent = bytes_sent(found, workers, micro_batches)
    # a ring enters and leaves a box once, and each of its devices carries an equal part of that
    between = sent / (box.per_box * box.between * LINK) if boxes > 1 else 0.0
    ring = (workers - boxes) * box.hop + (boxes - 1) * HOP_BETWEEN
    tree = 2 * ((each - 1) * box.hop + math.log2(boxes) * HOP_BETWEEN)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Step(
        compute=micro_batches * micro_batch_flops(model, rows, length, recompute) / (box.flops * MFU),
        optimiser=OPTIMISER_BYTES * trained / (workers if shard else 1) / (box.hbm * LINK),
        inside=sent / (box.inside * LINK),
        between=between,
        hops=micro_batches * (found.gathers + found.scatters) * ring + found.reductions * tree,
        shard=shard,
    )


# -- memory ----------------------------------------------------------------------------------------------------------
def worker_memory(model: nn.Module, box: Box, workers: int, rows: int, length: int, recompute: bool) -> int:
    """Estimated bytes of a worker's device, as --dry-run prints them. workers: how many share the model out."""
    backend = Planned(box.kind, "bf16")
    options = TrainOptions(batch_size=rows, gradient_checkpointing=recompute)
    return sum(peak_phase(options.memory(model, length, backend, workers=workers), backend)[1].values())


def way_to_fit(model: nn.Module, box: Box, workers: int, rows: int, length: int) -> tuple[bool, bool, int] | None:
    """The first of these that fits a worker's device: the whole model, with recomputed blocks, shared out, both.
    Returns (shard, recompute, bytes), or None."""
    for shard in (False, True)[: 1 + (box.kind == "cuda" and workers > 1)]:
        for recompute in (False, True):
            need = worker_memory(model, box, workers if shard else 1, rows, length, recompute)
            if need <= FILL * box.memory:
                return shard, recompute, need
    return None
