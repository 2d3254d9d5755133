"""A small LoRA on the frozen low-bit student that wins back what quantisation lost."""

import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer, ParamWrapper
from torch import Tensor, nn
from torch.utils.data import Dataset

from qat_lora.backend import TorchBackend, compute_dtype
from qat_lora.data.packing import Rows, fingerprint
from qat_lora.errors import UserError, first_line
from qat_lora.evaluate import kd_loss, text_loss
from qat_lora.kd.losses import kd_soft_ce
from qat_lora.lora import in_one_step
from qat_lora.machine import check_memory
from qat_lora.models.adapter import Dropout, write_origin
from qat_lora.models.architecture import hidden_states, unwrap
from qat_lora.models.norms import norms_in_one_step
from qat_lora.models.targets import adapted, choose, peft_targets
from qat_lora.qat import MOST_WEIGHT, Plan, resumable, training_stream, update
from qat_lora.quant.init import input_moments
from qat_lora.quant.student import head_of
from qat_lora.run.files import read_json, write_json, writing
from qat_lora.run.schedule import set_learning_rates
from qat_lora.run.session import Session

MODES = {"kd": kd_loss, "sft": text_loss, "recover": text_loss}


def add_adapter(
    student: nn.Module, rank: int, alpha: float, targets: tuple[str, ...], seed: int, dropout: float = 0.0,
    rslora: bool = False,
) -> nn.Module:  # fmt: skip
    """The frozen student inside a PEFT model with a new LoRA on what `targets` mean (see `targets.choose`).

    The adapter starts as the identity (B = 0) and is seeded: its A does not depend on what was drawn before. rslora:
    scaled by alpha/√rank instead of alpha/rank (arXiv 2312.03732). Experts, each with an A and a B of its own, and
    whatever else PEFT adapts by its weight have no dropout.
    """
    if rank < 1 or not 0 < alpha <= MOST_WEIGHT:
        raise UserError(
            f"the adapter's rank {rank} must be at least 1 and its alpha {alpha} above 0 and at most {MOST_WEIGHT:,.0f}"
        )
    if not 0 <= dropout < 1:
        raise UserError(f"the adapter's dropout {dropout} is outside [0, 1); use e.g. 0.05")
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
        warnings.simplefilter("ignore", FutureWarning)  # PEFT asks transformers for an attribute it has renamed
        torch.manual_seed(seed)
        try:
            model = get_peft_model(student, config)
        except ValueError as error:
            raise UserError(f"--targets {','.join(targets)}: {first_line(error)}; choose other layers") from error
    found = adapted(unwrap(model))
    if found.keys() != {*linear, *experts}:
        odd = min(found.keys() ^ {*linear, *experts})
        raise UserError(f"--targets {','.join(targets)}: PEFT does not keep to them at {odd}; choose other layers")
    for layer in found.values():
        if dropout and not isinstance(layer, ParamWrapper):
            layer.lora_dropout["default"] = Dropout(dropout)
        in_one_step(layer)
    norms_in_one_step(model)
    return model


@torch.no_grad()
def start_from_error(model: nn.Module, base: nn.Module, batches: list[dict], precision: str = "auto") -> None:
    """Set a new adapter, on the CPU, to the best it can be at once: B·A of least E‖(W − Q)x − scaling·B·A·x‖².

    W is the weight in `base`, the full-precision model, Q the student's, x what the student's layer gets on `batches`
    (dicts of tokens [B, L]). Closed form: with M = E[xxᵀ], the truncated SVD of (W − Q)·M^½ times M^−½ (as in LQER,
    arXiv 2402.02446, with the whole second moment). Of experts ‖W − Q − scaling·B·A‖ is least.
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
            if (moment := moments.get(f"{place}.base_layer")) is not None:  # else nothing was lost
                error = base.get_submodule(place).weight - linear.weight
                _start(layer, *low_rank(error, moment, layer.r["default"]))
        else:
            _start_experts(layer, base.get_parameter(place) - layer.get_param())


def _start(layer: LoraLayer, b: Tensor, a: Tensor) -> None:
    """B·A, of the adapter's rank or the layer's, where that is lower."""
    layer.lora_A["default"].weight[: len(a)] = a
    layer.lora_B["default"].weight[:, : len(a)] = b / layer.scaling["default"]


def _start_experts(layer: ParamWrapper, error: Tensor) -> None:
    """Each expert's B·A nearest to its error; error [experts, out, in], or [experts, in, out] where the module says so.
    What an expert gets to see depends on the router, so its inputs do not count here."""
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
    """B [out, r] and A [r, in] of least tr((E − BA)·M·(E − BA)ᵀ) for E [out, in] and M [in, in]."""
    values, vectors = torch.linalg.eigh(moment.double())
    root = values.clamp(min=1e-4 * values.mean()).sqrt()  # directions that never occur must not blow A up
    b, a = nearest_of_rank(error.double() @ (vectors * root), rank)
    return b.float(), ((a / root) @ vectors.T).float()


def nearest_of_rank(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """B [n, r] and A [r, m] of least ‖matrix − BA‖ for a matrix [n, m], both of like size: from the smaller Gram
    matrix, which takes a fraction of an SVD's time."""
    if matrix.shape[0] > matrix.shape[1]:
        b, a = nearest_of_rank(matrix.T, rank)
        return a.T, b.T
    wide = matrix.double()
    b = torch.linalg.eigh(wide @ wide.T).eigenvectors[:, -rank:]
    a = b.T @ wide
    size = a.norm(dim=1).sqrt().clamp(min=1e-30)  # of nothing: zeros
    return (b * size).to(matrix.dtype), (a / size[:, None]).to(matrix.dtype)


def save_adapter(model: nn.Module, folder: Path, student: str | None) -> None:
    """Write the adapter in PEFT's own format, and which student (sha256 of its file) it belongs to; the folder is
    replaced whole."""
    part, old = folder.with_name(f".{folder.name}.part"), folder.with_name(f".{folder.name}.old")
    try:
        with writing(folder):
            if old.exists() and not folder.exists():  # killed between the two renames below
                old.rename(folder)
            shutil.rmtree(part, ignore_errors=True)
            # From the host: safetensors cannot read an XLA tensor. The embedding is never trained here; "auto" would
            # ask the hub whether it was.
            weights = {name: p.detach().cpu() for name, p in model.named_parameters() if "lora_" in name}
            model.save_pretrained(part, save_embedding_layers=False, state_dict=weights)
            config = read_json(part / "adapter_config.json")  # PEFT writes sets in arbitrary order
            lists = {name: sorted(value) for name, value in config.items() if isinstance(value, list)}
            write_json(part / "adapter_config.json", dict(sorted((config | lists).items())))
            write_origin(part, student, model)
            shutil.rmtree(old, ignore_errors=True)
            if folder.exists():
                folder.rename(old)
            part.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(part, ignore_errors=True)


class TextDataset(Dataset):
    """Packed rows as items: tokens [L] int64 and mask [L], 1 at the tokens to be predicted (never the first, and never
    the rows' `given`)."""

    def __init__(self, rows: Rows, completions_only: bool):
        self.tokens, self.mask = rows.tokens, rows.mask.clone() if completions_only else torch.ones_like(rows.mask)
        self.mask[:, 0] = 0
        if rows.given is not None:
            self.mask[rows.tokens == rows.given] = 0
        self.fingerprint = fingerprint(rows)
        if len(rows) and not self.mask.any():
            raise UserError("the rows keep no completion token to learn; use longer rows or other text")

    def kept(self, i: int) -> int:
        """Positions of row i to be predicted."""
        return int(self.mask[i].sum())

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"tokens": self.tokens[i].long(), "mask": self.mask[i]}


@dataclass(frozen=True)
class Anchor:
    """What the student says without its adapter, to keep it from drifting: tokens [n, L] and logits [n, L, V]."""

    tokens: Tensor
    logits: Tensor
    weight: float

    @classmethod
    @torch.no_grad()
    def of(cls, student: nn.Module, tokens: Tensor, weight: float, backend: TorchBackend) -> "Anchor":
        tokens = backend.to_device({"tokens": tokens})["tokens"]
        with backend.autocast():
            logits = _logits(student, tokens)
        backend.step_boundary()
        return cls(tokens, logits, weight)

    def loss(self, model: nn.Module) -> Tensor:
        """weight · KL(student before ‖ now), up to the constant entropy."""
        return self.weight * kd_soft_ce(_logits(model, self.tokens), self.logits)


def _logits(model: nn.Module, tokens: Tensor) -> Tensor:
    hidden = hidden_states(model, tokens)
    return head_of(model).cast(compute_dtype(hidden)).logits(hidden)


def train_recovery_lora(
    model: nn.Module,
    train: Dataset,
    mode: str,
    plan: Plan,
    anchor: Anchor | None,
    session: Session,
    evaluate: Callable[[int], dict],
) -> None:
    """Train the adapter of a placed PEFT model; the student below it stays frozen, gradients cross it.

    mode: "kd" (train is a KDCacheDataset), "sft" or "recover" (train is a TextDataset).
    """
    backend = session.backend
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = backend.optimizer([{"params": trained, "lr": plan.learning_rate}])

    def loss_of(model: nn.Module, batch: dict) -> Tensor:
        loss = MODES[mode](model, batch)
        return loss + anchor.loss(model) / (plan.accumulation * backend.world_size) if anchor else loss

    stream = None
    model.train()
    for step in session.steps("recovery", plan.steps, *resumable(model, optimizer), evaluate):
        stream = stream or training_stream(train, plan, step, backend)
        factor = plan.learning_rate_factor(step)
        set_learning_rates(optimizer, factor)
        figures = update(model, stream, loss_of, optimizer, plan, backend)
        if anchor:
            figures.pop("kl", None)  # the loss holds the anchor's part too: no estimate of the KL to the teacher
        session.record(**figures, lr=plan.learning_rate * factor)
