"""How decoder blocks run in training: recomputed, or as torch.compile translates them, with their quantisers and
adapters inside."""

import functools

import torch
from torch import nn

from qat_lora.backend import TorchBackend
from qat_lora.backend.sharding import place_shards
from qat_lora.models.architecture import decoder, decoder_layers, unwrap


def placed(model: nn.Module, backend: TorchBackend, shared: bool) -> nn.Module:
    """Place a model, with its blocks shared out over the workers if it is `shared` for one of them: hosts may have
    different amounts of memory."""
    if not any(backend.group.gather(shared)):
        return backend.place(model)
    place_shards(backend, unwrap(model), decoder(model), decoder_layers(model))
    return model


def set_up_blocks(model: nn.Module, backend: TorchBackend, recomputed: bool, compile: str) -> None:
    """How the decoder blocks of a placed model run in training. recomputed: whether their activations are recomputed
    in the backward pass. compile: auto, on or off, see `TorchBackend.compiles`."""
    if recomputed:
        backend.gradient_checkpointing(model)
    if backend.compiles(compile):
        compile_blocks(model)


def compile_blocks(model: nn.Module) -> None:
    """Compile the training of the decoder blocks of a placed Hugging Face model: one graph, shared by all blocks of the
    same structure. Batches must have one shape. Without gradients, as in evaluation and generation, whose shapes vary,
    blocks run as they are."""
    model.enable_input_require_grads()  # otherwise the first block, whose input needs no gradient, has its own graph
    for block in decoder_layers(model):
        block.__class__ = _compiled(type(block))


@functools.cache
def _compiled(kind: type) -> type:
    """In the class, so that copies of a block share it. A block that recomputes its activations does so around it."""
    compiled = torch.compile(kind.forward, dynamic=False)

    def forward(self, *args, **named):
        return (compiled if torch.is_grad_enabled() else kind.forward)(self, *args, **named)

    return type(kind.__name__, (kind,), {"forward": forward, "__module__": __name__})
