"""The quantised linear layer: a latent fp32 weight seen through a codebook and a learned scale."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat_lora.backend import compute_dtype
from qat_lora.quant.spec import QuantSpec

SMALLEST_SCALE = 2.0**-13  # half of it is still a normal fp16 number, which GGUF's Q4_0 needs for half-integer levels


class FakeQuant(torch.autograd.Function):
    """Nearest level times scale, with the straight-through gradient of LSQ (arXiv 1902.08153).

    weight [O, G, g] latent; scale broadcastable to it. With x = w/s and q the level nearest to x:
      output q·s in `dtype`;  ∂/∂w = 1 inside the range, 0 outside;  ∂/∂s = q − x inside, the edge level outside,
    times gradient_scale. Inside means that rounding x needs no clipping (the edge levels' own cells included).
    Only weight and scale are kept for the backward pass: x and q are computed again.
    """

    @staticmethod
    def forward(ctx, weight: Tensor, scale: Tensor, spec: QuantSpec, gradient_scale: float, dtype: torch.dtype):
        ctx.save_for_backward(weight, scale)
        ctx.spec, ctx.gradient_scale = spec, gradient_scale
        return nearest_level(weight / scale, spec).mul_(scale).to(dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        weight, scale = ctx.saved_tensors
        spec = ctx.spec
        x = weight / scale
        code = ((x - spec.lowest) / spec.step).round_()
        clipped = code.clamp(0, spec.levels - 1)
        inside = code == clipped
        level = clipped.mul_(spec.step).add_(spec.lowest)
        grad = grad.to(weight.dtype)
        grad_weight = grad * inside
        grad_scale = level.sub_(x.masked_fill_(~inside, 0)).mul_(grad).sum_to_size(scale.shape) * ctx.gradient_scale
        return grad_weight, grad_scale, None, None, None


class ScaledCodes(torch.autograd.Function):
    """level[code]·scale in `dtype` for fixed codes [O, G, g]; ∂/∂scale is the level, times gradient_scale.

    Only the codes are kept for the backward pass.
    """

    @staticmethod
    def forward(ctx, codes: Tensor, scale: Tensor, spec: QuantSpec, gradient_scale: float, dtype: torch.dtype):
        ctx.save_for_backward(codes)
        ctx.spec, ctx.gradient_scale, ctx.shape = spec, gradient_scale, scale.shape
        return levels_of(codes, spec).mul_(scale).to(dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (codes,) = ctx.saved_tensors
        grad_scale = levels_of(codes, ctx.spec).mul_(grad).sum_to_size(ctx.shape) * ctx.gradient_scale
        return None, grad_scale, None, None, None


class Stored(torch.autograd.Function):
    """A learned scale as it is stored: rounded to fp16. The gradient passes straight through."""

    @staticmethod
    def forward(ctx, scale: Tensor):
        return scale.half().to(scale.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad


def nearest_code(x: Tensor, spec: QuantSpec) -> Tensor:
    """Codes 0 … 2^bits − 1 (as floats) of the levels nearest to x = weight / scale. Overwrites x."""
    return x.sub_(spec.lowest).div_(spec.step).round_().clamp_(0, spec.levels - 1)


def nearest_level(x: Tensor, spec: QuantSpec) -> Tensor:
    """The levels nearest to x = weight / scale. Overwrites x."""
    return nearest_code(x, spec).mul_(spec.step).add_(spec.lowest)


def levels_of(codes: Tensor, spec: QuantSpec) -> Tensor:
    """The fp32 levels of codes."""
    return codes.to(torch.float32).mul_(spec.step).add_(spec.lowest)


class Quantizer(nn.Module):
    """The learned scale of one weight [out, in] and, once frozen, its codes.

    group:   scale [out, in/g, 1]        tensor: scale [1, 1, 1]
    lowrank: A [out, r], g [r], B [r, in]; S = (A·diag(g))·B with the columns of A and the rows of B at unit norm, so
             that g alone carries magnitude
    codes:   uint8 [out, in], present only when frozen
    enabled: False shows the latent weight itself (the full-precision layer)

    The parameters are fp32 masters; whatever is computed with them sees them rounded to fp16, as a file stores them.
    """

    def __init__(self, spec: QuantSpec, out_features: int, in_features: int):
        super().__init__()
        spec.check("weight", out_features, in_features)
        self.spec, self.shape, self.enabled = spec, (out_features, in_features), True
        if spec.scale == "lowrank":
            self.a = nn.Parameter(torch.empty(out_features, spec.size))
            self.g = nn.Parameter(torch.empty(spec.size))
            self.b = nn.Parameter(torch.empty(spec.size, in_features))
        else:
            rows, groups = (1, 1) if spec.scale == "tensor" else (out_features, in_features // spec.size)
            self.scale = nn.Parameter(torch.empty(rows, groups, 1))
        self.register_buffer("codes", None)

    def scale_matrix(self) -> Tensor:
        """The scale, broadcastable to `grouped(weight)`."""
        if self.spec.scale != "lowrank":
            return Stored.apply(_not_zero(self.scale, SMALLEST_SCALE))
        a, g, b = (Stored.apply(p) for p in (self.a, self.g, self.b))
        a = a / torch.linalg.vector_norm(a, dim=0, keepdim=True)
        b = b / torch.linalg.vector_norm(b, dim=1, keepdim=True)
        return _not_zero((a * g) @ b, torch.finfo(a.dtype).tiny ** 0.5).unsqueeze(1)

    def stored(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Each parameter, and the fp16 values by which a file holds what `scale_matrix` sees of it."""
        if self.spec.scale != "lowrank":
            return [(self.scale, _not_zero(self.scale.detach(), SMALLEST_SCALE).half())]
        return [(p, p.detach().half()) for p in (self.a, self.g, self.b)]

    def grouped(self, weight: Tensor) -> Tensor:
        """A view of weight [out, in] as [out, groups, group], against which the scale broadcasts."""
        out_features, in_features = self.shape
        group = self.spec.size if self.spec.scale == "group" else in_features
        return weight.view(out_features, in_features // group, group)

    def forward(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """W_eff [out, in] in `dtype`, differentiable in the latent weight and the scale; with codes, in the scale."""
        shared = math.prod(self.shape) // self.spec.scale_values(*self.shape) if self.spec.scale != "lowrank" else 1
        gradient_scale = 1 / math.sqrt(shared * self.spec.largest)
        with torch.autocast(weight.device.type, enabled=False):  # the product A·B of a low-rank scale stays fp32
            scale = self.scale_matrix()
        if self.codes is not None:
            return ScaledCodes.apply(self.grouped(self.codes), scale, self.spec, gradient_scale, dtype).view(self.shape)
        return FakeQuant.apply(self.grouped(weight), scale, self.spec, gradient_scale, dtype).view(self.shape)

    @property
    def settled(self) -> bool:
        """Whether neither codes nor scale change any more."""
        return self.codes is not None and not next(self.parameters()).requires_grad

    @torch.no_grad()
    def encode(self, weight: Tensor) -> Tensor:
        """uint8 codes [out, in] of a latent weight."""
        return nearest_code(self.grouped(weight) / self.scale_matrix(), self.spec).to(torch.uint8).view(self.shape)

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """W_eff [out, in] of codes, fp32; equal to forward's to the bit."""
        return levels_of(self.grouped(codes), self.spec).mul_(self.scale_matrix()).view(self.shape)


def _not_zero(scale: Tensor, least: float) -> Tensor:
    """The scale with every magnitude at `least` or above, for w/s; signs stay."""
    return torch.where(scale < 0, scale.clamp(max=-least), scale.clamp(min=least))


class QuantLinear(nn.Linear):
    """An nn.Linear whose weight passes through a Quantizer.

    In training `weight` is the latent fp32 master. `freeze` stores the codes, puts the quantised weight in its place
    and stops its gradient: from then on it is a plain linear layer for PEFT, safetensors and HF.
    """

    def __init__(self, linear: nn.Linear, spec: QuantSpec):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.quantizer = Quantizer(spec, self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, effective_weight(self), self.bias)


class QuantEmbedding(nn.Embedding):
    """An nn.Embedding that looks its rows up in a quantised table; it shares the Quantizer of a tied lm_head."""

    def __init__(self, embedding: nn.Embedding, quantizer: Quantizer):
        nn.Module.__init__(self)
        self.num_embeddings, self.embedding_dim = embedding.num_embeddings, embedding.embedding_dim
        self.padding_idx, self.max_norm, self.norm_type = embedding.padding_idx, None, 2.0
        self.scale_grad_by_freq, self.sparse = False, False
        self.weight, self.quantizer = embedding.weight, quantizer

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, effective_weight(self, self.weight.dtype), self.padding_idx)  # as a plain one: fp32


def effective_weight(module: nn.Module, dtype: torch.dtype | None = None) -> Tensor:
    """The weight [out, in] that a linear layer or embedding multiplies with, quantised or not.

    dtype: of a weight that is quantised here and now; default: what autocast would make of it.
    """
    quantizer = getattr(module, "quantizer", None)
    if quantizer is None or not quantizer.enabled or quantizer.settled:
        return module.weight
    return quantizer(module.weight, dtype or compute_dtype(module.weight))


def freeze(module: nn.Module) -> None:
    """Turn every latent weight below `module` into codes, and show the quantised weight in its place."""
    for layer in quantized_layers(module).values():
        if layer.quantizer.codes is None:
            layer.quantizer.codes = layer.quantizer.encode(layer.weight)
        layer.weight.data = layer.quantizer.decode(layer.quantizer.codes)
        layer.weight.requires_grad_(False)
        layer.quantizer.requires_grad_(False)


def free_scales(module: nn.Module) -> None:
    """Let the scales of a frozen `module` learn again; the codes stay."""
    for layer in quantized_layers(module).values():
        layer.quantizer.requires_grad_(True)


def quantized_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Every layer with a Quantizer, by name; an embedding tied to its head counts once, as the head."""
    layers = {n: m for n, m in module.named_modules() if isinstance(m, QuantLinear | QuantEmbedding)}
    heads = {id(m.quantizer) for m in layers.values() if isinstance(m, QuantLinear)}
    return {n: m for n, m in layers.items() if isinstance(m, QuantLinear) or id(m.quantizer) not in heads}


class unquantized:
    """Within this context the layers below `module` show their latent weights: the full-precision network."""

    def __init__(self, module: nn.Module):
        self.quantizers = [layer.quantizer for layer in quantized_layers(module).values()]

    def __enter__(self):
        for quantizer in self.quantizers:
            quantizer.enabled = False

    def __exit__(self, *error):
        for quantizer in self.quantizers:
            quantizer.enabled = True
