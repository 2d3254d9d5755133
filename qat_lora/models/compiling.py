"""Decoder blocks that run as torch.compile translates them, with their quantisers and adapters inside."""

import functools

import torch
from torch import nn

from qat_lora.models.architecture import decoder_layers


def compile_blocks(model: nn.Module) -> None:
    """Compile the decoder blocks of a placed Hugging Face model: one graph for training, shared by all blocks of the
    same structure, and others for evaluation. Batches must have one shape."""
    model.enable_input_require_grads()  # otherwise the first block, whose input needs no gradient, has its own graph
    for block in decoder_layers(model):
        block.__class__ = _compiled(type(block))


@functools.cache
def _compiled(kind: type) -> type:
    """In the class, so that copies of a block share it. A block that recomputes its activations does so around it."""
    forward = torch.compile(kind.forward, dynamic=False)
    return type(kind.__name__, (kind,), {"forward": forward, "__module__": __name__})
