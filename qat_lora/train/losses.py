"""Cross-entropy losses and log-probabilities that never allocate [B, L, V]."""

import torch
from torch import Tensor, nn

from qat_lora.backend import compute_dtype
from qat_lora.backend.devices import is_lazy, on_host, without_autocast
from qat_lora.kernels.head import Head
from qat_lora.kernels.head_softmax import HeadSoftmax
from qat_lora.kernels.one_pass import OnePass
from qat_lora.kernels.target_rows import TargetRows
from qat_lora.kernels.tiles import strips_at_once
from qat_lora.kernels.two_passes import TwoPasses
from qat_lora.models.architecture import hidden_states
from qat_lora.quant.student import head_of


def kept(mask: Tensor) -> Tensor:
    """The number of positions that a mask keeps, as a float scalar on its device. On the CPU, raises ValueError if
    there are none."""
    if on_host(mask) and not mask.any():
        raise ValueError("the mask keeps no position; a batch needs at least one target")
    return mask.sum(dtype=torch.float32)


def sparse_loss(
    hidden: Tensor, head: Head | Tensor, index: Tensor, prob: Tensor, mask: Tensor, total: Tensor | None = None
) -> Tensor:
    """−Σ_j prob_j · log softmax(logits)[index_j], summed over kept positions and divided by `total`.

    hidden [B, L, H]; head: a Head, or its weight [V, H] if logits are just the product with it; index, prob [B, L, J]
    (probabilities of a repeated index add up); mask [B, L]; total: scalar divisor of the sum, by default the number of
    positions that this mask keeps (pass the number over all micro-batches and workers of an update to make accumulation
    equal one large batch). With J = 1 and prob 1 this is plain cross-entropy. With exact top-K probabilities and
    sampled tail draws that sum to 1, E[target] is the teacher's distribution and the gradient softmax − target is
    unbiased (arXiv 2503.16870). The LM head is applied in chunks of positions, and each chunk's gradient is computed
    while its logits are in memory, so the backward pass need not run the head again and [B, L, V] is never allocated.
    """
    total = kept(mask) if total is None else total
    width, head = index.shape[-1], Head.of(head)
    return _SparseLoss.apply(
        hidden.reshape(-1, hidden.shape[-1]), head.weight, head.bias, head, index.reshape(-1, width),
        prob.reshape(-1, width).float(), mask.reshape(-1).float() / total, compute_dtype(hidden),
        torch.is_grad_enabled(),
    )  # fmt: skip


def softmax_of(
    hidden: Tensor, head: Head, index: Tensor, dtype: torch.dtype, temperature: float = 1.0, trained: bool = False
) -> HeadSoftmax:
    """The softmax of a head at `index` by the algorithm that suits the device. trained: whether the gradients of the
    head's own weights are needed, too."""
    if on_host(hidden):
        one_strip = len(strips_at_once(len(hidden), len(head.weight), dtype)[1]) == 1  # then no product is repeated
        kind = TwoPasses if trained or one_strip else OnePass
    else:
        kind = TargetRows if is_lazy(hidden) and not trained and TargetRows.suits(head, index) else HeadSoftmax
    return kind(hidden, head, index, dtype, temperature)


class _SparseLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, table, bias, head, index, prob, weight, dtype, with_grad):
        with without_autocast(hidden):
            softmax = softmax_of(hidden, head, index, dtype, trained=any(ctx.needs_input_grad[1:3]))
            mass, taken = (weight * prob.sum(1)).unsqueeze(1), weight.unsqueeze(1) * prob
            if with_grad:
                ctx.save_for_backward(*softmax.gradients(mass, taken, ctx.needs_input_grad[1:3]))
            else:
                softmax.normalise()
        ctx.types = [None if tensor is None else tensor.dtype for tensor in (hidden, table, bias)]
        return (mass * softmax.z.log()).sum() - (taken * softmax.chosen).sum()

    @staticmethod
    def backward(ctx, grad):
        grads = ctx.saved_tensors
        if not (on_host(grad) and grad == 1):  # it is 1 for the loss of a micro-batch
            grads = [None if g is None else g * grad for g in grads]
        return *(None if g is None else g.to(kind) for g, kind in zip(grads, ctx.types)), *(None,) * 6


def log_probs_at(hidden: Tensor, head: Head | Tensor, index: Tensor) -> Tensor:
    """log softmax(logits)[index] [..., J], without gradients: hidden [..., H], index [..., J]."""
    with torch.no_grad(), without_autocast(hidden):
        softmax = softmax_of(hidden.flatten(0, -2), Head.of(head), index.flatten(0, -2), compute_dtype(hidden))
        return softmax.normalise().log_probs.view(index.shape)


def token_log_probs(hidden: Tensor, head: Head | Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature)[token] [N], with hidden [N, H], a head (or its weight [V, H]) and tokens [N];
    [N, V] is never allocated."""
    head = Head.of(head)
    return _TokenLogProb.apply(
        hidden, head.weight, head.bias, head, tokens, temperature, compute_dtype(hidden), torch.is_grad_enabled()
    )


class _TokenLogProb(torch.autograd.Function):
    """A position's log-probability depends only on its own hidden state. If the head is frozen, the forward pass
    computes the gradient while the logits are in memory, and the backward pass only scales it. The gradient of the
    head's own weights is a sum over positions, weighted by their incoming gradients, so for a trained head the backward
    pass computes the logits again."""

    @staticmethod
    def forward(ctx, hidden, table, bias, head, tokens, temperature, dtype, with_grad):
        trained = with_grad and any(ctx.needs_input_grad[1:3])
        with without_autocast(hidden):
            softmax = softmax_of(hidden, head, tokens.unsqueeze(1), dtype, temperature, trained)
            if with_grad and not trained:
                minus = -torch.ones_like(softmax.chosen)
                ctx.back, *_ = softmax.gradients(minus, minus, (False, False))
            else:
                softmax.normalise()
        ctx.softmax = softmax if trained else None
        ctx.trained, ctx.types = trained, [None if t is None else t.dtype for t in (hidden, table, bias)]
        return softmax.log_probs.squeeze(1)

    @staticmethod
    def backward(ctx, grad):
        if ctx.trained:
            with without_autocast(grad):
                minus = -grad.float().unsqueeze(1)
                grads = ctx.softmax.gradients(minus, minus, ctx.needs_input_grad[1:3])
        else:
            grads = ctx.back * grad.unsqueeze(1), None, None
        return *(None if g is None else g.to(kind) for g, kind in zip(grads, ctx.types)), *(None,) * 5


def text_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Next-token cross-entropy; mask [B, L] is 1 at the target tokens."""
    hidden, labels = hidden_states(model, batch["tokens"])[:, :-1], batch["tokens"][:, 1:].unsqueeze(2)
    mask, total = batch["mask"][:, 1:], batch.get("total")
    return sparse_loss(hidden, head_of(model), labels, torch.ones_like(labels), mask, total)
