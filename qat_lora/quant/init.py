"""Initialisation of learned scales: absolute maximum (round to nearest) or least squared error."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from qat_lora.backend.devices import without_autocast
from qat_lora.errors import UserError
from qat_lora.kernels.fake_quant import nearest_level
from qat_lora.quant.linear import quantized_layers, rows_of
from qat_lora.quant.spec import LOWRANK_INIT_GROUP, Levels, QuantSpec

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
        width = matrix.shape[1]
        size = {"group": spec.size, "rows": spec.size * width, "lowrank": LOWRANK_INIT_GROUP, "tensor": matrix.numel()}[
            spec.scale
        ]
        importance = (matrix.new_ones(()) if moment is None else moment.float().cpu()).expand_as(matrix)
        # a few rows at a time: the search holds several copies of its input
        rows = max(1, SEARCHED // max(width, size)) * max(1, size // width)
        found = [
            least_error(some.reshape(-1, size), counts.reshape(-1, size), spec, search)
            for some, counts in zip(matrix.split(rows), importance.split(rows))
        ]
        scale, offset = (None if many[0] is None else torch.cat(many) for many in zip(*found))
        if spec.scale == "lowrank":
            starts = _factors(scale, matrix.shape, spec.size)
        elif spec.narrow:
            starts = _narrow(spec, width, scale, offset)
        else:
            starts = [scale, offset][: 1 + spec.offset]
        for value, start in zip(values, starts):
            value.copy_(start.view(value.shape))


def _narrow(spec: QuantSpec, width: int, scale: Tensor, offset: Tensor | None) -> list[Tensor]:
    """Scales and offsets [rows · groups, 1] with the reach of their blocks: the masters of narrow ones."""
    per = (spec.block or width) // spec.size
    parts = [scale, offset][: 1 + spec.offset]
    grids = [spec.scale_levels, spec.offset_levels][: 1 + spec.offset]
    reach = []
    for values, levels in zip(parts, grids):
        groups = values.view(-1, per)
        factor, _ = least_error(groups, torch.ones_like(groups), levels)
        reach.append(factor * levels.largest)
    return [*parts, *reach]


def least_error(
    groups: Tensor, importance: Tensor, grid: QuantSpec | Levels, search: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Scale [G, 1], and offset [G, 1] if the quantiser has one, that minimise Σ importance·(w − level·scale − offset)²
    for each row of groups [G, g]. search=False gives the largest magnitude, or the whole range."""
    if getattr(grid, "offset", False):
        return least_error_range(groups, importance, grid, search)
    return least_error_scale(groups, importance, grid, search), None


def least_error_range(groups: Tensor, importance: Tensor, spec: QuantSpec, search: bool) -> tuple[Tensor, Tensor]:
    """The scale, above 0, and the offset of `least_error`: not above 0 if it is narrow; a whole number of scales with a
    zero point."""
    most, least = 0.0 if spec.narrow or spec.zero else torch.inf, 0.0 if spec.zero else -torch.inf
    low = groups.amin(1, keepdim=True).clamp(max=most)
    high = torch.maximum(groups.amax(1, keepdim=True).clamp(min=least), low + 1e-8)
    scale = (high - low) / spec.largest
    best = scale, _whole(low, scale, spec) if spec.zero else low
    if not search:
        return best
    best_error = _error(groups - best[1], importance, best[0], spec)

    def tried(scale: Tensor, offset: Tensor) -> None:
        nonlocal best, best_error
        offset = _whole(offset, scale, spec) if spec.zero else offset
        error = _error(groups - offset, importance, scale, spec)
        wins = error < best_error
        best = torch.where(wins, scale, best[0]), torch.where(wins, offset, best[1])
        best_error = torch.where(wins, error, best_error)

    if spec.zero:  # the best scale for the zero point in the middle
        half = 2 ** (spec.bits - 1)
        middle = least_error_scale(groups, importance, Levels(-half, 1, 2 * half))
        tried(middle.abs(), middle.abs() * torch.where(middle > 0, -half, 1 - half))
    for factor in SEARCH[::4].tolist():
        for anchor in (0.0, 0.5, 1.0):  # what stays where it is: the lower end, the middle, the upper end
            offset = low + (high - low) * ((1 - factor) * anchor)
            tried((high - low) * (factor / spec.largest), offset.clamp(max=most))
    for _ in range(2 * REFINE):
        tried(*_line(groups, importance, *best, spec, most))
    return best


def _whole(offset: Tensor, scale: Tensor, spec: QuantSpec) -> Tensor:
    """The offset as a whole number of scales that a zero point holds."""
    return nearest_level(offset / scale, spec.offset_levels).mul_(scale)


def _line(groups, importance, scale, offset, spec: QuantSpec, most: float) -> tuple[Tensor, Tensor]:
    """The line w = scale·level + offset through the weights and their levels, with an offset of at most `most`."""

    def mean(values: Tensor) -> Tensor:
        return (importance * values).sum(1, keepdim=True) / total

    total = importance.sum(1, keepdim=True).clamp(min=1e-20)
    level = nearest_level((groups - offset) / scale, spec)
    middle, center = mean(level), mean(groups)
    slope = mean((level - middle) * (groups - center)) / mean((level - middle).square()).clamp(min=1e-20)
    found = (center - slope * middle).clamp(max=most)
    through = mean(level * (groups - found)) / mean(level.square()).clamp(min=1e-20)  # the slope, if it was clamped
    usable = through > 1e-12
    return torch.where(usable, through, scale), torch.where(usable, found, offset)


def least_error_scale(groups: Tensor, importance: Tensor, spec: QuantSpec | Levels, search: bool = True) -> Tensor:
    """The scale of `least_error` without an offset. Both signs are tried if the levels are not symmetric."""
    start = groups.abs().amax(1, keepdim=True).clamp(min=1e-8) / spec.largest
    if not search:
        return start
    highest = spec.lowest + spec.step * (spec.levels - 1)
    mirrored = spec.lowest < 0 < highest and abs(spec.lowest + highest) > spec.step / 4
    signs = (1.0, -1.0) if mirrored else (1.0,)
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
