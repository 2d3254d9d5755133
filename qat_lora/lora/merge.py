"""Reads a trained model's saved adapter back, merges it, and measures how much merging changes the logits."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from qat_lora.backend import TorchBackend
from qat_lora.backend.sharding import whole_values, writes
from qat_lora.errors import UserError
from qat_lora.kernels.tiles import tiles
from qat_lora.lora.adapter import load_adapter
from qat_lora.models.architecture import decoder_layers, eager_experts, hidden_states, unwrap
from qat_lora.models.loading import load_model
from qat_lora.quant.student import head_of, load_student
from qat_lora.run.console import say

LOGIT_GAP = 1e-4  # largest accepted logit difference between adapter and merged model


@torch.no_grad()
def merged(
    model: nn.Module, name: str, checkpoint: Path | None, adapter: Path | None, tokens: Tensor, backend: TorchBackend
) -> tuple[nn.Module | None, float | None]:
    """The whole trained model on the CPU, with the adapter read back from its folder and merged into the weights; and
    the largest logit difference over `tokens` between adapter and merged model (None without an adapter).

    Both are computed in fp64, so that the difference shows the rounding of the merged weights to fp32 and not the order
    of sums. checkpoint: the file of a quantised base. Raises UserError if the adapter in the folder is not the trained
    one. If the model is shared out, every worker calls this, and the others than worker 0 get None.
    """
    trained = whole_values(model, lambda _, p: p.requires_grad)
    model.to("meta")  # frees its memory
    if not writes(model):
        return None, None
    whole = load_student(checkpoint, name)[0] if checkpoint else load_model(name)
    if adapter is None:
        for key, value in whole.named_parameters():
            value.copy_(trained[key])
        return whole, None
    adapted = load_adapter(whole, adapter, checkpoint)
    back = dict(adapted.named_parameters())
    for key, value in trained.items():
        if key not in back or not torch.equal(back[key], value):
            raise UserError(f"{adapter}: {key} in the saved file is not the trained one; check the disk")
    ids = tokens.unsqueeze(0)
    with eager_experts(adapted):
        before = exact_hidden_states(adapted, ids)
        for layer in adapted.modules():
            if isinstance(layer, LoraLayer):
                layer.double().merge()
                layer.float()
        whole = adapted.unload()
        gap = _largest_gap(whole, exact_hidden_states(whole, ids), before)
    if gap > LOGIT_GAP:
        say(f"warning: adapter and merged model differ by {gap:.1e} in a logit, more than {LOGIT_GAP:g}; use adapter/")
    return whole, gap


def exact_hidden_states(model: nn.Module, ids: Tensor) -> Tensor:
    """The hidden states [1, L, H] that an fp32 model's head gets for tokens [1, L], as fp64: computed in fp64, or in
    fp32 if the model's own code supports no other dtype (xglm, inkling2)."""
    try:
        with in_fp64(model):
            return hidden_states(model, ids)
    except RuntimeError:
        return hidden_states(model, ids).double()


@contextmanager
def in_fp64(model: nn.Module) -> Iterator[None]:
    """Context in which an fp32 model computes in fp64, one decoder layer at a time: converting all of it at once would
    take three times the memory."""
    layers, embedding, head = decoder_layers(model), unwrap(model).get_input_embeddings(), model.get_output_embeddings()
    apart = {id(module) for part in (*layers, embedding, head) for module in part.modules()}
    beside = [module for module in model.modules() if id(module) not in apart]  # norms, rotary embeddings

    def widen(module: nn.Module, given: tuple) -> None:
        module.double()

    def narrow(module: nn.Module, given: tuple, out: Tensor | tuple) -> None:
        module.float()

    hooks = [embedding.register_forward_hook(lambda module, given, out: out.double())]
    for layer in layers:
        hooks += [layer.register_forward_pre_hook(widen), layer.register_forward_hook(narrow, always_call=True)]
    try:
        for module in beside:
            module._apply(lambda t: t.double() if t.is_floating_point() else t, recurse=False)
        yield
    finally:
        for module in beside:
            module._apply(lambda t: t.float() if t.is_floating_point() else t, recurse=False)
        for hook in hooks:
            hook.remove()


def _largest_gap(model: nn.Module, one: Tensor, other: Tensor) -> float:
    """The largest logit difference between two hidden states [1, L, H] in fp64, without ever forming [L, V]."""
    head = head_of(model)
    strips = (head.strip(rows, torch.float64) for rows in tiles(len(head.weight), one.shape[1], one.device))
    return max(float((strip.logits(one) - strip.logits(other)).abs().max()) for strip in strips)
