"""Quantised weights: a latent fp32 weight rounded to a codebook times a learned scale.

They occur in linear layers, in embeddings tied to a quantised head, and in modules that keep all their experts in one
parameter.
"""

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qat_lora.backend import compute_dtype
from qat_lora.backend.devices import without_autocast
from qat_lora.kernels.fake_quant import FakeQuant, Stored, levels_of, nearest_code, not_zero, stored_scale
from qat_lora.quant.spec import QuantSpec

# The smallest scale; scales below 2⁻¹³ are multiples of it. Half of any scale is then still an exact fp16 number, which
# GGUF's Q4_0 needs for half-integer levels.
SMALLEST_SCALE = 2.0**-23


class Quantizer(nn.Module):
    """The learned scale of a weight [out, in] or of stacked expert weights [experts, out, in] and, once frozen, the
    codes.

    group:   scale [out, in/g, 1]        tensor: scale [1, 1, 1]
    lowrank: A [out, r], g [r], B [r, in]; S = (A·diag(g))·B with the columns of A and the rows of B at unit norm, so
             that g alone carries the magnitude
    codes:   uint8, of the weight's shape, present only when frozen
    enabled: False uses the latent weight itself (the full-precision layer)

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
        if spec.scale == "lowrank":
            self.a = nn.Parameter(torch.empty(*experts, out_features, spec.size))
            self.g = nn.Parameter(torch.empty(*experts, spec.size))
            self.b = nn.Parameter(torch.empty(*experts, spec.size, in_features))
        else:
            rows, groups = (1, 1) if spec.scale == "tensor" else (out_features, in_features // spec.size)
            self.scale = nn.Parameter(torch.empty(math.prod(experts) * rows, groups, 1))
        self.register_buffer("codes", None)

    def scale_matrix(self) -> Tensor:
        """The scale, broadcastable to `grouped(weight)`."""
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

    def stored(self) -> list[tuple[nn.Parameter, Tensor]]:
        """Each parameter of the scale with its fp16 values as stored in a file."""
        if self.spec.scale != "lowrank":
            return [(self.scale, stored_scale(self.scale.detach(), SMALLEST_SCALE))]
        return [(p, stored_scale(p.detach())) for p in (self.a, self.g, self.b)]

    def grouped(self, weight: Tensor) -> Tensor:
        """weight [..., out, in] as [rows, groups, group], to which the scale broadcasts; rows are ordered by expert."""
        in_features = self.shape[-1]
        group = self.spec.size if self.spec.scale == "group" else in_features
        return weight.reshape(-1, in_features // group, group)

    def forward(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """W_eff [..., out, in] in `dtype`, differentiable in latent weight and scale."""
        shared = math.prod(self.shape) // self.scale_values if self.spec.scale != "lowrank" else 1
        gradient_scale = 1 / math.sqrt(shared * self.spec.largest)
        with without_autocast(weight):  # the product A·B of a low-rank scale stays fp32
            scale = self.scale_matrix()
        return FakeQuant.apply(self.grouped(weight), scale, self.spec, gradient_scale, dtype).view(self.shape)

    @property
    def scale_values(self) -> int:
        """The number of values stored for the scale."""
        return math.prod(self.shape[:-2]) * self.spec.scale_values(*self.shape[-2:])

    @torch.no_grad()
    def encode(self, weight: Tensor) -> Tensor:
        """uint8 codes [..., out, in] of a latent weight."""
        return nearest_code(self.grouped(weight) / self.scale_matrix(), self.spec).to(torch.uint8).view(self.shape)

    @torch.no_grad()
    def decode(self, codes: Tensor) -> Tensor:
        """W_eff [..., out, in] of codes in fp32, bit-identical to forward's."""
        return levels_of(self.grouped(codes), self.spec).mul_(self.scale_matrix()).view(self.shape)


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
    value = quantizer(rows_of(module), dtype or compute_dtype(module.weight))
    return value.transpose(1, 2) if getattr(module, "transposed", False) else value


def freeze(module: nn.Module) -> None:
    """Encode every latent weight below `module` and overwrite it with the quantised weight."""
    for layer in quantized_layers(module).values():
        if layer.quantizer.codes is None:
            layer.quantizer.codes = layer.quantizer.encode(rows_of(layer))
        # in place: allocating new tensors for all weights would fragment memory
        rows_of(layer).detach().copy_(layer.quantizer.decode(layer.quantizer.codes))
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


def parameter_groups(student: nn.Module, learning_rate: float, scale_learning_rate: float) -> list[dict]:
    """Optimiser groups: latent weights together with all unquantised parameters, and the quantisers' scales; empty
    groups are left out."""
    scales = {id(p) for layer in quantized_layers(student).values() for p in layer.quantizer.parameters()}
    trained = [p for p in student.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if id(p) not in scales], "lr": learning_rate},
        {"params": [p for p in trained if id(p) in scales], "lr": scale_learning_rate},
    ]
    return [group for group in groups if group["params"]]
