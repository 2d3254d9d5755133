"""Adding a new LoRA to a frozen model."""

import warnings

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import ParamWrapper
from torch import Tensor, nn

from qat_lora.backend import TorchBackend
from qat_lora.backend.machine import check_memory
from qat_lora.errors import UserError, first_line
from qat_lora.kernels.norms import norms_in_one_step
from qat_lora.lora.adapter import Dropout
from qat_lora.lora.layer import in_one_step
from qat_lora.lora.targets import adapted, choose, peft_targets
from qat_lora.models.architecture import hidden_states, unwrap
from qat_lora.quant.init import input_moments
from qat_lora.run.options import MOST_WEIGHT, check_range


def add_adapter(
    student: nn.Module, rank: int, alpha: float, targets: tuple[str, ...], seed: int, dropout: float = 0.0,
    rslora: bool = False,
) -> nn.Module:  # fmt: skip
    """The frozen student in a PEFT model with a new LoRA on the layers that `targets` select (see `targets.choose`).

    The adapter starts as the identity (B = 0), and its A depends only on the seed. rslora: scale by alpha/√rank instead
    of alpha/rank (arXiv 2312.03732). Experts, which each have their own A and B, and other weights that PEFT adapts as
    parameters have no dropout.
    """
    check_range("the adapter's rank", rank, at_least=1)
    check_range("the adapter's alpha", alpha, above=0, at_most=MOST_WEIGHT)
    check_range("the adapter's dropout", dropout, at_least=0, below=1)
    linear, experts = choose(student, targets)
    sizes = [unwrap(student).get_submodule(place).weight.shape for place in linear]
    need = 4 * rank * sum(rows + columns for rows, columns in sizes)
    check_memory(need, f"an adapter of rank {rank}", "its rank")
    places = peft_targets(student, linear, experts)
    config = LoraConfig(
        r=rank, lora_alpha=alpha, **places, task_type="CAUSAL_LM",
        lora_dropout=0.0 if places["target_parameters"] else dropout, use_rslora=rslora,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # PEFT reads an attribute that transformers has renamed
        torch.manual_seed(seed)
        try:
            model = get_peft_model(student, config)
        except ValueError as error:
            raise UserError(f"--targets {','.join(targets)}: {first_line(error)}; choose other layers") from error
    found = adapted(unwrap(model))
    if found.keys() != {*linear, *experts}:
        odd = min(found.keys() ^ {*linear, *experts})
        raise UserError(f"--targets {','.join(targets)}: PEFT selects differently at {odd}; choose other layers")
    for layer in found.values():
        if dropout and not isinstance(layer, ParamWrapper):
            layer.lora_dropout["default"] = Dropout(dropout)
        in_one_step(layer)
    norms_in_one_step(model)
    return model


@torch.no_grad()
def fit_to_error(model: nn.Module, base: nn.Module, batches: list[dict], precision: str = "auto") -> None:
    """Initialise a new adapter, on the CPU, to the B·A that minimises E‖(W − Q)x − scaling·B·A·x‖².

    W is the weight in `base`, the full-precision model, Q the student's, x the input of the student's layer on
    `batches` (dicts of tokens [B, L]). Closed form: with M = E[xxᵀ], the truncated SVD of (W − Q)·M^½ times M^−½ (as in
    LQER, arXiv 2402.02446, with the whole second moment). For experts, ‖W − Q − scaling·B·A‖ is minimised.
    """
    backend = TorchBackend("cpu", precision)

    def run():
        for batch in batches:
            with backend.autocast():
                hidden_states(model, batch["tokens"])

    student = unwrap(model)
    moments = input_moments(student, run, cross=True)
    for place, layer in adapted(student).items():
        if isinstance(linear := layer.get_base_layer(), nn.Linear):
            if (moment := moments.get(f"{place}.base_layer")) is not None:  # else it is not quantised
                error = base.get_submodule(place).weight - linear.weight
                b, a = low_rank(error, moment, layer.r["default"])  # of the adapter's rank or, if lower, the layer's
                layer.lora_A["default"].weight[: len(a)] = a
                layer.lora_B["default"].weight[:, : len(a)] = b / layer.scaling["default"]
        else:
            _start_experts(layer, base.get_parameter(place) - layer.get_param())


def _start_experts(layer: ParamWrapper, error: Tensor) -> None:
    """Set each expert's B·A to the best approximation of its error; error [experts, out, in], or [experts, in, out] if
    the module is transposed. An expert's inputs depend on the router, so they are not taken into account."""
    if not error.any():
        return
    count, rank = len(error), layer.r["default"]
    if getattr(layer.get_base_layer(), "is_transposed", False):
        error = error.transpose(1, 2)
    a_of = layer.lora_A["default"].weight.view(count, rank, -1)
    b_of = layer.lora_B["default"].weight.view(-1, rank, count)
    for at, matrix in enumerate(error):
        b, a = nearest_of_rank(matrix, rank)
        a_of[at, : len(a)] = a
        b_of[:, : len(a), at] = b / layer.scaling["default"]


def low_rank(error: Tensor, moment: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """B [out, r] and A [r, in] that minimise tr((E − BA)·M·(E − BA)ᵀ) for E [out, in] and M [in, in]."""
    values, vectors = torch.linalg.eigh(moment.double())
    root = values.clamp(min=1e-4 * values.mean()).sqrt()  # directions without inputs must not blow up A
    b, a = nearest_of_rank(error.double() @ (vectors * root), rank)
    return b.float(), ((a / root) @ vectors.T).float()


def nearest_of_rank(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """B [n, r] and A [r, m], of similar norm, that minimise ‖matrix − BA‖ for a matrix [n, m]. Computed from the
    smaller Gram matrix, in a fraction of the time of an SVD."""
    if matrix.shape[0] > matrix.shape[1]:
        b, a = nearest_of_rank(matrix.T, rank)
        return a.T, b.T
    wide = matrix.double()
    b = torch.linalg.eigh(wide @ wide.T).eigenvectors[:, -rank:]
    a = b.T @ wide
    size = a.norm(dim=1).sqrt().clamp(min=1e-30)  # so that a zero matrix gives zeros
    return (b * size).to(matrix.dtype), (a / size[:, None]).to(matrix.dtype)
