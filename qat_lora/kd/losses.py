"""Distillation and cross-entropy losses that never hold [B, L, V]."""

import torch
import torch.nn.functional as F
from torch import Tensor

from qat_lora.backend import compute_dtype
from qat_lora.models.head import Head

# fp32 logits held at a time. Above 32 MB glibc maps fresh pages for every chunk: +35% on a teacher pass, measured.
CHUNK_BYTES = 24 * 2**20
ACCELERATOR_CHUNK_BYTES = 256 * 2**20  # fewer, larger products and a smaller graph; not measured on hardware


def kd_soft_ce(student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0, mask: Tensor | None = None):
    """Dense soft cross-entropy against the teacher's softmax, times temperature², averaged over kept positions.

    logits [..., V]; mask [...], 1 keeps (None: all). XLA-safe, unlike F.kl_div. The minimum is the teacher's entropy
    (times temperature²), not 0. Raises ValueError when the mask keeps nothing (checked on the CPU only).
    """
    with torch.no_grad():
        target = F.softmax(teacher_logits.float() / temperature, dim=-1)
    loss = -(target * F.log_softmax(student_logits.float() / temperature, dim=-1)).sum(-1) * temperature**2
    if mask is None:
        return loss.mean()
    return (loss * mask).sum() / kept(mask)


def kept(mask: Tensor) -> Tensor:
    """How many positions a mask keeps, as a float scalar on its device. Raises ValueError for none, on the CPU."""
    if mask.device.type == "cpu" and not mask.any():
        raise ValueError("the mask keeps no position; a batch needs at least one target")
    return mask.sum(dtype=torch.float32)


def sparse_loss(
    hidden: Tensor, head: Head | Tensor, index: Tensor, prob: Tensor, mask: Tensor, total: Tensor | None = None
) -> Tensor:
    """−Σ_j prob_j · log softmax(logits)[index_j], summed over kept positions and divided by `total`.

    hidden [B, L, H]; head: a Head, or its weight [V, H] where nothing else makes the logits; index, prob [B, L, J] (an
    index may repeat: its probabilities add up); mask [B, L]; total: scalar, what the sum is divided by; kept positions
    of this mask unless given (give the count over all micro-batches and workers of an update, and accumulation equals
    one large batch). With J = 1 and prob 1 this is plain cross-entropy. With exact top-K probabilities and sampled tail
    draws that sum to 1, E[target] is the teacher's distribution and the gradient softmax − target is unbiased (arXiv
    2503.16870). The LM head is applied in chunks of positions, and each chunk's gradient is formed while its logits are
    alive, so the backward pass repeats no head and [B, L, V] never exists.
    """
    total = kept(mask) if total is None else total
    width, head = index.shape[-1], Head.of(head)
    return _ChunkedHead.apply(
        hidden.reshape(-1, hidden.shape[-1]), head.weight, head.bias, head, index.reshape(-1, width),
        prob.reshape(-1, width).float(), mask.reshape(-1).float() / total, compute_dtype(hidden),
        torch.is_grad_enabled(),
    )  # fmt: skip


class _ChunkedHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, table, bias, head, index, prob, weight, dtype, with_grad):
        wanted = [with_grad and needed for needed in ctx.needs_input_grad[1:3]]
        with torch.autocast(hidden.device.type, enabled=False):
            head = head.cast(dtype)
            loss = hidden.new_zeros((), dtype=torch.float32)
            grad_hidden = []
            grad_table, grad_bias = (
                torch.zeros_like(tensor, dtype=torch.float32) if needed else None
                for tensor, needed in zip((table, bias), wanted)
            )
            for rows in positions(len(hidden), table.shape[0], hidden.device):
                h = hidden[rows].to(dtype)
                logits = head.logits(h)
                capped = logits.clone() if with_grad and head.cap is not None else None
                peak = logits.amax(1, keepdim=True)
                target = logits.gather(1, index[rows]) - peak
                logits.sub_(peak).exp_()
                z = logits.sum(1, keepdim=True)
                mass = prob[rows].sum(1, keepdim=True)
                loss += (weight[rows] * ((z.log() * mass).squeeze(1) - (prob[rows] * target).sum(1))).sum()
                if with_grad:
                    scale = weight[rows].unsqueeze(1)
                    grad = logits.mul_(mass * scale / z).scatter_add_(1, index[rows], -prob[rows] * scale)
                    grad = head.gradient(grad, capped)
                    if grad_bias is not None:
                        grad_bias += grad.sum(0) / head.before
                    grad = grad.to(dtype)
                    grad_hidden.append(grad @ head.weight)
                    if grad_table is not None:
                        grad_table += grad.T @ h
        if with_grad:
            ctx.save_for_backward(torch.cat(grad_hidden), grad_table, grad_bias)
            ctx.dtypes = hidden.dtype, table.dtype
        return loss

    @staticmethod
    def backward(ctx, grad):
        grad_hidden, *grads = ctx.saved_tensors
        hidden_type, table_type = ctx.dtypes
        grads = [None if part is None else (part * grad).to(table_type) for part in grads]
        return (grad_hidden * grad).to(hidden_type), *grads, None, None, None, None, None, None


def token_log_probs(hidden: Tensor, head: Head | Tensor, tokens: Tensor, temperature: float = 1.0) -> Tensor:
    """log softmax(logits / temperature)[token] [N], with hidden [N, H], a head (or its weight [V, H]), which must be
    frozen, and tokens [N]; in chunks of positions, so that [N, V] never exists."""
    head = Head.of(head)
    return _TokenLogProb.apply(
        hidden, head.weight, head.bias, head, tokens, temperature, compute_dtype(hidden), torch.is_grad_enabled()
    )


class _TokenLogProb(torch.autograd.Function):
    """log softmax(logits/T)[token], in chunks of positions. Each position's log-probability depends on
    its own hidden state alone, so that its gradient is formed while the logits are alive, and only scaled later."""

    @staticmethod
    def forward(ctx, hidden, table, bias, head, tokens, temperature, dtype, with_grad):
        if with_grad and any(ctx.needs_input_grad[1:3]):
            raise ValueError("the head's weight must be frozen: its gradient is not formed here")
        logps, grads = [], []
        with torch.autocast(hidden.device.type, enabled=False):
            head = head.cast(dtype)
            for rows in positions(len(hidden), table.shape[0], hidden.device):
                logits = head.logits(hidden[rows].to(dtype))
                chosen = tokens[rows].unsqueeze(1)
                logp = (logits if temperature == 1 else logits / temperature).log_softmax(1)
                logps.append(logp.gather(1, chosen).squeeze(1))
                if with_grad:
                    grad = logp.exp_().neg_().scatter_add_(1, chosen, torch.ones_like(chosen, dtype=logp.dtype))
                    grads.append(head.gradient(grad.div_(temperature), logits).to(dtype) @ head.weight)
        if with_grad:
            ctx.save_for_backward(torch.cat(grads))
            ctx.dtype = hidden.dtype
        return torch.cat(logps)

    @staticmethod
    def backward(ctx, grad):
        return (ctx.saved_tensors[0] * grad.unsqueeze(1)).to(ctx.dtype), None, None, None, None, None, None, None


def positions(count: int, vocab: int, device: torch.device) -> list[slice]:
    """Slices of so many positions that their fp32 logits fill a chunk of the device's size."""
    size = max(1, (CHUNK_BYTES if device.type == "cpu" else ACCELERATOR_CHUNK_BYTES) // (4 * vocab))
    return [slice(start, min(start + size, count)) for start in range(0, count, size)]
