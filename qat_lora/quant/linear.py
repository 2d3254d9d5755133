"""Quantised weights: a latent fp32 weight rounded to a codebook times a learned scale.

They occur in linear layers, in embeddings tied to a quantised head, and in modules that keep all their experts in one
parameter.
"""

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat_lora.backend import compute_dtype
from qat_lora.backend.devices import without_autocast
from qat_lora.kernels.fake_quant import FakeQuant, Stored, levels_of, nearest_code, not_zero, stored_scale
from qat_lora.quant.spec import Levels, QuantSpec

# The smallest scale; scales below 2⁻¹³ are multiples of it. Half of any scale is then still an exact fp16 number, which
# GGUF's Q4_0 needs for half-integer levels.
SMALLEST_SCALE = 2.0**-23
SMALLEST_FACTOR = 2.0**-24  # of narrow scales, which files hold as they are: fp16's smallest number


class StoredWeight(NamedTuple):
    """A frozen weight [out, in] as a file stores it: codes uint8 [out, in]; scale and offset fp32 [out, groups], which
    are integers int16 [out, groups] times factors fp32 [out, blocks] if they are narrow; with zero points Z, −Z is the
    offset's integer, times the scale."""

    codes: np.ndarray
    scale: np.ndarray
    offset: np.ndarray | None = None
    scale_integers: np.ndarray | None = None
    scale_factor: np.ndarray | None = None
    offset_integers: np.ndarray | None = None
    offset_factor: np.ndarray | None = None


def each(part: np.ndarray, groups: int) -> np.ndarray:
    """One value for each of `groups` groups of a row, from fewer values [out, n]."""
    return np.repeat(part, groups // part.shape[1], axis=1)


class Quantizer(nn.Module):
    """The learned scale and offset of a weight [out, in] or of stacked expert weights [experts, out, in] and, once
    frozen, the codes.

    group:   scale [out, in/g, 1]        rows: scale [out/n, 1, 1]        tensor: scale [1, 1, 1]
    lowrank: A [out, r], g [r], B [r, in]; S = (A·diag(g))·B with the columns of A and the rows of B at unit norm, so
             that g alone carries the magnitude
    offset:  of the scale's shape, with an offset
    reach, offset_reach: [out, blocks, 1], with narrow scales and offsets: the largest that a block can hold
    codes:   uint8, of the weight's shape, present only when frozen
    enabled: False uses the latent weight itself (the full-precision layer)
    held:    within `quantised_once`, the quantised weight in each dtype that was asked for

    With experts, the first dimension of a scale is experts · out (tensor: experts), and A, g, B and codes have a
    leading expert dimension. The parameters are fp32 masters; all computation uses them rounded to fp16, as they are
    stored in files.
    """

    def __init__(self, spec: QuantSpec, *shape: int):
        """shape: (out, in) or (experts, out, in)."""
        super().__init__()
        *experts, out_features, in_features = shape
        spec.check("weight", out_features, in_features)
        self.spec, self.shape, self.enabled = spec, tuple(shape), True
        self.held: dict[torch.dtype, Tensor] | None = None
        if spec.scale == "lowrank":
            self.a = nn.Parameter(torch.empty(*experts, out_features, spec.size))
            self.g = nn.Parameter(torch.empty(*experts, spec.size))
            self.b = nn.Parameter(torch.empty(*experts, spec.size, in_features))
        else:
            rows, groups = spec.scale_shape(out_features, in_features)
            blocks = in_features // (spec.block or in_features)
            for name in ("scale", "offset")[: 1 + spec.offset]:
                self.register_parameter(name, _parameter(math.prod(experts) * rows, groups, 1))
            for name in ("reach", "offset_reach")[: 1 + spec.offset if spec.narrow else 0]:
                self.register_parameter(name, _parameter(math.prod(experts) * rows, blocks, 1))
        self.register_buffer("codes", None)

    def scale_matrix(self) -> Tensor:
        """The scale, broadcastable to `grouped(weight)`."""
        if self.spec.narrow:
            return _narrowed(self.scale, _factor(self.reach, self.spec.scale_levels), self.spec.scale_levels)
        if self.spec.scale != "lowrank":
            scale = Stored.apply(self.scale, SMALLEST_SCALE)
            return (
                scale.repeat_interleave(self.shape[-2], 0) if len(scale) > 1 and self.spec.scale == "tensor" else scale
            )
        a, g, b = (Stored.apply(p) for p in (self.a, self.g, self.b))
        a = a / torch.linalg.vector_norm(a, dim=-2, keepdim=True)
        b = b / torch.linalg.vector_norm(b, dim=-1, keepdim=True)
        product = ((a * g.unsqueeze(-2)) @ b).view(-1, 1, self.shape[-1])
        return not_zero(product, torch.finfo(a.dtype).tiny ** 0.5)

    def offset_matrix(self, scale: Tensor | None = None) -> Tensor | None:
        """The offset, broadcastable to `grouped(weight)`; None without one. scale: the scale_matrix, if it is known."""
        if not self.spec.offset:
            return None
        if self.spec.narrow:
            return _narrowed(self.offset, _factor(self.offset_reach, self.spec.offset_levels), self.spec.offset_levels)
        if self.spec.zero:
            return _narrowed(self.offset, self.scale_matrix() if scale is None else scale, self.spec.offset_levels)
        return Stored.apply(self.offset)

    def _narrow_parts(self) -> list[tuple[nn.Parameter, nn.Parameter, Levels]]:
        """Narrow values, their reach and their levels."""
        parts = [(self.scale, self.reach, self.spec.scale_levels)]
        return [*parts, (self.offset, self.offset_reach, self.spec.offset_levels)] if self.spec.offset else parts

    @torch.no_grad()
    def stored(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Each parameter with its values as stored in a file: fp16; for narrow scales and offsets, their integers as
        int16 and the factor in place of the reach; for a zero point Z, −Z as int16."""
        if self.spec.scale == "lowrank":
            return [(p, stored_scale(p.detach())) for p in (self.a, self.g, self.b)]
        if not self.spec.narrow:
            plain = [(self.scale, stored_scale(self.scale.detach(), SMALLEST_SCALE))]
            if self.spec.zero:
                return [*plain, (self.offset, (self.offset_matrix() / self.scale_matrix()).round().to(torch.int16))]
            return [*plain, (self.offset, stored_scale(self.offset.detach()))] if self.spec.offset else plain
        found = []
        for values, reach, levels in self._narrow_parts():
            factor = _factor(reach, levels)
            integers = (_narrowed(values, factor, levels) / _for_each(factor, values)).round()
            found += [(values, integers.to(torch.int16)), (reach, factor.half())]
        return found

    @torch.no_grad()
    def from_stored(self) -> None:
        """Turn parameters that hold what `stored` gives into masters."""
        for values, reach, levels in self._narrow_parts() if self.spec.narrow else ():
            values.mul_(_for_each(reach, values))
            reach.mul_(levels.largest)
        if self.spec.zero:
            self.offset.mul_(self.scale)

    def grouped(self, weight: Tensor) -> Tensor:
        """weight [..., out, in] as [rows, groups, group], to which the scale broadcasts; rows are ordered by expert."""
        in_features = self.shape[-1]
        if self.spec.scale == "rows":
            return weight.reshape(-1, 1, self.spec.size * in_features)
        group = self.spec.size if self.spec.scale == "group" else in_features
        return weight.reshape(-1, in_features // group, group)

    def forward(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """W_eff [..., out, in] in `dtype`, differentiable in latent weight and scale."""
        shared = math.prod(self.shape) // self.scale.numel() if self.spec.scale != "lowrank" else 1
        gradient_scale = 1 / math.sqrt(shared * self.spec.largest)
        with without_autocast(weight):  # the product A·B of a low-rank scale stays fp32
            scale = self.scale_matrix()
            offset = self.offset_matrix(scale)
        return FakeQuant.apply(self.grouped(weight), scale, self.spec, gradient_scale, dtype, offset).view(self.shape)

    @property
    def bits(self) -> int:
        """The bits that codes, scales and offsets are stored in."""
        *experts, out_features, in_features = self.shape
        scales = math.prod(experts) * self.spec.scale_bits(out_features, in_features)
        return self.spec.code_bits(math.prod(self.shape)) + scales

    @torch.no_grad()
    def parts(self) -> StoredWeight:
        """What a file stores of the frozen weight [out, in]; not for low-rank scales and experts."""
        matrices = {"scale": self.scale_matrix(), "offset": self.offset_matrix()}
        names = {id(p): name for name, p in self.named_parameters()}
        factors = {"reach": "scale_factor", "offset_reach": "offset_factor"}
        for p, value in self.stored():
            name = names[id(p)]
            if value.dtype == torch.int16:
                matrices[f"{name}_integers"] = value
            elif name in factors:
                matrices[factors[name]] = value.float()
        rows = self.shape[0]
        found = {
            name: value.squeeze(2).repeat_interleave(rows // len(value), 0).numpy()
            for name, value in matrices.items() if value is not None
        }  # fmt: skip
        return StoredWeight(self.codes.numpy(), **found)

    def expanded(self, values: Tensor) -> Tensor:
        """A scale or offset for each weight, in the weight's shape."""
        return values.expand(self.grouped(torch.empty(self.shape, device="meta")).shape).reshape(self.shape)

    @torch.no_grad()
    def encode(self, weight: Tensor) -> Tensor:
        """uint8 codes [..., out, in] of a latent weight."""
        offset, weight = self.offset_matrix(), self.grouped(weight)
        weight = weight if offset is None else weight - offset
        return nearest_code(weight / self.scale_matrix(), self.spec).to(torch.uint8).view(self.shape)

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """W_eff [..., out, in] of codes in fp32, bit-identical to forward's."""
        offset, value = self.offset_matrix(), levels_of(self.grouped(codes), self.spec).mul_(self.scale_matrix())
        return (value if offset is None else value.add_(offset)).view(self.shape)


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape))


def _factor(reach: Tensor, levels: Levels) -> Tensor:
    """What narrow integers are multiplied by: [R, blocks, 1]."""
    return Stored.apply(reach / levels.largest, SMALLEST_FACTOR)


def _for_each(factor: Tensor, values: Tensor) -> Tensor:
    """The factor of each of the values [R, G, 1]."""
    return factor.repeat_interleave(values.shape[1] // factor.shape[1], 1)


def _narrowed(values: Tensor, factor: Tensor, levels: Levels) -> Tensor:
    """Scales or offsets [R, G, 1] as integers times the factor of their block [R, blocks, 1]. Gradients are LSQ's
    (arXiv 1902.08153): straight through for values in range; the factor gets level − x from those, and the edge level
    from clipped ones."""
    factor, top = _for_each(factor, values), levels.lowest + levels.levels - 1
    x, fixed = values.detach() / factor.detach(), factor.detach()
    level = nearest_code(x.clone(), levels).add_(levels.lowest)
    inside = (x - level).abs() <= 0.5
    slope = torch.where(inside, level - x, level)  # of each value: a difference of two sums loses digits
    kept = level * fixed + slope * (factor - fixed) + (values - values.detach()) * inside
    if levels.lowest < 0 < top:
        kept = not_zero(kept, factor.detach().abs())  # a scale is never 0
    return kept


class QuantLinear(nn.Linear):
    """An nn.Linear whose weight passes through a Quantizer.

    In training `weight` is the latent fp32 master. `freeze` stores the codes, overwrites `weight` with the quantised
    weight and stops its gradient: from then on PEFT, safetensors and HF see a plain linear layer.
    """

    def __init__(self, linear: nn.Linear, spec: QuantSpec):
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.quantizer = Quantizer(spec, self.out_features, self.in_features)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, effective_weight(self), self.bias)


class Shown:
    """Mixin that `show_quantized` adds to a module's class: during forward, reading a parameter named in `shown` gives
    its quantised value."""

    shown: tuple[str, ...] = ()
    transposed = False

    def forward(self, *args, **kwargs):
        self.__dict__["_live"] = {name: self._effective(name) for name in self.shown}
        try:
            return super().forward(*args, **kwargs)
        finally:
            del self.__dict__["_live"]

    def _effective(self, name: str) -> Tensor:
        if isinstance(self.quantizer, Quantizer):  # an embedding: same dtype as a plain one
            return effective_weight(self, self._parameters[name].dtype)
        return effective_weight(ExpertWeight(self, name))


def show_quantized(module: nn.Module, quantizer: nn.Module, names: tuple[str, ...], transposed: bool = False) -> None:
    """Make `module` read its parameters `names` through `quantizer`, whatever its forward does with them.

    quantizer: a Quantizer for "weight", or an nn.ModuleDict with one for each name. transposed: weights are stored as
    [experts, in, out].
    """
    module.__class__ = _shown_class(type(module), names)
    module.quantizer, module.transposed = quantizer, transposed


def hide_quantized(module: Shown) -> None:
    """Undo `show_quantized`: the module reads its parameters as they are."""
    module.__class__ = type(module).__bases__[1]
    del module.quantizer, module.transposed


@functools.cache
def _shown_class(kind: type, names: tuple[str, ...]) -> type:
    def seen(name: str) -> property:
        def get(self) -> Tensor:
            found = self.__dict__.get("_live", self._parameters)
            if name not in found:  # PEFT removes a parameter while it adds an adapter to it
                raise AttributeError(name)
            return found[name]

        return property(get)

    body = {name: seen(name) for name in names} | {"shown": names, "__module__": __name__}
    return type(f"Quant{kind.__name__}", (Shown, kind), body)


class ExpertWeight:
    """One stacked expert weight of a module, with the interface of a layer."""

    def __init__(self, module: Shown, name: str):
        self.module, self.name, self.transposed = module, name, module.transposed

    @property
    def weight(self) -> Tensor:
        """The parameter, or PEFT's replacement for it while an adapter runs."""
        return getattr(self.module, self.name)

    @property
    def quantizer(self) -> Quantizer:
        return self.module.quantizer[self.name]


def rows_of(layer) -> Tensor:
    """A layer's weight as its quantizer sees it: [out, in] or [experts, out, in]."""
    return layer.weight.transpose(1, 2) if getattr(layer, "transposed", False) else layer.weight


def effective_weight(module, dtype: torch.dtype | None = None) -> Tensor:
    """The weight that a linear layer, an embedding or experts compute with, quantised or not, in the model's own shape.

    dtype: dtype of the result if the weight is quantised on the fly (default: autocast's); ignored otherwise.
    """
    quantizer = getattr(module, "quantizer", None)
    if quantizer is None or not quantizer.enabled or quantizer.codes is not None:
        return module.weight
    dtype, held = dtype or compute_dtype(module.weight), quantizer.held
    value = quantizer(rows_of(module), dtype) if held is None or dtype not in held else held[dtype]
    if held is not None:
        held[dtype] = value
    return value.transpose(1, 2) if getattr(module, "transposed", False) else value


def freeze(module: nn.Module) -> None:
    """Encode every latent weight below `module` and overwrite it with the quantised weight; without values, only their
    places are made."""
    for layer in quantized_layers(module).values():
        weight, quantizer = rows_of(layer).detach(), layer.quantizer
        if quantizer.codes is None:
            quantizer.codes = weight.to(torch.uint8) if weight.is_meta else quantizer.encode(weight)
        if not weight.is_meta:  # in place: allocating new tensors for all weights would fragment memory
            weight.copy_(quantizer.decode(quantizer.codes))
        layer.weight.requires_grad_(False)
        layer.quantizer.requires_grad_(False)


def quantized_layers(module: nn.Module) -> dict[str, QuantLinear | Shown | ExpertWeight]:
    """Every quantised weight by the name of its layer (for experts, of the parameter); an embedding tied to the head
    counts once, as the head."""
    layers = {}
    for name, found in module.named_modules():
        if isinstance(found, QuantLinear) or (isinstance(found, Shown) and isinstance(found.quantizer, Quantizer)):
            layers[name] = found
        elif isinstance(found, Shown):
            layers |= {f"{name}.{weight}".lstrip("."): ExpertWeight(found, weight) for weight in found.shown}
    heads = {id(layer.quantizer) for layer in layers.values() if isinstance(layer, QuantLinear)}
    return {n: m for n, m in layers.items() if not isinstance(m, Shown) or id(m.quantizer) not in heads}


class quantised_once:
    """Context without gradients in which each weight below `model` is quantised once. Sampling would otherwise quantise
    every weight for every token."""

    def __init__(self, model: nn.Module):
        self.quantizers = [layer.quantizer for layer in quantized_layers(model).values()]
        self.no_grad = torch.no_grad()

    def __enter__(self):
        self.no_grad.__enter__()
        for quantizer in self.quantizers:
            quantizer.held = {}

    def __exit__(self, *error):
        for quantizer in self.quantizers:
            quantizer.held = None
        self.no_grad.__exit__(*error)


class full_precision:
    """Context in which the layers below `module` use their latent weights, as in the full-precision network."""

    def __init__(self, module: nn.Module):
        self.quantizers = [layer.quantizer for layer in quantized_layers(module).values()]

    def __enter__(self):
        for quantizer in self.quantizers:
            quantizer.enabled = False

    def __exit__(self, *error):
        for quantizer in self.quantizers:
            quantizer.enabled = True
