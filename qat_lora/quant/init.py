"""Initialisation of learned scales: absolute maximum (round to nearest) or least squared error."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from qat_lora.backend.devices import without_autocast
from qat_lora.errors import UserError
from qat_lora.kernels.fake_quant import nearest_level
from qat_lora.quant.linear import quantized_layers, rows_of
from qat_lora.quant.spec import LOWRANK_INIT_GROUP, QuantSpec

SEARCH = torch.linspace(0.35, 1.05, 29)  # fractions of the absolute-maximum scale tried by the least-error search
SEARCHED = 2**18  # weights per chunk of the search
REFINE = 3  # rounds of "fix codes, solve for the scale" after the search


@torch.no_grad()
def initialise(model: nn.Module, search: bool = True) -> None:
    """Set the scale of every quantiser below `model` from its latent weight, see `set_scale`."""
    for name, layer in quantized_layers(model).items():
        if not torch.isfinite(layer.weight).all():
            raise UserError(f"{name}: the weight holds NaN or infinity; load the model from an intact file")
        set_scale(layer, search)


@torch.no_grad()
def set_scale(layer: nn.Module, search: bool = True, moment: Tensor | None = None) -> None:
    """Set the scale of a quantised layer from its latent weight, on the CPU.

    search=True: least squared weight error, weighted by `moment` (the mean square of each input, [in]) if given; False:
    the edge level times the scale is the largest weight (round to nearest).
    """
    quantizer, weight = layer.quantizer, rows_of(layer).detach()
    spec, parameters = quantizer.spec, list(quantizer.parameters())
    parts = [(weight, *parameters)]
    if weight.ndim == 3:  # low-rank scales have an expert dimension; others stack experts as rows
        shapes = [p.shape if spec.scale == "lowrank" else (len(weight), -1, *p.shape[1:]) for p in parameters]
        parts = zip(weight, *(p.view(shape) for p, shape in zip(parameters, shapes)))
    for part, *values in parts:  # one expert at a time: the search takes many times an expert's memory
        matrix = part.float().cpu()
        size = {"group": spec.size, "lowrank": LOWRANK_INIT_GROUP, "tensor": matrix.numel()}[spec.scale]
        importance = (matrix.new_ones(()) if moment is None else moment.float().cpu()).expand_as(matrix)
        # a few rows at a time: the search holds several copies of its input
        rows = len(matrix) if spec.scale == "tensor" else -(-SEARCHED // matrix.shape[1])
        scale = torch.cat(
            [
                least_error_scale(some.reshape(-1, size), counts.reshape(-1, size), spec, search)
                for some, counts in zip(matrix.split(rows), importance.split(rows))
            ]
        )
        found = _factors(scale, matrix.shape, spec.size) if spec.scale == "lowrank" else [scale.view(values[0].shape)]
        for value, start in zip(values, found):
            value.copy_(start)


def least_error_scale(groups: Tensor, importance: Tensor, spec: QuantSpec, search: bool = True) -> Tensor:
    """Scale [G, 1] that minimises Σ importance·(w − level·scale)² for each row of groups [G, g].

    search=False gives the absolute-maximum scale. The `int` codebook is asymmetric, so both signs are tried.
    """
    start = groups.abs().amax(1, keepdim=True).clamp(min=1e-8) / spec.largest
    if not search:
        return start
    signs = (1.0, -1.0) if spec.codebook == "int" else (1.0,)
    best, best_error = start, _error(groups, importance, start, spec)
    for factor in [f * sign for sign in signs for f in SEARCH.tolist()]:
        best, best_error = _better(groups, importance, start * factor, spec, best, best_error)
    for _ in range(REFINE):
        level = nearest_level(groups / best, spec)
        solved = (importance * groups * level).sum(1, keepdim=True) / (importance * level * level).sum(
            1, keepdim=True
        ).clamp(min=1e-20)
        solved = torch.where(solved.abs() < 1e-12, best, solved)
        best, best_error = _better(groups, importance, solved, spec, best, best_error)
    return best


def _error(groups, importance, scale, spec) -> Tensor:
    return nearest_level(groups / scale, spec).mul_(scale).sub_(groups).square_().mul_(importance).sum(1, keepdim=True)


def _better(groups, importance, scale, spec, best, best_error) -> tuple[Tensor, Tensor]:
    error = _error(groups, importance, scale, spec)
    wins = error < best_error
    return torch.where(wins, scale, best), torch.where(wins, error, best_error)


def _factors(group_scale: Tensor, shape: torch.Size, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """A [out, r], g [r], B [r, in]: the truncated SVD of the group scales, expanded to one per weight.

    The expanded matrix repeats each column `size` times, so its SVD follows from that of the small one. Components
    beyond the rank of the group scales start with g = 0 and random unit vectors, so that they can be trained.
    """
    out_features, in_features = shape
    size = LOWRANK_INIT_GROUP
    u, g, vh = torch.linalg.svd(group_scale.view(out_features, in_features // size), full_matrices=False)
    known = min(rank, len(g))
    random = torch.Generator().manual_seed(0)
    a = torch.randn(out_features, rank, generator=random)
    b = torch.randn(rank, in_features, generator=random)
    a[:, :known], b[:known] = u[:, :known], vh[:known].repeat_interleave(size, 1)
    magnitude = torch.zeros(rank)
    magnitude[:known] = g[:known] * size**0.5
    return a / a.norm(dim=0, keepdim=True), magnitude, b / b.norm(dim=1, keepdim=True)


@torch.no_grad()
def input_moments(model: nn.Module, run: Callable[[], object], cross: bool = False) -> dict[str, Tensor]:
    """Moments of the inputs x [in] of every quantised linear layer during run().

    Layer name → mean square E[x²] [in], or with `cross` the second moment E[xxᵀ] [in, in].
    """
    sums: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    def watch(name):
        def hook(_, args):
            x = args[0].detach().float().flatten(0, -2)
            with without_autocast(x):
                sums[name] = sums.get(name, 0) + (x.T @ x if cross else x.square().sum(0))
            counts[name] = counts.get(name, 0) + x.shape[0]

        return hook

    layers = {n: m for n, m in quantized_layers(model).items() if isinstance(m, nn.Linear)}  # not experts
    hooks = [layer.register_forward_pre_hook(watch(name)) for name, layer in layers.items()]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return {name: sums[name] / counts[name] for name in sums}
